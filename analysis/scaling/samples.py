"""What laws are fitted to: the points of one target in columns, their frontier, and resamples of
their runs."""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from analysis.scaling.fitting import Array, Points

if TYPE_CHECKING:
    from analysis.points import Point

COLUMNS = ("compute", "parameters", "images", "epochs", "samples")
FEWEST_RUNS = 4
"""Of fewer there is no law: their resamples are too much alike to say how good it is."""
SAME_T = 0.01
"""By so much numbers of epochs may differ and be the same: a run ends at a whole batch."""


@dataclass(frozen=True)
class Sample:
    """In the order of their compute, whatever order the files have. What is not known is NaN."""

    name: str
    points: Points
    errors_N: Array
    runs_N: NDArray[np.int64]
    """Which pretraining each point is of: its checkpoints are resampled together."""

    @property
    def num_runs(self) -> int:
        return len(np.unique(self.runs_N))

    def num_different(self, name: str) -> int:
        values = self.points[name]
        return len(np.unique(values[np.isfinite(values)]))

    def resamples(self, count: int, *, seed: int = 0) -> Array:
        """How often each point is in each of them: in the first once, in the others as often as its
        run was drawn. There are none of too few runs. Of a whole sample."""
        count *= self.num_runs >= FEWEST_RUNS
        drawn = np.random.default_rng(seed).multinomial(
            self.num_runs, [1 / self.num_runs] * self.num_runs, size=count
        )
        return np.vstack([np.ones(len(self.runs_N)), drawn[:, self.runs_N]])

    def frontier(self, weights_BN: Array) -> Array:
        """1 for the points of each resample that are better than all of less compute, else 0."""
        errors_BN = np.where(weights_BN > 0, self.errors_N, np.inf)
        before_BN = np.minimum.accumulate(
            np.pad(errors_BN, ((0, 0), (1, 0)), constant_values=np.inf), axis=1
        )[:, :-1]
        return (errors_BN < before_BN).astype(float)

    def largest(self, *names: str) -> NDArray[np.bool_]:
        """Points that have the largest of the first; of these the largest of the second, and so
        on."""
        held = np.ones(len(self.errors_N), bool)
        for name in names:
            values = self.points[name]
            held &= values >= np.max(values, where=held & np.isfinite(values), initial=0.0) * (
                1 - SAME_T * (name == "epochs")
            )
        return held

    def at_epochs(self, wanted: float) -> tuple[NDArray[np.bool_], float]:
        """The points at so many epochs, or, where there are none, at the fewest that there are."""
        epochs = self.points["epochs"]
        held = np.abs(epochs / wanted - 1) <= SAME_T
        if not held.any() and np.isfinite(epochs).any():
            wanted = float(np.nanmin(epochs))
            held = np.abs(epochs / wanted - 1) <= SAME_T
        return held, wanted

    def of(self, held: NDArray[np.bool_]) -> "Sample":
        return Sample(
            self.name,
            {name: values[held] for name, values in self.points.items()},
            self.errors_N[held],
            self.runs_N[held],
        )


def read_samples(paths: Sequence[Path], *, targets: Sequence[str] = ()) -> tuple[list[Sample], int]:
    """One for each target and task, and the number of points that say too little (no error, no
    compute)."""
    if folder := next((path for path in paths if path.is_dir()), None):
        raise ValueError(
            f"{folder}: is a folder; name the file that `analysis points` has written, or a CSV"
        )
    pairs = [(path, pair) for path in paths if path.suffix == ".csv" for pair in _pairs(path)]
    from analysis.points import (
        Point,
        read_points,
    )  # it takes a while, and what is wrong with a path is said before

    found = read_points(path for path in paths if path.suffix != ".csv")
    for number, (path, pair) in enumerate(pairs):  # each is a run of its own
        place: dict[str, Any] = {
            "plan": "",
            "stage": "",
            "labels": "{}",
            "task": "csv",
            "target": path.stem,
        }
        found.append(Point(**place, member=number, run=f"row {number:06}", **pair))
    kinds: dict[tuple[str, str], list[Point]] = {}
    for point in (
        point for point in found if point.error is not None and point.compute is not None
    ):
        kinds.setdefault((str(point.target), point.task), []).append(point)
    tasks = Counter(target for target, _ in kinds)
    if not kinds:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no point has a compute and an error; give points of"
            " plans that pretrain"
        )
    if unknown := [each for each in targets if each not in tasks]:
        raise ValueError(
            f"--target: there are no points on {unknown[0]}; there are some on"
            f" {', '.join(sorted(tasks))}"
        )
    samples = [
        _sample(target if tasks[target] == 1 else f"{target} ({task})", points)
        for (target, task), points in sorted(kinds.items())
        if target in (targets or tasks)
    ]
    return samples, len(found) - sum(map(len, kinds.values()))


def _sample(name: str, points: "Iterable[Point]") -> Sample:
    rows = sorted(
        points,
        key=lambda point: (
            float(f"{point.compute:.9e}"),
            point.error or 0.0,
            point.weights or point.run,
        ),
    )
    columns = {
        each: np.array([getattr(point, each) or np.nan for point in rows], float)
        for each in COLUMNS
    }
    errors_N = np.array([point.error for point in rows], float)
    if not (np.isfinite(columns["compute"]) & (columns["compute"] > 0)).all():
        raise ValueError(
            f"{name}: every compute must be a positive number; remove the other points"
        )
    if not ((errors_N >= 0) & (errors_N <= 1)).all():
        raise ValueError(
            f"{name}: every error must be a share between 0 and 1; divide percents by 100"
        )
    return Sample(
        name,
        columns,
        errors_N,
        np.unique([point.weights or point.run for point in rows], return_inverse=True)[1],
    )


def _pairs(path: Path) -> list[dict[str, Any]]:
    """Compute and error (0..1) of each row."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [
                {name: float(row[name]) for name in ("compute", "error")}
                for row in csv.DictReader(file)
            ]
    except OSError as problem:
        raise ValueError(
            f"{path}: {problem.strerror}; give points, or a CSV with the columns compute and error"
        ) from None
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path}: needs the columns compute and error, all numbers ({problem})"
        ) from None
