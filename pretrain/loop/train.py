"""`pretrain train`: the pretraining task, with DeepSpeed as its engine."""

from pathlib import Path
from typing import Any

import torch

from pretrain.augment.augmentation import Normalisation
from pretrain.checkpoints.run import claim, stacks_dir
from pretrain.config import PretrainSettings
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.data.order import BatchPlan
from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
from pretrain.engine.micro_batch import micro_batch_size, with_local_batch_size
from pretrain.loop.assembly import Task, open_tracker
from pretrain.loop.logs import log_to
from pretrain.loop.supervision import supervise, watched
from pretrain.loop.trainer import Outcome
from pretrain.models.build import build_model
from pretrain.models.cost import num_parameters
from pretrain.optim import build_optimizer
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.preemption import StopFlag, entered
from pretrain.ranks.world import World


def train(settings: PretrainSettings, world: World) -> Outcome:
    """Runs, or goes on with, the run of `settings.run_dir` until it is finished or told to stop."""
    stop = StopFlag().install()
    with entered(claim(Path(settings.run_dir), settings, is_first=world.is_first, ranks=settings.engine, stop=stop)):
        data = load_training_data(settings.data)
        log_to(Path(settings.run_dir) / "logs" / f"rank-{world.rank}.log")
        device = start_distributed(world, timeout_s=settings.engine.timeout_s)
        with watched(world, settings.engine, device=device) as heartbeat:
            heartbeat.watch(stacks_dir(settings.run_dir))
            if any_rank(stop.raised_by is not None, device=device):
                return Outcome(0, False, None, 0.0)
            return supervise(prepare(settings, data, world, device=device, stop=stop).trainer(), heartbeat)


def prepare(
    settings: PretrainSettings, data: TrainingData, world: World, *, device: torch.device, stop: StopFlag
) -> Task:
    size: Any = {"num_classes": len(data.classes), "image_size": data.image_size}
    model = build_model(settings.model, **size, seed=settings.train.seed)
    num_weights = num_parameters(model)  # before ZeRO cuts the weights up
    local_batch_size = micro_batch_size(model, settings=settings, **size, device=device, world=world)
    plan = BatchPlan(settings.train.global_batch_size, local_batch_size, world.num_ranks)
    engine = DeepSpeedEngine(
        model,
        make_optimizer=lambda module: build_optimizer(module, settings.optimizer),
        settings=settings.engine,
        plan=plan,
        label_smoothing=settings.train.label_smoothing,
        device=device,
        world=world,
        ema_decay=settings.train.ema_decay,
    )
    run_key, tracker = open_tracker(
        with_local_batch_size(settings, local_batch_size), data, world, num_weights=num_weights
    )
    return Task(
        settings=settings,
        data=data,
        world=world,
        plan=plan,
        engine=engine,
        tracker=tracker,
        stop=stop,
        run_key=run_key,
        normalisation=Normalisation(*data.channel_statistics),
    )
