"""The data of a run brought to its nodes' own disks before training reads it: one rank of each node copies, all others wait.

What is trained on is the same: manifest and order stay those of the dataset, and only the place of shards and indices changes
(__init__.py). Whatever goes wrong with the disk, training goes on with the dataset where it is, and the log says so.
"""

import os
import platform
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.progress import ProgressLine, in_words, progress
from data_prep.remote import StoppedError
from pretrain.data.datasets import TrainingData
from pretrain.data.store.directory import File, NoRoomError, StoreError, tar_of
from pretrain.data.store.store import NUM_THREADS, ShardStore
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

_LOOK_S = 0.2
Files = dict[Path, list[File]]
"""Directory of a dataset -> what training reads of it."""


def staged(data: TrainingData, *, world: World, device: torch.device, stop: StopFlag) -> TrainingData:
    """Called by all ranks; returns when every node has what it can have. The copies stay as long as the result lives."""
    if data.settings.stage_dir is None:
        return data
    PROGRESS.mark("staging the data")
    copier = _Copier(Path(data.settings.stage_dir), files_of(data))
    if world.local_rank == 0:
        copier.start()
    _wait(copier, device=device, stop=stop)
    PROGRESS.mark("starting")
    store, held = copier.store, set[Path]()
    with suppress(StoreError, OSError):  # the first rank of the node has reported it
        store = store or _open(copier.directory)
        held = {directory for directory, files in copier.files.items() if store.hold_all_there(files)}
    place = store.directory if store else None
    parts = (replace(part, staged=place if part.directory in held else None) for part in data.parts)
    return replace(data, parts=tuple(parts))


def files_of(data: TrainingData) -> Files:
    """Remote shards have a store of their own; their indices are in the dataset."""
    found: defaultdict[Path, dict[str, File]] = defaultdict(dict)
    for part in data.read_parts:
        for shard in part.content.shards:
            if shard.num_samples:
                index = part.directory / shard.index_file
                files = [File(str(index), f"{shard.index_sha256}.npy", index.stat().st_size, shard.index_sha256)]
                files += [] if shard.is_remote else [tar_of(shard, part.directory)]
                found[part.directory] |= {file.name: file for file in files}
    return {directory: list(files.values()) for directory, files in found.items()}


def _open(directory: Path) -> ShardStore:
    """Below `data.stage_dir`, which may be everybody's."""
    return ShardStore(directory / f"shards-{os.getuid()}", setting="data.stage_dir", max_bytes=None, storage={})


def _wait(copier: "_Copier", *, device: torch.device, stop: StopFlag) -> None:
    """The line is its node's, and begins when there is something to copy."""
    line: ProgressLine | None = None
    with ExitStack() as stack:
        while any_rank(copier.is_alive(), device=device):
            time.sleep(_LOOK_S)
            if stop.raised_by is not None and copier.store is not None:
                copier.store.close()
            copied, total = copier.copied_bytes // 1_000_000, -(-copier.total_bytes // 1_000_000)
            if total and line is None:
                line = stack.enter_context(progress(copier.title, total=total, unit="MB"))
            if line is not None:
                line.total = total
                line.advance(copied - line.done)
    if copier.defect is not None:
        raise copier.defect
    if copier.copied_bytes:
        print(copier.result(), flush=True)


class _Copier(threading.Thread):
    """Fills the store of its node, dataset by dataset."""

    def __init__(self, directory: Path, files: Files):
        super().__init__(name="staging", daemon=True)
        self.directory, self.files = directory, files
        self.store: ShardStore | None = None
        self.total_bytes = self.copied_bytes = 0
        self._counting, self._began_s = threading.Lock(), time.monotonic()
        self.defect: Exception | None = None

    def run(self) -> None:
        for dataset, files in self.files.items():
            try:
                self.store = self.store or _open(self.directory)
                self._hold(self.store, files)
            except StoppedError:
                return
            except (StoreError, OSError) as error:
                print(
                    f"WARNING: data.stage_dir on {platform.node()}: {error}; training reads {dataset} where it is",
                    file=sys.stderr,
                    flush=True,
                )
            except Exception as error:  # noqa: BLE001 (of our own making: it belongs to the main thread)
                self.defect = error
                return

    def _hold(self, store: ShardStore, files: list[File]) -> None:
        """All files, or StoreError. Without room for all there stays no copy that nobody reads: a disk that we leave full would
        fail others. After any other fault the next start goes on with what is whole."""
        with store.directory.room():
            needed = sum(file.num_bytes for file in files if not store.directory.is_there(file))
            missing = store.directory.make_room(files)
        try:
            if missing:
                raise NoRoomError(
                    f"{store.directory.path}: {needed / 1e9:,.3g} GB will not fit, {(needed - missing) / 1e9:,.3g} GB are free "
                    "or can be freed"
                )
            self.total_bytes += needed
            threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="staging")
            try:  # several at once: hashing, reading and writing let go of Python's lock
                held = [threads.submit(store.hold, file, waits_for_room=False, moves=self._moves) for file in files]
                for each in as_completed(held):
                    each.result()
            finally:
                threads.shutdown(cancel_futures=True)
        except StoreError as error:
            with store.directory.room():
                store.directory.let_go(files)
                if isinstance(error, NoRoomError):
                    store.directory.remove_unread(files)
            raise

    @property
    def title(self) -> str:
        return f"staging {_gb(self.total_bytes)} to {self.directory} ({platform.node()})"

    def result(self) -> str:
        """Or how far it came."""
        took_s = max(time.monotonic() - self._began_s, 1e-3)
        copied, total = _gb(self.copied_bytes), _gb(self.total_bytes)
        much = copied if self.copied_bytes == self.total_bytes else f"{copied} of {total}"
        rate = f"{self.copied_bytes / took_s / 1e6:,.0f} MB/s"
        return f"staged {much} to {self.directory} ({platform.node()}) in {in_words(took_s)}, {rate}"

    def _moves(self, num_bytes: int) -> None:
        PROGRESS.touch()
        with self._counting:
            self.copied_bytes += num_bytes


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3g} MB"
