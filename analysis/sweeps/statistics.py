"""What a sweep shows in numbers: whether the error falls with the width, and where between C and S
it is least."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2_000
Facts = dict[str, Any]


def kendall(x: Sequence[float], y: Sequence[float]) -> Facts | None:
    """tau-b (-1 where each greater x has a smaller y) of `num` different x. p: of so strong an
    order either way, if every order of the y is as likely, exact, also with equal y; p_falling: of
    one that falls so much. None where there is no order: less than two, or all y are equal."""
    assert len(set(x)) == len(x) == len(y)
    values = [value for _, value in sorted(zip(x, y, strict=True))]
    counts = num_orders([*Counter(values).values()])
    pairs, total = len(counts) - 1, sum(counts)  # pairs of different y
    if not pairs:
        return None
    wrong = sum(before > after for before, after in combinations(values, 2))
    far = sum(
        count for at, count in enumerate(counts) if abs(pairs - 2 * at) >= abs(pairs - 2 * wrong)
    )
    tau = (pairs - 2 * wrong) / sqrt(comb(len(values), 2) * pairs)
    return {
        "tau": tau,
        "p": far / total,
        "p_falling": sum(counts[wrong:]) / total,
        "num": len(values),
    }


def num_orders(ties: Sequence[int]) -> list[int]:
    """At place d: in how many orders of values, the i-th of which is there ties[i] times, d pairs
    stand the wrong way round. As a polynomial in q it is [n]! / ([t1]! [t2]! ...), with [k]! the
    product of all (1 - q^j) / (1 - q), j <= k.
    """
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


def optimum(
    x: Sequence[float], y: Sequence[float], *, num_resamples: int = NUM_RESAMPLES
) -> Facts | None:
    """Where the parabola c0 + c1 x + c2 x^2 through all points is least between the first x and the
    last, 95 % of the resamples, whether 0 is between these, and the share of resamples that have no
    minimum between the ends.

    None with fewer than three different x or four points. Resampled are the residuals, each divided
    by sqrt(1 - leverage): x are chosen, not drawn, and with one seed they are all that there is."""
    at, values = np.asarray(x, float), np.asarray(y, float)
    if len(set(x)) < 3 or len(at) < 4:
        return None
    design = np.vander(at, 3, increasing=True)
    solve = np.linalg.pinv(design)
    fitted = design @ (coefficients := solve @ values)
    residuals = (values - fitted) / np.sqrt(
        np.maximum(1e-9, 1 - np.einsum("ij,ji->i", design, solve))
    )
    drawn = np.random.default_rng(0).choice(residuals - residuals.mean(), (num_resamples, len(at)))
    found = _least((fitted + drawn) @ solve.T, at.min(), at.max())
    low, high = np.percentile(found, [2.5, 97.5]).tolist()
    return {
        "at": float(_least(coefficients[None], at.min(), at.max())[0]),
        "low": low,
        "high": high,
        "has_zero": low <= 0 <= high,
        "share_at_ends": float(np.isin(found, [at.min(), at.max()]).mean()),
        "coefficients": coefficients.tolist(),
    }


def _least(coefficients: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """Of parabolas, a row each, between both ends."""
    _, slope, bend = coefficients.T
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.clip(-slope / (2 * bend), low, high)
    better_end = np.where(slope * low + bend * low**2 <= slope * high + bend * high**2, low, high)
    return np.where(bend > 0, inside, better_end)
