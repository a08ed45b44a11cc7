"""A task's trainer, put together from validated settings: everything but the engine is the same for pretraining and fine-tuning."""

import resource
import subprocess
from pathlib import Path

from data_prep.manifest import Manifest
from pretrain import checkpoint
from pretrain.augment import Augmentation, Normalisation
from pretrain.card import CheckpointError, ModelCard
from pretrain.checkpoint import TrainerState
from pretrain.config import PretrainSettings, check_against_data
from pretrain.counter import hash64, hex_key
from pretrain.durations import parse_length
from pretrain.evaluate import Scores, evaluate
from pretrain.loader import TrainingBatches
from pretrain.models.build import forward_flops
from pretrain.order import BatchPlan, Order
from pretrain.preemption import StopFlag
from pretrain.run import CONFIG_FILE, flatten, save_result
from pretrain.schedule import Schedule
from pretrain.shards import SplitReader
from pretrain.step import Engine
from pretrain.tracking import RunIdentity, Tracker
from pretrain.trainer import Cadence, Outcome, Trainer
from pretrain.world import World


def assemble(
    settings: PretrainSettings,
    manifest: Manifest,
    world: World,
    *,
    plan: BatchPlan,
    engine: Engine,
    tracker: Tracker,
    stop: StopFlag,
    run_key: str,
    normalisation: Normalisation,
) -> Trainer:
    """The trainer of a task: everything but the engine is the same for pretraining and fine-tuning."""
    data, image_size = settings.data, settings.data.image_size or manifest.image_size
    reader = SplitReader(data.dataset, manifest, data.train_split, image_size=image_size)
    eval_reader = (
        SplitReader(data.dataset, manifest, data.eval_split, image_size=image_size) if data.eval_split else None
    )
    key = int(hash64(hex_key(manifest.hash), settings.train.seed) >> 1)
    order = Order(reader.num_samples, key, data.shuffle, data.block_size, data.window_blocks)
    augmentation = Augmentation(
        settings.augment,
        seed=settings.train.seed,
        image_size=image_size,
        normalisation=normalisation,
        device=engine.device,
        dtype=engine.input_dtype,
    )

    def batches_from(consumed: int) -> TrainingBatches:
        return TrainingBatches(
            reader,
            order,
            plan,
            rank=world.rank,
            consumed=consumed,
            num_threads=settings.train.loader_threads,
            prefetch=settings.train.prefetch_batches,
            pin=engine.device.type == "cuda",
        )

    def scores() -> Scores | None:
        if eval_reader is None:
            return None
        return evaluate(engine.logits, eval_reader, augmentation, local_batch_size=plan.local_batch_size, world=world)

    def card_at(step: int) -> ModelCard:
        return ModelCard(
            model=settings.model,
            image_size=image_size,
            classes=manifest.classes,
            channel_mean=normalisation.mean,
            channel_std=normalisation.std,
            dataset=manifest.name,
            manifest_hash=manifest.hash,
            step=step,
            run_key=run_key,
        )

    return Trainer(
        engine=engine,
        augmentation=augmentation,
        plan=plan,
        schedule=schedule_of(settings, manifest),
        cadence=cadence_of(settings, manifest),
        batches_from=batches_from,
        evaluate=scores,
        card_at=card_at,
        run_dir=Path(settings.run_dir),
        tracker=tracker,
        stop=stop,
        world=world,
        flops_per_image=forward_flops(settings.model, num_classes=len(manifest.classes), image_size=image_size),
        title=Path(settings.run_dir).name,
    )


def supervise(trainer: Trainer) -> Outcome:
    """Restores, fits, and closes the tracker with the status that is true."""
    try:
        outcome = trainer.fit(restore(trainer))
    except BaseException as error:
        trainer.tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    if trainer.world.is_first and outcome.finished:
        scores = outcome.scores
        result = {"step": outcome.step, "images_per_s": outcome.images_per_s, "ranks": trainer.world.num_ranks}
        if scores is not None:
            result |= scores.metrics("eval")
        save_result(trainer.run_dir, result)
        trainer.tracker.artifact(trainer.run_dir / CONFIG_FILE)
    trainer.tracker.metrics({"memory/peak_rss_gb": _peak_rss_gb()}, step=outcome.step)
    trainer.tracker.close("FINISHED" if outcome.finished else "KILLED")
    return outcome


def restore(trainer: Trainer) -> TrainerState:
    """Every rank reads the newest whole checkpoint itself."""
    restored = checkpoint.restore(trainer.run_dir)
    if restored is None:
        return TrainerState(step=0, samples_consumed=0)
    if restored.trainer.samples_consumed != restored.trainer.step * trainer.plan.global_batch_size:
        raise CheckpointError(
            f"{restored.path}: was made with another global batch size; set it back, or name another run_dir"
        )
    trainer.engine.import_state(restored.engine)
    if trainer.world.is_first:
        print(f"{trainer.title}: going on from {restored.path.name}")
    return restored.trainer


def open_tracker(
    settings: PretrainSettings,
    manifest: Manifest,
    world: World,
    *,
    num_weights: int,
    parent_key: str | None = None,
    extra_tags: dict[str, str] | None = None,
) -> tuple[str, Tracker]:
    """(run key, tracker): the first rank's tracker is real, the others' say nothing."""
    if not world.is_first:
        return "", Tracker(None, params={}, tags={})
    run_dir, tracking = Path(settings.run_dir), settings.tracking
    identity = RunIdentity.of(run_dir, experiment=tracking.experiment, uri=tracking.uri, parent_key=parent_key)
    params = flatten(settings.model_dump(mode="json")) | {
        "num_ranks": world.num_ranks,
        "num_weights": num_weights,
        "manifest_hash": manifest.hash,
    }
    tags = {"git_commit": git_commit(), "dataset": manifest.name, "model": settings.model.kind}
    tags |= extra_tags or {"task": "pretrain"}
    return identity.run_key, Tracker(run_dir if tracking.enabled else None, params=params, tags=tags)


def schedule_of(settings: PretrainSettings, manifest: Manifest) -> Schedule:
    size = _size(settings, manifest)
    return Schedule(
        name=settings.schedule.name,
        base_lr=settings.optimizer.lr,
        final_lr=settings.schedule.final_lr,
        warmup_steps=parse_length(settings.schedule.warmup).steps(**size),
        num_steps=parse_length(settings.train.duration).steps(**size),
    )


def cadence_of(settings: PretrainSettings, manifest: Manifest) -> Cadence:
    size, train_settings = _size(settings, manifest), settings.train
    return Cadence(
        num_steps=check_against_data(
            data=settings.data,
            model=settings.model,
            train=train_settings,
            schedule=settings.schedule,
            manifest=manifest,
        ),
        log_every=train_settings.log_every_steps,
        eval_every=max(1, parse_length(train_settings.eval_every).steps(**size)),
        checkpoint_every=max(1, parse_length(settings.checkpoint.every).steps(**size)),
        keep_last=settings.checkpoint.keep_last,
    )


def git_commit() -> str:
    """The commit of the code that runs, with a mark where it was changed since."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _size(settings: PretrainSettings, manifest: Manifest) -> dict[str, int]:
    return {
        "global_batch_size": settings.train.global_batch_size,
        "num_samples": manifest.splits[settings.data.train_split].num_samples,
    }


def _peak_rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
