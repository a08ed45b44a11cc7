"""The one training loop: every task that updates weights runs it, whatever its engine.

Each step: 1. the learning rate, from the step; 2. this rank's micro-batches of the global batch; 3. the engine's update; 4. one
exchange of the mean loss, the vote on stopping and the number of bad samples, read while the next step runs (ledger.py); 5. what is
due (log, evaluate, checkpoint). State is (engine, step, samples consumed), nothing else.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.progress import ProgressLine, progress
from pretrain.augment.augmentation import Prepared
from pretrain.augment.feed import Feed
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint_writer import CheckpointWriter
from pretrain.checkpoints.files import TrainerState
from pretrain.data.first_read import FirstRead
from pretrain.data.order import BatchPlan, hash64
from pretrain.engine.step import Engine
from pretrain.loop.evaluate import Scores
from pretrain.loop.ledger import Entry, Ledger
from pretrain.loop.meter import Meter
from pretrain.loop.saving import Saver, SavingPlan
from pretrain.loop.skipped_steps import SkippedSteps
from pretrain.optim.schedule import Schedule
from pretrain.ranks.collectives import Exchange, any_rank
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.world import World
from pretrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class Cadence:
    """When things are due, in steps."""

    num_steps: int
    log_every: int
    eval_every: int


@dataclass(frozen=True)
class Outcome:
    step: int
    finished: bool
    scores: Scores | None
    images_per_s: float


@dataclass(frozen=True)
class Trainer:
    engine: Engine
    plan: BatchPlan
    schedule: Schedule
    cadence: Cadence
    feed_from: Callable[[int], AbstractContextManager[Feed]]
    """Micro-batches after so many consumed samples."""
    check_bad: Callable[[int, int], None]
    """Stops the run where too many samples (bad, of how many) do not decode."""
    first_read: FirstRead
    skipped: SkippedSteps
    evaluate: Callable[[], Scores | None]
    card_at: Callable[[int], ModelCard]
    writer: CheckpointWriter
    saving: SavingPlan
    run_dir: Path
    tracker: Tracker
    stop: StopFlag
    world: World
    samples_per_epoch: int
    flops_per_image: float
    peak_teraflops: float
    """Of all ranks together."""
    show_fed: Callable[[Prepared], None]
    """What the model is fed, at the start."""
    show_filters: Callable[[int], None]
    """What the first layer looks at, at the start and at each evaluation; called by every rank."""
    title: str
    seed: int

    def fit(self, start: TrainerState) -> Outcome:
        step, scores, began_s = start.step, None, time.monotonic()
        self.skipped.go_on(total=start.skipped_steps, in_a_row=start.skipped_in_a_row)
        saver = self._saver(start)
        self.first_read.start()
        with self._line(step) as line, self.feed_from(start.samples_consumed) as feed:
            ledger = self._ledger(line, start_step=step)
            stopping = any_rank(self.stop.raised_by is not None, device=self.engine.device)
            if start.owes_evaluation or step >= self.cadence.num_steps:  # it was given up, or killed before result.json
                scores, stopping = self._evaluated(step, saver, stopping=stopping)
                ledger.show(scores)
                ledger.meter.restart()
            while step < self.cadence.num_steps and not stopping:
                try:
                    ledger.enter(self._step(step, feed, ledger.meter))
                except Interrupted:  # while it waited for data
                    stopping = True
                    break
                step += 1
                eval_due, save_due = self._due(step, self.cadence.eval_every), saver.is_due(step)
                if eval_due or save_due or ledger.stopping:
                    ledger.settle()
                stopping = ledger.stopping
                if eval_due:
                    scores, stopping = self._evaluated(step, saver, stopping=stopping)
                    ledger.show(scores)
                if saver.is_due(step):  # the evaluation may have been the best so far
                    saver.save(step)
                if eval_due or save_due:
                    ledger.meter.restart()
                saver.tell(step)
            if stopping:
                ledger.settle()
            if step > 0:
                saver.save(step, is_last=True)
        saver.finish(step)
        is_saved = saver.saved_step == step  # it may have been left out
        finished = step >= self.cadence.num_steps and is_saved and not saver.owes_evaluation
        return Outcome(step, finished, scores, self._rate(step, start, began_s))

    def _saver(self, start: TrainerState) -> Saver:
        return Saver(
            engine=self.engine,
            writer=self.writer,
            plan=self.saving,
            card_at=self.card_at,
            tracker=self.tracker,
            skipped=self.skipped,
            world=self.world,
            global_batch_size=self.plan.global_batch_size,
            saved_step=start.step,
            best=start.best,
            owes_evaluation=start.owes_evaluation,
            data_is_right=lambda: self.first_read.wait(self.stop, device=self.engine.device),
        )

    def _ledger(self, line: ProgressLine, *, start_step: int) -> Ledger:
        size = self.plan.global_batch_size
        return Ledger(
            meter=Meter(
                global_batch_size=size,
                flops_per_image=self.flops_per_image,
                peak_teraflops=self.peak_teraflops,
                device=self.engine.device,
            ),
            line=line,
            tracker=self.tracker,
            skipped=self.skipped,
            check_bad=self.check_bad,
            log_due=lambda step: self._due(step, self.cadence.log_every),
            global_batch_size=size,
            samples_per_epoch=self.samples_per_epoch,
            start_step=start_step,
        )

    def _step(self, step: int, feed: Feed, meter: Meter) -> Entry:
        """Queues the step that takes the model from `step` to `step + 1`."""
        self.first_read.raise_fault()
        lr = self.schedule.lr(step)
        PROGRESS.mark("waiting for data", step=step + 1)
        with meter.waiting(), self.stop.waiting():
            fed = [next(feed) for _ in range(self.plan.accumulation_steps)]
        if step == 0:
            self.show_fed(fed[0].prepared)
            self.show_filters(step)
        PROGRESS.mark("computing", step=step + 1)
        torch.manual_seed(int(hash64(self.seed, step, self.world.rank)))  # what dropout draws has no state, either
        result = self.engine.train_step([each.prepared for each in fed], lr=lr)
        exchange = Exchange(
            result.loss,
            result.gradient_norm,
            flag=self.stop.raised_by is not None,
            num_bad=sum(each.num_bad for each in fed),
        )
        return Entry(step + 1, lr, result.applied, exchange)

    def _line(self, step: int) -> AbstractContextManager[ProgressLine]:
        return progress(self.title, total=self.cadence.num_steps, unit="step", start=step, enabled=self.world.is_first)

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.cadence.num_steps

    def _evaluated(self, step: int, saver: Saver, *, stopping: bool) -> tuple[Scores | None, bool]:
        """(scores, whether to stop): an evaluation waits for nobody who was told to stop; the next start makes up for it."""
        saver.owes_evaluation = True
        if stopping:
            return None, True
        self.show_filters(step)
        PROGRESS.mark("before its evaluation", step=step)
        try:
            scores = self.evaluate()
        except Interrupted:
            return None, True
        saver.judged(step, scores)
        if scores is not None:
            self.tracker.metrics(scores.metrics("eval"), step=step)
        return scores, False

    def _rate(self, step: int, start: TrainerState, began_s: float) -> float:
        """Images per second over the whole call: evaluation, checkpoints and the first step's warm-up included."""
        return (step - start.step) * self.plan.global_batch_size / max(time.monotonic() - began_s, 1e-9)
