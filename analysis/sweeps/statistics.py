"""What a sweep shows in numbers: whether the error falls with the width, and where between C and S it is least."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2_000


@dataclass(frozen=True)
class Kendall:
    tau: float
    """tau-b: -1 where each greater x has a smaller y."""
    p: float
    """Of so strong an order either way, if every order of the y is as likely: exact, also with equal y."""
    p_falling: float
    """Of one that falls so much."""
    num: int


def kendall(x: Sequence[float], y: Sequence[float]) -> Kendall | None:
    """Of different x; None where there is no order: less than two, or all y are equal."""
    assert len(set(x)) == len(x) == len(y)
    values = [value for _, value in sorted(zip(x, y, strict=True))]
    num, ties = len(values), list(Counter(values).values())
    if len(ties) < 2:
        return None
    counts = num_orders(ties)
    wrong = sum(values[i] > values[j] for i in range(num) for j in range(i + 1, num))
    pairs = len(counts) - 1  # of different y
    far = abs(pairs - 2 * wrong)
    total = sum(counts)
    return Kendall(
        tau=float((pairs - 2 * wrong) / sqrt(num * (num - 1) / 2 * pairs)),
        p=sum(count for at, count in enumerate(counts) if abs(pairs - 2 * at) >= far) / total,
        p_falling=sum(counts[wrong:]) / total,
        num=num,
    )


def num_orders(ties: Sequence[int]) -> list[int]:
    """At place d: in how many orders of values, the i-th of which is there ties[i] times, d pairs stand the wrong way round. As a
    polynomial in q it is [n]! / ([t1]! [t2]! ...), with [k]! the product of all 1 + q + ... + q^(j-1), j <= k."""
    counts = [1]
    for size in range(1, sum(ties) + 1):
        counts = [sum(counts[max(0, at - size + 1) : at + 1]) for at in range(len(counts) + size - 1)]
    for tie in ties:
        for size in range(1, tie + 1):  # long division
            quotient: list[int] = []
            for count in counts[: len(counts) - size + 1]:
                quotient.append(count - sum(quotient[max(0, len(quotient) - size + 1) :]))
            counts = quotient
    return counts


@dataclass(frozen=True)
class Optimum:
    at: float
    """Where the parabola through all points is least, between the first x and the last."""
    low: float
    high: float
    """95 % of the resamples."""
    has_zero: bool
    """0 is between them."""
    share_at_ends: float
    """Of the resamples: how many have no minimum between the ends."""
    coefficients: tuple[float, float, float]
    """y = c0 + c1 x + c2 x^2"""


def optimum(x: Sequence[float], y: Sequence[float], *, num_resamples: int = NUM_RESAMPLES) -> Optimum | None:
    """None with fewer than three different x or four points. Resampled are the residuals, each divided by sqrt(1 - leverage): x are
    chosen, not drawn, and with one seed they are all that there is."""
    at, values = np.asarray(x, float), np.asarray(y, float)
    if len(set(x)) < 3 or len(at) < 4:
        return None
    design = np.stack([np.ones_like(at), at, at**2], axis=1)
    solve = np.linalg.pinv(design)
    fitted = design @ (coefficients := solve @ values)
    residuals = (values - fitted) / np.sqrt(np.maximum(1e-9, 1 - np.einsum("ij,ji->i", design, solve)))
    drawn = np.random.default_rng(0).choice(residuals - residuals.mean(), (num_resamples, len(at)))
    found = _least((fitted + drawn) @ solve.T, at.min(), at.max())
    low, high = map(float, np.percentile(found, [2.5, 97.5]))
    return Optimum(
        at=float(_least(coefficients[None], at.min(), at.max())[0]),
        low=low,
        high=high,
        has_zero=low <= 0 <= high,
        share_at_ends=float(np.isin(found, [at.min(), at.max()]).mean()),
        coefficients=tuple(map(float, coefficients)),  # type: ignore[arg-type]
    )


def _least(coefficients: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """Of parabolas, a row each, between both ends."""
    _, slope, bend = coefficients.T
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.clip(-slope / (2 * bend), low, high)
    better_end = np.where(slope * low + bend * low**2 <= slope * high + bend * high**2, low, high)
    return np.where(bend > 0, inside, better_end)
