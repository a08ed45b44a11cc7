"""A task's trainer, put together from validated settings: everything but the engine is the same for pretraining and fine-tuning."""

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pretrain.augment.augmentation import Augmentation, Normalisation, Prepared
from pretrain.augment.feed import Feed
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.checkpoint_writer import CheckpointWriter
from pretrain.checkpoints.files import Retention
from pretrain.checkpoints.run import CONFIG_FILE, flatten
from pretrain.config import PretrainSettings, parse_length
from pretrain.data.bad_samples import BadSamples, check_share
from pretrain.data.datasets import TrainingData, check_against_data
from pretrain.data.first_read import FirstRead, read_in_place
from pretrain.data.loader import training_batches
from pretrain.data.order import BatchPlan, Line
from pretrain.data.reader import ShardReader, open_cache
from pretrain.data.shard_cache import ShardCache
from pretrain.data.staging import staged
from pretrain.engine.step import Engine
from pretrain.loop.evaluate import Scores, evaluate
from pretrain.loop.peak import find_peak
from pretrain.loop.saving import SavingPlan
from pretrain.loop.skipped_steps import SkippedSteps, samples_of_rank
from pretrain.loop.trainer import Cadence, Trainer
from pretrain.models.cost import forward_flops
from pretrain.optim.schedule import Schedule
from pretrain.ranks.collectives import barrier
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World
from pretrain.tracking.node import NodeSampler, node_name
from pretrain.tracking.pictures import (
    FIRST_LAYER,
    draw_filters,
    fed_sheet,
    filter_side,
    first_of,
    recipe,
    strongest_filters,
)
from pretrain.tracking.run_tags import datasets_of, training_tags
from pretrain.tracking.tracker import RunIdentity, Tracker

NUM_SHOWN, COLUMNS = 40, 5
"""Pictures on the sheet of what the model is fed; columns of the picture of its first layer."""


