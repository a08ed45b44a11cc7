"""When a checkpoint is due, and how all ranks make one: a snapshot together, which the first rank's writer then brings to disk.

What training loses is the snapshot, and the wait for the write before it, if that is still under way (checkpoint/stall_s).
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pretrain.card import ModelCard
from pretrain.checkpoint import Snapshot, TrainerState
from pretrain.checkpoint_writer import CheckpointWriter
from pretrain.collectives import any_rank
from pretrain.evaluate import Scores
from pretrain.retention import Best
from pretrain.step import Engine
from pretrain.tracker import Tracker
from pretrain.world import World


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


@dataclass
class Saver:
    engine: Engine
    writer: CheckpointWriter
    plan: SavingPlan
    card_at: Callable[[int], ModelCard]
    tracker: Tracker
    world: World
    global_batch_size: int
    saved_step: int
    """Where training went on from, then the last one handed to the writer."""
    best: Best | None = None
    owes_evaluation: bool = False
    _best_is_new: bool = field(default=False, init=False)

    def judged(self, step: int, scores: Scores | None) -> None:
        """What an evaluation found; every rank has the same scores."""
        self.owes_evaluation = False
        if self.plan.keep_best and scores is not None and (self.best is None or scores.top1 > self.best.score):
            self.best, self._best_is_new = Best(step, scores.top1), True

    def is_due(self, step: int) -> bool:
        at_end = step == self.plan.num_steps
        kept = self.plan.keep_every is not None and step % self.plan.keep_every == 0
        return at_end or kept or step % self.plan.every == 0 or self._best_is_new

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Every rank calls it at the same step, at which no update is under way. The last one is never left out."""
        began_s = time.monotonic()
        self._best_is_new = False
        if step == self.saved_step:
            return
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
                return
        state = self.engine.export_state()
        if self.world.is_first:
            trainer = TrainerState(
                step=step,
                samples_consumed=step * self.global_batch_size,
                best=self.best,
                owes_evaluation=self.owes_evaluation,
            )
            self.writer.submit(Snapshot(state, trainer, self.card_at(step)))
        self.saved_step = step
        self.tracker.metrics({"checkpoint/stall_s": time.monotonic() - began_s}, step=step)

    def _is_late(self) -> bool:
        mine = self.world.is_first and not self.writer.make_room(timeout_s=self.plan.longest_wait_s)
        return any_rank(mine, device=self.engine.device)

    def tell(self, step: int) -> None:
        """What the writer has done meanwhile, to the tracker."""
        news = self.writer.news()
        if news:
            self.tracker.metrics(news, step=step)

    def finish(self, step: int) -> None:
        """Returns when all is on disk."""
        if self.world.is_first:
            try:
                self.writer.finish(self.best)
            finally:
                self.tell(step)
