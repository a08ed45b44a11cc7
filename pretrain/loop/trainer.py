"""The training loop of every task and engine.

Each step:
1. this rank's micro-batches of the global batch;
2. the update of the engine, at the learning rate of the step;
3. one exchange of the mean loss, the votes to stop and the number of bad samples;
4. the log;
5. an evaluation or a checkpoint, if due;
6. the end, if a rank voted to stop.

The state is (engine, step, samples consumed), nothing else. The exchange of a step is read during
the next step, or before an evaluation, a checkpoint or the end. All ranks read the same sums, so
all stop or fail at the same step.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data_prep.interrupts import keep
from data_prep.manifest import accuracy
from data_prep.progress import ProgressLine
from pretrain.augment.augmentation import Augmentation, Prepared
from pretrain.augment.feed import Fed, Feed, finish_for
from pretrain.checkpoints.files import Best, TrainerState
from pretrain.checkpoints.writer import Saver
from pretrain.config import PretrainSettings
from pretrain.data.bad_samples import check_fraction
from pretrain.data.datasets import TrainingData, fit_warmup
from pretrain.data.first_read import FirstRead
from pretrain.data.loader import BatchSource, num_cpu_threads
from pretrain.data.order import BatchPlan, hash64
from pretrain.data.reader import ShardReader
from pretrain.data.stream import Stream, batches_of
from pretrain.engine.step import Engine, span
from pretrain.loop.evaluate import Scores, evaluate
from pretrain.loop.garbage import collect, fixed_collection
from pretrain.loop.peak import Meter
from pretrain.loop.profile_window import ProfileWindow
from pretrain.loop.skipped_steps import SkippedSteps
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
"""Number of input images on the first sheet, and columns on the sheet of first-layer filters."""


@dataclass(frozen=True)
class Outcome:
    step: int
    finished: bool
    scores: Scores | None = None
    best: Best | None = None
    images_per_s: float | None = None
    """Throughput of this attempt without its first step, which loads and compiles."""


@dataclass(frozen=True)
class QueuedStep:
    """A step that may still be running on the device."""

    step: int
    """Number of finished steps, including this one."""
    lr: float
    asked: Moment
    given: Moment
    """Moment at which the device received the data. The wait for the data began at `asked`."""
    exchange: Exchange


@dataclass
class Trainer:
    """Training loop over the parts that `assemble` makes. All ranks create the trainer together."""

    settings: PretrainSettings
    data: TrainingData
    plan: BatchPlan
    world: World
    stop: StopFlag
    tracker: Tracker
    engine: Engine
    reader: ShardReader | Stream
    eval_reader: ShardReader | None
    augmentation: Augmentation
    saver: Saver
    first_read: FirstRead
    meter: Meter
    step: int = 0
    start_step: int = 0
    owes_evaluation: bool = False
    stopping: bool = False
    """True once all ranks know that one of them must stop."""
    num_bad: int = 0
    scores: Scores | None = None
    scored_step: int = 0
    queued: QueuedStep | None = None
    reading: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        train, self.run_dir = self.settings.train, Path(self.settings.run_dir)
        self.num_steps = self._steps(train.duration)
        self.lengths: tuple[int, ...] = (self.num_steps,)
        self.eval_every = max(1, self._steps(train.eval_every))
        self.order = self.data.order(seed=train.seed, global_batch_size=train.global_batch_size)
        self.schedule = self._schedule_of(self.num_steps)
        self.skipped = SkippedSteps(
            self.settings, self.reader, self.order, self.plan, rank=self.world.rank
        )
        window, device = self.settings.tracking.profile, self.engine.device
        self.window = ProfileWindow(window, self.run_dir, world=self.world, device=device)
        self.line: ProgressLine

    def fit(self, start: TrainerState) -> Outcome:
        self.step = self.start_step = start.step
        self.owes_evaluation = start.owes_evaluation
        self._note_lengths(start)
        keep("the checkpoint of the next step is saved first")
        self.skipped.go_on(total=start.skipped_steps, in_a_row=start.skipped_in_a_row)
        self.saver.go_on(start)
        self.first_read.start()
        with (
            ProgressLine(
                self.run_dir.name,
                total=self.num_steps,
                unit="step",
                start=self.step,
                enabled=self.world.is_first,
            ) as self.line,
            self._feed() as feed,
            fixed_collection(),
        ):
            self.line.note = f"first step{' and compilation' * self.settings.engine.compile}"
            self.stopping = any_rank(self.stop.raised_by is not None, device=self.engine.device)
            if self.owes_evaluation or self.step >= self.num_steps:  # skipped or killed before
                self._evaluate()
                if self.step > 0:
                    self.saver.save(self._state())
            self.meter.restart()
            while self.step < self.num_steps and not self.stopping:
                self.window.begin_step(self.step + 1)
                try:
                    queued = self._queue_step(feed)
                except Interrupted:  # while waiting for data
                    self.stopping = True
                    break
                self._finish_step()  # the previous step
                self.queued = queued
                self.step += 1
                eval_due = self._is_due(self.step, self.eval_every)
                save_due, trace_due = self.saver.is_due(self.step), self.window.is_last(self.step)
                if eval_due or save_due or trace_due or self.stopping:
                    self._finish_step()
                if eval_due:
                    with span("evaluation"):
                        self._evaluate()
                if self.saver.is_due(self.step):  # the evaluation may be the best so far
                    with span("checkpoint"):
                        self.saver.save(self._state())
                collect(self.step, is_pause=eval_due or save_due)
                if trace_due:
                    self.window.close()
                if eval_due or save_due or trace_due:
                    self.meter.restart()
            self._finish_step()
            self.window.close()
            self.first_read.raise_fault()
            if self.step > 0:
                self.saver.save(self._state(), is_last=True)
        self.saver.finish(self.stop if self.stopping else None)
        is_saved = self.saver.saved_step == self.step
        return Outcome(
            self.step,
            finished=self.step >= self.num_steps and is_saved and not self.owes_evaluation,
            scores=self.scores,
            best=self.saver.best,
            images_per_s=self.meter.images_per_s,
        )

    def _schedule_of(self, num_steps: int) -> Schedule:
        wanted = self.settings.schedule
        asked = self._steps(wanted.warmup)
        warmup = fit_warmup(asked, num_steps=num_steps)
        if warmup != asked and num_steps == self.num_steps and self.world.is_first:
            print(
                f"{self.run_dir.name}: schedule.warmup: {wanted.warmup} is {asked:,} steps, but the"
                f" run has {num_steps:,}; the warm-up is shortened to {warmup:,} steps",
                flush=True,
            )
        lr, cooldown = self.settings.optimizer.lr, self._steps(wanted.cooldown)
        return Schedule(wanted, lr, num_steps, warmup, cooldown)

    def _note_lengths(self, start: TrainerState) -> None:
        """Report a changed training length. The learning rate follows the new length from this step
        on."""
        if not start.lengths or start.lengths[-1] == self.num_steps:
            self.lengths = start.lengths or self.lengths
            return
        self.lengths = (*start.lengths, self.num_steps)
        before = self._schedule_of(start.lengths[-1]).lr(self.step)
        now = self.schedule.lr(self.step)
        counts = " -> ".join(f"{count:,}" for count in self.lengths)
        words = f"{counts} steps, at step {self.step:,}"
        if before != now and self.step < self.num_steps:
            words += f"; the learning rate jumps from {before:.3g} to {now:.3g}"
        tag = "extended" if self.lengths[-1] > self.lengths[-2] else "shortened"
        self.tracker.params({}, tags={tag: words})
        if self.world.is_first:
            print(f"{self.run_dir.name}: new length: {words}", flush=True)

    def _feed(self) -> Feed:
        """Return the micro-batches from the next step on, augmented and on the device."""
        batch_size, on_gpu = self.plan.global_batch_size, self.engine.device.type == "cuda"
        batches: BatchSource[Fed] = batches_of(
            self.reader,
            self.order,
            self.plan,
            rank=self.world.rank,
            consumed=self.step * batch_size,
            num_threads=self._num_threads,
            prefetch=self.settings.train.prefetch_batches,
            pin=on_gpu,
            finish=finish_for(self.augmentation),
            log=self.run_dir / "bad_samples" / f"rank-{self.world.rank}.jsonl",
            node_ranks=self.world.node_ranks,
            previous_in=batch_size if self.settings.augment.mixes_previous else None,
            # on a GPU a thread of the feed waits for batches, and signals do not reach the thread
            waits=Future.result if on_gpu else self.stop.result,
        )
        return Feed(batches, self.augmentation, waits=self.stop.result)

    def _queue_step(self, feed: Feed) -> QueuedStep:
        """Queue the step after `step` on the device."""
        self.first_read.raise_fault()
        step, lr = self.step, self.schedule.lr(self.step)
        PROGRESS.mark("waiting for data", step=step + 1)
        asked = Moment(self.engine.device)
        with self.stop.waiting(), span("wait for data"):
            fed = [next(feed) for _ in range(self.plan.accumulation_steps)]
        given = Moment(self.engine.device)
        if step == 0:
            self._show_inputs(fed[0].prepared)
            self._show_filters()
        PROGRESS.mark("computing", step=step + 1)
        seed = hash64(self.settings.train.seed, step, self.world.rank)
        torch.manual_seed(int(seed))  # so dropout needs no saved state
        result = self.engine.train_step([each.prepared for each in fed], lr=lr)
        exchange = Exchange(
            result.loss,
            result.gradient_norm,
            flag=self.stop.raised_by is not None,
            num_bad=sum(each.num_bad for each in fed),
            applied=result.applied,
        )
        return QueuedStep(step + 1, lr, asked, given, exchange)

    def _finish_step(self) -> None:
        """Read the result of the queued step, if there is one, and act on it."""
        done, self.queued = self.queued, None
        if done is None:
            return
        PROGRESS.mark("waiting for the end of the step on all ranks", step=done.step)
        with span("wait for the end of the previous step"):
            agreed, batch_size = done.exchange.read(), self.plan.global_batch_size
        self.stopping = self.stopping or agreed.votes > 0
        self.skipped.note(done.step, agreed)
        self.num_bad += agreed.num_bad
        check_fraction(
            self.num_bad,
            num_seen=(done.step - self.start_step) * batch_size,
            num_samples=self.reader.num_samples,
            max_fraction=self.settings.data.max_bad_fraction,
        )
        self.meter.count(done.exchange.ended, wait_s=done.given.seconds_since(done.asked))
        samples = done.step * batch_size
        epoch = samples / self.data.epoch_size(global_batch_size=batch_size)
        if self._is_due(done.step, self.settings.train.log_every_steps):
            self.reading = {
                "train/epoch": epoch,
                "train/loss": agreed.loss,
                "train/gradient_norm": agreed.gradient_norm,
                "train/lr": done.lr,
                "train/samples": float(samples),
                "train/bad_samples": float(self.num_bad),
                "train/skipped_steps": float(self.skipped.total),
            } | self.meter.reading()
            self.tracker.metrics(self.reading, step=done.step)
        self.reading["train/epoch"] = epoch
        self.line.advance(note=in_words(self.reading, self.scores, scored_step=self.scored_step))

    def _evaluate(self) -> None:
        """Evaluate the model. If the run must stop, leave this to the resumed run."""
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
        self.tracker.metrics(scores.metrics(), step=self.step)
        self.line.note = in_words(self.reading, scores, scored_step=self.step)
        self.line.log_now()  # in a log, new scores get their own line

    def _state(self) -> TrainerState:
        return TrainerState(
            step=self.step,
            samples_consumed=self.step * self.plan.global_batch_size,
            owes_evaluation=self.owes_evaluation,
            skipped_steps=self.skipped.total,
            skipped_in_a_row=self.skipped.in_a_row,
            num_cpu_threads=num_cpu_threads(self.engine.device),
            lengths=self.lengths,
        )

    def _steps(self, length: str) -> int:
        return self.data.steps(length, global_batch_size=self.plan.global_batch_size)

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.num_steps

    @property
    def _num_threads(self) -> int:
        return self.settings.train.loader_threads or self.world.num_cores

    def _show_inputs(self, prepared: Prepared) -> None:
        sample, data = first_of(prepared, count=NUM_SHOWN), self.data
        self.tracker.picture(
            "fed",
            lambda: fed_sheet(
                sample,
                normalization=self.augmentation.normalization,
                classes=data.classes,
                title=f"{data.name}, as {self.run_dir.name} sees it",
                facts=f"{data.image_size} px  ·  {self.settings.augment.recipe}",
            ),
            step=0,
        )

    def _show_filters(self) -> None:
        """Log the filters of the first layer. Every rank must call this method, because weights may
        be sharded."""
        side = filter_side(self.settings.model, image_size=self.data.image_size)
        if side is None or not self.settings.tracking.enabled:
            return
        weight_NF = self.engine.weight(FIRST_LAYER)
        if weight_NF is not None:
            filters = strongest_filters(weight_NF, side=side, count=COLUMNS**2)
            place = f"{self.run_dir.name}, step {self.step:,}"
            title = f"{place}: the strongest filters of the first layer"
            self.tracker.picture(
                "first_layer",
                lambda: draw_filters(filters, columns=COLUMNS, title=title),
                step=self.step,
            )


def in_words(reading: dict[str, float], scores: Scores | None, *, scored_step: int) -> str:
    """Return the note of the progress line. `scored_step`: step of the evaluation."""
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
