"""Processes that read shards, for tests of a shared cache."""

import hashlib
import json
import multiprocessing
import os
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

from data_prep import remote
from pretrain.data import store
from pretrain.data.store import File
from tests.forked import begin, wait


class Walkers:
    """Processes that begin together. Each holds the files of its list in turn, while its next
    `ahead` files are fetched."""

    def __init__(self, place: Path, *, room_bytes: int, lists: list[tuple[list[File], int]]):
        self._found = [place.parent / f"walker-{number}.json" for number in range(len(lists))]
        self._output = place.parent / "walkers"
        self._ready = multiprocessing.get_context("forkserver").Barrier(
            len(lists)
        )  # it ends without references in this process
        how = {"environment": dict(os.environ), "output": self._output}
        self.processes: list[ForkServerProcess] = [
            begin(f"{__name__}:walk", place, room_bytes, files, ahead, self._ready, found, **how)  # type: ignore[arg-type]
            for (files, ahead), found in zip(lists, self._found, strict=True)
        ]

    def finish(self) -> list[list[str]]:
        """Return the hash of each file's bytes."""
        codes = wait(self.processes, timeout_s=300)
        assert not any(codes) and self._output.read_text() == "", self._output.read_text()
        return [json.loads(found.read_text()) for found in self._found]


def walk(
    place: Path, room_bytes: int, files: list[File], ahead: int, ready: Barrier, found: Path
) -> None:
    store.NUM_ATTEMPTS, remote.FIRST_PAUSE_S = 3, 0.01
    ours, hashes = (
        store.ShardStore(place, setting="data.cache_dir", max_bytes=room_bytes, storage={}),
        [],
    )
    ready.wait()
    for number, file in enumerate(files):
        if ahead:
            ours.fetch_ahead(files[number : number + 1 + ahead])
        hashes.append(hashlib.sha256(ours.hold(file).read_bytes()).hexdigest())
        ours.release([file])
    ours.close()
    found.write_text(json.dumps(hashes))
