"""Similarity of two sets of features, in float64: HSIC1, the unbiased estimator of the
Hilbert-Schmidt independence criterion with linear kernels, and centered kernel alignment (CKA). Two
algorithms give the same HSIC1:

minibatch       uses the Gram matrices K = XX', L = YY' of n images. HSIC1 is averaged over batches
                before CKA is computed, because a mean of CKA would be biased.
                Memory: the Gram matrices, layers x n^2 x 8 bytes.
full sample     uses X'X, X'Y, Y'Y and row sums of all N images, in one pass.
                Memory: d^2 numbers for d features and any N.

Rows are roughly centered, so that fewer digits are lost. This does not change HSIC1. Shapes: L, M
layers, N images, D features.
"""

import torch
from torch import Tensor

FEWEST = 4
"""Smallest number of images in a batch, because HSIC1 compares four images at a time."""


def gram(x_ND: Tensor) -> Tensor:
    """Return the Gram matrix XX' of features (a row for each image), with zeros on its diagonal."""
    x_ND = x_ND.flatten(1).to(torch.float64, copy=True)
    x_ND -= x_ND.mean(0)
    return (x_ND @ x_ND.T).fill_diagonal_(0)


def hsic(k_LNN: Tensor, l_MNN: Tensor) -> Tensor:
    """Return HSIC1 (L, M) of each Gram matrix in `k_LNN` with each Gram matrix in `l_MNN`."""
    traces = k_LNN.flatten(1) @ l_MNN.flatten(1).T
    rows_LN, rows_MN = k_LNN.sum(2), l_MNN.sum(2)
    sums = rows_LN.sum(1)[:, None] * rows_MN.sum(1)
    return _hsic(k_LNN.shape[1], traces, rows_LN @ rows_MN.T, sums)


def _hsic(size: int, traces: Tensor, crossed: Tensor, sums: Tensor) -> Tensor:
    """Return HSIC1 from tr KL, 1'KL1 and (1'K1)(1'L1), where K and L have zero diagonals."""
    total = traces + sums / ((size - 1) * (size - 2)) - 2 * crossed / (size - 2)
    return total / (size * (size - 3))


def cka(cross: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return CKA from HSIC1 (..., L, M) and the HSIC1 of each layer with itself, (..., L) and (...,
    M). CKA is nan if the HSIC1 of a layer with itself is not positive, for example for constant
    features."""
    both = one.clamp_min(0).unsqueeze(-1) * other.clamp_min(0).unsqueeze(-2)
    return torch.where(both > 0, cross / both.sqrt(), torch.nan)


class WholeSample:
    """HSIC1 of two layers over all added images."""

    def __init__(self) -> None:
        self._size, self._sums = 0, [torch.zeros(())] * 7

    def add(self, x_ND: Tensor, y_ND: Tensor) -> None:
        x_ND, y_ND = x_ND.flatten(1).double(), y_ND.flatten(1).double()
        if not self._size:
            self._centers = x_ND.mean(0), y_ND.mean(0)
            self._product = x_ND.new_zeros(x_ND.shape[1], y_ND.shape[1])
        x_ND, y_ND = x_ND - self._centers[0], y_ND - self._centers[1]
        # the diagonals of the Gram matrices, which HSIC1 excludes
        squares_x_N, squares_y_N = x_ND.square().sum(1), y_ND.square().sum(1)
        self._size += len(x_ND)
        self._product.addmm_(x_ND.T, y_ND)
        sums = [x_ND.sum(0), y_ND.sum(0), squares_y_N @ x_ND, squares_x_N @ y_ND]
        sums += [squares_x_N.sum(), squares_y_N.sum(), squares_x_N @ squares_y_N]
        self._sums = [each + total for each, total in zip(sums, self._sums, strict=True)]

    def hsic(self) -> Tensor:
        sum_x, sum_y, weighted_x, weighted_y, squares_x, squares_y, both = self._sums
        crossed = sum_x @ self._product @ sum_y - sum_x @ weighted_x - sum_y @ weighted_y + both
        sums = (sum_x @ sum_x - squares_x) * (sum_y @ sum_y - squares_y)
        return _hsic(self._size, self._product.square().sum() - both, crossed, sums)


class WholeCka:
    """CKA of two layers over all added images. For layers with d and e features, memory is (d^2 +
    e^2 + d e) x 8 bytes."""

    def __init__(self) -> None:
        self._samples = WholeSample(), WholeSample(), WholeSample()

    def add(self, x_ND: Tensor, y_ND: Tensor) -> None:
        pairs = ((x_ND, y_ND), (x_ND, x_ND), (y_ND, y_ND))
        for sample, pair in zip(self._samples, pairs, strict=True):
            sample.add(*pair)

    def value(self) -> float:
        cross, one, other = (sample.hsic() for sample in self._samples)
        return float(cka(cross[None, None], one[None], other[None]))
