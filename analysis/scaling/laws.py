"""Laws with intervals: fitted to all points and to resamples of the runs, and to the points without
the largest size, whose errors they then predict. If the points are too few, the result is the
reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array, Fit, Law, Points, Term, fit
from analysis.scaling.samples import FEWEST_RUNS, Sample

QUANTILES = (2.5, 97.5)
FEWEST_USABLE = 0.1
"""Fraction of the resamples that must fix a law for intervals."""
FULL = "full"


def forms_of(variable: str) -> dict[str, Law]:
    """Return a (b + x)^-alpha + E_inf, and the same without b and without E_inf."""
    whole, bare = Term(variable, "a", "alpha", "offset", "b"), Term(variable, "a", "alpha")
    return {FULL: Law((whole,)), "b = 0": Law((bare,)), "E_inf = 0": Law((whole,), floor=False)}


_SIZE = Term("parameters", "A", "alpha")
SUM_LAW = Law((_SIZE, Term("images", "B", "beta")))
REPEATS_LAW = Law((_SIZE, Term("images", "B", "beta", "repeats", "R*")))
NOUNS = {
    "compute": "amounts of compute",
    "parameters": "model sizes",
    "images": "numbers of images",
    "epochs": "lengths",
}


@dataclass(frozen=True)
class Estimate:
    """A law on some points of one target."""

    num_points: int
    parameters: Mapping[str, Array]
    """By name: the value for the points, then for each resample that fixes the law."""
    fit: Fit | None = None
    aicc: float = np.nan
    """Counts the noise as a parameter."""
    beyond: float = np.nan
    """Root mean square of predicted / measured - 1 at the largest size, fitted without it."""
    at_bounds: Mapping[str, float] = field(default_factory=dict)
    """1 for a parameter that is at the end of its range, else the fraction of resamples."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each parameter."""
        for name, values_B in self.parameters.items():
            low, high = interval_of(values_B)
            row = {"parameter": name, "value": values_B[0], "low": low, "high": high}
            row |= {"points": self.num_points, "aicc": self.aicc, "beyond": self.beyond}
            yield row | {"at_bound": self.at_bounds.get(name, 0.0)}


def interval_of(values_B: Array) -> tuple[float, float]:
    """Return the interval of the resamples, which follow the value for the points; NaN without
    resamples."""
    if len(values_B) < 2:
        return np.nan, np.nan
    low, high = np.percentile(values_B[1:], QUANTILES)
    return float(low), float(high)


def band_of(values_BN: Array) -> tuple[Array, Array, Array]:
    """Return the lower end, the values for the points, and the upper end."""
    low, high = np.percentile(values_BN[1:] if len(values_BN) > 1 else values_BN, QUANTILES, axis=0)
    return low, values_BN[0], high


def estimate(
    law: Law,
    sample: Sample,
    weights_BN: Array,
    *,
    size: str = "parameters",
    without_N: Array | None = None,
) -> Estimate | str:
    """Fit a law. `weights_BN`: how often each resample has each point; the first row is 1 for those
    that count. `without_N`: those that count without the largest `size` (default: all smaller
    ones)."""
    counted_N = weights_BN[0] > 0
    held = sample.of(counted_N)
    if lack := _lack(law, held):
        return lack
    if held.num_runs < FEWEST_RUNS:
        return f"{held.num_runs} runs are too few for a law; {FEWEST_RUNS} are needed"
    usable = _fixes(law, sample.points, weights_BN)
    has_interval = usable[1:].sum() >= FEWEST_USABLE * len(usable)
    weights_BN = weights_BN[usable] if has_interval else weights_BN[:1]
    found = fit(law, sample.points, sample.errors_N, weights_BN)
    parameters = found.parameters
    if "beta" in parameters:  # how the best P and N grow with compute
        both = parameters["alpha"] + parameters["beta"]
        parameters["P* exponent"] = parameters["beta"] / both
        parameters["N* exponent"] = parameters["alpha"] / both
    n, k, aicc = len(held.errors_N), law.num_parameters + 1, np.nan
    if n > k + 1:
        aicc = n * np.log(max(found.squares_B[0], 1e-300) / n) + 2 * k
        aicc += 2 * k * (k + 1) / (n - k - 1)
    largest_N = sample.largest(size)
    rest = sample.of((counted_N if without_N is None else without_N > 0) & ~largest_N)
    beyond = _error_beyond(law, rest, sample.of(counted_N & largest_N & (sample.errors_N > 0)))
    at_bounds = {
        name: max(float(hits[0]), float(hits[1:].mean()) if len(hits) > 1 else 0.0)
        for name, hits in found.at_bounds.items()
    }
    return Estimate(n, parameters, found, aicc, beyond, at_bounds)


def _needed(law: Law) -> dict[str, int]:
    """Return the least number of different values of each variable."""
    if len(law.terms) == 1:
        return {law.terms[0].variable: law.num_parameters}
    lengths = {"epochs": 2} if "repeats" in law.shape.values() else {}
    return {term.variable: 3 for term in law.terms} | lengths


def _lack(law: Law, sample: Sample) -> str:
    """Return why the points cannot fix the law with one to spare, or nothing."""
    spare = int(len(law.terms) == 1)
    counts = [
        (sample.num_different(name), NOUNS[name], needed + spare)
        for name, needed in _needed(law).items()
    ]
    counts.append((len(sample.errors_N), "points", law.num_parameters + 1))
    for number, noun, needed in counts:
        if number < needed:
            problem = f"{number} {noun} cannot fix {law.num_parameters} parameters"
            return f"{problem}; {needed} are needed"
    return ""


def _fixes(law: Law, points: Points, weights_BN: Array) -> NDArray[np.bool_]:
    """Return the resamples with as many different points as the law has parameters."""
    usable = (weights_BN > 0).sum(axis=1) >= law.num_parameters
    for name, needed in _needed(law).items():
        _, which = np.unique(points[name], return_inverse=True)
        usable &= (weights_BN @ np.eye(which.max() + 1)[which] > 0).sum(axis=1) >= needed
    return np.asarray(usable)


def _error_beyond(law: Law, rest: Sample, largest: Sample) -> float:
    if not len(largest.errors_N) or _lack(law, rest):
        return np.nan
    predicted_N = fit(law, rest.points, rest.errors_N).predict(largest.points)[0]
    return float(np.sqrt(np.mean((predicted_N / largest.errors_N - 1) ** 2)))
