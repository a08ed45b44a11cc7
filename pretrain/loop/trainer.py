"""The one training loop: every task that updates weights runs it, whatever its engine.

Each step: 1. this rank's micro-batches of the global batch; 2. the engine's update, at the learning
rate of the step; 3. one exchange of the mean loss, the votes on stopping and the number of bad
samples; 4. the log; 5. what is due: an evaluation, a checkpoint; 6. the end, if a rank voted for
it. State is (engine, step, samples consumed), nothing else.

The exchange of a step is read while the next one runs, when that costs no wait, or before anything
that must not be late (evaluation, checkpoint, the end). What is decided from it (to stop, too many
bad samples or skipped steps) is decided by all ranks at the same step, because all of them read the
same sums. A number that is logged for a step is that step's, however late it is read.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.interrupts import keep
from data_prep.manifest import accuracy
from data_prep.progress import ProgressLine, progress
from pretrain.augment.augmentation import Augmentation, Normalisation, Prepared
from pretrain.augment.feed import Feed
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.files import Best, TrainerState
from pretrain.checkpoints.writer import Saver
from pretrain.config import PretrainSettings
from pretrain.data.bad_samples import BadSamples, check_share
from pretrain.data.datasets import TrainingData, fit_warmup
from pretrain.data.first_read import FirstRead
from pretrain.data.loader import num_cpu_threads
from pretrain.data.order import BatchPlan, hash64
from pretrain.data.reader import ShardReader, open_store
from pretrain.data.stream import batches_of, open_reader
from pretrain.engine.step import Engine
from pretrain.loop.evaluate import Scores, evaluate
from pretrain.loop.peak import Meter
from pretrain.loop.skipped_steps import SkippedSteps, samples_of_rank
from pretrain.models.cost import training_flops
from pretrain.optim.schedule import Schedule
from pretrain.ranks.collectives import Exchange, Moment, any_rank
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.world import World
from pretrain.tracking.pictures import (
    FIRST_LAYER,
    draw_filters,
    fed_sheet,
    filter_side,
    first_of,
    strongest_filters,
)
from pretrain.tracking.tracker import Tracker

NUM_SHOWN, COLUMNS = 40, 5
"""Pictures on the sheet of what the model is fed; columns of the picture of its first layer."""


@dataclass(frozen=True)
class Outcome:
    step: int
    finished: bool
    scores: Scores | None = None
    best: Best | None = None
    images_per_s: float | None = None
    """Of the steps of this start but the first, which loads and compiles."""


@dataclass(frozen=True)
class QueuedStep:
    """A step that the device may still be working on."""

    step: int
    """How many steps are done with this one."""
    lr: float
    asked: Moment
    given: Moment
    """When the device came to the hand-over of its data, and when it had them: what lies between is
    lost, whoever was late."""
    exchange: Exchange


@dataclass
class Trainer:
    """Made by all ranks together."""

    settings: PretrainSettings
    data: TrainingData
    plan: BatchPlan
    world: World
    stop: StopFlag
    tracker: Tracker
    engine: Engine
    card: ModelCard
    """For the checkpoints; each adds its step."""
    peak_teraflops: float
    """Of all ranks together."""

    def __post_init__(self) -> None:
        settings, data, rank, device = self.settings, self.data, self.world.rank, self.engine.device
        train, self.run_dir = settings.train, Path(settings.run_dir)
        unchecked = data.read_parts if data.settings.check == "first-read" else ()
        self.first_read = FirstRead(
            unchecked, run_dir=self.run_dir, world=self.world, device=device
        )
        store, eval_part = open_store(data.settings, data.read_parts), data.eval_part()
        bad_log = self.run_dir / "bad_samples" / f"rank-{rank}.jsonl"
        self.reader = open_reader(data, seed=train.seed, world=self.world, store=store, log=bad_log)
        self.eval_reader = (
            ShardReader([eval_part], image_size=data.image_size, store=store) if eval_part else None
        )
        self.augmentation = Augmentation(
            settings.augment,
            seed=train.seed,
            image_size=data.image_size,
            normalisation=Normalisation(self.card.channel_mean, self.card.channel_std),
            device=device,
            dtype=self.engine.input_dtype,
            pixels=self.card,
        )
        self.saver = Saver(
            settings, data, engine=self.engine, world=self.world, card=self.card, log=self.tracker
        )
        self.num_steps, self.eval_every = (
            self._steps(train.duration),
            max(1, self._steps(train.eval_every)),
        )
        self.order = data.order(seed=train.seed, global_batch_size=train.global_batch_size)
        warmup, self.schedule = (
            self._steps(settings.schedule.warmup),
            self._schedule_of(self.num_steps),
        )
        if (fitted := self.schedule.warmup_steps) != warmup and self.world.is_first:
            why = (
                f"{settings.schedule.warmup} is {warmup:,} steps, but the run has"
                f" {self.num_steps:,}"
            )
            print(
                f"{self.run_dir.name}: schedule.warmup: {why}; shortened to {fitted:,} steps",
                flush=True,
            )
        self.bad_samples = None
        if isinstance(self.reader, ShardReader):
            self.bad_samples = BadSamples(self.reader, log=bad_log, chosen=data.parts[0].chosen)
        self.skipped = SkippedSteps(
            lambda step: samples_of_rank(self.order, self.plan, step=step, rank=rank),
            self.reader,
            log=self.run_dir / "skipped_steps" / f"rank-{rank}.jsonl",
            max_in_a_row=train.max_skipped_steps,
            scales_loss=settings.engine.precision == "fp16",
        )
        self.meter = Meter(
            global_batch_size=train.global_batch_size,
            flops_per_image=training_flops(
                settings.model, num_classes=len(data.classes), image_size=data.image_size
            ),
            peak_teraflops=self.peak_teraflops,
            device=device,
        )
        self.start_step = self.step = 0
        self.owes_evaluation = self.stopping = False
        """`stopping`: whether a rank was asked to stop, as all ranks know."""
        self.scores: Scores | None = None
        self.scored_step = 0
        self.lengths: tuple[int, ...] = (self.num_steps,)
        self.num_bad = 0
        self.queued: QueuedStep | None = None
        self.reading: dict[str, float] = {}
        self.line: ProgressLine

    def fit(self, start: TrainerState) -> Outcome:
        self.step = self.start_step = start.step
        self.owes_evaluation = start.owes_evaluation
        self._note_length(start)
        keep("the checkpoint of the next step is saved first")
        self.skipped.go_on(total=start.skipped_steps, in_a_row=start.skipped_in_a_row)
        self.saver.go_on(start)
        self.first_read.start()
        title, shown = self.run_dir.name, self.world.is_first
        with (
            progress(
                title, total=self.num_steps, unit="step", start=self.step, enabled=shown
            ) as self.line,
            self._feed() as feed,
        ):
            self.line.note = f"first step{' and compilation' * self.settings.engine.compile}"
            self.stopping = any_rank(self.stop.raised_by is not None, device=self.engine.device)
            if (
                self.owes_evaluation or self.step >= self.num_steps
            ):  # it was given up, or killed before result.json
                self._evaluate()
            self.meter.restart()
            while self.step < self.num_steps and not self.stopping:
                try:
                    queued = self._queue_step(feed)
                except Interrupted:  # while it waited for data
                    self.stopping = True
                    break
                self._settle()  # the step before
                self.queued = queued
                self.step += 1
                eval_due, save_due = (
                    self._is_due(self.step, self.eval_every),
                    self.saver.is_due(self.step),
                )
                if eval_due or save_due or self.stopping:
                    self._settle()
                if eval_due:
                    self._evaluate()
                if self.saver.is_due(self.step):  # the evaluation may have been the best so far
                    self.saver.save(self._state())
                if eval_due or save_due:
                    self.meter.restart()
                self._log_saving()
            self._settle()
            self.first_read.raise_fault()
            if self.step > 0:
                self.saver.save(self._state(), is_last=True)
        try:
            self.saver.finish(self.stop if self.stopping else None)
        finally:
            self._log_saving()
        is_saved = self.saver.saved_step == self.step  # it may have been left out
        return Outcome(
            self.step,
            finished=self.step >= self.num_steps and is_saved and not self.owes_evaluation,
            scores=self.scores,
            best=self.saver.best,
            images_per_s=self.meter.images_per_s,
        )

    def _schedule_of(self, num_steps: int) -> Schedule:
        """Return the learning rates of this run if it has `num_steps`."""
        wanted = self.settings.schedule
        warmup = fit_warmup(self._steps(wanted.warmup), num_steps=num_steps)
        return Schedule(
            wanted, self.settings.optimizer.lr, num_steps, warmup, self._steps(wanted.cooldown)
        )

    def _note_length(self, start: TrainerState) -> None:
        """Of a run whose length was changed: the rate follows the new one from here on."""
        if not start.lengths or start.lengths[-1] == self.num_steps:
            self.lengths = start.lengths or self.lengths
            return
        self.lengths = (*start.lengths, self.num_steps)
        before, now = (self._schedule_of(count).lr(self.step) for count in self.lengths[-2:])
        words = (
            f"{' -> '.join(f'{count:,}' for count in self.lengths)} steps, at step {self.step:,}"
        )
        jump = (
            ""
            if before == now or self.step >= self.num_steps
            else f"; its learning rate jumps from {before:.3g} to {now:.3g}"
        )
        self.tracker.params(
            {},
            tags={"extended" if self.lengths[-1] > self.lengths[-2] else "shortened": words + jump},
        )
        if self.world.is_first:
            print(f"{self.run_dir.name}: another length: {words}{jump}", flush=True)

    def _feed(self) -> Feed:
        """Micro-batches, augmented and on the device, from where training stands."""
        consumed, on_gpu = (
            self.step * self.plan.global_batch_size,
            self.engine.device.type == "cuda",
        )
        return Feed(
            lambda finish: batches_of(
                self.reader,
                self.order,
                self.plan,
                rank=self.world.rank,
                consumed=consumed,
                num_threads=self._num_threads,
                prefetch=self.settings.train.prefetch_batches,
                pin=on_gpu,
                finish=finish,
                bad_samples=self.bad_samples,
                previous_in=(
                    self.plan.global_batch_size if self.settings.augment.mixes_previous else None
                ),
                # on a GPU a thread of the feed waits for batches, which no signal interrupts
                waits=Future.result if on_gpu else self.stop.result,
            ),
            self.augmentation,
            waits=self.stop.result,
        )

    def _queue_step(self, feed: Feed) -> QueuedStep:
        """Queues the step that takes the model from `step` to `step + 1`."""
        self.first_read.raise_fault()
        step, lr = self.step, self.schedule.lr(self.step)
        PROGRESS.mark("waiting for data", step=step + 1)
        asked = Moment(self.engine.device)
        with self.stop.waiting():
            fed = [next(feed) for _ in range(self.plan.accumulation_steps)]
        given = Moment(self.engine.device)
        if step == 0:
            self._show_fed(fed[0].prepared)
            self._show_filters()
        PROGRESS.mark("computing", step=step + 1)
        seed = hash64(self.settings.train.seed, step, self.world.rank)
        torch.manual_seed(int(seed))  # what dropout draws has no state, either
        result = self.engine.train_step([each.prepared for each in fed], lr=lr)
        exchange = Exchange(
            result.loss,
            result.gradient_norm,
            flag=self.stop.raised_by is not None,
            num_bad=sum(each.num_bad for each in fed),
            applied=result.applied,
        )
        return QueuedStep(step + 1, lr, asked, given, exchange)

    def _settle(self) -> None:
        """Reads what the queued step came to, if there is one, and acts on it."""
        done, self.queued = self.queued, None
        if done is None:
            return
        PROGRESS.mark("waiting for the end of the step on all ranks", step=done.step)
        agreed = done.exchange.read()
        self.stopping = self.stopping or agreed.votes > 0
        self.skipped.note(done.step, agreed)
        self.num_bad += agreed.num_bad
        check_share(
            self.num_bad,
            num_seen=(done.step - self.start_step) * self.plan.global_batch_size,
            num_samples=self.reader.num_samples,
            max_share=self.settings.data.max_bad_share,
        )
        self.meter.count(done.exchange.ended, wait_s=done.given.seconds_since(done.asked))
        if self._is_due(done.step, self.settings.train.log_every_steps):
            samples = done.step * self.plan.global_batch_size
            self.reading = {
                "train/loss": agreed.loss,
                "train/gradient_norm": agreed.gradient_norm,
                "train/lr": done.lr,
                "train/samples": float(samples),
                "train/epoch": (
                    samples / self.data.epoch_size(global_batch_size=self.plan.global_batch_size)
                ),
                "train/bad_samples": float(self.num_bad),
                "train/skipped_steps": float(self.skipped.total),
            } | self.meter.reading()
            self.tracker.metrics(self.reading, step=done.step)
            self.line.note = in_words(self.reading, self.scores, scored_step=self.scored_step)
        self.line.advance(note=None if self.reading or self.scores else "")

    def _evaluate(self) -> None:
        """Not if the run is to stop: then the evaluation is owed, and the next start makes up for
        it."""
        self.owes_evaluation = self.eval_reader is not None
        if self.stopping:
            return
        self._show_filters()
        if self.eval_reader is None:
            return
        PROGRESS.mark("before its evaluation", step=self.step)
        try:
            with self.engine.averaged():
                scores = evaluate(
                    self.engine.logits,
                    self.eval_reader,
                    self.augmentation,
                    local_batch_size=self.plan.local_batch_size,
                    num_threads=self._num_threads,
                    world=self.world,
                    stop=self.stop,
                )
        except Interrupted:
            self.stopping = True
            return
        self.scores, self.scored_step, self.owes_evaluation = scores, self.step, False
        self.saver.judge(self.step, top1=scores.top1)
        self.tracker.metrics(scores.metrics("eval"), step=self.step)
        self.line.note = in_words(self.reading, scores, scored_step=self.step)
        self.line.log_now()  # new scores have a line of their own in a log

    def _state(self) -> TrainerState:
        """All that a resume needs besides weights."""
        return TrainerState(
            step=self.step,
            samples_consumed=self.step * self.plan.global_batch_size,
            owes_evaluation=self.owes_evaluation,
            skipped_steps=self.skipped.total,
            skipped_in_a_row=self.skipped.in_a_row,
            num_cpu_threads=num_cpu_threads(self.engine.device),
            lengths=self.lengths,
        )

    def _log_saving(self) -> None:
        if news := self.saver.writer.news():
            self.tracker.metrics(news, step=self.step)

    def _steps(self, length: str) -> int:
        return self.data.steps(length, global_batch_size=self.settings.train.global_batch_size)

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.num_steps

    @property
    def _num_threads(self) -> int:
        return self.settings.train.loader_threads or self.world.num_cores

    def _show_fed(self, prepared: Prepared) -> None:
        """A sheet of the first pictures of a run, of the first rank's share."""
        sample, data, normalisation = (
            first_of(prepared, count=NUM_SHOWN),
            self.data,
            self.augmentation.normalisation,
        )
        title = f"{data.name}, as {self.run_dir.name} sees it"
        facts = f"{data.image_size} px  ·  {self.settings.augment.recipe}"
        self.tracker.picture(
            "fed",
            lambda: fed_sheet(
                sample, normalisation=normalisation, classes=data.classes, title=title, facts=facts
            ),
            step=0,
        )

    def _show_filters(self) -> None:
        """What the first layer looks at. Every rank calls it; the weights may lie in shards."""
        side = filter_side(self.settings.model, image_size=self.data.image_size)
        if side is None or not self.settings.tracking.enabled:
            return
        weight_NF = self.engine.weight(FIRST_LAYER)
        if weight_NF is not None:
            filters = strongest_filters(weight_NF, side=side, count=COLUMNS**2)
            title = (
                f"{self.run_dir.name}, step {self.step:,}: the strongest filters of the first layer"
            )
            self.tracker.picture(
                "first_layer",
                lambda: draw_filters(filters, columns=COLUMNS, title=title),
                step=self.step,
            )


def in_words(reading: dict[str, float], scores: Scores | None, *, scored_step: int) -> str:
    """Return the note of the progress line. `scored_step`: the step of the scores, which may be
    older than the step of the line."""
    parts = [f"epoch {reading['train/epoch']:.1f}"] if "train/epoch" in reading else []
    if "train/loss" in reading:
        parts.append(f"training loss {reading['train/loss']:.3f}")
    if scores is not None:
        parts.append(f"{accuracy(scores.top1, scores.class_top1)} at step {scored_step:,}")
    if "usage/images_per_s" in reading:
        parts.append(f"{reading['usage/images_per_s']:,.0f} images/s")
    if "usage/mfu" in reading:
        parts.append(f"MFU {100 * reading['usage/mfu']:.0f} %")
    return "  ".join(parts)
