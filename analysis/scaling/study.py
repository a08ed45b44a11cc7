"""All of S1 on the points of one target, as facts, rows and what the pictures need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.scaling import fitting
from analysis.scaling.allocation import Allocation, IsoFlop, by_frontier, by_parabolas
from analysis.scaling.fitting import Array
from analysis.scaling.laws import FEWEST_RUNS, QUANTILES, REPEATS_LAW, SUM_LAW, Advance, Estimate, estimate, forms_of, fullest
from analysis.scaling.samples import Sample

RESAMPLES, QUICK_RESAMPLES = 2000, 200
FITS = 11
"""For progress: three laws in three forms, and two in P and N."""
VARIABLES = {"compute": ("compute", "parameters"), "size": ("parameters", "parameters"), "data": ("images", "images")}
"""The laws in one variable: which, and whose largest value is left out."""
Found = Estimate | str


@dataclass(frozen=True)
class Study:
    sample: Sample
    frontier_N: Array
    laws: Mapping[str, Mapping[str, Found]]
    """compute (of the frontier), size, data: by form; sum (at one number of epochs) and repeats (at all)."""
    used: Mapping[str, Array]
    """1 for the points of each."""
    epochs: float
    """Of the allocation and of the law `sum`."""
    allocation: Allocation | str
    isoflop: IsoFlop | str

    def estimates(self) -> Iterator[tuple[str, Estimate]]:
        for name, forms in self.laws.items():
            yield from ((name, each) for each in forms.values() if isinstance(each, Estimate))

    def fewer_parameters(self) -> Iterator[tuple[str, str]]:
        """Laws of which another form than the drawn one has the least AICc, and which."""
        for name, forms in self.laws.items():
            known = [each for each in forms.values() if isinstance(each, Estimate) and np.isfinite(each.aicc)]
            best = min(known, key=lambda each: each.aicc, default=None)
            if best is not None and best is not fullest(forms):
                yield name, best.form

    def lacking(self) -> dict[str, str]:
        """What the points are too few for, and why."""
        found = {name: each for name, forms in self.laws.items() if isinstance(each := fullest(forms), str)}
        iso = self.isoflop if isinstance(self.isoflop, str) else self.isoflop.allocation
        return found | {name: each for name, each in (("allocation", self.allocation), ("isoFLOP", iso)) if isinstance(each, str)}


def study(sample: Sample, *, epochs: float, resamples: int, advance: Advance = lambda _: None) -> Study:
    ones, weights_BN = np.ones(len(sample.errors_N)), sample.resamples(resamples)
    largest = sample.largest("parameters")
    known = np.isfinite(sample.points["parameters"]) & np.isfinite(sample.points["images"])
    at, epochs = sample.at_epochs(epochs)
    used = {
        "compute": sample.frontier(ones[None])[0],
        "size": sample.largest("images", "epochs") * known * 1.0,
        "data": sample.largest("parameters", "epochs") * known * 1.0,
        "sum": at * known * 1.0,
        "repeats": np.isfinite(sample.points["epochs"]) * known * 1.0,
    }
    laws: dict[str, dict[str, Found]] = {}
    for name, (variable, size) in VARIABLES.items():
        on_frontier = name == "compute"
        each_BN = sample.frontier(weights_BN) if on_frontier else weights_BN * used[name]
        without_N = sample.frontier(ones[None] * ~largest)[0] if on_frontier else None
        more: dict[str, Any] = {"size": size, "without_N": without_N, "advance": advance}
        laws[name] = {form: estimate(form, law, sample, used[name], each_BN, **more) for form, law in forms_of(variable).items()}
    for name, law in (("sum", SUM_LAW), ("repeats", REPEATS_LAW)):
        laws[name] = {"": estimate("", law, sample, used[name], weights_BN * used[name], advance=advance)}
    allocation = by_frontier(sample.of(at), weights_BN[:, at]) if at.any() else "no epochs are known"
    return Study(sample, used["compute"], laws, used, epochs, allocation, by_parabolas(sample, weights_BN))


def rows_of(studies: Sequence[Study]) -> list[dict[str, Any]]:
    """One for each parameter of each law."""
    rows = []
    for each in studies:
        for law, found in each.estimates():
            shares = found.at_bounds
            for name, value in found.values.items():
                low, high = found.intervals.get(name, (None, None))
                place = {"target": each.sample.name, "law": law, "form": found.form, "parameter": name}
                about = {"points": found.num_points, "aicc": found.aicc, "at_bound": shares.get(name, 0.0)}
                about |= {"drawn": fullest(each.laws[law]) is found, "beyond": found.beyond}
                rows.append({**place, "value": value, "low": low, "high": high, **about})
        for way, allocation in allocations(each):
            for name, line in allocation.lines.items():
                low, high = line.facts().get("interval_95", (None, None))
                place = {"target": each.sample.name, "law": way, "form": "", "parameter": f"{name} exponent"}
                counts = {"points": len(allocation.compute), "aicc": None, "at_bound": 0.0, "drawn": True, "beyond": None}
                rows.append({**place, "value": float(line.exponents_B[0]), "low": low, "high": high, **counts})
    return rows


def allocations(each: Study) -> Iterator[tuple[str, Allocation]]:
    if isinstance(each.allocation, Allocation):
        yield "allocation", each.allocation
    if isinstance(each.isoflop, IsoFlop) and isinstance(each.isoflop.allocation, Allocation):
        yield "isoFLOP", each.isoflop.allocation


def facts_of(studies: Sequence[Study], *, resamples: int, num_left_out: int) -> dict[str, Any]:
    return {"checklist": _checklist(resamples, num_left_out), "targets": {each.sample.name: _facts(each) for each in studies}}


def _facts(each: Study) -> dict[str, Any]:
    points, on = each.sample.points, each.frontier_N > 0
    counts = {name: len(np.unique(values[np.isfinite(values)])) for name, values in points.items()}
    laws = {
        name: {form or "law": found.facts() if isinstance(found, Estimate) else found for form, found in forms.items()}
        for name, forms in each.laws.items()
    }
    return {
        "points": len(on),
        "runs": each.sample.num_runs,
        "different": counts,
        "epochs_of_sum_and_allocation": each.epochs,
        "frontier": {"compute": points["compute"][on].tolist(), "error": each.sample.errors_N[on].tolist()},
        "laws": laws,
        **{way: found.facts() for way, found in allocations(each)},
        "too_few_points": each.lacking(),
    }


def _checklist(resamples: int, num_left_out: int) -> dict[str, Any]:
    """How the fits were made, for who wants to make them again."""
    return {
        "laws": {
            "compute, size, data": "E = a (b + x)^-alpha + E_inf in x = C, P, N; also b = 0, and E_inf = 0",
            "sum": "E = E_inf + A P^-alpha + B N^-beta at one number of epochs",
            "repeats": "the same at all, with N_eff = N (1 + R* (1 - e^(-(T-1)/R*))) in the place of N",
        },
        "compute": "C = 3 x multiply-adds of a picture x samples (paper B); FLOP are twice that",
        "parameters": "all, with stem and head of the pretraining",
        "error": "1 - top-1 on the target's test pictures",
        "points": {
            "compute": "the frontier: less error than all points of less compute (its minimum is biased downward by noise)",
            "size": "largest N, of these the largest T",
            "data": "largest P, of these the largest T",
            "left out, without error or compute": num_left_out,
        },
        "loss": "squares of the error (not of its logarithm), all points alike",
        "solver": "variable projection: grid, factors and E_inf by non-negative least squares, Levenberg-Marquardt on the rest",
        "units": "each variable in units of its geometric mean",
        "grids": {name: [float(values[0]), float(values[-1]), len(values)] for name, values in fitting.GRIDS.items()},
        "bounds": fitting.BOUNDS,
        "starts": fitting.STARTS,
        "intervals": {
            "resamples": resamples,
            "unit": "a run, with all its checkpoints",
            "kind": "percentile",
            "percentiles": QUANTILES,
            "seed": 0,
            "fewest_runs": FEWEST_RUNS,
            "left_out": "resamples with fewer different points than parameters",
        },
        "aicc": "n ln(squares / n) + 2 k + 2 k (k + 1) / (n - k - 1); k counts the noise, too",
        "leave-largest-size-out": "root mean square of predicted / seen - 1 at the largest size (data: N), fitted without it",
        "allocation": "least squares of log P and log N on log C over the frontier at one number of epochs",
        "isoFLOP": "each size's own frontier, between its points, at equal compute; a parabola in log P through the five sizes "
        "about the best; a line through the minima",
    }
