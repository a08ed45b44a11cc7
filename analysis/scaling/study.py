"""All of S1 on the points of one target, as facts, rows and what the pictures need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.table import Table

from analysis.output import Result, table_of
from analysis.scaling import fitting
from analysis.scaling.allocation import Allocation, IsoFlop, by_frontier, by_parabolas
from analysis.scaling.fitting import Array
from analysis.scaling.laws import (
    FULL,
    QUANTILES,
    REPEATS_LAW,
    SUM_LAW,
    Advance,
    Estimate,
    estimate,
    forms_of,
    fullest,
)
from analysis.scaling.samples import FEWEST_RUNS, SAME_T, Sample, samples_of
from data_prep.progress import progress
from finetune.looks import looks

if TYPE_CHECKING:
    from rich.console import RenderableType

RESAMPLES, QUICK_RESAMPLES = 2000, 200
FITS = 11
"""For progress: three laws in three forms, and two in P and N."""
VARIABLES = {
    "compute": ("compute", "parameters"),
    "size": ("parameters", "parameters"),
    "data": ("images", "images"),
}
"""The laws in one variable: which, and whose largest value is left out."""


@dataclass(frozen=True)
class Study:
    sample: Sample
    laws: Mapping[str, Mapping[str, Estimate | Allocation | str]]
    """compute (of the frontier), size, data: by form; sum, allocation (at one number of epochs),
    repeats and isoFLOP (at all)."""
    used: Mapping[str, Array]
    """1 for the points of each law in P, N and C."""
    epochs: float
    """Of the allocation and of the law `sum`."""
    isoflop: IsoFlop | str

    def found(self) -> Iterator[tuple[str, str, Estimate | Allocation]]:
        """Each law, each form."""
        for law, forms in self.laws.items():
            yield from (
                (law, form, each) for form, each in forms.items() if not isinstance(each, str)
            )

    def drawn(self, law: str) -> Estimate | Allocation | str:
        return fullest(self.laws[law])

    def simpler(self) -> Iterator[tuple[str, str]]:
        """Laws of which another form than the drawn one has the least AICc, and which."""
        for law in self.laws:
            known = {
                form: each.facts.get("aicc", np.nan)
                for name, form, each in self.found()
                if name == law
            }
            known = {form: aicc for form, aicc in known.items() if np.isfinite(aicc)}
            best = min(known, key=known.__getitem__, default=None)
            if best is not None and self.laws[law][best] is not self.drawn(law):
                yield law, best

    def lacking(self) -> dict[str, str]:
        """What the points are too few for, and why."""
        return {law: each for law in self.laws if isinstance(each := self.drawn(law), str)}

    def facts(self) -> dict[str, Any]:
        points, on = self.sample.points, self.used["compute"] > 0
        return {
            "points": len(on),
            "runs": self.sample.num_runs,
            "different": {name: self.sample.num_different(name) for name in points},
            "epochs_of_sum_and_allocation": self.epochs,
            "frontier": {
                "compute": points["compute"][on].tolist(),
                "error": self.sample.errors_N[on].tolist(),
            },
            "laws": {
                law: {
                    form or "law": each if isinstance(each, str) else each.facts
                    for form, each in forms.items()
                }
                for law, forms in self.laws.items()
            },
            "too_few_points": self.lacking(),
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each parameter of each law."""
        for law, form, each in self.found():
            facts = each.facts
            for name, value in facts["parameters"].items():
                low, high = facts["intervals_95"].get(name, (None, None))
                place = {"target": self.sample.name, "law": law, "form": form, "parameter": name}
                about = {
                    "points": facts["points"],
                    "aicc": facts.get("aicc"),
                    "drawn": each is self.drawn(law),
                }
                about |= {
                    "at_bound": facts.get("at_bounds", {}).get(name, 0.0),
                    "beyond": facts.get("largest_size_left_out"),
                }
                yield {**place, "value": value, "low": low, "high": high, **about}


def study(
    sample: Sample, *, epochs: float, resamples: int, advance: Advance = lambda _: None
) -> Study:
    weights_BN = sample.resamples(resamples)
    known = np.isfinite(sample.points["parameters"] * sample.points["images"])
    at, epochs = sample.at_epochs(epochs)
    used = {
        "compute": sample.frontier(weights_BN),
        "size": weights_BN * sample.largest("images", "epochs") * known,
        "data": weights_BN * sample.largest("parameters", "epochs") * known,
        "sum": weights_BN * at * known,
        "repeats": weights_BN * np.isfinite(sample.points["epochs"]) * known,
    }
    without_N = sample.frontier(weights_BN[:1] * ~sample.largest("parameters"))[0]
    laws: dict[str, dict[str, Estimate | Allocation | str]] = {}
    for law, (variable, size) in VARIABLES.items():
        more: dict[str, Any] = {
            "size": size,
            "without_N": without_N if law == "compute" else None,
            "advance": advance,
        }
        laws[law] = {
            form: estimate(each, sample, used[law], **more)
            for form, each in forms_of(variable).items()
        }
    for law, each in (("sum", SUM_LAW), ("repeats", REPEATS_LAW)):
        laws[law] = {"": estimate(each, sample, used[law], advance=advance)}
    isoflop = by_parabolas(sample, weights_BN)
    laws["allocation"] = {
        "": by_frontier(sample.of(at), weights_BN[:, at]) if at.any() else "no epochs are known"
    }
    laws["isoFLOP"] = {"": isoflop if isinstance(isoflop, str) else isoflop.allocation}
    return Study(sample, laws, {law: each[0] for law, each in used.items()}, epochs, isoflop)


