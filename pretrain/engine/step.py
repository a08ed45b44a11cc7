"""What one training step is, for every task and engine: the loss of a prepared batch, and the
engine's contract.

Pretraining (DeepSpeed) and fine-tuning (accelerate) run the same `Trainer` over two implementations
of `Engine`. Shapes: B batch, K classes.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import record_function

from data_prep.errors import SettingsError
from pretrain.augment.augmentation import Prepared
from pretrain.models.layers.products import products

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""By `engine.precision`."""
SUMMED_ELEMENTS = 2**16


def span(name: str) -> AbstractContextManager[object]:
    """Name a part of a step in the traces of `tracking.profile`."""
    is_on = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_on else nullcontext()


def working_in(precision: str) -> AbstractContextManager[None]:
    """Around forward and backward passes."""
    return (
        products(in_tf32=precision == "tf32")
        if DTYPES[precision] == torch.float32
        else nullcontext()
    )


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Of all together, in fp32. On a CPU in rows of `SUMMED_ELEMENTS`, for there torch adds the
    squares of a tensor up one after the other: the norm of 12 million elements, a large head, would
    be off by 0.04 %, that of 50 million by 0.4 %.
    """
    if tensors[0].device.type == "cpu":
        tensors = [
            row for each in tensors for row in torch.split(each.reshape(-1), SUMMED_ELEMENTS)
        ]
    norm: Tensor = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()
    return norm


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


def keep_freed_memory() -> None:
    """For the rest of a process that computes on a CPU: what a step frees the next one takes again.
    glibc would hand it back to the kernel each time, which clears every page anew: a fifth of a
    small Mixer's step. The peak is the same. Tensors above 1 GiB, which would leave holes, are
    still handed back."""
    set_malloc = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_malloc is not None:  # other C libraries have none
        set_malloc(M_MMAP_THRESHOLD, 1 << 30) or set_malloc(
            M_MMAP_THRESHOLD, 1 << 25
        )  # older glibc takes no more
        set_malloc(M_TRIM_THRESHOLD, -1)  # never


@dataclass(frozen=True)
class StepResult:
    """On the device: reading a number waits for the step, which only the trainer decides to do."""

    loss: Tensor
    """Mean over this rank's share of the global batch."""
    gradient_norm: Tensor | float
    """Of the global batch, before clipping; not finite where the step was skipped for its
    gradients."""
    applied: Tensor | bool = True
    """False on all ranks if the loss or a gradient of any rank was not finite: then nothing has
    changed but fp16's loss scale."""


@dataclass(frozen=True)
class EngineState:
    """Whole and independent of ranks and ZeRO stages: fp32 weights and kept buffers by name,
    optimizer state as KIND.NAME.

    With a moving average of the weights, `weights` are the averaged ones, which people use, and
    those that training goes on from are `optimizer["weight.NAME"]`.
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
        """Inside the block `logits` uses the averaged weights, where there are any, else the
        weights; every rank enters it."""

    def weight(self, name: str) -> Tensor | None:
        """One weight, whole, on the device, as the model works with it; called by every rank, and
        the first rank gets it."""

    def export_state(self) -> EngineState:
        """Called by every rank; the first rank gets the state, which later training does not touch,
        the others an empty one."""

    def import_state(self, state: EngineState) -> None:
        """Called by every rank with the whole state."""


def checkpoint_activations(model: Any) -> None:
    """From now on the model computes its blocks' activations again in the backward pass, instead of
    keeping them."""
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, ValueError) as error:
        raise SettingsError(
            "engine.activation_checkpointing",
            f"true is not valid with this model ({error})",
            "set it to false",
            code="conflict",
        ) from None


def compile_blocks(model: nn.Module, **how: Any) -> None:
    """Compiles the blocks (`repeated_parts`) one by one, in place: a wrapper would rename the
    weights. Blocks of one kind share their graphs, so that a deep model is compiled as quickly as a
    shallow one, and between the backward passes of two blocks gradients are on their way to other
    ranks: the one graph of a whole model would hand them over at its end.
    """
    parts = repeated_parts(model) or [model]
    config = torch._dynamo.config
    config.recompile_limit = max(
        config.recompile_limit, 2 * len(parts)
    )  # of one class: each in training and in evaluation
    for part in parts:
        part.compile(dynamic=False, **how)


def repeated_parts(model: nn.Module) -> list[nn.Module]:
    """The blocks of any model, timm's included: of each sequence of modules of one kind its
    members, if these have modules within them, but no such sequence."""
    children = list(model.children())
    found = [part for child in children for part in repeated_parts(child)]
    is_sequence = (
        isinstance(model, nn.Sequential | nn.ModuleList)
        and len({type(child) for child in children}) == 1
    )
    if found or not is_sequence or not any(True for _ in children[0].children()):
        return found
    return children


def loss_of(logits_BK: Tensor, batch: Prepared, *, label_smoothing: float) -> Tensor:
    """Mean cross-entropy against one label each, or against a mixture of two."""
    if logits_BK.is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # else they are fake: there is no device to compile for
        return _compiled_loss()(
            logits_BK, batch.labels_B, batch.other_labels_B, batch.weight_B, label_smoothing
        )
    logits_BK = logits_BK.float()
    if batch.other_labels_B is None:
        return cross_entropy(logits_BK, batch.labels_B, label_smoothing=label_smoothing)
    assert batch.weight_B is not None
    logs_BK = logits_BK.log_softmax(dim=1)  # once for both labels
    first_B, second_B = (
        logs_BK.gather(1, each[:, None])[:, 0] for each in (batch.labels_B, batch.other_labels_B)
    )
    chosen_B = torch.lerp(second_B, first_B, batch.weight_B)
    if label_smoothing:
        chosen_B = torch.lerp(chosen_B, logs_BK.mean(dim=1), label_smoothing)
    return -chosen_B.mean()


def one_pass_loss(
    logits_BK: Tensor,
    labels_B: Tensor,
    others_B: Tensor | None,
    weight_B: Tensor | None,
    smoothing: float,
) -> Tensor:
    """The same number in the operations that a compiler makes one pass over the logits of, and of
    the gradient another: classes are compared in the place of an index, whose gradient would be
    scattered into zeros. Without a compiler it is slower.
    """
    wide_BK = logits_BK.float()
    classes_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)

    def of(answers_B: Tensor) -> Tensor:
        return torch.where(classes_K == answers_B[:, None], wide_BK, 0.0).sum(dim=1)

    chosen_B = of(labels_B)
    if others_B is not None and weight_B is not None:
        chosen_B = torch.lerp(of(others_B), chosen_B, weight_B)
    losses_B = torch.logsumexp(wide_BK, dim=1) - (1 - smoothing) * chosen_B
    if smoothing:  # or a logit of -inf, of any class, would make it NaN
        losses_B = losses_B - smoothing * wide_BK.mean(dim=1)
    return losses_B.mean()


@functools.cache
def _compiled_loss() -> Callable[..., Tensor]:
    """Whether the model is compiled or not: as single operations two cross-entropies of 16,384 x
    11,230 logits move 17.7 GB."""
    return torch.compile(one_pass_loss, dynamic=False)
