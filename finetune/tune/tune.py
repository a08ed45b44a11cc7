"""`finetune tune`: the one training loop over accelerate, from a checkpoint's weights with a new head (or from scratch)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from finetune.session import recorded, register, start_accelerator
from finetune.tune.config import TuneSettings
from finetune.tune.engine import AccelerateEngine
from finetune.tune.repeats import summary
from pretrain.augment.augmentation import Normalisation
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.run import finished_result, save_result
from pretrain.data.datasets import TrainingData
from pretrain.data.order import BatchPlan
from pretrain.loop.train import Task, train
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.optim import build_optimizer
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.preemption import Interrupted, StopFlag, entered
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import Tracker


class Tuning(Task):
    def __init__(self, settings: TuneSettings, data: TrainingData, checkpoint: Checkpoint, *, group: Path | None = None):
        """`group`: the run directory of what it is a repetition of."""
        card = checkpoint.card
        super().__init__(
            settings.as_training(card),
            data,
            config=settings,
            normalisation=Normalisation(card.channel_mean, card.channel_std),
            tags={"task": "tune", "init": settings.init, "origin": card.origin},
        )
        self.parent_key, self.parent_dir = card.run_key or None, group or checkpoint.run_dir
        recompute = "" if settings.engine.activation_checkpointing else "set engine.activation_checkpointing=true, or "
        self.remedy = f"{recompute}take devices with more memory"
        self._tuning, self._checkpoint, self._is_repeat = settings, checkpoint, group is not None

    def join_ranks(self, world: World) -> torch.device:
        engine = self._tuning.engine
        self._accelerator = start_accelerator(world, precision=engine.precision, timeout_s=engine.timeout_s)
        device: torch.device = self._accelerator.device
        return device

    def model(self) -> ImageModel:
        settings, card, num_classes = self._tuning, self._checkpoint.card, len(self.data.classes)
        if settings.init == "scratch":
            return build_model(card.model, num_classes=num_classes, image_size=card.image_size, seed=settings.train.seed)
        model = load_model(self._checkpoint)
        model.reset_classifier(num_classes)
        return model

    def engine(
        self,
        model: ImageModel,
        plan: BatchPlan,  # noqa: ARG002 (accelerate needs neither)
        *,
        device: torch.device,  # noqa: ARG002
        world: World,
    ) -> AccelerateEngine:
        return AccelerateEngine(
            model,
            make_optimizer=lambda module: build_optimizer(module, self._tuning.optimizer),
            settings=self._tuning.engine,
            accelerator=self._accelerator,
            label_smoothing=self._tuning.train.label_smoothing,
            world=world,
        )

    def record_result(self, result: dict[str, float], tracker: Tracker) -> None:
        if not self._is_repeat and self._tuning.init == "pretrained":
            target = target_of(self.data.parts[0].manifest)
            register(tracker, self._checkpoint, _scores(result, names=REGISTERED), target=target)


def tune_repeatedly(
    settings: TuneSettings, repeats: Sequence[tuple[TuneSettings, TrainingData]], checkpoint: Checkpoint, world: World
) -> bool:
    """Whether all repetitions have been finished."""
    run_dir = Path(settings.run_dir)
    parts = [replace(part, fold=settings.data.fold) for part in repeats[0][1].parts]
    stop = StopFlag().install()
    accelerator = start_accelerator(world, precision=settings.engine.precision, timeout_s=settings.engine.timeout_s)
    with suppress(Interrupted):
        place = recorded(
            settings,
            run_dir=run_dir,
            ranks=settings.engine,
            tracking=settings.tracking,
            world=world,
            used=[(part, "training") for part in parts],
            checkpoint=checkpoint,
            tags={"task": "tune_seeds", "init": settings.init},
            stop=stop,
        )
        with entered(place) as tracker:
            if any_rank(stop.raised_by is not None, device=accelerator.device) or tracker is None:
                raise Interrupted
            for each, data in repeats:
                if finished_result(Path(each.run_dir)) is not None:
                    continue
                if not train(Tuning(each, data, checkpoint, group=run_dir), world).finished:
                    raise Interrupted
            if world.is_first:
                result = summary([each for each, _ in repeats])
                tracker.metrics(_scores(result, names=FIGURES), step=len(repeats))
                save_result(run_dir, result)
                if settings.init == "pretrained":
                    register(tracker, checkpoint, _scores(result, names=REGISTERED), target=target_of(parts[0].manifest))
        return True
    return False


FIGURES = {"eval/top1": "eval/top1_mean", "eval/top1_std": "eval/top1_std", "eval/loss": "eval/loss_mean"}
REGISTERED = {"eval/top1": "tune/top1", "eval/top1_std": "tune/top1_std"}


def _scores(result: Mapping[str, float], *, names: Mapping[str, str]) -> dict[str, float]:
    return {name: float(result[key]) for key, name in names.items() if key in result}
