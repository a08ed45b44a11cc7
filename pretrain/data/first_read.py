"""`data.check: first-read`: each local shard is hashed once in a run, behind training, which ends where one is not the manifest's.

1. The files that any rank reads in place, to train and to evaluate on, are dealt out to all ranks, to each every n-th: one without
   a staged copy hashes no more than the others. (Fetched and staged shards are hashed where they arrive.)
2. On each rank a thread of the lowest priority hashes its share. What was right has a line in RUN/checked/rank-R.jsonl (path,
   size, mtime, sha256), and no later start of this run hashes it again: beside the run, and not in a cache of the node, because
   the next start may be on other nodes, and "once in a run" ends with the run.
3. A rank that finds a fault raises it at its next step, and the heartbeat ends the others.
4. A checkpoint waits until all ranks have hashed their shares, the first one that is, if at all. From the moment at which the run
   has to stop it waits no longer than a write may; if they still hash then, it is left out, and all that this start has
   learned is lost. What it has hashed is not, so the next start has less to wait for. (USR2 gives no more time than TERM:
   cluster/job.py passes both on as USR2.)

What is guaranteed: a flipped byte may be seen by steps, but never by a checkpoint, and so by no run that is finished: all that a
start has learned is saved only when each shard was right as it was hashed. Not guaranteed: a file that is changed after that shows
at the next start, and only if its size or mtime did change; a dataset of which each node has a copy of its own is hashed on one
node, shard by shard (`data.stage_dir` makes such copies and hashes them all); what an earlier start has staged is known by its
size alone, and a byte that flipped there since is not seen.

What it costs: a CPU second for 1.3 GB, once in a run, at a priority that gives way to training: for pictures of 64 px 0.6 % of the
first epoch of a model so small that it takes 1.6 ms of CPU a picture, and less for any other. While it lasts steps took 10 % longer
on 2 cores, of which training leaves none idle (benchmarks/train.py --quick --only mlp, AMD EPYC, commit 8b3410d).
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from data_prep.manifest import DatasetError
from data_prep.publish import sha256_of
from pretrain.data.datasets import Part
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import LAST_WRITE_S, StopFlag
from pretrain.ranks.world import World

LOOK_S, LOG_AFTER_S = 0.2, 10.0
Line = tuple[str, int, int, str]


class WrongElsewhere(DatasetError):  # noqa: N818
    """The rank that hashed it names it."""

    of_all_ranks = True


class FirstRead(threading.Thread):
    def __init__(self, parts: Sequence[Part], *, run_dir: Path, world: World, device: torch.device):
        """Called by all ranks: their lists are the same, as what is not staged everywhere is hashed. No `parts`: nothing is."""
        super().__init__(name="first-read", daemon=True)
        self._memory, self._world, self._device = run_dir / "checked", world, device
        files = {
            ((part.directory / shard.file).absolute(), shard.sha256): part.directory
            for part in [part for part in parts if any_rank(part.staged is None, device=device)]
            for shard in part.content.shards
            if shard.num_samples and not shard.is_remote
        }
        self._mine = list(files.items())[world.rank :: world.num_ranks]
        self._num_pieces, self._all_are_right, self._is_late = 0, False, False
        self._fault: Exception | None = None

    def run(self) -> None:
        lowest_priority()
        try:
            self._hash_all()
        except Exception as error:  # noqa: BLE001 (raised where training can end)
            self._fault = error

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def wait(self, stop: StopFlag) -> bool:
        """Called by all ranks: whether all have hashed their shares. If not, the run is to stop, and that would take too long."""
        if self._all_are_right:
            return True
        PROGRESS.mark("hashing the shards")
        began_s, seen, is_logged = time.monotonic(), -1, False
        while True:
            is_under_way = any_rank(self.is_alive(), device=self._device)
            if any_rank(self._fault is not None, device=self._device):  # asked last: who has ended has said it
                raise self._fault or WrongElsewhere("data.check: another rank found a shard that is not right; see its message")
            if not is_under_way:
                self._all_are_right = True
                return True
            is_late = self._is_late or stop.ignored_s(began_s) > LAST_WRITE_S
            self._is_late = any_rank(is_late, device=self._device)  # a later call looks once, and waits no more
            if self._is_late:
                return False
            if self._world.is_first and not is_logged and time.monotonic() - began_s > LOG_AFTER_S:
                print("waiting until all shards are hashed, before the first checkpoint (data.check=none does without)")
                is_logged = True
            if self._num_pieces > seen:
                PROGRESS.touch()
                seen = self._num_pieces
            self.join(LOOK_S)

    def _hash_all(self) -> None:
        known = self._remembered()
        for (path, sha256), directory in self._mine:
            try:
                line = _line(path, sha256)
                found = sha256 if line in known else sha256_of(path, after_each_piece=self._count_piece)
            except OSError as error:
                raise DatasetError(f"{path}: cannot be read ({error.strerror}); run data_prep verify {directory}") from None
            if found != sha256:
                hashes = f"sha256 {found[:12]}..., not {sha256[:12]}..."
                lost = "nothing that was learned since this start is saved"
                remedy = f"Run data_prep verify {directory}, put the right file back, and the same command goes on"
                raise DatasetError(f"{path}: its bytes are not those of the manifest any more ({hashes}); {lost}. {remedy}")
            if line not in known:
                self._remember(line)

    def _count_piece(self) -> None:
        self._num_pieces += 1

    def _remember(self, line: Line) -> None:
        """Without room for it the shard is hashed again: no reason to end."""
        with suppress(OSError):
            self._memory.mkdir(parents=True, exist_ok=True)
            with open(self._memory / f"rank-{self._world.rank}.jsonl", "ab", buffering=0) as memory:
                memory.write(json.dumps(line).encode() + b"\n")

    def _remembered(self) -> set[Line]:
        found = set()
        for path in sorted(self._memory.glob("rank-*.jsonl")):
            for line in path.read_bytes().splitlines():
                try:
                    name, num_bytes, mtime_ns, sha256 = json.loads(line)
                    found.add((str(name), int(num_bytes), int(mtime_ns), str(sha256)))
                except (ValueError, TypeError):  # half of a line, of a rank that was killed: its shard is hashed again
                    continue
        return found


def lowest_priority() -> None:
    """Of this thread alone: it runs while nobody else would."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _line(path: Path, sha256: str) -> Line:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns, sha256
