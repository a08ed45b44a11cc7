"""When a checkpoint is due, how all ranks make one together, and how the first rank brings it to
disk while training goes on.

A checkpoint's way: 1. `make_room` waits until none is being written; 2. the ranks make the snapshot
(which may reuse the memory of the one before); 3. `submit` hands it over, in place of one that
could not be written; 4. a thread syncs the event log, then publishes the checkpoint. A failed write
is reported, and the next checkpoint replaces it: a full disk costs a checkpoint, never the run.
Only the last one is retried, by `finish`, and the run does not count as hung meanwhile. What
training loses is the snapshot, and the wait for the write before it, if that is still under way
(usage/checkpoint_stall_s). 5. With checkpoint.mirror another thread brings it to a store
(mirror.py).

The best is the best evaluation so far. best.json names the best checkpoint that was published.

Figures wait in `news` for the trainer's thread, which alone uses the tracker.
"""

import errno
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from data_prep.limits import limit_remedy
from pretrain.checkpoints.card import CheckpointError, ModelCard
from pretrain.checkpoints.files import (
    Best,
    Retention,
    Snapshot,
    TrainerState,
    prune,
    publish,
    published_best,
    settle,
    write_best,
)
from pretrain.checkpoints.mirror import GRACE_SHARE, Mirror, MirrorWriter
from pretrain.checkpoints.run import checkpoints_dir, list_checkpoints
from pretrain.config import PretrainSettings
from pretrain.data.datasets import TrainingData
from pretrain.engine.step import Engine
from pretrain.ranks.collectives import any_rank, on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable again"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "put the directory back in its place"),
    errno.EXDEV: "let all of the run lie on one file system",
}
FINAL_S = 120.0
"""How long the end of training waits for a file system that refuses; one that is merely slow has
all the time it needs."""
RETRY_S = 10.0
"""The pause between two attempts to write the last checkpoint."""
_LOOK_S = 0.2


class EventLog(Protocol):
    def sync(self) -> None:
        """Bring all events to disk."""


class Saver:
    """All ranks' side: every rank has one, and calls it at the same steps. Only the first rank's
    writer writes."""

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
        self._retention = Retention(
            wanted.keep_last, keep_every, frozenset(steps(length) for length in wanted.keep_at)
        )
        self._keep_best = (
            data.settings.eval_split is not None if wanted.keep_best is None else wanted.keep_best
        )
        self._longest_wait_s = settings.engine.timeout_s / 2
        """For the write before: well before the other ranks give up a collective."""
        self._engine, self._world, self._card = engine, world, card
        self._grace_s, self.mirror = wanted.grace_s, Mirror.of(settings)
        mirror = self.mirror if world.is_first else None
        self.writer = CheckpointWriter(
            Path(settings.run_dir), self._retention, log=log, mirror=mirror
        )
        self.saved_step = 0
        """Where training went on from, then the last one handed to the writer."""
        self.best: Best | None = None
        """The best evaluation so far; after `finish`, on the first rank, the best checkpoint that
        was published."""

    def go_on(self, start: TrainerState) -> None:
        self.saved_step, self.best = start.step, start.best
        if self.writer.mirror is not None:
            self.writer.mirror.start()

    def judge(self, step: int, *, top1: float) -> None:
        """What an evaluation found; every rank has the same scores."""
        if self._keep_best and (self.best is None or top1 > self.best.score):
            self.best = Best(step, top1)

    def is_due(self, step: int) -> bool:
        is_new_best = self.best is not None and self.best.step == step != self.saved_step
        return (
            step == self._num_steps
            or self._retention.keeps(step)
            or step % self._every == 0
            or is_new_best
        )

    def save(self, state: TrainerState, *, is_last: bool = False) -> None:
        """Every rank calls it at the same step, at which no update is under way. The last one is
        never left out. `state.best` is filled in here."""
        began_s, step = time.monotonic(), state.step
        if step == self.saved_step:
            return
        PROGRESS.mark("making a checkpoint", step=step)
        while any_rank(
            self._world.is_first and not self.writer.make_room(timeout_s=self._longest_wait_s),
            device=self._engine.device,
        ):
            what = (
                "waiting for it"
                if is_last
                else f"that of step {step} is left out: make checkpoint.every longer"
            )
            self._warn(
                f"the checkpoint before is still being written after {self._longest_wait_s:,.0f} s;"
                f" {what}, or use a faster file system"
            )
            if not is_last:
                return
        engine = self._engine.export_state()
        if self._world.is_first:
            card = self._card.model_copy(update={"step": step})
            self.writer.submit(Snapshot(engine, replace(state, best=self.best), card))
            self.writer.report({"usage/checkpoint_stall_s": time.monotonic() - began_s})
        self.saved_step = step

    def finish(self, stop: StopFlag | None = None) -> None:
        """Returns when all is on disk, and in the mirror, unless a `stop` leaves no time for that.
        The other ranks wait for the first one, however long it takes, while it is alive."""
        PROGRESS.mark("writing the last checkpoint")
        on_all_ranks(
            lambda: self._finish(stop) if self._world.is_first else None,
            device=self._engine.device,
            failed="the last checkpoint could not be written; see the message of the first rank",
        )

    def _finish(self, stop: StopFlag | None) -> None:
        began_s = time.monotonic()
        self.best = self.writer.finish(self.best)
        if self.writer.mirror is not None:

            def left_s() -> float:
                passed_s = max(
                    time.monotonic() - began_s, stop.ignored_s(0) if stop else 0
                )  # another rank may have been told
                return GRACE_SHARE * self._grace_s - passed_s

            self.writer.mirror.catch_up(left_s if stop else None)
            self.writer.tidy()
            self.writer.raise_defect()

    def close(self, *, finished: bool) -> None:
        """When nothing more is written in the run's directory."""
        on_all_ranks(
            lambda: (
                self.writer.mirror.close(finished=finished)
                if self.writer.mirror is not None
                else None
            ),
            device=self._engine.device,
            failed="the mirror is not complete; see the message of the first rank",
        )

    def _warn(self, text: str) -> None:
        if self._world.is_first:
            print(f"WARNING: {text}", file=sys.stderr, flush=True)


