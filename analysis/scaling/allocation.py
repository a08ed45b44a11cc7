"""How size and data best grow with compute: lines through the frontier at one number of epochs, as
in Scaling MLPs, and isoFLOP parabolas. Both are lines log y = intercept + exponent log C, for the
points and for resamples of the runs. B resamples, K budgets, N points, P sizes of model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array
from analysis.scaling.laws import Estimate
from analysis.scaling.samples import FEWEST_RUNS, Sample

NUM_BUDGETS, NUM_NEAR = 7, 5


@dataclass(frozen=True)
class Allocation(Estimate):
    compute_K: Array = field(kw_only=True)
    best: Mapping[str, Array] = field(kw_only=True)
    """The best parameters, and images or samples, at each compute."""
    lines: Mapping[str, Array] = field(kw_only=True)
    """(B, 2): exponent and intercept for the points, then for the resamples that fix a line."""


def _allocation(
    log_compute_K: Array, values: Mapping[str, Array], masks_BK: NDArray[np.bool_]
) -> Allocation:
    """`values`: logarithms (B, K) of what is best at each compute."""
    lines, on = {}, masks_BK[0]
    for name, log_BK in values.items():
        rows = zip(np.broadcast_to(log_BK, masks_BK.shape), masks_BK, strict=True)
        fits = [
            np.polyfit(log_compute_K[mask_K], log_K[mask_K], 1)
            for log_K, mask_K in rows
            if len(np.unique(log_compute_K[mask_K])) > 1
        ]
        lines[name] = np.array(fits)
    exponents = {f"{name} exponent": line_B2[:, 0] for name, line_B2 in lines.items()}
    best = {name: np.exp(np.atleast_2d(log_BK)[0, on]) for name, log_BK in values.items()}
    compute_K = np.exp(log_compute_K[on])
    return Allocation(int(on.sum()), exponents, compute_K=compute_K, best=best, lines=lines)


def by_frontier(sample: Sample, weights_BN: Array) -> Allocation | str:
    """Fit lines to the frontier of points at one number of epochs."""
    names = ("parameters", "images")
    known = np.isfinite(sample.points["parameters"] * sample.points["images"])
    weights_BN = weights_BN if sample.num_runs >= FEWEST_RUNS else weights_BN[:1]
    masks_BN = (sample.frontier(weights_BN) > 0) & known
    if masks_BN[0].sum() < 3:
        return f"{masks_BN[0].sum()} points on the frontier cannot fix a line; 3 are needed"
    values = {name: np.log(np.where(known, sample.points[name], 1.0)) for name in names}
    return _allocation(np.log(sample.points["compute"]), values, masks_BN)


@dataclass(frozen=True)
class IsoFlop:
    budgets_K: Array
    sizes_P: Array
    errors_KP: Array
    """Interpolated on the frontier of each size; NaN outside its range of compute."""
    parabolas_K3: Array
    """Coefficients in log P, the square first; NaN with fewer than three known sizes."""
    allocation: Allocation | str


def by_parabolas(sample: Sample, weights_BN: Array) -> IsoFlop | str:
    parameters, compute = sample.points["parameters"], sample.points["compute"]
    sizes_P = np.unique(parameters[np.isfinite(parameters) & np.isfinite(sample.points["samples"])])
    if len(sizes_P) < 3:
        return f"{len(sizes_P)} model sizes cannot fix a parabola; 3 are needed"
    ends = np.array([np.log(compute[parameters == size])[[0, -1]] for size in sizes_P])
    low, high = np.sort(ends[:, 0])[2], np.sort(ends[:, 1])[-3]
    if low >= high:
        return "no three sizes have been trained with the same compute"
    log_K = np.linspace(low, high, NUM_BUDGETS)
    curves = [_parabolas(sample, weights_N, log_K, sizes_P) for weights_N in weights_BN]
    errors_KP, parabolas_K3, _ = curves[0]
    best_BK = np.array([best_K for *_, best_K in curves])
    masks_BK = np.isfinite(best_BK)
    if (count := masks_BK[0].sum()) < 3:
        problem = f"{count} of {NUM_BUDGETS} parabolas have their least error between the sizes"
        return IsoFlop(np.exp(log_K), sizes_P, errors_KP, parabolas_K3, f"{problem}; 3 are needed")
    cost_N = compute / sample.points["samples"]
    cost_P = [np.nanmin(cost_N[parameters == size]) for size in sizes_P]
    samples_BK = log_K - np.interp(best_BK, np.log(sizes_P), np.log(cost_P))
    allocation = _allocation(log_K, {"parameters": best_BK, "samples": samples_BK}, masks_BK)
    return IsoFlop(np.exp(log_K), sizes_P, errors_KP, parabolas_K3, allocation)


def _parabolas(
    sample: Sample, weights_N: Array, log_K: Array, sizes_P: Array
) -> tuple[Array, Array, Array]:
    """Return errors KP, parabolas K3, and the log P of the least error if it is between the
    sizes."""
    log_compute_N, log_P = np.log(sample.points["compute"]), np.log(sizes_P)
    own_PN = (weights_N > 0) & (sample.points["parameters"] == sizes_P[:, None])
    errors_KP = np.full((len(log_K), len(sizes_P)), np.nan)
    for column, on_N in enumerate(sample.frontier(own_PN * 1.0) > 0):
        if (own_N := own_PN[column]).any():
            low, high = log_compute_N[own_N].min(), log_compute_N[own_N].max()
            inside = (log_K >= low - 1e-9) & (log_K <= high + 1e-9)
            errors_K = np.interp(log_K, log_compute_N[on_N], sample.errors_N[on_N])
            errors_KP[inside, column] = errors_K[inside]
    parabolas_K3, best_K = np.full((len(log_K), 3), np.nan), np.full(len(log_K), np.nan)
    for row in np.flatnonzero(np.isfinite(errors_KP).sum(axis=1) >= 3):
        near = around_least(errors_KP[row])
        parabolas_K3[row] = square, slope, _ = np.polyfit(log_P[near], errors_KP[row, near], 2)
        least = -slope / (2 * square) if square > 0 else np.nan
        if log_P[near].min() <= least <= log_P[near].max():
            best_K[row] = least
    return errors_KP, parabolas_K3, best_K


def around_least(errors_P: Array) -> NDArray[np.intp]:
    """Return the best size and its neighbors: far from its minimum no curve is a parabola."""
    known = np.flatnonzero(np.isfinite(errors_P))
    last = max(0, len(known) - NUM_NEAR)
    first = int(np.clip(np.argmin(errors_P[known]) - NUM_NEAR // 2, 0, last))
    return known[first : first + NUM_NEAR]
