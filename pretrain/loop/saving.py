"""When a checkpoint is due, and how all ranks make one: a snapshot together, which the first rank's writer then brings to disk.

What training loses is the snapshot, and the wait for the write before it, if that is still under way (checkpoint/stall_s).

The best is the best of the checkpoints that came to be: what an evaluation found is forgotten, by all ranks, where the checkpoint
of its step is left out, or could not be written and made room for the next. So whatever a checkpoint calls the best is there.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pretrain.checkpoints.card import CheckpointError, ModelCard
from pretrain.checkpoints.checkpoint_writer import CheckpointWriter
from pretrain.checkpoints.files import Best, Snapshot, TrainerState
from pretrain.data.loader import num_cpu_threads
from pretrain.engine.step import Engine
from pretrain.loop.evaluate import Scores
from pretrain.loop.skipped_steps import SkippedSteps
from pretrain.ranks.collectives import any_rank, highest
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World
from pretrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class SavingPlan:
    """In steps."""

    every: int
    num_steps: int
    """The last one is always saved."""
    keep_every: int | None = None
    keep_best: bool = False
    longest_wait_s: float = 300.0
    """For the write before; a checkpoint that would wait longer is left out, well before the other ranks give up a collective."""


LOOK_S = 1.0
"""How often ranks that wait for the last checkpoint tell each other that they are still there."""


class LastCheckpointLost(CheckpointError):  # noqa: N818
    """On the ranks that did not write it: the first one says why."""

    of_all_ranks = True


@dataclass
class Saver:
    engine: Engine
    writer: CheckpointWriter
    plan: SavingPlan
    card_at: Callable[[int], ModelCard]
    tracker: Tracker
    skipped: SkippedSteps
    world: World
    global_batch_size: int
    saved_step: int
    """Where training went on from, then the last one handed to the writer."""
    best: Best | None = None
    owes_evaluation: bool = False
    data_is_right: Callable[[], bool] = lambda: True
    """What all ranks know of the shards that they learned from, which may take a while; False: it would take too long."""
    _best_is_new: bool = field(default=False, init=False)
    _bests_before: list[Best] = field(default_factory=list, init=False)
    """Each better than the one before it, and not as good as `best`."""
    _last_judged: Best | None = field(default=None, init=False)

    def judged(self, step: int, scores: Scores | None) -> None:
        """What an evaluation found; every rank has the same scores."""
        self.owes_evaluation = False
        if self.plan.keep_best and scores is not None:
            self._last_judged = Best(step, scores.top1)
            self._consider(self._last_judged)

    def _consider(self, judged: Best) -> None:
        if self.best is None or judged.score > self.best.score:
            self._bests_before += [self.best] if self.best is not None else []
            self.best, self._best_is_new = judged, True

    def _forget(self, step: int) -> None:
        """There is no checkpoint of this step, and there will be none."""
        bests = [each for each in (*self._bests_before, self.best) if each is not None and each.step != step]
        self.best, self._bests_before = (bests[-1] if bests else None), bests[:-1]

    def is_due(self, step: int) -> bool:
        at_end = step == self.plan.num_steps
        kept = self.plan.keep_every is not None and step % self.plan.keep_every == 0
        return at_end or kept or step % self.plan.every == 0 or self._best_is_new

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Every rank calls it at the same step, at which no update is under way. The last one is never left out."""
        began_s = time.monotonic()
        if step == self.saved_step:
            self._best_is_new = False
            return
        if not self.data_is_right():
            if self.world.is_first and is_last:  # told to stop: there will be a last one
                what = f"the checkpoint of step {step} is left out: its shards could not be hashed in time"
                print(f"WARNING: {what} (data.check)", file=sys.stderr, flush=True)
            self._forget(step)
            self._best_is_new = False
            return
        PROGRESS.mark("making a checkpoint", step=step)
        while self._is_late():
            if self.world.is_first:
                what = "waiting for it" if is_last else f"that of step {step} is left out: make checkpoint.every longer"
                print(
                    f"WARNING: the checkpoint before is still being written after {self.plan.longest_wait_s:,.0f} s; {what}, "
                    "or use a faster file system",
                    file=sys.stderr,
                    flush=True,
                )
            if not is_last:
                self._forget(step)
                self._best_is_new = False
                return
        self._replace_failed(step)
        self._best_is_new = False
        state = self.engine.export_state()
        if self.world.is_first:
            trainer = TrainerState(
                step=step,
                samples_consumed=step * self.global_batch_size,
                best=self.best,
                owes_evaluation=self.owes_evaluation,
                skipped_steps=self.skipped.total,
                skipped_in_a_row=self.skipped.in_a_row,
                num_cpu_threads=num_cpu_threads(self.engine.device),
            )
            self.writer.submit(Snapshot(state, trainer, self.card_at(step)))
        self.saved_step = step
        self.tracker.metrics({"checkpoint/stall_s": time.monotonic() - began_s}, step=step)

    def _is_late(self) -> bool:
        mine = self.world.is_first and not self.writer.make_room(timeout_s=self.plan.longest_wait_s)
        return any_rank(mine, device=self.engine.device)

    def _replace_failed(self, step: int) -> None:
        """The checkpoint before, if it could not be written, will never be."""
        failed = self.writer.held_back_step if self.world.is_first else None
        lost = highest(-1 if failed is None else failed, device=self.engine.device)
        if lost < 0:
            return
        self._forget(lost)
        if self._last_judged is not None and self._last_judged.step == step:
            self._consider(self._last_judged)  # now it may be the best of those that there are

    def tell(self, step: int) -> None:
        """What the writer has done meanwhile, to the tracker."""
        news = self.writer.news()
        if news:
            self.tracker.metrics(news, step=step)

    def finish(self, step: int) -> None:
        """Returns when all is on disk. The other ranks wait for the first one, however long it takes, while it is seen to live."""
        PROGRESS.mark("writing the last checkpoint")
        error: Exception | None = None
        done = not self.world.is_first
        while True:
            if self.world.is_first and error is None:
                try:
                    done = self.writer.finish(self.best, timeout_s=LOOK_S)
                except Exception as found:  # noqa: BLE001 (raised below, when the others know)
                    error = found
            failed = any_rank(error is not None, device=self.engine.device)
            if failed or not any_rank(not done, device=self.engine.device):
                break
        self.tell(step)
        if failed:
            raise error or LastCheckpointLost("the last checkpoint could not be written; see what the first rank says")
