"""What one training step is, for every task and engine: the loss of a prepared batch, and the engine's contract.

Pretraining (DeepSpeed) and fine-tuning (accelerate) run the same `Trainer` over two implementations of `Engine`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_prep.settings import SettingsError
from pretrain.augment.augmentation import Prepared

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `engine.precision`."""


@dataclass(frozen=True)
class StepResult:
    """On the device: reading a number waits for the step, which only the trainer decides to do."""

    loss: Tensor
    """Mean over this rank's share of the global batch."""
    gradient_norm: Tensor | float
    """Of the global batch, before clipping; not finite where the step was skipped for its gradients."""
    applied: bool = True
    """False on all ranks if the loss or a gradient of any rank was not finite: then nothing has changed but fp16's loss scale."""


@dataclass(frozen=True)
class EngineState:
    """Whole and independent of ranks and ZeRO stages: fp32 weights and kept buffers by name, optimizer state as KIND.NAME.

    With a moving average of the weights, `weights` are the averaged ones, which people use, and those that training goes on from
    are `optimizer["weight.NAME"]`.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    num_updates: int = 0
    scale: dict[str, float] = field(default_factory=dict)
    """fp16: all of the dynamic loss scale's state."""


class Engine(Protocol):
    device: torch.device
    input_dtype: torch.dtype

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        """One update from this rank's micro-batches of one global batch."""

    def logits(self, images: Tensor) -> Tensor:
        """float32 logits in evaluation mode; every rank calls it equally often."""

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the block `logits` uses the averaged weights, where there are any, else the weights; every rank enters it."""

    def weight(self, name: str) -> Tensor | None:
        """One weight, whole, on the device, as the model works with it; called by every rank, and the first rank gets it."""

    def export_state(self) -> EngineState:
        """Called by every rank; the first rank gets the state, which later training does not touch, the others an empty one."""

    def import_state(self, state: EngineState) -> None:
        """Called by every rank with the whole state."""


def checkpoint_activations(model: Any) -> None:
    """From now on the model computes its blocks' activations again in the backward pass, instead of keeping them."""
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, ValueError) as error:
        raise SettingsError(
            f"engine.activation_checkpointing: true will not do with this model ({error}); set it to false"
        ) from None


def loss_of(logits: Tensor, batch: Prepared, *, label_smoothing: float) -> Tensor:
    """Mean cross-entropy of logits (B, classes) against one label each, or against a mixture of two."""
    logits = logits.float()
    if batch.other_labels_B is None:
        return cross_entropy(logits, batch.labels_B, label_smoothing=label_smoothing)
    assert batch.weight_B is not None
    first = cross_entropy(logits, batch.labels_B, label_smoothing=label_smoothing, reduction="none")
    second = cross_entropy(logits, batch.other_labels_B, label_smoothing=label_smoothing, reduction="none")
    return torch.lerp(second, first, batch.weight_B).mean()
