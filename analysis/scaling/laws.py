"""The laws of S1, each with its intervals: fitted to all points and to resamples of the runs, and
to the points without the largest size, whose errors it then has to predict. Where points are too
few the answer is a sentence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array, Fit, Law, Points, Term, fit
from analysis.scaling.samples import FEWEST_RUNS, Sample

QUANTILES = (2.5, 97.5)
FEWEST_USABLE = 0.1
"""Of the resamples: of fewer that can fix a law there are no intervals."""
FULL = "full"


def forms_of(variable: str) -> dict[str, Law]:
    """a (b + x)^-alpha + E_inf, and without b, without E_inf."""
    whole, bare = Term(variable, "a", "alpha", "offset", "b"), Term(variable, "a", "alpha")
    return {FULL: Law((whole,)), "b = 0": Law((bare,)), "E_inf = 0": Law((whole,), floor=False)}


_SIZE = Term("parameters", "A", "alpha")
SUM_LAW = Law((_SIZE, Term("images", "B", "beta")))
REPEATS_LAW = Law((_SIZE, Term("images", "B", "beta", "repeats", "R*")))
_IN_WORDS = {
    "compute": "amounts of compute",
    "parameters": "sizes of model",
    "images": "numbers of pictures",
    "epochs": "lengths",
}
Advance = Callable[[int], None]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Estimate:
    """One law on some points of one target."""

    fit: Fit
    """The first is of the points, the others of the resamples that can fix the law."""
    facts: Mapping[str, Any]


def numbers_of(parameters: Mapping[str, Array]) -> dict[str, Any]:
    """Of the points, which come first, and of the resamples, which follow."""
    first = {name: float(values_B[0]) for name, values_B in parameters.items()}
    num_resamples = min(len(values_B) for values_B in parameters.values()) - 1
    rest = {
        name: np.percentile(values_B[1:], QUANTILES).tolist()
        for name, values_B in parameters.items()
        if num_resamples
    }
    return {"parameters": first, "intervals_95": rest, "resamples": num_resamples}


def band_of(values_BN: Array) -> tuple[Array, Array, Array]:
    """Low, of the points, high."""
    low, high = np.percentile(values_BN[1:] if len(values_BN) > 1 else values_BN, QUANTILES, axis=0)
    return low, values_BN[0], high


def _with_exponents(found: Fit) -> Mapping[str, Array]:
    """Of a law in P and N also how both best grow with compute."""
    parameters = found.parameters
    if "beta" not in parameters:
        return parameters
    both = parameters["alpha"] + parameters["beta"]
    return parameters | {
        "P* exponent": parameters["beta"] / both,
        "N* exponent": parameters["alpha"] / both,
    }


def estimate(
    law: Law,
    sample: Sample,
    weights_BN: Array,
    *,
    size: str = "parameters",
    without_N: Array | None = None,
    advance: Advance = lambda _: None,
) -> Estimate | str:
    """`weights_BN`: how often each resample has each point, first 1 for those that count.
    `without_N` are those that count without the largest `size` (these points less that, if nothing
    is given), which predict its errors: `largest_size_left_out` is the root mean square of
    predicted / seen - 1. `at_bounds`: parameters that are at an end of what they may be (1), or are
    so in this share of the resamples. `aicc`: k counts the noise, too. NaN is what points are too
    few for."""
    held = sample.of(weights_BN[0] > 0)
    if lack := _lack(law, held):
        return lack
    if held.num_runs < FEWEST_RUNS:
        return f"{held.num_runs} runs are too few for a law; {FEWEST_RUNS} are needed"
    usable = _fixes(law, sample.points, weights_BN)
    chosen = (
        weights_BN[usable] if usable[1:].sum() >= FEWEST_USABLE * len(usable) else weights_BN[:1]
    )
    found = fit(law, sample.points, sample.errors_N, chosen, advance=advance)
    n, k, squares = len(held.errors_N), law.num_parameters + 1, found.squares_B[0]
    largest = sample.largest(size)
    rest = sample.of((weights_BN[0] if without_N is None else without_N) * ~largest > 0)
    at_bounds = {
        name: max(float(hits[0]), float(hits[1:].mean() if len(hits) > 1 else 0))
        for name, hits in found.at_bounds.items()
    }
    facts = {
        "points": n,
        **numbers_of(_with_exponents(found)),
        "resamples_left_out": int((~usable).sum()),
        "root_mean_square_residual": float(np.sqrt(squares / n)),
        "aicc": (
            float(n * np.log(max(squares, 1e-300) / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1))
            if n > k + 1
            else np.nan
        ),
        "largest_size_left_out": _error_beyond(
            law, rest, sample.of((weights_BN[0] > 0) & largest & (sample.errors_N > 0))
        ),
        "at_bounds": {name: share for name, share in at_bounds.items() if share > 0},
    }
    return Estimate(found, facts)


def fullest(forms: Mapping[str, Found | str]) -> Found | str:
    """What is drawn: paper B's form where the points can fix it. If none can be fitted, why b = 0,
    which needs least, cannot."""
    return next(
        (each for each in forms.values() if not isinstance(each, str)),
        list(forms.values())[len(forms) // 2],
    )


def _needed(law: Law) -> dict[str, int]:
    """Different values of each variable: a power with a floor goes through any two of them."""
    if len(law.terms) == 1:
        return {law.terms[0].variable: law.num_parameters}
    return {term.variable: 3 for term in law.terms} | (
        {"epochs": 2} if "repeats" in law.shape.values() else {}
    )


def _lack(law: Law, sample: Sample) -> str:
    """Why its points cannot fix the law with one to spare, or nothing."""
    spare = int(len(law.terms) == 1)
    counts = [
        (sample.num_different(name), _IN_WORDS[name], needed + spare)
        for name, needed in _needed(law).items()
    ]
    for number, what, needed in [*counts, (len(sample.errors_N), "points", law.num_parameters + 1)]:
        if number < needed:
            return (
                f"{number} {what} cannot fix {law.num_parameters} parameters; {needed} are needed"
            )
    return ""


def _fixes(law: Law, points: Points, weights_BN: Array) -> NDArray[np.bool_]:
    """Which resamples have as many different points as the law has parameters."""
    usable = (weights_BN > 0).sum(axis=1) >= law.num_parameters
    for name, needed in _needed(law).items():
        _, which = np.unique(points[name], return_inverse=True)
        usable &= (weights_BN @ np.eye(which.max() + 1)[which] > 0).sum(axis=1) >= needed
    return np.asarray(usable)


def _error_beyond(law: Law, rest: Sample, largest: Sample) -> float:
    if not len(largest.errors_N) or _lack(law, rest):
        return float("nan")
    predicted_N = fit(law, rest.points, rest.errors_N).predict(largest.points)[0]
    return float(np.sqrt(np.mean((predicted_N / largest.errors_N - 1) ** 2)))
