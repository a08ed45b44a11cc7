"""`finetune tune`: the one training loop over accelerate, from a checkpoint's weights with a new head (or from scratch)."""

from pathlib import Path

from accelerate import Accelerator

from finetune.accelerator import start_accelerator
from finetune.tuning.config import TuneSettings
from finetune.tuning.engine import AccelerateEngine
from pretrain.assembly import Task, open_tracker
from pretrain.augment.augmentation import Normalisation
from pretrain.card import ModelCard, read_card
from pretrain.config import PretrainSettings
from pretrain.datasets import load_training_data
from pretrain.folder import load_folder
from pretrain.logs import log_to
from pretrain.micro_batch import micro_batch_size, with_local_batch_size
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters
from pretrain.models.image_model import ImageModel
from pretrain.optim import build_optimizer
from pretrain.order import BatchPlan
from pretrain.preemption import StopFlag
from pretrain.run import claim
from pretrain.supervision import supervise, watched
from pretrain.trainer import Outcome
from pretrain.world import World


def tune(settings: TuneSettings, world: World) -> Outcome:
    stop, engine = StopFlag().install(), settings.engine
    with claim(Path(settings.run_dir), settings, is_first=world.is_first):
        training = settings.as_training(read_card(Path(settings.pretrained)))
        log_to(Path(settings.run_dir) / "logs" / f"rank-{world.rank}.log")
        accelerator = start_accelerator(world, precision=engine.precision, timeout_s=engine.timeout_s)
        timeout_s = training.engine.heartbeat_timeout_s
        with watched(world, timeout_s=timeout_s, device=accelerator.device) as heartbeat:
            return supervise(
                prepare(settings, training, world, accelerator=accelerator, stop=stop).trainer(), heartbeat
            )


def prepare(
    settings: TuneSettings, training: PretrainSettings, world: World, *, accelerator: Accelerator, stop: StopFlag
) -> Task:
    data = load_training_data(training.data)
    card, model = starting_model(settings, num_classes=len(data.classes))
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
        parent_key=card.run_key,
        extra_tags={"task": "tune", "init": settings.init},
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


def starting_model(settings: TuneSettings, *, num_classes: int) -> tuple[ModelCard, ImageModel]:
    path = Path(settings.pretrained)
    if settings.init == "scratch":
        card = read_card(path)
        seed = settings.train.seed
        return card, build_model(card.model, num_classes=num_classes, image_size=card.image_size, seed=seed)
    card, model = load_folder(path)
    model.reset_classifier(num_classes)
    return card, model
