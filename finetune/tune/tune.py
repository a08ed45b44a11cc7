"""`finetune tune`: the training loop of `pretrain` with accelerate. It starts from a checkpoint
with a new head, or from scratch."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data_prep.errors import UserError
from finetune.session import recorded, register, start_accelerator
from finetune.tune.config import TuneEngineSettings, TuneSettings, summary
from pretrain.augment.augmentation import Normalization, Prepared
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.checkpoints.remote import Remote
from pretrain.checkpoints.run import finished_result, save_result
from pretrain.config import OptimizerSettings
from pretrain.data.datasets import TrainingData
from pretrain.data.order import BatchPlan
from pretrain.engine.step import (
    EngineState,
    StepResult,
    checkpoint_activations,
    compile_blocks,
    loss_of,
    norm_of,
    span,
    working_in,
)
from pretrain.loop.train import Task, train
from pretrain.models.build import build_model
from pretrain.models.image_model import ImageModel
from pretrain.models.layers.buffers import average_over_ranks, kept_buffers, restore_buffers
from pretrain.models.spec import TimmModelSpec
from pretrain.optim import build_optimizer, counts_steps, set_lr
from pretrain.ranks.collectives import any_rank, on_all_ranks
from pretrain.ranks.preemption import Interrupted, StopFlag, entered
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import target_of
from pretrain.tracking.tracker import Tracker


class Tuning(Task):
    name = "tune"

    def __init__(
        self,
        settings: TuneSettings,
        data: TrainingData,
        checkpoint: Checkpoint,
        *,
        group: Path | None = None,
    ):
        """`group`: run directory of the repetitions, if this run is a repetition."""
        card = checkpoint.card
        statistics = (card.channel_mean, card.channel_std)
        if settings.channel_stats == "target":
            statistics = data.channel_statistics
        super().__init__(
            settings.as_training(card),
            data,
            config=settings,
            normalization=Normalization(*statistics),
            tags={"task": "tune", "init": settings.init, "origin": card.origin},
        )
        self.parent_key, self.parent_dir = card.run_key or None, group or checkpoint.run_dir
        self.remedy = "use devices with more memory"
        if not settings.engine.activation_checkpointing:
            self.remedy = f"set engine.activation_checkpointing=true, or {self.remedy}"
        self._tuning, self._checkpoint, self._is_repeat = settings, checkpoint, group is not None
        self.start = checkpoint if settings.init == "pretrained" else None

    def join_ranks(self, world: World) -> torch.device:
        engine = self._tuning.engine
        self._accelerator = start_accelerator(
            world, precision=engine.precision, timeout_s=engine.timeout_s
        )
        device: torch.device = self._accelerator.device
        return device

    def model(self) -> ImageModel:
        settings, card, num_classes = self._tuning, self._checkpoint.card, len(self.data.classes)
        if settings.init == "scratch":
            size, seed = card.image_size, settings.train.seed
            return build_model(card.model, num_classes=num_classes, image_size=size, seed=seed)
        model = load_model(self._checkpoint)
        if isinstance(card.model, TimmModelSpec) and not cast(Any, model).layers():
            problem = f"timm does not split the weights of {settings.pretrained} into layers"
            raise UserError("pretrained", problem, "use probe, knn or evaluate", code="unsupported")
        model.reset_classifier(num_classes)
        if settings.head_init == "torch":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(settings.train.seed)
                cast(nn.Linear, model.head).reset_parameters()
        return model

    def engine(
        self,
        model: ImageModel,
        plan: BatchPlan,  # noqa: ARG002 (accelerate needs neither)
        *,
        device: torch.device,  # noqa: ARG002
        world: World,
    ) -> "AccelerateEngine":
        settings = self._tuning
        return AccelerateEngine(
            model,
            optimizer=settings.optimizer,
            settings=settings.engine,
            accelerator=self._accelerator,
            label_smoothing=settings.train.label_smoothing,
            world=world,
        )

    def record_result(self, result: Mapping[str, Any], tracker: Tracker) -> None:
        if not self._is_repeat and self._tuning.init == "pretrained":
            target = target_of(self.data.parts[0].manifest)
            register(tracker, self._checkpoint, _scores(result, names=REGISTERED), target=target)


def tune_repeatedly(
    settings: TuneSettings,
    repeats: Sequence[tuple[TuneSettings, TrainingData]],
    checkpoint: Checkpoint,
    world: World,
) -> bool:
    """Train all repetitions. Return False if a signal interrupted them."""
    run_dir, engine = Path(settings.run_dir), settings.engine
    parts = [replace(part, fold=settings.data.fold) for part in repeats[0][1].parts]
    stop = StopFlag().install()
    accelerator = start_accelerator(world, precision=engine.precision, timeout_s=engine.timeout_s)
    place = recorded(
        settings,
        world,
        used=[(part, "training") for part in parts],
        checkpoint=checkpoint,
        tags={"task": "tune_seeds", "init": settings.init},
        stop=stop,
    )
    with suppress(Interrupted), entered(place) as tracker:
        if any_rank(stop.raised_by is not None, device=accelerator.device) or tracker is None:
            raise Interrupted
        remote = Remote.of(settings) if world.is_first else None
        on_all_ranks(
            lambda: remote.send_records() if remote else None,
            device=accelerator.device,
            field="checkpoint.remote",
        )
        for each, data in repeats:
            is_done = finished_result(Path(each.run_dir), each) is not None
            if (
                not is_done
                and not train(Tuning(each, data, checkpoint, group=run_dir), world).finished
            ):
                raise Interrupted
        if world.is_first:
            result = summary([each for each, _ in repeats])
            num_steps = sum(each["step"] for each in result["runs"].values())
            tracker.metrics(_scores(result, names=FIGURES), step=num_steps)
            save_result(run_dir, result)
            if remote is not None:
                remote.send_records()
            if settings.init == "pretrained":
                scores, target = _scores(result, names=REGISTERED), target_of(parts[0].manifest)
                register(tracker, checkpoint, scores, target=target)
        return True
    return False


FIGURES = {
    "eval/top1": "eval/top1_mean",
    "eval/top1_std": "eval/top1_std",
    "eval/loss": "eval/loss_mean",
}
REGISTERED = {"eval/top1": "tune/top1", "eval/top1_std": "tune/top1_std"}


def _scores(result: Mapping[str, float], *, names: Mapping[str, str]) -> dict[str, float]:
    return {name: float(result[key]) for key, name in names.items() if key in result}


class AccelerateEngine:
    """Training `Engine` that uses accelerate: data parallelism with fp32 weights."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings,
        settings: TuneEngineSettings,
        accelerator: Accelerator,
        label_smoothing: float,
        world: World,
    ):
        self.module = model.to(accelerator.device)
        self.settings, self.accelerator = settings, accelerator
        self.label_smoothing, self.world, self.device = label_smoothing, world, accelerator.device
        self.input_dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        if settings.compile:
            compile_blocks(model)
        self._optimizer, self._num_updates = build_optimizer(model, optimizer), 0
        self._model, self._stepper = accelerator.prepare(model, self._optimizer)

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        self._model.train()
        set_lr(self._optimizer, lr)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with (
                nullcontext() if last else self.accelerator.no_sync(self._model),
                working_in(self.settings.precision),
                span("forward and backward"),
            ):
                loss = loss_of(
                    self._model(batch.images_BCHW), batch, label_smoothing=self.label_smoothing
                ) / len(micro_batches)
                total += loss.detach()
                # makes the gradients of all ranks NaN if one loss is not finite
                self.accelerator.backward(
                    loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
                )
        parameters = [each for each in self.module.parameters() if each.grad is not None]
        with span("update"):
            norm = norm_of([each.grad for each in parameters if each.grad is not None])
            if self.settings.gradient_clip_norm:
                nn.utils.clip_grads_with_norm_(parameters, self.settings.gradient_clip_norm, norm)
            applied = bool(norm.isfinite())  # the same on all ranks, as the gradients are
            if applied:
                self._stepper.step()
                self._num_updates += 1
            self._stepper.zero_grad()
        return StepResult(loss=total, gradient_norm=norm, applied=applied)

    def logits(self, images: Tensor) -> Tensor:
        if self.module.training:
            average_over_ranks(self.module)
        self.module.eval()
        with torch.no_grad(), self.accelerator.autocast(), working_in(self.settings.precision):
            logits: Tensor = self.module(images)
        return logits.float()

    def averaged(self) -> AbstractContextManager[None]:
        """Do nothing, because tune has no averaged weights."""
        return nullcontext()

    def weight(self, name: str) -> Tensor | None:
        return self.module.get_parameter(name).detach() if self.world.is_first else None

    def export_state(self) -> EngineState:
        average_over_ranks(self.module)
        if not self.world.is_first:
            return EngineState()
        weights, optimizer = kept_buffers(self.module), {}
        for name, parameter in self.module.named_parameters():
            weights[name] = _copy(parameter)
            for kind, value in self._optimizer.state[parameter].items():
                if torch.is_tensor(value) and value.ndim:
                    optimizer[f"{kind}.{name}"] = _copy(value)
        return EngineState(weights, optimizer, self._num_updates)

    def import_state(self, state: EngineState) -> None:
        self._num_updates = state.num_updates
        kinds = sorted({name.partition(".")[0] for name in state.optimizer})
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state.weights[name])
                slots = self._optimizer.state[parameter]
                slots.update(
                    {kind: state.optimizer[f"{kind}.{name}"].to(self.device) for kind in kinds}
                )
                if state.num_updates and counts_steps(self._optimizer):
                    slots["step"] = torch.tensor(float(state.num_updates), device=self.device)
        restore_buffers(self.module, state.weights)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().clone().contiguous()
