"""The one training loop: every task that updates weights runs it, whatever its engine.

Each step: 1. the learning rate, from the step; 2. this rank's micro-batches of the global batch; 3. the engine's update; 4. one
exchange of the mean loss, the vote on stopping and the number of bad samples; 5. what is due (log, evaluate, checkpoint). State is
(engine, step, samples consumed), nothing else.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.progress import ProgressLine, progress
from data_prep.settings import UserError
from pretrain import checkpoint
from pretrain.augment.augmentation import Prepared
from pretrain.card import ModelCard
from pretrain.checkpoint import TrainerState
from pretrain.collectives import barrier, exchange
from pretrain.counter import hash64
from pretrain.evaluate import Scores
from pretrain.feed import Fed, Feed
from pretrain.meter import Meter, in_words
from pretrain.order import BatchPlan
from pretrain.preemption import StopFlag
from pretrain.schedule import Schedule
from pretrain.step import Engine
from pretrain.tracker import Tracker
from pretrain.world import World


class NonFiniteLoss(UserError):  # noqa: N818
    """Training has diverged; every rank raises it at the same step."""


@dataclass(frozen=True)
class Cadence:
    """When things are due, in steps."""

    num_steps: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    keep_last: int


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
    evaluate: Callable[[], Scores | None]
    card_at: Callable[[int], ModelCard]
    run_dir: Path
    tracker: Tracker
    stop: StopFlag
    world: World
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
        step, scores, num_bad = start.step, None, 0
        meter, began_s, reading = Meter(), time.monotonic(), dict[str, float]()
        size = self.plan.global_batch_size
        with self._line(step) as line, self.feed_from(start.samples_consumed) as feed:
            while step < self.cadence.num_steps:
                lr = self.schedule.lr(step)
                fed = self._fed(feed, meter)
                if step == 0:
                    self.show_fed(fed[0].prepared)
                    self.show_filters(step)
                torch.manual_seed(
                    int(hash64(self.seed, step, self.world.rank))
                )  # what dropout draws has no state, either
                result = self.engine.train_step([each.prepared for each in fed], lr=lr)
                bad_here = sum(each.num_bad for each in fed)
                loss, stopping, bad_now = exchange(result.loss, self.stop.raised_by is not None, bad_here)
                if not math.isfinite(loss):
                    raise NonFiniteLoss(
                        f"loss is {loss} at step {step} (lr {lr:.3g}): lower optimizer.lr or set engine.gradient_clip_norm=1"
                    )
                step += 1
                meter.steps += 1
                num_bad += bad_now
                self.check_bad(num_bad, (step - start.step) * size)
                if self._due(step, self.cadence.log_every):
                    reading = meter.reading(
                        loss,
                        float(result.gradient_norm),
                        lr=lr,
                        batch_size=size,
                        flops_per_image=self.flops_per_image,
                        peak_teraflops=self.peak_teraflops,
                        device=self.engine.device,
                    )
                    reading |= {"train/samples": float(step * size), "train/bad_samples": float(num_bad)}
                    self.tracker.metrics(reading, step=step)
                    meter = Meter()
                    line.note = in_words(reading, scores)
                line.advance()
                if self._due(step, self.cadence.eval_every):
                    scores = self._evaluated(step)
                    line.note, meter = in_words(reading, scores), Meter()
                if stopping or self._due(step, self.cadence.checkpoint_every):
                    self._save(step)
                    meter = Meter()
                if stopping and step < self.cadence.num_steps:
                    return Outcome(step, False, scores, self._rate(step, start, began_s))
            if start.step >= self.cadence.num_steps:  # killed between the last checkpoint and result.json
                scores = self._evaluated(step)
        return Outcome(step, True, scores, self._rate(step, start, began_s))

    def _line(self, step: int) -> AbstractContextManager[ProgressLine]:
        return progress(self.title, total=self.cadence.num_steps, unit="step", start=step, enabled=self.world.is_first)

    def _fed(self, feed: Feed, meter: Meter) -> list[Fed]:
        """This rank's micro-batches of one step."""
        asked_s = time.monotonic()
        fed = [next(feed) for _ in range(self.plan.accumulation_steps)]
        meter.wait_s += time.monotonic() - asked_s
        return fed

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.cadence.num_steps

    def _evaluated(self, step: int) -> Scores | None:
        self.show_filters(step)
        scores = self.evaluate()
        if scores is not None:
            self.tracker.metrics(scores.metrics("eval"), step=step)
        return scores

    def _save(self, step: int) -> None:
        state = self.engine.export_state()
        if self.world.is_first:
            consumed = step * self.plan.global_batch_size
            trainer = TrainerState(step=step, samples_consumed=consumed)
            checkpoint.save(
                self.run_dir, engine=state, trainer=trainer, card=self.card_at(step), keep_last=self.cadence.keep_last
            )
        barrier()

    def _rate(self, step: int, start: TrainerState, began_s: float) -> float:
        """Images per second over the whole call: evaluation, checkpoints and the first step's warm-up included."""
        return (step - start.step) * self.plan.global_batch_size / max(time.monotonic() - began_s, 1e-9)
