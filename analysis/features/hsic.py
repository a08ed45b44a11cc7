"""Similarity of two sets of features: the unbiased HSIC1 with linear kernels, and CKA, in float64.
Two forms that agree:

minibatch       HSIC1 of the Gram matrices K = XX', L = YY' of n images, averaged over batches
                before the ratio of CKA is taken, so it is unbiased (the mean of ratios is not).
                Memory: the Gram matrices, layers x n^2 x 8 bytes.
whole sample    HSIC1 of all N images in one pass, from X'X, X'Y, Y'Y and row sums: d^2 numbers for
                any N.

HSIC1 does not change if a constant is added to all rows of X. Rows are roughly centered to keep
digits. L layers, N images, D entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST = 4
"""Pictures of a batch: HSIC1 looks at four at a time."""


def gram(x_ND: Tensor) -> Tensor:
    """XX' of any features, a row for each picture, with zeros on its diagonal."""
    x_ND = x_ND.flatten(1).to(torch.float64, copy=True)
    x_ND -= x_ND.mean(0)
    return (x_ND @ x_ND.T).fill_diagonal_(0)


@dataclass(frozen=True)
class Grams:
    """Of several layers on the same pictures."""

    entries_LM: Tensor
    """M = N N"""
    rows_LN: Tensor
    """Their sums."""

    @classmethod
    def of(cls, grams: Iterable[Tensor]) -> "Grams":
        grams_LNN = torch.stack(list(grams))
        return cls(grams_LNN.flatten(1), grams_LNN.sum(2))

    def shuffled(self, order_N: Tensor) -> "Grams":
        """Of the pictures in another order."""
        size = self.rows_LN.shape[1]
        grams_LNN = self.entries_LM.view(-1, size, size)[:, order_N[:, None], order_N]
        return Grams(grams_LNN.flatten(1), self.rows_LN[:, order_N])


def hsic(one: Grams, other: Grams) -> Tensor:
    """HSIC1 of each layer of one with each of the other."""
    traces, crossed = one.entries_LM @ other.entries_LM.T, one.rows_LN @ other.rows_LN.T
    sums = one.rows_LN.sum(1)[:, None] * other.rows_LN.sum(1)
    return _hsic(one.rows_LN.shape[1], traces, crossed, sums)


def _hsic(size: int, traces: Tensor, crossed: Tensor, sums: Tensor) -> Tensor:
    """From tr K~L~, 1'K~L~1 and (1'K~1)(1'L~1)."""
    return (traces + sums / ((size - 1) * (size - 2)) - 2 * crossed / (size - 2)) / (
        size * (size - 3)
    )


def cka(cross: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return CKA from HSIC1 (..., L, M) and the HSIC1 of each layer with itself, (..., L) and
    (..., M). nan if one of these is not positive: the features are constant, or noise."""
    both = one.clamp_min(0).unsqueeze(-1) * other.clamp_min(0).unsqueeze(-2)
    return torch.where(both > 0, cross / both.sqrt(), torch.nan)


class WholeSample:
    """HSIC1 of two layers over all pictures that are added, of which none is kept."""

    def __init__(self) -> None:
        self._size, self._sums = 0, [torch.zeros(())] * 7

    def add(self, x_ND: Tensor, y_ND: Tensor) -> None:
        x_ND, y_ND = x_ND.flatten(1).double(), y_ND.flatten(1).double()
        if not self._size:
            self._centres = x_ND.mean(0), y_ND.mean(0)
            self._product = x_ND.new_zeros(x_ND.shape[1], y_ND.shape[1])
        x_ND, y_ND = x_ND - self._centres[0], y_ND - self._centres[1]
        of_x_N, of_y_N = (
            x_ND.square().sum(1),
            y_ND.square().sum(1),
        )  # the diagonals of the Grams, which are left out
        self._size += len(x_ND)
        self._product.addmm_(x_ND.T, y_ND)
        more = (
            x_ND.sum(0),
            y_ND.sum(0),
            of_y_N @ x_ND,
            of_x_N @ y_ND,
            of_x_N.sum(),
            of_y_N.sum(),
            of_x_N @ of_y_N,
        )
        self._sums = [each + total for each, total in zip(more, self._sums, strict=True)]

    def hsic(self) -> Tensor:
        sum_x, sum_y, weighted_x, weighted_y, of_x, of_y, of_both = self._sums
        crossed = sum_x @ self._product @ sum_y - sum_x @ weighted_x - sum_y @ weighted_y + of_both
        sums = (sum_x @ sum_x - of_x) * (sum_y @ sum_y - of_y)
        return _hsic(self._size, self._product.square().sum() - of_both, crossed, sums)


class WholeCka:
    """Of two layers over all pictures that are added. Three products: (d^2 + e^2 + d e) x 8 bytes
    of d and e entries."""

    def __init__(self) -> None:
        self._cross, self._one, self._other = WholeSample(), WholeSample(), WholeSample()

    def add(self, x_ND: Tensor, y_ND: Tensor) -> None:
        self._cross.add(x_ND, y_ND)
        self._one.add(x_ND, x_ND)
        self._other.add(y_ND, y_ND)

    def value(self) -> float:
        return float(
            cka(self._cross.hsic()[None, None], self._one.hsic()[None], self._other.hsic()[None])
        )
