"""Decide when a checkpoint is due, make it on all ranks, and write it on the first rank.

1. `make_room` waits until no checkpoint is being written.
2. All ranks make the snapshot, which may reuse the memory of the previous one.
3. `submit` hands the snapshot to a thread of the first rank. The thread syncs the event log,
   publishes the checkpoint (files.py) and offers it to the uploader (uploader.py).

Training waits for steps 1 and 2 only (metric usage/checkpoint_stall_s). A failed write is reported,
and the next checkpoint replaces the failed one: a full disk costs a checkpoint, never the run.
"""

import errno
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from data_prep.limits import limit_remedy
from pretrain.checkpoints.card import CheckpointError, ModelCard
from pretrain.checkpoints.checkpoint import LATEST
from pretrain.checkpoints.files import (
    BEST,
    Best,
    Retention,
    Snapshot,
    TrainerState,
    publish,
    read_best,
    settle,
)
from pretrain.checkpoints.remote import Remote
from pretrain.checkpoints.run import checkpoints_dir, list_checkpoints
from pretrain.checkpoints.uploader import EventLog, Uploader
from pretrain.config import PretrainSettings
from pretrain.data.datasets import TrainingData
from pretrain.engine.step import Engine
from pretrain.ranks.collectives import any_rank, on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

_FIXES = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some of your disk quota",
    errno.EROFS: "make the directory writable",
    errno.EACCES: "make the directory writable",
    errno.EPERM: "make the directory writable",
    errno.ENOTDIR: "put the directory back",
    errno.EEXIST: "put the directory back",
    errno.EXDEV: "keep the run directory on one file system",
}
FINAL_S = 120.0
"""Seconds that the end of training waits for a failing file system. For a slow file system there is
no limit."""
RETRY_S = 10.0
"""Pause between two attempts to write the last checkpoint."""
_GRACE_FRACTION = 0.9
"""Fraction of checkpoint.grace_s for the upload. The rest is for the last log lines."""
_LOOK_S = 0.2


class Saver:
    """Checkpoints of one rank. All ranks call their savers at the same steps; only the first rank
    writes."""

    def __init__(
        self,
        settings: PretrainSettings,
        data: TrainingData,
        *,
        engine: Engine,
        world: World,
        card: ModelCard,
        log: EventLog,
    ):
        wanted = settings.checkpoint

        def steps(length: str) -> int:
            return max(1, data.steps(length, global_batch_size=settings.train.global_batch_size))

        self._every, self._num_steps = steps(wanted.every), steps(settings.train.duration)
        keep_every = steps(wanted.keep_every) if wanted.keep_every else None
        milestones = frozenset(map(steps, wanted.milestones))
        self._retention = Retention(wanted.keep_last, keep_every, milestones)
        self._keep_best = wanted.keep_best
        if wanted.keep_best is None:
            self._keep_best = data.settings.eval_split is not None
        self._longest_wait_s = settings.engine.timeout_s / 2
        """Longest wait of a checkpoint until the previous one is written."""
        self._engine, self._world, self._card, self._log = engine, world, card, log
        self._grace_s = wanted.grace_s
        self._deadline_s: float | None = None
        self.remote = Remote.of(settings)
        self.writer = CheckpointWriter(
            Path(settings.run_dir),
            self._retention,
            log=log,
            uploader=(
                Uploader(self.remote, self._retention, log)
                if self.remote and world.is_first
                else None
            ),
        )
        self.saved_step = 0
        """Step at which training resumed, then the step of the last snapshot given to the writer.
        """
        self._judged: Best | None = None
        """Last evaluation."""
        self.best: Best | None = None
        """Best evaluation of a snapshot given to the writer. After `finish`, on the first rank, the
        best published checkpoint."""

    def go_on(self, start: TrainerState) -> None:
        self.saved_step, self.best = start.step, start.best
        if self.writer.uploader is not None:
            self.writer.uploader.start()

    def judge(self, step: int, *, top1: float) -> None:
        """Note an evaluation. All ranks call this with the same score."""
        self._judged = Best(step, top1) if self._keep_best else None

    def _best_with(self, step: int) -> Best | None:
        """Return the best evaluation if this step is saved."""
        judged, best = self._judged, self.best
        if judged is None or judged.step != step or (best and judged.score <= best.score):
            return best
        return judged

    def is_due(self, step: int) -> bool:
        return (
            step == self._num_steps
            or self._retention.keeps(step)
            or step % self._every == 0
            or self._best_with(step) != self.best
        )

    def save(self, state: TrainerState, *, is_last: bool = False) -> None:
        """Make a checkpoint between two updates, on every rank at the same step. The checkpoint has
        `state` and the best evaluation. Unless `is_last`, skip this checkpoint if the previous one
        is still being written. A saved step is saved again if a resume finds it the best."""
        began_s, step = time.monotonic(), state.step
        best = self._best_with(step)
        if step == self.saved_step and best == self.best:
            return
        PROGRESS.mark("making a checkpoint", step=step)
        while any_rank(
            self._world.is_first and not self.writer.make_room(timeout_s=self._longest_wait_s),
            device=self._engine.device,
        ):
            if self._world.is_first:
                skipped = "" if is_last else f"; the checkpoint of step {step} is skipped"
                _warn(
                    "checkpoint.every: the previous checkpoint is still being written after"
                    f" {self._longest_wait_s:,.0f} s{skipped}. Use a longer interval or a faster"
                    " file system"
                )
            if not is_last:
                return
        engine = self._engine.export_state()
        if self._world.is_first:
            card = self._card.model_copy(update={"step": step})
            self.writer.submit(Snapshot(engine, replace(state, best=best), card))
            stall_s = time.monotonic() - began_s
            self._log.metrics({"usage/checkpoint_stall_s": stall_s}, step=step)
        self.saved_step, self.best = step, best

    def finish(self, stop: StopFlag | None = None) -> None:
        """Wait until the last checkpoint is on disk. Other ranks wait while the first rank is
        alive. `stop`: flag of a stopped run, which has checkpoint.grace_s left."""
        PROGRESS.mark("writing the last checkpoint")
        if stop is not None:
            left_s = _GRACE_FRACTION * self._grace_s - stop.ignored_s(0)
            self._deadline_s = time.monotonic() + left_s

        def write() -> None:
            if self._world.is_first:
                self.writer.finish()
                self.best = read_best(self.writer.run_dir) if self.best else None

        on_all_ranks(
            write, device=self._engine.device, field=str(checkpoints_dir(self.writer.run_dir))
        )

    def close(self, *, finished: bool) -> None:
        """Wait until the last checkpoint is uploaded."""
        uploader = self.writer.uploader

        def upload() -> None:
            if uploader is not None:
                uploader.close(finished=finished, deadline_s=self._deadline_s)

        if self.remote is not None:
            on_all_ranks(upload, device=self._engine.device, field="checkpoint.remote")


