"""Fixed permutations as index vectors (never matrices), and the PK layer of paper A that they are for.

The index is a buffer, so it is saved with the weights and is the same on every rank; the inverse, which makes the backward pass a
gather instead of a scatter, is derived from it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Permutation(nn.Module):
    """y_i = x_index(i) on the last axis of (B, m)."""

    index: Tensor
    inverse: Tensor

    def __init__(self, index: Tensor):
        super().__init__()
        self.register_buffer("index", index.to(torch.int32))
        self.register_buffer("inverse", inverse_of(self.index), persistent=False)

    def forward(self, x_BM: Tensor) -> Tensor:
        permuted: Tensor = _Gather.apply(x_BM, self.index, self.inverse)  # type: ignore[no-untyped-call]
        return permuted

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.inverse = inverse_of(self.index)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x_BM: Tensor, index: Tensor, _inverse: Tensor) -> Tensor:
        return _take(x_BM, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], _output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient_BM: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _take(gradient_BM, inverse), None, None


@torch.library.custom_op("wide_mlps::take_columns", mutates_args=())
def take_columns(x_BM: Tensor, index: Tensor) -> Tensor:
    return x_BM.index_select(1, index)


@take_columns.register_fake
def _(x_BM: Tensor, index: Tensor) -> Tensor:
    return x_BM.new_empty(x_BM.shape[0], index.shape[0])


def _take(x_BM: Tensor, index: Tensor) -> Tensor:
    """On a CPU inductor must not see the gather: fused with what stands around it, all that runs one number at a time, and a step
    takes 1.7 times as long. On a GPU it may fuse; an exported graph has to name what others know."""
    if x_BM.device.type == "cpu" and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        taken: Tensor = take_columns(x_BM, index)
        return taken
    return x_BM.index_select(1, index)


def inverse_of(index: Tensor) -> Tensor:
    inverse = torch.empty_like(index)
    inverse[index.long()] = torch.arange(len(index), dtype=index.dtype, device=index.device)
    return inverse


def random_permutation(size: int) -> Permutation:
    return Permutation(torch.randperm(size))


def commutation(rows: int, columns: int) -> Permutation:
    """vec of a (rows, columns) matrix, row by row -> vec of its transpose."""
    return Permutation(torch.arange(rows * columns).reshape(rows, columns).T.flatten())


def pk(
    x_BM: Tensor,
    inner: Callable[[Tensor], Tensor],
    *,
    num_copies: int,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
) -> Tensor:
    """J2 (I (x) inner) J1 x: `inner` acts on each of `num_copies` equal parts of the permuted vector."""
    parts = before(x_BM).reshape(len(x_BM), num_copies, -1)
    return after(inner(parts).flatten(1))


class PKLayer(nn.Module):
    """act(J2 (I (x) W) J1 x), the layer that paper A writes Mixers with; it has no bias there."""

    def __init__(
        self, weight: nn.Linear, *, num_copies: int, before: nn.Module, after: nn.Module, activation: nn.Module
    ):
        super().__init__()
        self.weight, self.num_copies, self.activation = weight, num_copies, activation
        self.before, self.after = before, after

    def forward(self, x_BM: Tensor) -> Tensor:
        y: Tensor = self.activation(
            pk(x_BM, self.weight, num_copies=self.num_copies, before=self.before, after=self.after)
        )
        return y
