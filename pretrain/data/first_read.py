"""Hash each local shard once in a run (`data.verify_hashes: on_first_read`).

Hashing runs in the background and stops the run at the first shard with a wrong hash.

1. The local shards that at least one node reads in place are divided among all ranks. Staged and
   downloaded shards are hashed as they arrive.
2. On each rank, a thread of the lowest priority hashes the rank's shards. RUN/checked/rank-R.jsonl
   gets a line for each correct shard (path, size, mtime, sha256). Later attempts skip this shard.
3. A rank with a wrong shard fails at its next step, or at the end of training, and the watchdog
   ends the other ranks.

Checkpoints do not wait for the hashes, so earlier checkpoints may have been trained on wrong bytes.
If a run ends before all shards are hashed, the remaining shards stay unchecked.
"""

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from data_prep.limits import cause_of
from data_prep.manifest import DatasetError
from data_prep.publish import sha256_of
from pretrain.data.datasets import Part
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.world import World


class FirstRead(threading.Thread):
    def __init__(self, parts: Sequence[Part], *, run_dir: Path, world: World, device: torch.device):
        """Choose the shards that this rank hashes. All ranks pass the same parts, but only some
        nodes may have staged them."""
        super().__init__(name="first-read", daemon=True)
        self._checked, self._rank = run_dir / "checked", world.rank
        is_in_place = any_rank(any(part.staged is None for part in parts), device=device)
        shards = {
            ((part.directory / shard.file).absolute(), shard.sha256): part.directory
            for part in parts
            for shard in part.content.shards
            if is_in_place and shard.num_samples and not shard.is_remote
        }
        self._shards = list(shards.items())[world.rank :: world.num_ranks]
        self._fault: Exception | None = None

    def run(self) -> None:
        lowest_priority()
        try:
            known = {
                line
                for path in self._checked.glob("rank-*.jsonl")
                for line in path.read_bytes().splitlines()
            }
            for (path, expected), dataset in self._shards:
                self._check(path, expected, dataset, known)
        except Exception as error:  # noqa: BLE001 (raised when training can end)
            self._fault = error

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _check(self, path: Path, expected: str, dataset: Path, known: set[bytes]) -> None:
        try:
            status = path.stat()
            words = [str(path), status.st_size, status.st_mtime_ns, expected]
            if (line := json.dumps(words).encode()) in known:
                return
            sha256 = sha256_of(path)
        except OSError as error:
            problem, fix = f"cannot be read ({cause_of(error)})", f"run data_prep verify {dataset}"
            raise DatasetError(str(path), f"the shard {problem}", fix, code="unreadable") from None
        if sha256 != expected:
            raise DatasetError(
                str(path),
                f"the shard has sha256 {sha256[:12]}..., not the manifest's {expected[:12]}...,"
                " and checkpoints of this run may have been trained on wrong bytes",
                f"run data_prep verify {dataset}, restore the file, and repeat the command",
                code="damaged",
            )
        with suppress(OSError):  # without this line the shard is hashed again
            self._checked.mkdir(parents=True, exist_ok=True)
            with open(self._checked / f"rank-{self._rank}.jsonl", "ab", buffering=0) as file:
                file.write(line + b"\n")


def lowest_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
