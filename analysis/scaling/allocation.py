"""How size and data best grow with compute, read off the points: paper B's way, lines through the
frontier at one number of epochs, and isoFLOP parabolas. Both are lines log y = intercept + exponent
log C, of the points and of resamples of the runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array
from analysis.scaling.laws import numbers_of
from analysis.scaling.samples import FEWEST_RUNS, Sample

NUM_BUDGETS, NUM_NEAR = 7, 5


@dataclass(frozen=True)
class Allocation:
    compute: Array
    """Where it was read off."""
    best: Mapping[str, Array]
    """What was best there: parameters, and images or samples."""
    lines: Mapping[str, Array]
    """(B, 2): intercept and exponent, first of the points, then of the resamples that fix a
    line."""

    @property
    def facts(self) -> dict[str, Any]:
        """As an estimate's."""
        best = {name: values.tolist() for name, values in self.best.items()}
        exponents = {f"{name} exponent": line_B2[:, 1] for name, line_B2 in self.lines.items()}
        return {
            "points": len(self.compute),
            **numbers_of(exponents),
            "compute": self.compute.tolist(),
            "best": best,
        }


def by_frontier(sample: Sample, weights_BN: Array) -> Allocation | str:
    """Of points at one number of epochs."""
    known = np.isfinite(sample.points["parameters"] * sample.points["images"])
    masks_BN = (
        sample.frontier(weights_BN if sample.num_runs >= FEWEST_RUNS else weights_BN[:1]) * known
    )
    on = masks_BN[0] > 0
    if on.sum() < 3:
        return f"{on.sum()} points on the frontier cannot fix a line; 3 are needed"
    compute, values = (
        sample.points["compute"],
        {name: sample.points[name] for name in ("parameters", "images")},
    )
    lines = {
        name: _line(np.log(compute), np.log(np.where(known, each, 1.0)), masks_BN)
        for name, each in values.items()
    }
    return Allocation(compute[on], {name: each[on] for name, each in values.items()}, lines)


def _line(x_N: Array, y_BN: Array, weights_BN: Array) -> Array:
    """Ordinary least squares of each row, of those that have two different x."""
    total = np.maximum(weights_BN.sum(1, keepdims=True), 1e-9)
    mean_x, mean_y = (
        (weights_BN * x_N).sum(1, keepdims=True) / total,
        (weights_BN * y_BN).sum(1, keepdims=True) / total,
    )
    spread = (weights_BN * (x_N - mean_x) ** 2).sum(1)
    slope = (weights_BN * (x_N - mean_x) * (y_BN - mean_y)).sum(1) / np.maximum(spread, 1e-12)
    return np.asarray(
        np.stack([mean_y[:, 0] - slope * mean_x[:, 0], slope], axis=1)[spread > 1e-12]
    )


@dataclass(frozen=True)
class IsoFlop:
    budgets_K: Array
    sizes_P: Array
    errors_KP: Array
    """Of each size with so much compute, between the points of its own frontier; NaN where it was
    not trained so little or long."""
    parabolas_K3: Array
    """In log P, from the square on, through the five sizes about the best; NaN where fewer than
    three are known."""
    allocation: Allocation | str


def by_parabolas(sample: Sample, weights_BN: Array) -> IsoFlop | str:
    parameters, compute = sample.points["parameters"], sample.points["compute"]
    sizes_P = np.unique(parameters[np.isfinite(parameters) & np.isfinite(sample.points["samples"])])
    if len(sizes_P) < 3:
        return f"{len(sizes_P)} sizes of model cannot fix a parabola; 3 are needed"
    ends = np.array([np.log(compute[parameters == size])[[0, -1]] for size in sizes_P])
    low, high = np.sort(ends[:, 0])[2], np.sort(ends[:, 1])[-3]
    if low >= high:
        return "no three sizes have been trained with the same compute"
    budgets_K = np.exp(np.linspace(low, high, NUM_BUDGETS))
    curves = [_parabolas(sample, weights_N, budgets_K, sizes_P) for weights_N in weights_BN]
    errors_KP, parabolas_K3, _ = curves[0]
    best_BK = np.array([best_K for *_, best_K in curves])
    masks = np.isfinite(best_BK)
    lack = (
        f"{masks[0].sum()} of {NUM_BUDGETS} parabolas have their least error between the sizes; 3"
        " are needed"
    )
    allocation: Allocation | str = lack
    if masks[0].sum() >= 3:
        per_sample = [
            np.nanmin((compute / sample.points["samples"])[parameters == size]) for size in sizes_P
        ]
        samples_BK = np.log(budgets_K) - np.interp(best_BK, np.log(sizes_P), np.log(per_sample))
        values = {"parameters": best_BK, "samples": samples_BK}
        lines = {
            name: _line(np.log(budgets_K), np.where(masks, each, 0.0), masks * 1.0)
            for name, each in values.items()
        }
        best = {name: np.exp(each[0, masks[0]]) for name, each in values.items()}
        allocation = Allocation(budgets_K[masks[0]], best, lines)
    return IsoFlop(budgets_K, sizes_P, errors_KP, parabolas_K3, allocation)


def _parabolas(
    sample: Sample, weights_N: Array, budgets_K: Array, sizes_P: Array
) -> tuple[Array, Array, Array]:
    """Errors KP, parabolas K3, and the log P of the least error where it lies between the sizes
    that were tried."""
    compute, log_budgets, x_P = np.log(sample.points["compute"]), np.log(budgets_K), np.log(sizes_P)
    own_PN = (weights_N > 0) & (sample.points["parameters"] == sizes_P[:, None])
    errors_KP = np.full((len(budgets_K), len(sizes_P)), np.nan)
    for column, (own, frontier) in enumerate(
        zip(own_PN, sample.frontier(own_PN * 1.0) > 0, strict=True)
    ):
        if own.any():
            inside = (log_budgets >= compute[own].min() - 1e-9) & (
                log_budgets <= compute[own].max() + 1e-9
            )
            errors_KP[inside, column] = np.interp(
                log_budgets, compute[frontier], sample.errors_N[frontier]
            )[inside]
    parabolas_K3, best_K = np.full((len(budgets_K), 3), np.nan), np.full(len(budgets_K), np.nan)
    for row in np.flatnonzero(np.isfinite(errors_KP).sum(axis=1) >= 3):
        near = around_least(errors_KP[row])
        parabolas_K3[row] = square, slope, _ = np.polyfit(x_P[near], errors_KP[row, near], 2)
        least = -slope / (2 * square) if square > 0 else np.nan
        if x_P[near].min() <= least <= x_P[near].max():
            best_K[row] = least
    return errors_KP, parabolas_K3, best_K


def around_least(errors_P: Array) -> NDArray[np.intp]:
    """The best size and its neighbours: far from its minimum no curve is a parabola."""
    known = np.flatnonzero(np.isfinite(errors_P))
    first = int(
        np.clip(np.argmin(errors_P[known]) - NUM_NEAR // 2, 0, max(0, len(known) - NUM_NEAR))
    )
    return known[first : first + NUM_NEAR]
