"""accelerate behind the `Engine` contract: plain data parallelism over fp32 weights, for models that fit on every rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from finetune.tune.config import TuneEngineSettings
from pretrain.augment.augmentation import Prepared
from pretrain.engine.step import EngineState, StepResult, checkpoint_activations, loss_of
from pretrain.models.layers.buffers import average_over_ranks, kept_buffers, restore_buffers
from pretrain.optim import counts_steps, set_lr
from pretrain.ranks.world import World


class AccelerateEngine:
    def __init__(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Optimizer],
        settings: TuneEngineSettings,
        accelerator: Accelerator,
        label_smoothing: float,
        world: World,
    ):
        self.accelerator, self.settings, self.world, self.label_smoothing = (accelerator, settings, world, label_smoothing)
        self.device = accelerator.device
        self.input_dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        self.module = model.to(self.device)
        if settings.activation_checkpointing:
            checkpoint_activations(self.module)
        if settings.compile:
            self.module.compile()  # in place: a wrapper would rename the weights
        self._optimizer = make_optimizer(self.module)
        self._num_updates = 0
        self._model, self._stepper = accelerator.prepare(self.module, self._optimizer)

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        self._model.train()
        set_lr(self._optimizer, lr)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self._model):
                loss = loss_of(self._model(batch.images_BCHW), batch, label_smoothing=self.label_smoothing) / len(micro_batches)
                total += loss.detach()
                # a loss that is not finite shows in the gradients of all ranks
                self.accelerator.backward(loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan))
        limit = self.settings.gradient_clip_norm or float("inf")
        norm = self.accelerator.clip_grad_norm_(self._model.parameters(), limit)
        applied = bool(norm.isfinite())  # gradients are the same on all ranks, and so is this
        if applied:
            self._stepper.step()
            self._num_updates += 1
        self._stepper.zero_grad()
        return StepResult(loss=total, gradient_norm=norm, applied=applied)

    def logits(self, images: Tensor) -> Tensor:
        if self.module.training:
            average_over_ranks(self.module)
        self.module.eval()
        with torch.no_grad(), self.accelerator.autocast():
            logits: Tensor = self.module(images)
        return logits.float()

    def averaged(self) -> AbstractContextManager[None]:
        """There are no averaged weights here, and no setting that asks for them."""
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
            for kind, value in self._state_of(parameter).items():
                if value.ndim:
                    optimizer[f"{kind}.{name}"] = _copy(value)
        return EngineState(weights, optimizer, self._num_updates)

    def import_state(self, state: EngineState) -> None:
        self._num_updates = state.num_updates
        kinds = sorted({name.partition(".")[0] for name in state.optimizer})
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state.weights[name])
                slots = self._optimizer.state[parameter]
                slots.update({kind: state.optimizer[f"{kind}.{name}"].to(self.device) for kind in kinds})
                if state.num_updates and counts_steps(self._optimizer):
                    slots["step"] = torch.tensor(float(state.num_updates), device=self.device)
        restore_buffers(self.module, state.weights)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return {kind: value for kind, value in self._optimizer.state[parameter].items() if torch.is_tensor(value)}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().clone().contiguous()
