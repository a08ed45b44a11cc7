"""`finetune tune`: the one training loop over accelerate, from a checkpoint's weights with a new head (or from scratch)."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator

from finetune.session import recorded, register, start_accelerator
from finetune.tune.config import TuneSettings
from finetune.tune.engine import AccelerateEngine
from finetune.tune.repeats import repeats_of, summary
from pretrain.augment.augmentation import Normalisation
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import claim, finished_result, save_result
from pretrain.config import PretrainSettings
from pretrain.data.datasets import load_training_data
from pretrain.data.order import BatchPlan
from pretrain.engine.micro_batch import micro_batch_size, with_local_batch_size
from pretrain.loop.assembly import Task, open_tracker
from pretrain.loop.logs import log_to
from pretrain.loop.supervision import supervise, watched
from pretrain.loop.trainer import Outcome
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters
from pretrain.models.image_model import ImageModel
from pretrain.optim import build_optimizer
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.preemption import Interrupted, StopFlag, entered
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of


def tune(settings: TuneSettings, world: World, *, group: Path | None = None) -> Outcome:
    """Runs, or goes on with, one run; `group`: the run directory of what it is a repetition of."""
    stop, engine = StopFlag().install(), settings.engine
    with entered(claim(Path(settings.run_dir), settings, is_first=world.is_first, ranks=engine, stop=stop)):
        weights = Checkpoint.open(settings.pretrained)
        training = settings.as_training(weights.card)
        log_to(Path(settings.run_dir) / "logs" / f"rank-{world.rank}.log")
        accelerator = start_accelerator(world, precision=engine.precision, timeout_s=engine.timeout_s)
        with watched(world, engine, device=accelerator.device) as heartbeat:
            if any_rank(stop.raised_by is not None, device=accelerator.device):
                return Outcome(0, False, None, 0.0)
            task = prepare(settings, training, world, weights=weights, accelerator=accelerator, stop=stop, group=group)

            def tell(result: dict[str, float]) -> None:
                if group is None and settings.init == "pretrained":
                    register(task.tracker, weights, _scores(result), target=target_of(task.data.parts[0].manifest))

            return supervise(task.trainer(), heartbeat, on_result=tell)


def tune_repeatedly(settings: TuneSettings, world: World) -> bool:
    """Whether all repetitions have been finished."""
    run_dir, repeats = Path(settings.run_dir), repeats_of(settings)
    weights, data = Checkpoint.open(settings.pretrained), load_training_data(settings.data)
    used = [(part, "training") for part in data.parts]
    stop = StopFlag().install()
    accelerator = start_accelerator(world, precision=settings.engine.precision, timeout_s=settings.engine.timeout_s)
    with suppress(Interrupted):
        place = recorded(
            settings,
            run_dir=run_dir,
            ranks=settings.engine,
            tracking=settings.tracking,
            world=world,
            used=used,
            checkpoint=weights,
            tags={"task": "tune_seeds", "init": settings.init},
            stop=stop,
        )
        with entered(place) as tracker:
            if any_rank(stop.raised_by is not None, device=accelerator.device) or tracker is None:
                raise Interrupted
            for each in repeats:
                if finished_result(Path(each.run_dir)) is not None:
                    continue
                if not tune(each, world, group=run_dir).finished:
                    raise Interrupted
            if world.is_first:
                result = summary(repeats)
                tracker.metrics(_scores(result, names=FIGURES), step=len(repeats))
                save_result(run_dir, result)
                if settings.init == "pretrained":
                    register(tracker, weights, _scores(result), target=target_of(data.parts[0].manifest))
        return True
    return False


FIGURES = {"eval/top1": "eval/top1_mean", "eval/top1_std": "eval/top1_std", "eval/loss": "eval/loss_mean"}
REGISTERED = {"eval/top1": "tune/top1", "eval/top1_std": "tune/top1_std"}


def _scores(result: Mapping[str, float], *, names: Mapping[str, str] = REGISTERED) -> dict[str, float]:
    return {name: float(result[key]) for key, name in names.items() if key in result}


def prepare(
    settings: TuneSettings,
    training: PretrainSettings,
    world: World,
    *,
    weights: Checkpoint,
    accelerator: Accelerator,
    stop: StopFlag,
    group: Path | None,
) -> Task:
    data = load_training_data(training.data)
    card, model = weights.card, starting_model(settings, weights, num_classes=len(data.classes))
    more_memory = "take devices with more memory"
    recompute = "" if settings.engine.activation_checkpointing else "set engine.activation_checkpointing=true, or "
    local_batch_size = micro_batch_size(
        model,
        settings=training,
        num_classes=len(data.classes),
        image_size=data.image_size,
        device=accelerator.device,
        world=world,
        remedy=recompute + more_memory,
    )
    engine = AccelerateEngine(
        model,
        make_optimizer=lambda module: build_optimizer(module, settings.optimizer),
        settings=settings.engine,
        accelerator=accelerator,
        label_smoothing=settings.train.label_smoothing,
        world=world,
    )
    run_key, tracker = open_tracker(
        with_local_batch_size(training, local_batch_size),
        data,
        world,
        num_weights=num_parameters(model),
        parent_key=card.run_key or None,
        parent_dir=group or weights.run_dir,
        extra_tags={"task": "tune", "init": settings.init, "origin": card.origin},
    )
    return Task(
        settings=training,
        data=data,
        world=world,
        plan=BatchPlan(settings.train.global_batch_size, local_batch_size, world.num_ranks),
        engine=engine,
        tracker=tracker,
        stop=stop,
        run_key=run_key,
        normalisation=Normalisation(card.channel_mean, card.channel_std),
    )


def starting_model(settings: TuneSettings, weights: Checkpoint, *, num_classes: int) -> ImageModel:
    card = weights.card
    if settings.init == "scratch":
        seed = settings.train.seed
        return build_model(card.model, num_classes=num_classes, image_size=card.image_size, seed=seed)
    model = load_model(weights)
    model.reset_classifier(num_classes)
    return model
