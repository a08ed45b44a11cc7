"""The laws of S1, each with its intervals: fitted to all points and to resamples of the runs, and to the points without the largest
size, whose errors it then has to predict. Where points are too few the answer is a sentence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array, Fit, Law, Points, Term, fit, fit_resamples
from analysis.scaling.samples import Sample

QUANTILES = (2.5, 97.5)
FEWEST_RUNS = 4
"""Of fewer there is no law: their resamples are too much alike to say how good it is."""
FULL = "full"
SUM, REPEATS = "E_inf + A P^-alpha + B N^-beta", "E_inf + A P^-alpha + B N_eff^-beta"


def forms_of(variable: str) -> dict[str, Law]:
    """a (b + x)^-alpha + E_inf, and without b, without E_inf."""
    whole, bare = Term(variable, "a", "alpha", "offset", "b"), Term(variable, "a", "alpha")
    return {FULL: Law((whole,)), "b = 0": Law((bare,)), "E_inf = 0": Law((whole,), floor=False)}


_SIZE = Term("parameters", "A", "alpha")
SUM_LAW = Law((_SIZE, Term("images", "B", "beta")))
REPEATS_LAW = Law((_SIZE, Term("images", "B", "beta", "repeats", "R*")))
_IN_WORDS = {"compute": "amounts of compute", "parameters": "sizes of model", "images": "numbers of pictures", "epochs": "lengths"}
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Estimate:
    """One law on some points of one target."""

    form: str
    fit: Fit
    resampled: Fit | None
    """Without intervals where the runs are too few."""
    num_points: int
    num_left_out: int
    """Resamples that have too few different values to fix the law."""
    aicc: float
    """n ln(squares / n) + 2 k + 2 k (k + 1) / (n - k - 1), k with the noise; NaN where n is too small."""
    beyond: float
    """Leave-largest-size-out: root mean square of predicted / seen - 1 there; NaN where the rest is too little."""

    @property
    def values(self) -> dict[str, float]:
        return {name: float(value[0]) for name, value in _with_exponents(self.fit).items()}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        return {} if self.resampled is None else {name: interval(each) for name, each in _with_exponents(self.resampled).items()}

    @property
    def at_bounds(self) -> dict[str, float]:
        """Parameters that are at an end of what they may be (1), or are so in this share of the resamples."""
        shares = {} if self.resampled is None else self.resampled.at_bounds
        found = {name: float(max(hit[0], np.mean(shares.get(name, hit)))) for name, hit in self.fit.at_bounds.items()}
        return {name: share for name, share in found.items() if share > 0}

    def band(self, points: Points) -> Array:
        """Low and high at these points."""
        assert self.resampled is not None
        return np.percentile(self.resampled.predict(points), QUANTILES, axis=0)

    def facts(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "points": self.num_points,
            "parameters": self.values,
            "intervals_95": self.intervals,
            "resamples": 0 if self.resampled is None else len(self.resampled.squares_B),
            "resamples_left_out": self.num_left_out,
            "root_mean_square_residual": float(np.sqrt(self.fit.squares_B[0] / self.num_points)),
            "aicc": self.aicc,
            "largest_size_left_out_relative_error": self.beyond,
            "at_bounds": self.at_bounds,
        }


def interval(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, QUANTILES)
    return float(low), float(high)


def _with_exponents(found: Fit) -> Mapping[str, Array]:
    """Of a law in P and N also how both best grow with compute."""
    parameters = found.parameters
    if "beta" not in parameters:
        return parameters
    both = parameters["alpha"] + parameters["beta"]
    return parameters | {"P* exponent": parameters["beta"] / both, "N* exponent": parameters["alpha"] / both}


def estimate(
    form: str,
    law: Law,
    sample: Sample,
    weights_N: Array,
    weights_BN: Array,
    *,
    size: str = "parameters",
    without_N: Array | None = None,
    advance: Advance = lambda _: None,
) -> Estimate | str:
    """`weights_N` is 1 for each point of the whole sample that counts, `weights_BN` how often each resample has it. `without_N`
    are those that count without the largest `size` (these points less that, if nothing is given), which predict its errors."""
    held = weights_N > 0
    if lack := _lack(law, sample.points, held):
        return lack
    if (num_runs := len(np.unique(sample.runs_N[held]))) < FEWEST_RUNS:
        return f"{num_runs} runs are too few for a law; {FEWEST_RUNS} are needed"
    points, errors_N = _of(sample.points, held), sample.errors_N[held]
    found, resampled = fit(law, points, errors_N), None
    usable = _fixes(law, sample.points, weights_BN)
    if usable.sum() >= len(usable) / 10:
        resampled = fit_resamples(law, sample.points, sample.errors_N, weights_BN[usable], advance=advance)
    n, k = len(errors_N), law.num_parameters + 1
    spread = np.log(max(found.squares_B[0], 1e-300) / n)
    aicc = n * spread + 2 * k + 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else np.nan
    largest = sample.largest(size)
    rest = (weights_N if without_N is None else without_N) * ~largest > 0
    beyond = _error_beyond(law, sample, rest=rest, largest=held & largest)
    return Estimate(form, found, resampled, n, int((~usable).sum()), float(aicc), beyond)


def fullest(forms: Mapping[str, Estimate | str]) -> Estimate | str:
    """What is drawn: paper B's form where the points can fix it. If none can be fitted, why b = 0, which needs least, cannot."""
    return next((each for each in forms.values() if isinstance(each, Estimate)), list(forms.values())[len(forms) // 2])


def _of(points: Points, held: NDArray[np.bool_]) -> dict[str, Array]:
    return {name: values[held] for name, values in points.items()}


def _needed(law: Law) -> dict[str, int]:
    """Different values of each variable: a power with a floor goes through any two of them."""
    if len(law.terms) == 1:
        return {law.terms[0].variable: law.num_parameters}
    return {term.variable: 3 for term in law.terms} | ({"epochs": 2} if "repeats" in law.shape.values() else {})


def _lack(law: Law, points: Points, held: NDArray[np.bool_]) -> str:
    """Why these points cannot fix the law with one to spare, or nothing."""
    one = len(law.terms) == 1
    for name, needed in _needed(law).items():
        values = points[name][held]
        number = len(np.unique(values[np.isfinite(values)]))
        if number < needed + one:
            return f"{number} {_IN_WORDS[name]} cannot fix {law.num_parameters} parameters; {needed + one} are needed"
    if held.sum() <= law.num_parameters:
        return f"{held.sum()} points cannot fix {law.num_parameters} parameters; {law.num_parameters + 1} are needed"
    return ""


def _fixes(law: Law, points: Points, weights_BN: Array) -> NDArray[np.bool_]:
    """Which resamples have as many different points as the law has parameters."""
    usable = (weights_BN > 0).sum(axis=1) >= law.num_parameters
    for name, needed in _needed(law).items():
        _, which = np.unique(points[name], return_inverse=True)
        usable &= (weights_BN @ np.eye(which.max() + 1)[which] > 0).sum(axis=1) >= needed
    return np.asarray(usable)


def _error_beyond(law: Law, sample: Sample, *, rest: NDArray[np.bool_], largest: NDArray[np.bool_]) -> float:
    largest = largest & (sample.errors_N > 0)
    if not largest.any() or _lack(law, sample.points, rest):
        return float("nan")
    predicted_N = fit(law, _of(sample.points, rest), sample.errors_N[rest]).predict(_of(sample.points, largest))[0]
    return float(np.sqrt(np.mean((predicted_N / sample.errors_N[largest] - 1) ** 2)))