def scaling(
    results: pd.DataFrame, targets: Sequence[str] = (), *, epochs: float = 50.0, quick: bool = False
) -> Result:
    samples, num_left_out = samples_of(results, targets)
    from analysis.scaling.figures import draw

    resamples = QUICK_RESAMPLES if quick else RESAMPLES
    with progress("resamples", total=FITS * (resamples + 1) * len(samples), unit="fits") as line:
        studies = [
            study(each, epochs=epochs, resamples=resamples, advance=line.advance)
            for each in samples
        ]
        line.advance(line.total - line.done)  # fits that have too few points
    rows = pd.DataFrame([row for each in studies for row in each.rows()])
    printed: list[RenderableType] = [_table(rows)] if len(rows) else []
    for each in studies:
        name = each.sample.name
        if abs(each.epochs / epochs - 1) > SAME_T:
            printed.append(
                f"{name}: no results at T = {epochs:g}; sum and allocation are for T ="
                f" {each.epochs:.3g}"
            )
        printed += [f"{name}: {law}: {form} has the lower AICc" for law, form in each.simpler()]
        printed += [f"{name}: {law}: {why}" for law, why in each.lacking().items()]
    if num_left_out:
        printed.append(f"{num_left_out:,} results without an error or a compute are left out")
    number = {"left out, without error or compute": num_left_out, "resamples": resamples}
    facts = {
        "checklist": {**CHECKLIST, **number},
        "targets": {each.sample.name: each.facts() for each in studies},
    }
    with looks(*(each.name for each in samples)):
        return Result(rows, facts, draw(studies), printed=printed)


def _table(rows: pd.DataFrame) -> Table:
    """Return the drawn form of each law, without its factors and offset."""
    table = []
    for row in rows[rows.drawn & ~rows.parameter.isin(["a", "A", "B", "b"])].itertuples():
        interval = "no interval" if pd.isna(row.low) else f"{row.low:.3g} to {row.high:.3g}"
        share = row.at_bound
        bound = "at its bound" if share == 1 else f"{share:.0%} at a bound" if share > 0.02 else ""
        table.append(
            [
                row.target,
                row.law if row.form in ("", FULL) else f"{row.law}, {row.form}",
                row.parameter,
                f"{row.value:.4g}",
                interval,
                str(row.points),
                "" if pd.isna(row.beyond) else f"off by {row.beyond:.1%}",
                bound,
            ]
        )
    columns = ("target", "law", "parameter", "value", "95 % interval", "points")
    return table_of((*columns, "largest left out", ""), table, num_words=3)


CHECKLIST: dict[str, Any] = {
    "laws": {
        "compute, size, data": (
            "E = a (b + x)^-alpha + E_inf in x = C, P, N; also b = 0, and E_inf = 0"
        ),
        "sum": "E = E_inf + A P^-alpha + B N^-beta at one number of epochs",
        "repeats": "the same at all, with N_eff = N (1 + R* (1 - e^(-(T-1)/R*))) in the place of N",
    },
    "compute": "C = 3 x multiply-adds of a picture x samples (paper B); FLOP are twice that",
    "parameters": "all, with stem and head of the pretraining",
    "error": "1 - top-1 on the target's test pictures",
    "points": {
        "compute": (
            "the frontier: less error than all points of less compute (its minimum is biased"
            " downward by noise)"
        ),
        "size": "largest N, of these the largest T",
        "data": "largest P, of these the largest T",
    },
    "loss": "squares of the error (not of its logarithm), all points alike",
    "solver": (
        "variable projection: grid, factors and E_inf by non-negative least squares,"
        " Levenberg-Marquardt on the rest"
    ),
    "units": "each variable in units of its geometric mean",
    "grids": {
        name: [float(values[0]), float(values[-1]), len(values)]
        for name, values in fitting.GRIDS.items()
    },
    "bounds": fitting.BOUNDS,
    "starts": (
        "of each value of each shape parameter the grid's best place; the best of these for each"
        " resample"
    ),
    "intervals": (
        f"percentiles {QUANTILES} of resamples (seed 0) of runs, with all their checkpoints, of"
        f" {FEWEST_RUNS} or more; those with fewer different points than parameters are left out"
    ),
    "aicc": "n ln(squares / n) + 2 k + 2 k (k + 1) / (n - k - 1); k counts the noise, too",
    "leave-largest-size-out": (
        "root mean square of predicted / seen - 1 at the largest size (data: N), fitted without it"
    ),
    "allocation": (
        "least squares of log P and log N on log C over the frontier at one number of epochs"
    ),
    "isoFLOP": (
        "each size's own frontier, between its points, at equal compute; a parabola in log P"
        " through the five sizes about the best; a line through the minima"
    ),
}
"""How the fits were made, for who wants to make them again."""
