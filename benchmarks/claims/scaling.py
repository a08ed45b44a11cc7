import math
import sys

import numpy as np
import pandas as pd
from claims.decisions import conclude, with_ends, with_interval
from frame import markdown

from analysis.scaling.laws import FULL, REPEATS_LAW, error_beyond, estimate, forms_of, interval_of
from analysis.scaling.samples import Sample, samples_of
from analysis.scaling.study import Study, study
from analysis.sweeps.statistics import holm

LOGISTIC_ERRORS = {48_000: 15.76, 24_000: 16.00, 12_000: 16.56, 6_000: 17.26}
"""Test error of logistic regression in percent, by the number of training images."""
LENGTHS = (4, 8, 16, 32)
"""Epochs of the evaluations that the laws use."""
LONGEST = LENGTHS[-1]
EXPONENTS = {
    "compute": ("alpha",),
    "size": ("alpha",),
    "data": ("alpha",),
    "allocation": ("parameters exponent",),
    "repeats": ("alpha", "beta", "R*"),
}
"""Printed parameters of each law."""


def scaling(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/scaling.md."""
    rows = evaluations_of(results)
    sample = sample_of(rows)
    if len(sample.errors_N) != 288:
        sys.exit("scaling: the table needs 72 runs with 4 lengths. Run `make findings`.")
    laws = study(sample, epochs=LONGEST, resamples=2_000)
    beyond = errors_at_largest_size(laws)
    power_law, constant, _ = beyond.values()
    fails = not power_law <= 5 or power_law > constant + 1  # True for NaN; within 1 is equal
    predicts = not fails and power_law < constant - 1
    outcomes, decisions = decide_exponents(laws)
    longest = rows[rows.epochs.round() == LONGEST]
    by_size = 100 * longest.pivot_table("error", "parameters", "images")
    weak = [
        f"{n:,}" for n, error in by_size.iloc[-1].items() if not error < LOGISTIC_ERRORS[int(n)]
    ]
    conclusion = conclude(
        {
            "It is undecided whether a power law in compute predicts the largest size.": not fails
            and not predicts,
            "The error follows a power law in compute, up to 2 M parameters.": predicts,
            "A power law in compute does not predict the largest size.": fails,
            "Dataset size limits these MLPs more than parameters.": outcomes["2"] == "yes",
            "Parameters limit these MLPs more.": outcomes["2"] == "reversed",
            "Neither limits these MLPs more.": outcomes["2"] == "equal",
            "Repeated images lose value.": outcomes["3"] == "yes",
        }
    )
    if weak:
        words = "Not tested: the largest MLP does not beat logistic regression at N ="
        conclusion = f"{words} {', '.join(weak)}."
    table = [
        [f"{size:,}", *(f"{errors[n]:.2f}" for n in LOGISTIC_ERRORS)]
        for size, errors in by_size.iterrows()
    ]
    table.append(["logistic regression", *(f"{error:.2f}" for error in LOGISTIC_ERRORS.values())])
    alphas = [frontier_alpha(sample_of(own)) for _, own in rows.groupby("seed")]
    fits = [*rows_of_fits(laws), ["compute", "alpha, each seed", with_interval(alphas)]]
    header = ("parameters", *(f"N = {n:,}" for n in LOGISTIC_ERRORS))
    printed = [
        [words, "-" if math.isnan(error) else f"{error:.1f} %"] for words, error in beyond.items()
    ]
    return [
        f"Mean test errors after {LONGEST} epochs:",
        "",
        *markdown(header, table),
        "",
        *markdown(("prediction of the frontier at the largest size", "error"), printed),
        "",
        *markdown(("law", "parameter", "value"), fits),
        "",
        *decisions,
        "",
        conclusion,
    ]


def evaluations_of(results: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each length of each run."""
    rows = results.assign(passed=results.test_epochs, error=results.test_errors)
    rows = rows.explode(["passed", "error"], ignore_index=True)
    rows = rows.astype({"passed": float, "error": float})
    rows = rows[rows.passed.round(1).isin(LENGTHS)]  # evaluations follow a complete step
    part = rows.passed / rows.epochs
    parts = {name: rows[name] * part for name in ("epochs", "samples", "compute")}
    # one law for all sizes, although each size has its own learning rate
    one_law = {"target": "fashion-mnist", "lr": 0.0, "family": ""}
    return rows.assign(**parts, **one_law)


def sample_of(rows: pd.DataFrame) -> Sample:
    (sample,), _ = samples_of(rows)
    return sample


def errors_at_largest_size(laws: Study) -> dict[str, float]:
    """Return the relative errors, in percent, of predictions that use the smaller sizes only."""
    sample, compute = laws.sample, laws.drawn["compute"]
    is_largest = sample.largest("parameters")
    target, smaller = sample.of(sample.frontier() & is_largest), sample.of(~is_largest)
    ratios_N = smaller.errors_N.min() / target.errors_N
    constant = np.sqrt(np.mean((ratios_N - 1) ** 2)) if len(ratios_N) else math.nan
    return {
        "power law in compute": math.nan if isinstance(compute, str) else 100 * compute.beyond,
        "least error of the smaller sizes": 100 * float(constant),
        "data-constrained law": 100 * error_beyond(REPEATS_LAW, smaller, target),
    }


def decide_exponents(laws: Study) -> tuple[dict[str, str], list[str]]:
    """Return the outcomes of rules 2 and 3, and their table."""
    repeats = laws.drawn["repeats"]
    if isinstance(repeats, str):
        return {"2": "not tested", "3": "not tested"}, [f"Rules 2 and 3 are not tested: {repeats}."]
    alpha, beta, scale = (repeats.parameters[name] for name in ("alpha", "beta", "R*"))
    difference = alpha - beta
    worth = (1 + scale * (1 - np.exp(-(LONGEST - 1) / scale))) / LONGEST
    p = holm(pd.Series([np.mean(difference[1:] <= 0), np.mean(worth[1:] >= 0.9)]))
    low, high = interval_of(difference)
    second, third = ("yes" if each < 0.05 else "undecided" for each in p)
    if second != "yes":
        is_equal = low > -0.1 and high < 0.1
        second = "equal" if is_equal else "reversed" if high < 0 else second
    words = ("alpha_P minus alpha_N is above 0", f"N_eff / (N T) at {LONGEST} epochs is below 0.9")
    rows = [
        [rule, claim, with_ends(values[0], *ends), f"{each:.2g}", outcome]
        for rule, claim, values, ends, each, outcome in (
            ("2", words[0], difference, (low, high), p[0], second),
            ("3", words[1], worth, interval_of(worth), p[1], third),
        )
    ]
    table = markdown(("rule", "prediction", "value", "p", "holds"), rows)
    return {"2": second, "3": third}, table


def frontier_alpha(sample: Sample) -> float:
    law = estimate(forms_of("compute")[FULL], sample, sample.frontier())
    return math.nan if isinstance(law, str) else float(law.parameters["alpha"][0])


def rows_of_fits(laws: Study) -> list[list[str]]:
    rows = []
    for law, names in EXPONENTS.items():
        if isinstance(found := laws.drawn[law], str):
            rows.append([law, "-", found])
            continue
        for name in names:
            values = found.parameters[name]
            low, high = interval_of(values)
            without = f"{values[0]:.2f}"
            rows.append(
                [law, name, without if math.isnan(low) else with_ends(values[0], low, high)]
            )
    return rows