class CheckpointWriter:
    """Writer of the first rank. It writes one snapshot at a time in a thread."""

    def __init__(
        self,
        run_dir: Path,
        retention: Retention,
        *,
        log: EventLog,
        uploader: Uploader | None = None,
    ):
        self.run_dir, self._retention, self._log = run_dir, retention, log
        self.uploader = uploader
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._fault: OSError | None = None
        """Error that prevented writing the snapshot."""
        self._is_published = False
        """True if the snapshot is a complete checkpoint on disk, even if later steps failed."""
        self._defect: Exception | None = None
        """Unexpected error of the thread. Training raises it at the next checkpoint."""
        self._num_failures = 0

    def make_room(self, *, timeout_s: float | None) -> bool:
        """Wait until no snapshot is being written. Return False on a timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        defect = self._defect or (self.uploader and self.uploader.defect)
        if defect:
            raise defect
        return self._thread is None or not self._thread.is_alive()

    def submit(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot. It replaces a previous snapshot whose write failed."""
        assert self.make_room(timeout_s=0)
        self._is_published &= snapshot is self._snapshot
        self._snapshot = snapshot
        self._thread = threading.Thread(
            target=self._work, args=(snapshot,), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for a write and an upload in progress."""
        end_s = time.monotonic() + timeout_s
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self.uploader is not None:
            self.uploader.wait(max(0.0, end_s - time.monotonic()))

    def finish(self) -> None:
        """Wait until the last snapshot is on disk. Retry a failed write at least once and for
        FINAL_S, then raise CheckpointError. If `publish` has succeeded, only `settle` is retried,
        and its failure is not an error."""
        self.make_room(timeout_s=None)
        give_up_at_s, is_last = time.monotonic() + FINAL_S, False
        while self._fault is not None and self._snapshot is not None:
            if is_last:
                if self._is_published:
                    return
                raise self._last_failed(self._snapshot.trainer.step, self._fault)
            is_last = time.monotonic() >= give_up_at_s
            self.submit(self._snapshot)
            self.make_room(timeout_s=None)
            retry_at_s = min(time.monotonic() + RETRY_S, give_up_at_s)
            while self._fault is not None and time.monotonic() < retry_at_s:
                PROGRESS.touch()
                time.sleep(_LOOK_S)

    def _work(self, snapshot: Snapshot) -> None:
        step = snapshot.trainer.step
        try:
            if not self._is_published:
                self._publish(snapshot)
            settle(self.run_dir, snapshot, self._retention)
            self._fault = None
        except OSError as error:
            self._fault = error
            self._num_failures += 1
            failures = {"usage/checkpoint_failures": float(self._num_failures)}
            self._log.metrics(failures, step=step)
            PROGRESS.touch()
            problem, then = "could not be written", "The next checkpoint replaces it"
            if self._is_published:
                problem = (
                    f"is complete, but {LATEST}, {BEST} or older checkpoints could not be updated"
                )
                then = "The next checkpoint updates them"
            _warn(
                f"{checkpoints_dir(self.run_dir)}: the checkpoint of step {step} {problem}"
                f" ({error.strerror or error}). To fix it, {_fix_of(error)}. {then}"
            )
        except Exception as error:  # noqa: BLE001 (the trainer raises it at the next checkpoint)
            self._defect = error
        if self.uploader is not None:
            self.uploader.offer()

    def _publish(self, snapshot: Snapshot) -> None:
        self._log.sync()
        began_s, num_bytes = time.monotonic(), publish(self.run_dir, snapshot)
        self._is_published = True
        cost = {"write_s": time.monotonic() - began_s, "gb": num_bytes / 1e9}
        named = {f"usage/checkpoint_{name}": value for name, value in cost.items()}
        self._log.metrics(named, step=snapshot.trainer.step)

    def _last_failed(self, step: int, error: OSError) -> CheckpointError:
        earlier = list_checkpoints(self.run_dir)[-1:]
        resumes = f". The same command then resumes from {earlier[0].name}" if earlier else ""
        return CheckpointError(
            str(checkpoints_dir(self.run_dir)),
            f"the last checkpoint (step {step}) could not be written ({error.strerror or error})",
            _fix_of(error) + resumes,
            code="no-space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "no-access",
        )


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _fix_of(error: OSError) -> str:
    return limit_remedy(error) or _FIXES.get(error.errno or 0, "check the file system")
