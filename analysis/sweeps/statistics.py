"""Statistics of a sweep: the trend of the error with the width, and the C / S of least error."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
FEWEST_SPARE = 4
"""Fewest degrees of freedom for an interval."""
Facts = dict[str, Any]


def kendall(x: Sequence[float], y: Sequence[float]) -> Facts:
    """Return tau-b (-1 if y always falls as x grows) and the exact one-sided p-value for falling y;
    {} if all y are equal. All x must differ. For p, equal y are treated as rising."""
    if len(set(y)) < 2:
        return {}
    rank = np.empty(len(x))
    rank[np.lexsort((x, y))] = np.arange(len(x))
    falling = stats.kendalltau(x, rank, method="exact", alternative="less")
    tau = float(stats.kendalltau(x, y).statistic)
    return {"tau": tau, "p_falling": float(falling.pvalue), "num_widths": len(x)}


def holm(p: "pd.Series[float]") -> "pd.Series[float]":
    """Return the p-values after Holm's correction, which ignores unknown values."""
    known = p.dropna().sort_values()
    remaining = np.arange(len(known), 0, -1)
    return (known * remaining).cummax().clip(upper=1).reindex(p.index)


def optimum(x: Sequence[float], y: Sequence[float], seeds: Sequence[Any]) -> Facts:
    """Fit a parabola. Return its minimum between the first and the last x, a 95 % interval, and
    `has_zero` (True if the interval contains 0).

    Each seed has its own offset, because its runs share initial weights and order. Fieller's
    interval has all x at which Student's t does not reject a slope of 0, or all x
    if the parabola may open downward. The result is empty if there are fewer than three different x
    or fewer than FEWEST_SPARE degrees of freedom."""
    at, values = np.asarray(x, float), np.asarray(y, float)
    levels = pd.get_dummies(pd.Series([*seeds], dtype=str)).to_numpy(float)
    design = np.column_stack([at, at**2, levels])
    spare = len(at) - int(np.linalg.matrix_rank(design))
    if len(set(x)) < 3 or spare < FEWEST_SPARE:
        return {}
    inverse = np.linalg.pinv(design)
    found = inverse @ values
    variance = ((values - design @ found) ** 2).sum() / spare
    wide = stats.t.ppf((1 + CONFIDENCE) / 2, spare) ** 2 * variance * (inverse @ inverse.T)
    # (slope + 2 bend x)^2 <= t^2 var(slope + 2 bend x): a quadratic inequality in x
    slope, bend = found[:2]
    square = 4 * (bend**2 - wide[1, 1])
    half, constant = 2 * (slope * bend - wide[0, 1]), slope**2 - wide[0, 0]
    low, high = ends = at.min(), at.max()
    if bend > 0 and square > 0:
        root = np.sqrt(max(0.0, half**2 - square * constant))
        low, high = np.clip([(-half - root) / square, (-half + root) / square], *ends)
    candidates = np.array([*ends, np.clip(-slope / (2 * bend), *ends) if bend > 0 else ends[0]])
    least = candidates[np.argmin(slope * candidates + bend * candidates**2)]
    facts = {"at": float(least), "low": float(low), "high": float(high)}
    return facts | {"has_zero": bool(low <= 0 <= high)}
