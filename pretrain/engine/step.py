"""One training step of every task and engine: the loss of a prepared batch, and the `Engine`
interface.

Pretraining (DeepSpeed) and fine-tuning (accelerate) run the same `Trainer` with two implementations
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
"""Dtype of the working weights for each `engine.precision`."""
SUMMED_ELEMENTS = 2**16


def span(name: str) -> AbstractContextManager[object]:
    """Name a part of a step in the traces of `tracking.profile`."""
    is_on = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_on else nullcontext()


def working_in(precision: str) -> AbstractContextManager[None]:
    """Set the precision of matrix products inside the block."""
    return (
        products(in_tf32=precision == "tf32")
        if DTYPES[precision] == torch.float32
        else nullcontext()
    )


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors together, in fp32.

    On a CPU, compute the norms of rows of `SUMMED_ELEMENTS` first. torch adds squares one after the
    other, and the norm of 50 million elements would be off by 0.4 %.
    """
    if tensors[0].device.type == "cpu":
        tensors = [
            row for each in tensors for row in torch.split(each.reshape(-1), SUMMED_ELEMENTS)
        ]
    norm: Tensor = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()
    return norm


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let a process that computes on a CPU reuse the memory that a step frees.

    Otherwise glibc returns the memory to the kernel, and the kernel clears every page again, which
    takes a fifth of a small Mixer's step. glibc still returns tensors above 1 GiB, because they
    would leave holes.
    """
    set_malloc = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_malloc is not None:  # other C libraries have no mallopt
        if not set_malloc(M_MMAP_THRESHOLD, 1 << 30):
            set_malloc(M_MMAP_THRESHOLD, 1 << 25)  # older glibc allows no more
        set_malloc(M_TRIM_THRESHOLD, -1)  # never return memory


@dataclass(frozen=True)
class StepResult:
    """Results of a step, as tensors on the device. Only the trainer reads the values, because
    reading waits for the step."""

    loss: Tensor
    """Mean loss over this rank's part of the global batch."""
    gradient_norm: Tensor | float
    """Gradient norm of the global batch, before clipping. It is not finite if gradients caused a
    skip."""
    applied: Tensor | bool = True
    """False on all ranks if the loss or a gradient of any rank was not finite. A skipped step
    changes only fp16's loss scale."""


@dataclass(frozen=True)
class EngineState:
    """Training state, independent of the number of ranks and the ZeRO stage: fp32 weights and
    persistent buffers by name, optimizer state by KIND.NAME.

    If the run has a moving average, `weights` are the averaged weights, and training resumes from
    `optimizer["weight.NAME"]`.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    num_updates: int = 0
    scale: dict[str, float] = field(default_factory=dict)
    """Complete state of fp16's dynamic loss scale."""


class Engine(Protocol):
    """Trainer of one model. Every rank must call each method equally often."""

    device: torch.device
    input_dtype: torch.dtype

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        """Make one update from this rank's micro-batches of one global batch."""

    def logits(self, images: Tensor) -> Tensor:
        """Return float32 logits in evaluation mode."""

    def averaged(self) -> AbstractContextManager[None]:
        """Let `logits` use the averaged weights inside the block, if the run has an average."""

    def weight(self, name: str) -> Tensor | None:
        """Return one complete working weight on the first rank, and None on other ranks."""

    def export_state(self) -> EngineState:
        """Return the state on the first rank, and an empty state on other ranks. Later training
        does not change the returned tensors."""

    def import_state(self, state: EngineState) -> None: ...


def checkpoint_activations(model: Any) -> None:
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
    """Compile each block of `repeated_parts` in place. A wrapper would rename the weights.

    Blocks of one kind share their graphs, so a deep model compiles as quickly as a shallow one. The
    engine sends the gradients of a block during the backward pass of the next block. One graph for
    the model would delay all gradients to its end.
    """
    parts = repeated_parts(model) or [model]
    config = torch._dynamo.config
    # torch counts all blocks of a class, each in training and evaluation
    config.recompile_limit = max(config.recompile_limit, 2 * len(parts))
    for part in parts:
        part.compile(dynamic=False, **how)


def repeated_parts(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of any model: members of an innermost Sequential or ModuleList whose
    members have submodules and the same class."""
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
    """Return the mean cross-entropy against one label per image, or against a mixture of two
    labels."""
    # fake tensors have no device to compile for
    if logits_BK.is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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
    """Return the loss of `loss_of` by operations that a compiler fuses into two passes, one over
    the logits and one over their gradient.

    Labels are compared with all class numbers, because the gradient of indexing would be scattered
    into a tensor of zeros. Without a compiler, this loss is slower than `loss_of`.
    """
    wide_BK = logits_BK.float()
    classes_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)

    def of(answers_B: Tensor) -> Tensor:
        return torch.where(classes_K == answers_B[:, None], wide_BK, 0.0).sum(dim=1)

    chosen_B = of(labels_B)
    if others_B is not None and weight_B is not None:
        chosen_B = torch.lerp(of(others_B), chosen_B, weight_B)
    losses_B = torch.logsumexp(wide_BK, dim=1) - (1 - smoothing) * chosen_B
    if smoothing:  # otherwise a logit of -inf, of any class, would make the loss NaN
        losses_B = losses_B - smoothing * wide_BK.mean(dim=1)
    return losses_B.mean()


@functools.cache
def _compiled_loss() -> Callable[..., Tensor]:
    """Return the compiled loss, even if the model is not compiled: separate operations move more
    memory."""
    return torch.compile(one_pass_loss, dynamic=False)
