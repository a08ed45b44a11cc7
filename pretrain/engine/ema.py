"""The exponential moving average of the weights, in fp32 shards next to the optimizer's state.

The average starts as a copy of the weights. After each applied update, the average moves by (1 -
decay) toward the weights. It costs one more pass over memory per update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_SWAP_ELEMENTS = 2**24
"""Number of elements to swap at a time. A swap then needs no second copy of the shards."""


class WeightAverage:
    def __init__(self, weights: Sequence[Tensor], *, decay: float):
        self.decay = decay
        self._weights = [weight.detach() for weight in weights]
        self.shards = [weight.float().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self, applied: Tensor | bool) -> None:
        if torch.is_tensor(applied):  # on the device; the host does not wait
            share = applied.float() * (1 - self.decay)
            for average, weight in zip(self.shards, self._weights, strict=True):
                average.lerp_(weight, share)
        elif applied:
            torch._foreach_lerp_(self.shards, self._weights, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap weights and averages inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self.shards, strict=True):
            pieces = (torch.split(each.view(-1), _SWAP_ELEMENTS) for each in (weight, average))
            for one, other in zip(*pieces, strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
