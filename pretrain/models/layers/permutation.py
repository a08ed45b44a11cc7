"""Fixed permutations as index vectors, and the PK layer of the Mixer paper.

The index is a buffer: it is saved with the weights and is the same on every rank. The inverse index
makes the backward pass a gather. A state dict whose index is not a permutation is rejected.

The PK layer is act[J2 (I (x) W) J1 x]. J1 and J2 permute all m = S C entries. I (x) W applies one
small matrix to each of the equal parts of the vector. x lists the entries of X (S tokens, C
channels) token by token. The paper's vec lists them channel by channel, so the paper swaps the
first two cases:

- J1 = J2 = identity: W acts on the channels of each token;
- J1 = the commutation (vec X -> vec X'), J2 = its inverse: W acts on the tokens of each channel;
- J1, J2 random: the RP mixing.

A mixing of an MLP-Mixer has two layers, W2 act(W1 x): J1 comes before W1 and J2 after W2. If the
first block maps S0 to S tokens, J1 has S0 C entries and J2 has S C entries.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Permutation(nn.Module):
    """Permutation y_i = x_index(i) on the last axis of (B, m)."""

    index: Tensor
    inverse: Tensor

    def __init__(self, index: Tensor):
        super().__init__()
        if not is_permutation(index):
            raise ValueError(f"index is not a permutation of 0 to {index.numel() - 1}")
        self.register_buffer("index", index.to(torch.int32))
        self.register_buffer("inverse", inverse_of(self.index), persistent=False)
        self.register_load_state_dict_pre_hook(_reject_wrong_index)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(lambda permutation, _: permutation.invert())  # type: ignore[no-untyped-call]

    def forward(self, x_BM: Tensor) -> Tensor:
        return _Gather.apply(x_BM, self.index, self.inverse)  # type: ignore[no-untyped-call]

    def invert(self) -> None:
        self.index = self.index.to(torch.int32)  # `assign=True` may load another integer type
        self.inverse = inverse_of(self.index)


def _reject_wrong_index(
    permutation: Permutation, state_dict: dict[str, Tensor], prefix: str, *more: Any
) -> None:
    index = state_dict.get(f"{prefix}index")
    if index is not None and index.shape == permutation.index.shape and not is_permutation(index):
        problem = f"{prefix}index is not a permutation of its entries; use another copy of the file"
        more[-1].append(problem)
        state_dict[f"{prefix}index"] = permutation.index


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
    """Gather columns. On a CPU, hide the gather from Inductor: its fused loops would be scalar, and
    a step would take 1.7 times as long."""
    if x_BM.device.type == "cpu" and torch.compiler.is_dynamo_compiling():
        return take_columns(x_BM, index)
    return x_BM.index_select(1, index)


def inverse_of(index: Tensor) -> Tensor:
    inverse = torch.empty_like(index)
    inverse[index.long()] = torch.arange(len(index), dtype=index.dtype, device=index.device)
    return inverse


def is_permutation(index: Tensor) -> bool:
    """Return True for a permutation. On the meta device, return True for any index."""
    if index.is_meta:
        return True
    places = torch.arange(index.numel(), device=index.device)
    is_of_integers = index.ndim == 1 and not index.is_floating_point() and index.dtype != torch.bool
    return is_of_integers and torch.equal(index.detach().long().sort().values, places)


def random_permutation(size: int, *, generator: torch.Generator | None = None) -> Permutation:
    """Draw a permutation on the CPU, so that it does not depend on the model's device."""
    drawn = torch.randperm(size, generator=generator, device="cpu")
    return Permutation(drawn.to(torch.get_default_device()))


def generator_beside_weights() -> torch.Generator:
    """Return a generator that is seeded from torch's generator, without advancing torch's
    generator.

    An RP model has the same weights as the normal model of the same seed. A block has the same
    permutation in every model that permutes the block.
    """
    with torch.random.fork_rng(devices=[]):
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return torch.Generator().manual_seed(seed)


def pk(
    x_BM: Tensor,
    inner: Callable[[Tensor], Tensor],
    *,
    num_copies: int,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return J2 (I (x) inner) J1 x: `inner` acts on each of `num_copies` equal parts."""
    parts = before(x_BM).reshape(x_BM.shape[0], num_copies, x_BM.shape[1] // num_copies)
    return after(inner(parts).flatten(1))
