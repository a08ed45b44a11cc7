"""Best model size and number of images for each compute, as lines log y = intercept + exponent log
C.

Lines are fitted to the frontier at one number of epochs (as in Scaling MLPs), and to the minima of
isoFLOP parabolas. Exponents have no intervals, because the minimum of noisy errors is biased and no
interval has been tested. Shapes: K compute budgets, N points, P model sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array
from analysis.scaling.laws import Estimate
from analysis.scaling.samples import Sample

NUM_BUDGETS, NUM_NEAR, FEWEST_SIZES = 7, 5, 4


@dataclass(frozen=True)
class Allocation(Estimate):
    compute_K: Array = field(kw_only=True)
    best: Mapping[str, Array] = field(kw_only=True)
    """Best number of parameters, and best number of images or samples, at each compute."""
    lines: Mapping[str, Array] = field(kw_only=True)
    """Exponent and intercept of each fitted line."""


def _allocation(log_compute_K: Array, logs: Mapping[str, Array]) -> Allocation:
    """Fit a line to each quantity in `logs`, the logarithms of the best values at each compute."""
    lines = {name: np.polyfit(log_compute_K, log_K, 1) for name, log_K in logs.items()}
    exponents = {f"{name} exponent": line[:1] for name, line in lines.items()}
    best = {name: np.exp(log_K) for name, log_K in logs.items()}
    compute_K = np.exp(log_compute_K)
    return Allocation(len(compute_K), exponents, compute_K=compute_K, best=best, lines=lines)


def by_frontier(sample: Sample) -> Allocation | str:
    """Fit lines to the frontier of points at one number of epochs, or return the reason if the
    frontier has too few points."""
    known = np.isfinite(sample.points["parameters"] * sample.points["images"])
    on = sample.of(sample.frontier() & known)
    if (count := on.num_different("compute")) < 3:
        return f"{count} points on the frontier cannot determine a line; 3 are needed"
    logs = {name: np.log(on.points[name]) for name in ("parameters", "images")}
    return _allocation(np.log(on.points["compute"]), logs)


@dataclass(frozen=True)
class IsoFlop:
    budgets_K: Array
    sizes_P: Array
    errors_KP: Array
    """Error of each size at each compute, interpolated on the frontier of this size; NaN outside
    the frontier."""
    parabolas_K3: Array
    """Coefficients of each parabola (log error against log P), highest power first. NaN if too few
    sizes have an error."""
    allocation: Allocation | str


def by_parabolas(sample: Sample) -> IsoFlop | str:
    parameters = sample.points["parameters"]
    known = np.isfinite(parameters) & np.isfinite(sample.points["samples"]) & (sample.errors_N > 0)
    sizes_P = np.unique(parameters[known])
    if len(sizes_P) < FEWEST_SIZES:
        return f"{len(sizes_P)} model sizes cannot determine a parabola; {FEWEST_SIZES} are needed"
    curves = [sample.of(known & (parameters == size)) for size in sizes_P]
    ends = np.log([each.points["compute"][[0, -1]] for each in curves])
    low, high = np.sort(ends[:, 0])[FEWEST_SIZES - 1], np.sort(ends[:, 1])[-FEWEST_SIZES]
    if low >= high:
        return f"no {FEWEST_SIZES} model sizes were trained with the same compute"
    log_K, log_P = np.linspace(low, high, NUM_BUDGETS), np.log(sizes_P)
    errors_KP = np.full((len(log_K), len(sizes_P)), np.nan)
    for column, (each, (first, last)) in enumerate(zip(curves, ends, strict=True)):
        inside, on = (log_K >= first - 1e-9) & (log_K <= last + 1e-9), each.of(each.frontier())
        log_errors_K = np.interp(log_K, np.log(on.points["compute"]), np.log(on.errors_N))
        errors_KP[inside, column] = np.exp(log_errors_K[inside])
    parabolas_K3, best_K = np.full((len(log_K), 3), np.nan), np.full(len(log_K), np.nan)
    for row in np.flatnonzero(np.isfinite(errors_KP).sum(axis=1) >= FEWEST_SIZES):
        near = around_least(errors_KP[row])
        parabolas_K3[row] = np.polyfit(log_P[near], np.log(errors_KP[row, near]), 2)
        square, slope, _ = parabolas_K3[row]
        least = -slope / (2 * square) if square > 0 else np.nan
        if log_P[near].min() <= least <= log_P[near].max():
            best_K[row] = least
    is_inside = np.isfinite(best_K)
    if (count := is_inside.sum()) < 3:
        problem = f"{count} of {NUM_BUDGETS} parabolas have their minimum between the sizes"
        return IsoFlop(np.exp(log_K), sizes_P, errors_KP, parabolas_K3, f"{problem}; 3 are needed")
    cost_P = [np.nanmin(each.points["compute"] / each.points["samples"]) for each in curves]
    log_K_in, best_K = log_K[is_inside], best_K[is_inside]
    logs = {"parameters": best_K, "samples": log_K_in - np.interp(best_K, log_P, np.log(cost_P))}
    allocation = _allocation(log_K_in, logs)
    return IsoFlop(np.exp(log_K), sizes_P, errors_KP, parabolas_K3, allocation)


def around_least(errors_P: Array) -> NDArray[np.intp]:
    """Return the indices of the best size and its neighbors. Farther from the minimum, curves are
    not parabolas."""
    known = np.flatnonzero(np.isfinite(errors_P))
    last = max(0, len(known) - NUM_NEAR)
    first = int(np.clip(np.argmin(errors_P[known]) - NUM_NEAR // 2, 0, last))
    return known[first : first + NUM_NEAR]
