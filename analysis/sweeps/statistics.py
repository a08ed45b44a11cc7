"""Statistics of a sweep: whether the error falls with the width, and between which C and S it is
least."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, compress
from math import comb, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2_000
Facts = dict[str, Any]


def kendall(x: Sequence[float], y: Sequence[float]) -> Facts:
    """Return tau-b (-1 if each greater x has a smaller y), p for an order as strong in either
    direction, and p_falling for one that falls as strongly. The x differ. The null distribution is
    exact. Empty if all y are equal."""
    if len(set(y)) < 2:
        return {}
    values = [value for _, value in sorted(zip(x, y, strict=True))]
    counts = num_orders([*Counter(values).values()])
    pairs, total = len(counts) - 1, sum(counts)  # pairs of different y
    wrong = sum(before > after for before, after in combinations(values, 2))
    is_as_strong = [abs(pairs - 2 * at) >= abs(pairs - 2 * wrong) for at in range(len(counts))]
    return {
        "tau": (pairs - 2 * wrong) / sqrt(comb(len(values), 2) * pairs),
        "p": sum(compress(counts, is_as_strong)) / total,
        "p_falling": sum(counts[wrong:]) / total,
        "num_widths": len(x),
    }


def num_orders(ties: Sequence[int]) -> list[int]:
    """Return at place d the number of orders in which d pairs stand the wrong way round. The i-th
    value occurs ties[i] times. As a polynomial in q it is [n]! / ([t1]! [t2]! ...), where [k]! is
    the product of all (1 - q^j) / (1 - q) with j <= k."""
    num = sum(ties)
    counts = [1] + [0] * (comb(num, 2) - sum(comb(tie, 2) for tie in ties))
    for size in range(1, num + 1):
        counts = [
            count - (counts[at - size] if at >= size else 0) for at, count in enumerate(counts)
        ]
    for tie in ties:
        for size in range(1, tie + 1):
            for at in range(size, len(counts)):
                counts[at] += counts[at - size]
    return counts


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