@dataclass(frozen=True)
class Task:
    """One training task, ready to be run: what differs between tasks is here, the loop is the same for all."""

    settings: PretrainSettings
    data: TrainingData
    world: World
    plan: BatchPlan
    engine: Engine
    tracker: Tracker
    stop: StopFlag
    run_key: str
    normalisation: Normalisation

    def trainer(self) -> Trainer:
        settings, run_dir = self.settings, Path(self.settings.run_dir)
        assert self.read_data.parts  # all ranks together, before anything is read
        barrier()  # all ranks measure at once
        peak = find_peak(
            self.engine.device, precision=settings.engine.precision, given=settings.tracking.peak_teraflops
        )
        self.tracker.params({"peak_teraflops": str(peak)})
        size = {"num_classes": len(self.data.classes), "image_size": self.data.image_size}
        return Trainer(
            engine=self.engine,
            plan=self.plan,
            schedule=schedule_of(settings, self.data),
            cadence=cadence_of(settings, self.data),
            feed_from=self.feed_from,
            check_bad=self.check_bad,
            first_read=self.first_read,
            skipped=self.skipped,
            evaluate=self.scores,
            card_at=self.card_at,
            writer=CheckpointWriter(run_dir, retention_of(settings, self.data)),
            saving=saving_of(settings, self.data),
            run_dir=run_dir,
            tracker=self.tracker,
            stop=self.stop,
            world=self.world,
            samples_per_epoch=self.data.epoch_size(global_batch_size=self.plan.global_batch_size),
            flops_per_image=forward_flops(settings.model, **size),
            peak_teraflops=peak.teraflops * self.world.num_ranks,
            show_fed=self.show_fed,
            show_filters=self.show_filters,
            title=run_dir.name,
            seed=settings.train.seed,
        )

    @cached_property
    def cache(self) -> ShardCache | None:
        return open_cache(self.data.settings, self.data.read_parts)

    @cached_property
    def read_data(self) -> TrainingData:
        """As it is read; all ranks ask for it together."""
        return staged(self.data, world=self.world, device=self.engine.device, stop=self.stop)

    @property
    def first_read(self) -> FirstRead:
        """All ranks ask for it together."""
        checked = self.read_data.read_parts if self.data.settings.check == "first-read" else ()
        parts = read_in_place(checked, device=self.engine.device)
        return FirstRead(parts, run_dir=Path(self.settings.run_dir), world=self.world)

    @cached_property
    def reader(self) -> ShardReader:
        return ShardReader(self.read_data.parts, image_size=self.data.image_size, cache=self.cache)

    @cached_property
    def eval_reader(self) -> ShardReader | None:
        part = self.read_data.eval_part()
        return ShardReader([part], image_size=self.data.image_size, cache=self.cache) if part else None

    @cached_property
    def augmentation(self) -> Augmentation:
        return Augmentation(
            self.settings.augment,
            seed=self.settings.train.seed,
            image_size=self.data.image_size,
            normalisation=self.normalisation,
            device=self.engine.device,
            dtype=self.engine.input_dtype,
        )

    @cached_property
    def bad_samples(self) -> BadSamples:
        log = Path(self.settings.run_dir) / "bad_samples" / f"rank-{self.world.rank}.jsonl"
        return BadSamples(self.reader, log=log, chosen=self.data.parts[0].chosen)

    @cached_property
    def order(self) -> Line:
        return self.data.order(seed=self.settings.train.seed, global_batch_size=self.plan.global_batch_size)

    @cached_property
    def skipped(self) -> SkippedSteps:
        rank = self.world.rank
        return SkippedSteps(
            lambda step: samples_of_rank(self.order, self.plan, step=step, rank=rank),
            self.reader,
            log=Path(self.settings.run_dir) / "skipped_steps" / f"rank-{rank}.jsonl",
            max_in_a_row=self.settings.train.max_skipped_steps,
            scales_loss=self.settings.engine.precision == "fp16",
        )

    def feed_from(self, consumed: int) -> Feed:
        train, plan = self.settings.train, self.plan
        on_gpu = (
            self.engine.device.type == "cuda"
        )  # there a thread of the feed waits for batches, which no signal interrupts
        return Feed(
            lambda finish: training_batches(
                self.reader,
                self.order,
                plan,
                rank=self.world.rank,
                consumed=consumed,
                num_threads=self.num_threads,
                prefetch=train.prefetch_batches,
                pin=on_gpu,
                finish=finish,
                bad_samples=self.bad_samples,
                waits=Future.result if on_gpu else self.stop.result,
            ),
            self.augmentation,
            waits=self.stop.result,
        )

    @property
    def num_threads(self) -> int:
        return self.settings.train.loader_threads or self.world.num_cores

    def check_bad(self, num_bad: int, num_seen: int) -> None:
        share = self.settings.data.max_bad_share
        check_share(num_bad, num_seen=num_seen, num_samples=self.reader.num_samples, max_share=share)

    def scores(self) -> Scores | None:
        if self.eval_reader is None:
            return None
        with self.engine.averaged():
            return evaluate(
                self.engine.logits,
                self.eval_reader,
                self.augmentation,
                local_batch_size=self.plan.local_batch_size,
                num_threads=self.num_threads,
                world=self.world,
                stop=self.stop,
            )

    def show_fed(self, prepared: Prepared) -> None:
        """A sheet of the first pictures of a run, of the first rank's share."""
        sample = first_of(prepared, count=NUM_SHOWN)
        names = self.data.classes
        title = f"{self.data.name}, as {Path(self.settings.run_dir).name} sees it"
        facts = f"{self.data.image_size} px  ·  {recipe(self.settings.augment)}"
        self.tracker.picture(
            "pictures/fed",
            lambda: fed_sheet(sample, normalisation=self.normalisation, classes=names, title=title, facts=facts),
            step=0,
        )

    def show_filters(self, step: int) -> None:
        """Every rank calls it; the weights may lie in shards."""
        side = filter_side(self.settings.model, image_size=self.data.image_size)
        if side is None or not self.settings.tracking.enabled:
            return
        weight_NF = self.engine.weight(FIRST_LAYER)
        if weight_NF is not None:
            filters = strongest_filters(weight_NF, side=side, count=COLUMNS**2)
            self.tracker.picture("pictures/first_layer", lambda: draw_filters(filters, columns=COLUMNS), step=step)

    def card_at(self, step: int) -> ModelCard:
        crop, interpolation = self.data.squares
        return ModelCard(
            model=self.settings.model,
            image_size=self.data.image_size,
            classes=self.data.classes,
            channel_mean=self.normalisation.mean,
            channel_std=self.normalisation.std,
            dataset=self.data.name,
            stored_crop=crop,
            stored_interpolation=interpolation,
            fed_interpolation=self.settings.augment.plain_filter,
            content_hash=self.data.content_hash,
            pixels_hash=self.data.pixels_hash,
            step=step,
            run_key=self.run_key,
        )


