"""Fit laws to the measured errors, to resampled errors (for intervals), and to the points without
the largest size (to test predictions). If there are too few points, functions return the reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from analysis.scaling.fitting import Array, Fit, Law, Term, fit
from analysis.scaling.samples import FEWEST_RUNS, Sample

QUANTILES = (2.5, 97.5)
FULL = "full"


def forms_of(variable: str) -> dict[str, Law]:
    """Return the law a (b + x)^-alpha + E_inf, and its forms without b and without E_inf."""
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
    """A law fitted to some points of one target."""

    num_points: int
    parameters: Mapping[str, Array]
    """Values of each parameter: for the measured errors, then for each set of resampled errors."""
    fit: Fit | None = None
    aicc: float = np.nan
    """AICc with the number of runs as sample size, because checkpoints of a run are not
    independent. The noise variance counts as a parameter."""
    beyond: float = np.nan
    """Root mean square of predicted / measured - 1 at the largest size, predicted by a fit without
    this size."""
    at_bounds: Mapping[str, float] = field(default_factory=dict)
    """For each parameter: 1 if its fit is at an end of its range, otherwise the fraction of
    resampled fits at an end."""

    def rows(self) -> Iterator[dict[str, Any]]:
        for name, values_B in self.parameters.items():
            low, high = interval_of(values_B)
            row = {"parameter": name, "value": values_B[0], "low": low, "high": high}
            row |= {"points": self.num_points, "aicc": self.aicc, "beyond": self.beyond}
            yield row | {"at_bound": self.at_bounds.get(name, 0.0)}


def interval_of(values_B: Array) -> tuple[float, float]:
    """Return the 95 % interval of the resampled values (all after the first); NaN if there are
    none."""
    if len(values_B) < 2:
        return np.nan, np.nan
    low, high = np.percentile(values_B[1:], QUANTILES)
    return float(low), float(high)


def band_of(values_BN: Array) -> tuple[Array, Array, Array]:
    """Return the lower end of the 95 % interval, row 0 (for the measured errors), and the upper
    end. The other rows are resamples."""
    low, high = np.percentile(values_BN[1:] if len(values_BN) > 1 else values_BN, QUANTILES, axis=0)
    return low, values_BN[0], high


def estimate(
    law: Law,
    sample: Sample,
    counted_N: NDArray[np.bool_],
    *,
    size: str = "parameters",
    without_N: NDArray[np.bool_] | None = None,
    resamples: int = 0,
) -> Estimate | str:
    """Fit a law to the points in `counted_N`. A second fit, to `without_N` (default: `counted_N`)
    without the largest `size`, predicts the points of the largest `size`. `resamples`: number of
    sets of resampled errors."""
    held = sample.of(counted_N)
    if lack := _lack(law, held):
        return lack
    if held.num_runs < FEWEST_RUNS:
        return f"{held.num_runs} runs are too few for a law; {FEWEST_RUNS} are needed"
    fitted = fit(law, held.points, held.errors_N)
    spare = held.num_runs - law.num_parameters
    found = fitted
    if resamples and spare > 0:
        drawn_BN = _resampled_errors(held, fitted.predict(held.points)[0], spare, resamples)
        found = fit(law, held.points, np.vstack([held.errors_N, drawn_BN]))
    parameters = found.parameters
    if law is SUM_LAW and not sample.disproportion:  # how the best P and N grow with compute
        both = parameters["alpha"] + parameters["beta"]
        parameters["P* exponent"] = parameters["beta"] / both
        parameters["N* exponent"] = parameters["alpha"] / both
    runs, k, aicc = held.num_runs, law.num_parameters + 1, np.nan
    if runs > k + 1:
        squares = max(found.squares_B[0], 1e-300) / len(held.errors_N)
        aicc = runs * np.log(squares) + 2 * k + 2 * k * (k + 1) / (runs - k - 1)
    largest_N = sample.largest(size)
    rest = sample.of((counted_N if without_N is None else without_N) & ~largest_N)
    beyond = error_beyond(law, rest, sample.of(counted_N & largest_N & (sample.errors_N > 0)))
    at_bounds = {
        name: max(float(hits[0]), float(hits[1:].mean()) if len(hits) > 1 else 0.0)
        for name, hits in found.at_bounds.items()
    }
    return Estimate(len(held.errors_N), parameters, found, aicc, beyond, at_bounds)


def _resampled_errors(sample: Sample, fitted_N: Array, spare: int, count: int) -> Array:
    """Return `count` sets of resampled errors (B, N). Points stay the same, because sizes are
    chosen, not random. Each run gets the residuals of a random run, checkpoint by checkpoint, so
    checkpoints stay correlated. `spare`: degrees of freedom.

    Two factors widen the residuals. The first is sqrt(runs / spare), because the fit follows the
    noise. The second is the quantile of Student's t / normal quantile, because the variance is
    estimated.
    """
    rest_N = sample.errors_N - fitted_N
    _, run_N, length_R = np.unique(sample.runs_N, return_inverse=True, return_counts=True)
    order_N = pd.Series(run_N).groupby(run_N).cumcount().to_numpy()
    rest_N = rest_N - rest_N.mean()
    blocks = np.array([np.resize(rest_N[run_N == run], length_R.max()) for run in np.unique(run_N)])
    wider = stats.t.ppf(QUANTILES[1] / 100, spare) / stats.norm.ppf(QUANTILES[1] / 100)
    wider *= np.sqrt(len(length_R) / spare)
    drawn_BR = np.random.default_rng(0).integers(len(length_R), size=(count, len(length_R)))
    return np.asarray(fitted_N + wider * blocks[drawn_BR[:, run_N], order_N])


def _needed(law: Law) -> dict[str, int]:
    """Return the number of different values that each variable needs."""
    if len(law.terms) == 1:
        return {law.terms[0].variable: law.num_parameters}
    lengths = {"epochs": 2} if "repeats" in law.shape.values() else {}
    return {term.variable: 3 for term in law.terms} | lengths


def _lack(law: Law, sample: Sample) -> str:
    """Return the reason why the points are too few for the law and one degree of freedom; empty if
    they suffice."""
    spare = int(len(law.terms) == 1)
    counts = [
        (sample.num_different(name), NOUNS[name], needed + spare)
        for name, needed in _needed(law).items()
    ]
    counts.append((len(sample.errors_N), "points", law.num_parameters + 1))
    for number, noun, needed in counts:
        if number < needed:
            problem = f"{number} {noun} cannot determine {law.num_parameters} parameters"
            return f"{problem}; {needed} are needed"
    return ""


def error_beyond(law: Law, rest: Sample, largest: Sample) -> float:
    if not len(largest.errors_N) or _lack(law, rest):
        return np.nan
    predicted_N = fit(law, rest.points, rest.errors_N).predict(largest.points)[0]
    return float(np.sqrt(np.mean((predicted_N / largest.errors_N - 1) ** 2)))
