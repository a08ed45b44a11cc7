"""All laws fitted to the points of one target, as rows, facts and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.output import Result
from analysis.scaling import fitting
from analysis.scaling.allocation import (
    FEWEST_SIZES,
    NUM_NEAR,
    Allocation,
    IsoFlop,
    by_frontier,
    by_parabolas,
)
from analysis.scaling.laws import QUANTILES, REPEATS_LAW, SUM_LAW, Estimate, estimate, forms_of
from analysis.scaling.samples import HELD, SAME_T, Sample, samples_of
from data_prep.progress import ProgressLine
from finetune.looks import looks

RESAMPLES, QUICK_RESAMPLES = 2000, 200
VARIABLES = {
    "compute": ("compute", "parameters"),
    "size": ("parameters", "parameters"),
    "data": ("images", "images"),
}
"""The variable of each law, and the variable whose largest value `beyond` predicts."""


@dataclass(frozen=True)
class Study:
    sample: Sample
    drawn: Mapping[str, Estimate | str]
    """For each law, the fitted form with the most parameters, or the reason why no form could be
    fitted. Laws: compute (frontier), size, data, sum and allocation (one number of epochs), repeats
    and isoFLOP (all epochs)."""
    rows: pd.DataFrame
    """One row for each parameter of each form of each law."""
    used: Mapping[str, NDArray[np.bool_]]
    """Mask of the points that each law uses."""
    epochs: float
    """Number of epochs T of the allocation and of the law `sum`."""
    isoflop: IsoFlop | str


def study(sample: Sample, *, epochs: float, resamples: int) -> Study:
    known = np.isfinite(sample.points["parameters"] * sample.points["images"])
    at, epochs = sample.at_epochs(epochs)
    used = {
        "compute": sample.frontier(),
        "size": sample.largest("images", "epochs") & known,
        "data": sample.largest("parameters", "epochs") & known,
        "sum": at & known,
        "repeats": np.isfinite(sample.points["epochs"]) & known,
    }
    laws = dict[str, dict[str, Estimate | str]]()
    with ProgressLine(f"laws of {sample.name}", total=len(used), unit="laws") as line:
        for law, counted_N in used.items():
            variable, size = VARIABLES.get(law, ("", "parameters"))
            forms = {"": SUM_LAW if law == "sum" else REPEATS_LAW}
            options: dict[str, Any] = {"size": size, "resamples": resamples}
            if law == "compute":
                smaller_N = sample.frontier(~sample.largest("parameters"))
                options |= {"resamples": 0, "without_N": smaller_N}
            laws[law] = {
                form: estimate(each, sample, counted_N, **options)
                for form, each in (forms_of(variable) if variable else forms).items()
            }
            line.advance(1)
    isoflop = by_parabolas(sample)
    laws["allocation"] = {"": by_frontier(sample.of(at)) if at.any() else "no epochs are known"}
    laws["isoFLOP"] = {"": isoflop if isinstance(isoflop, str) else isoflop.allocation}
    drawn, rows = dict[str, Estimate | str](), list[dict[str, Any]]()
    for law, found in laws.items():
        fixed = {form: each for form, each in found.items() if not isinstance(each, str)}
        # b = 0, the second form, needs the fewest points, so its reason is the clearest
        drawn[law] = next(iter(fixed.values()), [*found.values()][len(found) // 2])
        for form, each in fixed.items():
            place = {"target": sample.name, "law": law, "form": form, "drawn": each is drawn[law]}
            rows += [place | row for row in each.rows()]
    return Study(sample, drawn, pd.DataFrame(rows), used, epochs, isoflop)


def scaling(
    results: pd.DataFrame, targets: Sequence[str] = (), *, epochs: float = 50.0, quick: bool = False
) -> Result:
    samples, num_left_out = samples_of(results, targets)
    from analysis.scaling.figures import draw

    resamples = QUICK_RESAMPLES if quick else RESAMPLES
    studies = [study(each, epochs=epochs, resamples=resamples) for each in samples]
    rows = pd.concat([each.rows for each in studies], ignore_index=True)
    printed, facts = list[str | pd.DataFrame](), dict[str, Any]()
    if len(rows):
        shown = rows[rows.drawn & ~rows.parameter.isin(["a", "A", "B", "b"])]
        printed.append(shown.drop(columns=["drawn", "aicc"]))
    for each in studies:
        name, disproportion = each.sample.name, each.sample.disproportion
        lacking = {law: reason for law, reason in each.drawn.items() if isinstance(reason, str)}
        if abs(each.epochs / epochs - 1) > SAME_T:
            words = f"no results at T = {epochs:g} epochs; `sum` and `allocation` use T"
            printed.append(f"{name}: {words} = {each.epochs:.3g}")
        forms = each.rows[each.rows.aicc.notna()] if len(each.rows) else each.rows
        for law, own in forms.groupby("law") if len(forms) else ():
            best = own.loc[own.aicc.idxmin()]
            if not best.drawn:
                printed.append(f"{name}: {law}: {best.form} has lower AICc than the drawn form")
        printed += [f"{name}: {law}: {reason}" for law, reason in lacking.items()]
        if isinstance(each.drawn["sum"], Estimate):
            words = "P* and N* exponents assume that compute is proportional to P N T"
            if disproportion:
                words = f"no P* and N* exponents, because {disproportion}"
            printed.append(f"{name}: sum: {words}")
        facts[name] = {
            "points": len(each.sample.errors_N),
            "runs": each.sample.num_runs,
            "epochs_of_sum_and_allocation": each.epochs,
            "too_few_points": lacking,
            "why_no_exponents_of_sum": disproportion,
            **points_of(each),
        }
    if num_left_out:
        printed.append(f"{num_left_out:,} results without an error or a compute are skipped")
    number = {"skipped, without error or compute": num_left_out, "resamples": resamples}
    with looks(*facts):
        figures = draw(studies)
    return Result(rows, {"checklist": CHECKLIST | number, "targets": facts}, figures, (), printed)


def points_of(study: Study) -> dict[str, Any]:
    """Return the points of the frontier, and the best parameters and images at each compute."""
    sample, is_on = study.sample, study.used["compute"]
    points = {name: values[is_on].tolist() for name, values in sample.points.items()}
    found: dict[str, Any] = {"frontier": points | {"error": sample.errors_N[is_on].tolist()}}
    for law in ("allocation", "isoFLOP"):
        if isinstance(each := study.drawn[law], Allocation):
            best = {name: values.tolist() for name, values in each.best.items()}
            found[law] = {"compute": each.compute_K.tolist(), **best}
    return found


CHECKLIST: dict[str, Any] = {
    "laws": {
        "compute, size, data": (
            "E = a (b + x)^-alpha + E_inf in x = C, P, N; also b = 0, and E_inf = 0"
        ),
        "sum": (
            "E = E_inf + A P^-alpha + B N^-beta at one number of epochs;"
            " P* ~ C^(beta/(alpha+beta)) if C is proportional to P N T"
        ),
        "repeats": "sum at all epochs, with N_eff = N (1 + R* (1 - e^(-(T-1)/R*))) instead of N",
    },
    "compute": "C = 3 x MACs of an image x samples (Scaling MLPs); a MAC is two FLOP",
    "parameters": "all, including stem and head of the pretrained model",
    "error": "1 - top-1 on the target's test images",
    "points": {
        "compute": "the frontier: less error than all points of less compute",
        "size": "largest N, of these the largest T",
        "data": "largest P, of these the largest T",
    },
    "loss": "squares of the error (not of its logarithm), with equal weights",
    "solver": (
        "variable projection: grid, factors and E_inf by non-negative least squares,"
        " Levenberg-Marquardt on the rest"
    ),
    "units": "geometric mean of each variable",
    "grids": {
        name: [float(values[0]), float(values[-1]), len(values)]
        for name, values in fitting.GRIDS.items()
    },
    "bounds": fitting.BOUNDS,
    "starts": (
        "the best grid point for each value of each shape parameter; resamples: the best of these"
    ),
    "groups": f"one law for each target, task and {', '.join(HELD)}",
    "intervals": (
        f"size, data, sum, repeats: percentiles {QUANTILES} of fits to resampled errors. Errors get"
        " residuals of random runs (seed 0), times sqrt(runs / (runs - parameters)) t / 1.96. This"
        " assumes runs of equal noise. Frontier, allocation and isoFLOP: none, because the least"
        " error of noisy points is biased"
    ),
    "aicc": (
        "runs ln(mean square) + 2 k + 2 k (k + 1) / (runs - k - 1); k includes the noise variance"
    ),
    "beyond": (
        "root mean square of predicted / measured - 1 at the largest size (data: N), from a fit"
        " without this size"
    ),
    "allocation": "least squares of log P and log N on log C over the frontier at one T",
    "isoFLOP": (
        "log error of each size's own frontier, interpolated at equal compute; a parabola in log P"
        f" through the {NUM_NEAR} sizes around the best ({FEWEST_SIZES} or more); a line through"
        " the minima"
    ),
}
"""Description of the fits, for NAME.json."""
