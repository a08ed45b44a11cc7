"""Statistics of a sweep: whether the error falls with the width, and between which C and S it is
least."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

NUM_RESAMPLES = 2_000
Facts = dict[str, Any]


def kendall(x: Sequence[float], y: Sequence[float]) -> Facts:
    """Return tau-b (-1 if each greater x has a smaller y), p for an order as strong in either
    direction, and p_falling for one that falls as strongly. The null distribution is exact; with
    equal y it is the normal approximation. Empty if all y are equal."""
    if len(set(y)) < 2:
        return {}
    method = "exact" if len(set(y)) == len(y) else "asymptotic"
    tau, p = kendalltau(x, y, method=method)
    falling = kendalltau(x, y, method=method, alternative="less").pvalue
    return {"tau": tau, "p": p, "p_falling": falling, "num_widths": len(x)}


def optimum(x: Sequence[float], y: Sequence[float], *, num_resamples: int = NUM_RESAMPLES) -> Facts:
    """Return the x at which the parabola through all points is least between the first and the
    last x, its 95 % interval, whether 0 is inside, and the fraction of resamples whose least value
    is at an end.

    Empty with fewer than three different x or four points. The resampled residuals are divided by
    sqrt(1 - leverage): x are chosen, not drawn at random."""
    at, values = np.asarray(x, float), np.asarray(y, float)
    if len(set(x)) < 3 or len(at) < 4:
        return {}
    design = np.vander(at, 3, increasing=True)
    solve = np.linalg.pinv(design)
    fitted = design @ solve @ values
    leverage = np.einsum("ij,ji->i", design, solve)
    residuals = (values - fitted) / np.sqrt(np.maximum(1e-9, 1 - leverage))
    drawn = np.random.default_rng(0).choice(residuals - residuals.mean(), (num_resamples, len(at)))
    ends = at.min(), at.max()
    found = _least((fitted + drawn) @ solve.T, *ends)
    low, high = np.percentile(found, [2.5, 97.5]).tolist()
    least = float(_least((solve @ values)[None], *ends)[0])
    at_ends = float(np.isin(found, ends).mean())
    return {"at": least, "low": low, "high": high, "has_zero": low <= 0 <= high, "at_ends": at_ends}


def _least(coefficients: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """Return the x of the least value of each parabola (a row) between both ends."""
    _, slope, bend = coefficients.T
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.clip(-slope / (2 * bend), low, high)
    better_end = np.where(slope * low + bend * low**2 <= slope * high + bend * high**2, low, high)
    return np.where(bend > 0, inside, better_end)
