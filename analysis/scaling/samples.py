"""The points of one target, recipe and family of models, and their frontier."""

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
MIXERS = ("mixer", "smixer")
PROPORTIONAL = 1.1
"""Largest ratio between two values of C / (P N T) for which compute is treated as proportional to P
N T."""
HELD = (
    *("kind", "optimizer", "lr", "weight_decay", "global_batch_size", "augmented"),
    *("own_augmented", "num_views", "family"),
)
"""Columns that are equal in all points of a law."""
SAME_T = 0.01
"""Relative tolerance for equal numbers of epochs, because runs end with a complete batch."""


@dataclass(frozen=True)
class Sample:
    """Points in the order of their compute. Unknown values are NaN."""

    name: str
    points: Points
    errors_N: Array
    runs_N: NDArray[np.int64]
    """Index of the pretraining run of each point."""
    kind: str = ""

    @property
    def num_runs(self) -> int:
        return len(np.unique(self.runs_N))

    def num_different(self, name: str) -> int:
        values = self.points[name]
        return len(np.unique(values[np.isfinite(values)]))

    @property
    def disproportion(self) -> str:
        """Reason why compute is not proportional to P N T; empty if it is proportional."""
        if self.kind in MIXERS:
            return "a Mixer uses each weight many times, so compute is not proportional to P N T"
        cost = self.points["compute"] / (self.points["parameters"] * self.points["samples"])
        if not np.isfinite(cost).any():
            return "P, N or T is unknown"
        ratio = np.nanmax(cost) / np.nanmin(cost)
        return f"C / (P N T) varies {ratio:.2f}-fold" if ratio > PROPORTIONAL else ""

    def frontier(self, counted_N: NDArray[np.bool_] | bool = True) -> NDArray[np.bool_]:
        """Return the mask of counted points with a smaller error than all counted points of less
        compute."""
        errors_N = np.where(counted_N, self.errors_N, np.inf)
        least_N = np.minimum.accumulate(errors_N)
        return np.asarray(errors_N < np.concatenate([[np.inf], least_N[:-1]]))

    def largest(self, *names: str) -> NDArray[np.bool_]:
        """Return the mask of points with the largest value of the first name; of these, the largest
        of the second name, and so on."""
        held = np.ones(len(self.errors_N), bool)
        for name in names:
            values, tolerance = self.points[name], SAME_T * (name == "epochs")
            most = np.max(values, where=held & np.isfinite(values), initial=0.0)
            held &= values >= most * (1 - tolerance)
        return held

    def at_epochs(self, wanted: float) -> tuple[NDArray[np.bool_], float]:
        """Return the mask of points at `wanted` epochs, and `wanted`. If there are none, use the
        least known number of epochs instead."""
        epochs = self.points["epochs"]
        held = np.abs(epochs / wanted - 1) <= SAME_T
        if not held.any() and np.isfinite(epochs).any():
            wanted = float(np.nanmin(epochs))
            held = np.abs(epochs / wanted - 1) <= SAME_T
        return held, wanted

    def of(self, held: NDArray[np.bool_]) -> "Sample":
        points = {name: values[held] for name, values in self.points.items()}
        return Sample(self.name, points, self.errors_N[held], self.runs_N[held], self.kind)


def read_points(paths: Sequence[Path]) -> pd.DataFrame:
    """Read results tables, and CSV files with the columns compute and error. Each row of a CSV is
    treated as one run."""
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
    """Return a sample for each target, task, recipe and family of models. Also return the number of
    results without an error or a compute, such as imported weights."""
    columns = [*results, *COLUMNS, *HELD, "weights", "neighbors"]
    results = results.reindex(columns=[*dict.fromkeys(columns)])
    fewest = results.neighbors.groupby(results.run).transform("min")
    results = results[results.neighbors.isna() | (results.neighbors == fewest)]  # k-NN: one k
    known = results[results.error.notna() & results.compute.notna()]
    if known.empty:
        problem, fix = "no result has a compute and an error", "give results of pretraining runs"
        raise UserError("points", problem, fix, code="empty")
    if not (np.isfinite(known.compute) & (known.compute > 0) & known.error.between(0, 1)).all():
        problem = "a compute is not positive, or an error is not between 0 and 1"
        raise UserError("points", problem, "divide percentages by 100", code="bad-value")
    tasks = known.groupby("target").task.nunique()
    if unknown := [each for each in targets if each not in tasks]:
        problem, fix = f"{unknown[0]} has no results", f"give one of {', '.join(tasks.index)}"
        raise UserError("--target", problem, fix, code="unknown-name")
    samples = list[Sample]()
    for (target, task), rows in known.groupby(["target", "task"]):
        if targets and target not in targets:
            continue
        families = [own for _, own in rows.groupby([*HELD], dropna=False)]
        differing = [name for name in HELD if rows[name].nunique(dropna=False) > 1]
        readable = [name for name in differing if name != "family"]
        if readable and len(rows[readable].drop_duplicates()) == len(families):
            differing = readable
        for own in families:
            words = [] if tasks[target] == 1 else [task]
            words += [f"{name} {own[name].iloc[0]}" for name in differing]
            name = f"{target} ({', '.join(words)})" if words else target
            samples.append(_sample(name, own))
    return samples, len(results) - len(known)


def _sample(name: str, rows: pd.DataFrame) -> Sample:
    run = rows.weights.where(rows.weights.notna(), rows.run)
    # the compute of equal trainings differs in its last digits
    rows = rows.assign(run=run, rounded=rows.compute.map("{:.9e}".format).astype(float))
    rows = rows.sort_values(["rounded", "error", "run"])
    columns = {each: rows[each].astype(float).replace(0, np.nan).to_numpy() for each in COLUMNS}
    runs_N = np.unique(rows.run, return_inverse=True)[1]
    kind = rows.kind.iloc[0]
    return Sample(name, columns, rows.error.to_numpy(float), runs_N, "" if pd.isna(kind) else kind)
