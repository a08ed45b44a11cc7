"""The points of one target, their frontier, and resamples of their runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.results import read_results
from analysis.scaling.fitting import Array, Points
from data_prep.errors import UserError

COLUMNS = ("compute", "parameters", "images", "epochs", "samples")
FEWEST_RUNS = 4
"""Fewer runs fix no law: their resamples are too similar for an interval."""
SAME_T = 0.01
"""Relative difference of equal numbers of epochs: a run ends with a complete batch."""


@dataclass(frozen=True)
class Sample:
    """Points in the order of their compute. Unknown values are NaN."""

    name: str
    points: Points
    errors_N: Array
    runs_N: NDArray[np.int64]
    """The pretraining of each point: its checkpoints are resampled together."""

    @property
    def num_runs(self) -> int:
        return len(np.unique(self.runs_N))

    def num_different(self, name: str) -> int:
        values = self.points[name]
        return len(np.unique(values[np.isfinite(values)]))

    def resamples(self, count: int, *, seed: int = 0) -> Array:
        """Return how often each resample has each point: the first one has each once. Too few runs
        have no other resamples."""
        count *= self.num_runs >= FEWEST_RUNS
        drawn = np.random.default_rng(seed).multinomial(
            self.num_runs, [1 / self.num_runs] * self.num_runs, size=count
        )
        return np.vstack([np.ones(len(self.runs_N)), drawn[:, self.runs_N]])

    def frontier(self, weights_BN: Array) -> Array:
        """Return 1 for each point of a resample that is better than all of less compute, else
        0."""
        errors_BN = np.where(weights_BN > 0, self.errors_N, np.inf)
        least_BN = np.minimum.accumulate(errors_BN, axis=1)
        before_BN = np.roll(least_BN, 1, axis=1)
        before_BN[:, 0] = np.inf
        return (errors_BN < before_BN).astype(float)

    def largest(self, *names: str) -> NDArray[np.bool_]:
        """Return the points with the largest value of the first name; of these the largest of the
        second, and so on."""
        held = np.ones(len(self.errors_N), bool)
        for name in names:
            values, tolerance = self.points[name], SAME_T * (name == "epochs")
            most = np.max(values, where=held & np.isfinite(values), initial=0.0)
            held &= values >= most * (1 - tolerance)
        return held

    def at_epochs(self, wanted: float) -> tuple[NDArray[np.bool_], float]:
        """Return the points at this number of epochs, or at the least known number."""
        epochs = self.points["epochs"]
        held = np.abs(epochs / wanted - 1) <= SAME_T
        if not held.any() and np.isfinite(epochs).any():
            wanted = float(np.nanmin(epochs))
            held = np.abs(epochs / wanted - 1) <= SAME_T
        return held, wanted

    def of(self, held: NDArray[np.bool_]) -> "Sample":
        points = {name: values[held] for name, values in self.points.items()}
        return Sample(self.name, points, self.errors_N[held], self.runs_N[held])


def read_points(paths: Sequence[Path]) -> pd.DataFrame:
    """Read results tables, and CSV files with the columns compute and error. Each row of a CSV is a
    run of its own."""
    frames = []
    for number, path in enumerate(paths):
        if path.suffix != ".csv":
            frames.append(read_results([path]))
            continue
        try:
            pairs = pd.read_csv(path)[["compute", "error"]].astype(float)
        except (ValueError, KeyError) as problem:
            fix = "give the columns compute and error, with a number in each row"
            raise UserError(str(path), str(problem), fix, code="unknown-format") from None
        runs = [f"file {number} row {row:06}" for row in range(len(pairs))]
        frames.append(pairs.assign(task="csv", target=path.stem, run=runs))
    return pd.concat(frames, ignore_index=True)


def samples_of(results: pd.DataFrame, targets: Sequence[str] = ()) -> tuple[list[Sample], int]:
    """Return a sample for each target and task, and the number of results without an error or a
    compute."""
    results = results.reindex(
        columns=[*dict.fromkeys([*results, *COLUMNS, "weights", "neighbors"])]
    )
    fewest = results.neighbors.groupby(results.run).transform("min")
    results = results[results.neighbors.isna() | (results.neighbors == fewest)]  # k-NN: one k
    known = results[results.error.notna() & results.compute.notna()]
    if known.empty:
        problem, fix = "no result has a compute and an error", "give results of pretrainings"
        raise UserError("points", problem, fix, code="empty")
    if not (np.isfinite(known.compute) & (known.compute > 0) & known.error.between(0, 1)).all():
        problem = "a compute is not positive, or an error is not between 0 and 1"
        raise UserError("points", problem, "divide per cents by 100", code="bad-value")
    tasks = known.groupby("target").task.nunique()
    if unknown := [each for each in targets if each not in tasks]:
        problem, fix = f"{unknown[0]} has no results", f"give one of {', '.join(tasks.index)}"
        raise UserError("--target", problem, fix, code="unknown-name")
    samples = [
        _sample(target if tasks[target] == 1 else f"{target} ({task})", rows)
        for (target, task), rows in known.groupby(["target", "task"])
        if not targets or target in targets
    ]
    return samples, len(results) - len(known)


def _sample(name: str, rows: pd.DataFrame) -> Sample:
    run = rows.weights.where(rows.weights.notna(), rows.run)
    # computes of equal trainings differ in their last digits
    rows = rows.assign(run=run, rounded=rows.compute.map("{:.9e}".format).astype(float))
    rows = rows.sort_values(["rounded", "error", "run"])
    columns = {each: rows[each].astype(float).replace(0, np.nan).to_numpy() for each in COLUMNS}
    runs_N = np.unique(rows.run, return_inverse=True)[1]
    return Sample(name, columns, rows.error.to_numpy(float), runs_N)
