"""How size and data best grow with compute, read off the points: paper B's way, lines through the frontier at one number of epochs,
and isoFLOP parabolas. Both are lines log y = intercept + exponent log C, of the points and of resamples of the runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array
from analysis.scaling.laws import FEWEST_RUNS, QUANTILES, interval
from analysis.scaling.samples import Sample

NUM_BUDGETS, NUM_NEAR = 7, 5


@dataclass(frozen=True)
class Line:
    """The first is of the points, the others of the resamples that fix one."""

    exponents_B: Array
    intercepts_B: Array

    @property
    def interval(self) -> tuple[float, float] | None:
        return interval(self.exponents_B[1:]) if len(self.exponents_B) > 1 else None

    def at(self, compute: Array) -> Array:
        """Low, of the points, high."""
        values = np.exp(self.intercepts_B[:, None] + self.exponents_B[:, None] * np.log(compute))
        low, high = np.percentile(values[1:] if self.interval else values, QUANTILES, axis=0)
        return np.array([low, values[0], high])


@dataclass(frozen=True)
class Allocation:
    compute: Array
    """Where it was read off."""
    best: Mapping[str, Array]
    """What was best there: parameters, and images or samples."""
    lines: Mapping[str, Line]

    @property
    def facts(self) -> dict[str, Any]:
        """As an estimate's."""
        return {
            "points": len(self.compute),
            "parameters": {f"{name} exponent": float(line.exponents_B[0]) for name, line in self.lines.items()},
            "intervals_95": {f"{name} exponent": line.interval for name, line in self.lines.items() if line.interval},
            "resamples": {name: len(line.exponents_B) - 1 for name, line in self.lines.items()},
            "compute": self.compute.tolist(),
            "best": {name: values.tolist() for name, values in self.best.items()},
        }


def by_frontier(sample: Sample, weights_BN: Array) -> Allocation | str:
    """Of points at one number of epochs."""
    names = ("parameters", "images")
    known = np.isfinite(sample.points["parameters"] * sample.points["images"])
    rows = weights_BN if sample.num_runs >= FEWEST_RUNS else weights_BN[:0]
    masks_BN = sample.frontier(np.vstack([np.ones(len(known)), rows])) * known
    on = masks_BN[0] > 0
    if on.sum() < 3:
        return f"{on.sum()} points on the frontier cannot fix a line; 3 are needed"
    compute = sample.points["compute"]
    lines = {name: _line(np.log(compute), np.log(np.where(known, sample.points[name], 1.0)), masks_BN) for name in names}
    return Allocation(compute[on], {name: sample.points[name][on] for name in names}, lines)


def _line(x_N: Array, y_BN: Array, weights_BN: Array) -> Line:
    """Ordinary least squares of each row, of those that have two different x."""
    total = np.maximum(weights_BN.sum(1, keepdims=True), 1e-9)
    x_BN, mean_y = x_N - (weights_BN * x_N).sum(1, keepdims=True) / total, (weights_BN * y_BN).sum(1, keepdims=True) / total
    spread = (weights_BN * x_BN**2).sum(1)
    fixed = spread > 1e-12
    slope = (weights_BN * x_BN * (y_BN - mean_y)).sum(1)[fixed] / spread[fixed]
    return Line(slope, mean_y[fixed, 0] - slope * (x_N - x_BN)[fixed, 0])


@dataclass(frozen=True)
class IsoFlop:
    budgets_K: Array
    sizes_P: Array
    errors_KP: Array
    """Of each size with so much compute, between the points of its own frontier; NaN where it was not trained so little or long."""
    parabolas_K3: Array
    """In log P, from the square on, through the five sizes about the best; NaN where fewer than three are known."""
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
    errors_KP, parabolas_K3, best_K = _parabolas(sample, np.ones(len(parameters)), budgets_K, sizes_P)
    found = np.isfinite(best_K)
    if found.sum() < 3:
        lack = f"{found.sum()} of {NUM_BUDGETS} parabolas have their least error between the sizes; 3 are needed"
        return IsoFlop(budgets_K, sizes_P, errors_KP, parabolas_K3, lack)
    rows = [] if sample.num_runs < FEWEST_RUNS else [_parabolas(sample, each, budgets_K, sizes_P)[2] for each in weights_BN]
    best_BK = np.array([best_K, *rows])
    per_sample = [np.nanmin((compute / sample.points["samples"])[parameters == size]) for size in sizes_P]
    samples_BK = np.log(budgets_K) - np.interp(best_BK, np.log(sizes_P), np.log(per_sample))
    masks = np.isfinite(best_BK)
    enough = masks.sum(axis=1) >= 2
    values = {"parameters": best_BK, "samples": samples_BK}
    lines = {
        name: _line(np.log(budgets_K), np.where(masks, each, 0.0)[enough], masks[enough] * 1.0) for name, each in values.items()
    }
    best = {name: np.exp(each[0, found]) for name, each in values.items()}
    return IsoFlop(budgets_K, sizes_P, errors_KP, parabolas_K3, Allocation(budgets_K[found], best, lines))


def _parabolas(sample: Sample, weights_N: Array, budgets_K: Array, sizes_P: Array) -> tuple[Array, Array, Array]:
    """Errors KP, parabolas K3, and the log P of the least error where it lies between the sizes that were tried."""
    compute, log_budgets, x_P = np.log(sample.points["compute"]), np.log(budgets_K), np.log(sizes_P)
    own_PN = (weights_N > 0) & (sample.points["parameters"] == sizes_P[:, None])
    errors_KP = np.full((len(budgets_K), len(sizes_P)), np.nan)
    for column, (own, frontier) in enumerate(zip(own_PN, sample.frontier(own_PN * 1.0) > 0, strict=True)):
        if own.any():
            inside = (log_budgets >= compute[own].min() - 1e-9) & (log_budgets <= compute[own].max() + 1e-9)
            errors_KP[inside, column] = np.interp(log_budgets, compute[frontier], sample.errors_N[frontier])[inside]
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
    first = int(np.clip(np.argmin(errors_P[known]) - NUM_NEAR // 2, 0, max(0, len(known) - NUM_NEAR)))
    return known[first : first + NUM_NEAR]