class CheckpointWriter:
    """The first rank's side: writes snapshots one at a time, in a thread of its own."""

    def __init__(
        self,
        run_dir: Path,
        retention: Retention,
        *,
        log: EventLog | None = None,
        mirror: Mirror | None = None,
    ):
        self._run_dir, self._retention, self._log = run_dir, retention, log
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        """The snapshot that waits, is being written, or could not be written."""
        self._is_published = False
        """Of the snapshot's steps the first two are done, though a later one failed."""
        self._num_failures = 0
        self._fault: OSError | None = None
        """Why the snapshot could not be written."""
        self._defect: Exception | None = None
        self._news: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self.mirror = MirrorWriter(mirror, retention, report=self.report) if mirror else None

    def make_room(self, *, timeout_s: float) -> bool:
        """Waits until the last snapshot is written, or has failed. False: neither yet, and a new
        one has to be left out."""
        with self._changed:
            has_room = self._changed.wait_for(self._has_room, timeout_s)
            self.raise_defect()
            return has_room

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot, in place of the one that could not be written."""
        with self._changed:
            assert self._has_room()
            self._snapshot, self._is_published, self._fault = snapshot, False, None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="checkpoint-writer", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def report(self, figures: dict[str, float]) -> None:
        with self._changed:
            self._news |= figures

    def news(self) -> dict[str, float]:
        """Figures of what has happened since the last call."""
        with self._changed:
            found, self._news = self._news, {}
            return found

    def wait(self, timeout_s: float) -> None:
        """For a write that is under way, before the process ends for another reason."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(self._has_room, timeout_s)
        if self.mirror is not None:
            self.mirror.wait(max(0.0, end_s - time.monotonic()))

    def finish(self, best: Best | None) -> Best | None:
        """Return the best checkpoint on disk once the last snapshot is there. Raise an error after
        FINAL_S of failed writes."""
        give_up_at_s, retry_at_s = time.monotonic() + FINAL_S, 0.0
        with self._changed:
            while self._snapshot is not None:
                if self._fault is None:  # it is being written, and reports its own progress
                    self._changed.wait()
                elif time.monotonic() > give_up_at_s:
                    step, self._snapshot = self._snapshot.trainer.step, None
                    before = list_checkpoints(self._run_dir)[-1:]
                    resumes = (
                        f". The same command then resumes from {before[0].name}" if before else ""
                    )
                    raise CheckpointError(
                        f"{checkpoints_dir(self._run_dir)}: the last checkpoint (step {step}) could"
                        f" not be written {_in_words(self._fault)}{resumes}"
                    )
                elif time.monotonic() < retry_at_s:
                    PROGRESS.touch()  # the run waits, and does not hang
                    self._changed.wait(_LOOK_S)
                else:
                    self._fault, retry_at_s = None, time.monotonic() + RETRY_S
                    self._changed.notify_all()
            self.raise_defect()
        published = published_best(self._run_dir, best) if best is not None else None
        if best is not None:
            write_best(self._run_dir, published)
        return published

    def tidy(self) -> None:
        """What the mirror was reading when its turn came."""
        for newest in list_checkpoints(self._run_dir)[-1:]:
            prune(self._run_dir, newest, self._retention)

    def _has_room(self) -> bool:
        return self._snapshot is None or self._fault is not None

    def raise_defect(self) -> None:
        for found in (self._defect, self.mirror.defect if self.mirror else None):
            if found is not None:
                raise found

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._snapshot is None or self._fault is not None:
                    self._changed.wait()
                snapshot = self._snapshot
            fault, defect = None, None
            try:
                self._write(snapshot)
            except OSError as error:
                fault = error
                self._warn(snapshot.trainer.step, error)
            except Exception as error:  # noqa: BLE001 (it belongs to the trainer, who meets it at the next checkpoint)
                defect = error
            with self._changed:
                self._fault, self._defect = fault, defect
                if fault is None:
                    self._snapshot = None
                else:
                    self._num_failures += 1
                    self._news["usage/checkpoint_failures"] = float(self._num_failures)
                self._changed.notify_all()

    def _write(self, snapshot: Snapshot) -> None:
        if not self._is_published:
            if self._log is not None:
                self._log.sync()
            began_s, num_bytes = time.monotonic(), publish(self._run_dir, snapshot)
            self._is_published = True
            self.report(
                {
                    "usage/checkpoint_write_s": time.monotonic() - began_s,
                    "usage/checkpoint_gb": num_bytes / 1e9,
                }
            )
        settle(
            self._run_dir,
            snapshot,
            self._retention,
            spared=self.mirror.holding if self.mirror else None,
        )
        if self.mirror is not None:
            self.mirror.offer()

    def _warn(self, step: int, error: OSError) -> None:
        PROGRESS.touch()
        print(
            f"WARNING: {checkpoints_dir(self._run_dir)}: the checkpoint of step {step} could not be"
            f" written {_in_words(error)}. The next checkpoint replaces it; the last one is retried"
            f" for up to {FINAL_S:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def _in_words(error: OSError) -> str:
    remedy = limit_remedy(error) or _REMEDIES.get(
        error.errno or 0, "see what is wrong with that file system"
    )
    return f"({error.strerror or error}); {remedy}"