def open_tracker(
    settings: PretrainSettings,
    data: TrainingData,
    world: World,
    *,
    num_weights: int,
    parent_key: str | None = None,
    parent_dir: Path | None = None,
    extra_tags: dict[str, str] | None = None,
) -> tuple[str, Tracker]:
    """(run key, tracker): the first rank's tracker is real, the others' say nothing. `parent_key` serves where no run is in
    `parent_dir`."""
    if not world.is_first:
        return "", Tracker(None, params={}, tags={})
    run_dir, tracking = Path(settings.run_dir), settings.tracking
    identity = RunIdentity.of(
        run_dir, experiment=tracking.experiment, uri=tracking.uri, parent_key=parent_key, parent_dir=parent_dir
    )
    params = flatten(settings.model_dump(mode="json")) | {
        "num_ranks": world.num_ranks,
        "num_weights": num_weights,
        "content_hash": data.content_hash,
    }
    tags = training_tags(settings, data, num_weights=num_weights) | (extra_tags or {"task": "pretrain"})
    tracker = Tracker(run_dir if tracking.enabled else None, params=params, tags=tags, datasets=datasets_of(data))
    tracker.artifact(run_dir / CONFIG_FILE)
    if tracking.enabled:
        tracker.sample_system(NodeSampler(run_dir).sample, node=node_name(world))
    return identity.run_key, tracker


def schedule_of(settings: PretrainSettings, data: TrainingData) -> Schedule:
    size = _size(settings, data)
    return Schedule(
        name=settings.schedule.name,
        base_lr=settings.optimizer.lr,
        final_lr=settings.schedule.final_lr,
        warmup_steps=parse_length(settings.schedule.warmup).steps(**size),
        num_steps=parse_length(settings.train.duration).steps(**size),
        warmup_from=settings.schedule.warmup_from,
    )


def cadence_of(settings: PretrainSettings, data: TrainingData) -> Cadence:
    size, train_settings = _size(settings, data), settings.train
    return Cadence(
        num_steps=check_against_data(data, model=settings.model, train=train_settings, schedule=settings.schedule),
        log_every=train_settings.log_every_steps,
        eval_every=max(1, parse_length(train_settings.eval_every).steps(**size)),
    )


def saving_of(settings: PretrainSettings, data: TrainingData) -> SavingPlan:
    size, wanted = _size(settings, data), settings.checkpoint
    return SavingPlan(
        every=max(1, parse_length(wanted.every).steps(**size)),
        num_steps=parse_length(settings.train.duration).steps(**size),
        keep_every=retention_of(settings, data).keep_every_steps,
        keep_best=wanted.keep_best,
        longest_wait_s=settings.engine.timeout_s / 2,
    )


def retention_of(settings: PretrainSettings, data: TrainingData) -> Retention:
    wanted = settings.checkpoint
    steps = max(1, parse_length(wanted.keep_every).steps(**_size(settings, data))) if wanted.keep_every else None
    return Retention(wanted.keep_last, steps)


def _size(settings: PretrainSettings, data: TrainingData) -> dict[str, int]:
    batch = settings.train.global_batch_size
    return {"global_batch_size": batch, "num_samples": data.epoch_size(global_batch_size=batch)}
