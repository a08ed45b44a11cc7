"""The one training loop: every task that updates weights runs it, whatever its engine.

Each step: 1. the learning rate, from the step; 2. this rank's micro-batches of the global batch; 3. the engine's update; 4. one
exchange of the mean loss and the vote on stopping; 5. what is due (log, evaluate, checkpoint). State is (engine, step, samples
consumed), nothing else.
"""

import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.progress import ProgressLine, progress
from data_prep.settings import UserError
from pretrain import checkpoint
from pretrain.augment.augmentation import Augmentation
from pretrain.card import ModelCard
from pretrain.checkpoint import TrainerState
from pretrain.collectives import barrier, mean_and_vote
from pretrain.evaluate import Scores
from pretrain.loader import TrainingBatches
from pretrain.order import BatchPlan
from pretrain.preemption import StopFlag
from pretrain.schedule import Schedule
from pretrain.step import Engine
from pretrain.tracking import Tracker
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


@dataclass
class Meter:
    """Sums since the last log line."""

    steps: int = 0
    wait_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    def reading(
        self, loss: float, gradient_norm: float, *, lr: float, batch_size: int, flops_per_image: float
    ) -> dict[str, float]:
        elapsed_s = max(time.monotonic() - self.started_s, 1e-9)
        images_per_s = self.steps * batch_size / elapsed_s
        return {
            "train/loss": loss,
            "train/gradient_norm": gradient_norm,
            "train/lr": lr,
            "speed/images_per_s": images_per_s,
            "speed/teraflops": 3 * flops_per_image * images_per_s / 1e12,
            "speed/data_wait_share": self.wait_s / elapsed_s,
            "memory/peak_rss_gb": peak_rss_gb(),
        }


def peak_rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(frozen=True)
class Trainer:
    engine: Engine
    augmentation: Augmentation
    plan: BatchPlan
    schedule: Schedule
    cadence: Cadence
    batches_from: Callable[[int], AbstractContextManager[TrainingBatches]]
    """The loader that starts after so many consumed samples."""
    evaluate: Callable[[], Scores | None]
    card_at: Callable[[int], ModelCard]
    run_dir: Path
    tracker: Tracker
    stop: StopFlag
    world: World
    flops_per_image: float
    title: str

    def fit(self, start: TrainerState) -> Outcome:
        step, scores = start.step, None
        meter, began_s = Meter(), time.monotonic()
        size = self.plan.global_batch_size
        with self._line(step) as line, self.batches_from(start.samples_consumed) as batches:
            while step < self.cadence.num_steps:
                lr = self.schedule.lr(step)
                result = self.engine.train_step([*self._prepared(batches, meter)], lr=lr)
                loss, stopping = mean_and_vote(result.loss, self.stop.raised_by is not None)
                if not math.isfinite(loss):
                    raise NonFiniteLoss(
                        f"loss is {loss} at step {step} (lr {lr:.3g}): lower optimizer.lr or set engine.gradient_clip_norm=1"
                    )
                step += 1
                meter.steps += 1
                if self._due(step, self.cadence.log_every):
                    reading = meter.reading(
                        loss, float(result.gradient_norm), lr=lr, batch_size=size, flops_per_image=self.flops_per_image
                    )
                    self.tracker.metrics(reading | {"train/samples": float(step * size)}, step=step)
                    meter = Meter()
                    line.note = f"loss {loss:.3f}  {reading['speed/images_per_s']:,.0f} images/s"
                line.advance()
                if self._due(step, self.cadence.eval_every):
                    scores = self._evaluated(step, line)
                    meter = Meter()
                if stopping or self._due(step, self.cadence.checkpoint_every):
                    self._save(step)
                    meter = Meter()
                if stopping and step < self.cadence.num_steps:
                    return Outcome(step, False, scores, self._rate(step, start, began_s))
            if start.step >= self.cadence.num_steps:  # killed between the last checkpoint and result.json
                scores = self._evaluated(step, line)
        return Outcome(step, True, scores, self._rate(step, start, began_s))

    def _line(self, step: int) -> AbstractContextManager[ProgressLine]:
        return progress(self.title, total=self.cadence.num_steps, unit="steps", start=step, enabled=self.world.is_first)

    def _prepared(self, batches: TrainingBatches, meter: Meter) -> Iterator:  # type: ignore[type-arg]
        for _ in range(self.plan.accumulation_steps):
            asked_s = time.monotonic()
            batch = next(batches)
            meter.wait_s += time.monotonic() - asked_s
            yield self.augmentation.prepare(batch)

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.cadence.num_steps

    def _evaluated(self, step: int, line: ProgressLine) -> Scores | None:
        scores = self.evaluate()
        if scores is not None:
            self.tracker.metrics(scores.metrics("eval"), step=step)
            line.note = f"top-1 {scores.top1:.1%}"
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
