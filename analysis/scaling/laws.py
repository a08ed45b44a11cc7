"""The scaling law of paper B: E(C) = a (b + C)^(-alpha) + E_inf, fitted to (compute, error) pairs."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Law(NamedTuple):
    a: float
    b: float
    alpha: float
    floor: float
    """E_inf: the error that no compute removes."""

    def error(self, compute: Array) -> Array:
        result: Array = self.a * (self.b + compute) ** -self.alpha + self.floor
        return result


def fit(compute: Array, error: Array) -> Law:
    """Least squares in the logarithm of the compute's scale, so that the parameters are of like size."""
    num_points = len(np.unique(compute))
    if num_points < 5:
        raise ValueError(f"scaling: {num_points} points cannot fix 4 parameters; give at least 5 of different compute")
    if not (np.isfinite(compute) & (compute > 0)).all():
        raise ValueError("scaling: every compute must be a positive number (of FLOP); remove the other points")
    if not ((error >= 0) & (error <= 1)).all():
        raise ValueError("scaling: every error must be a share between 0 and 1; divide percents by 100")
    from scipy.optimize import curve_fit  # it takes a while, and what is wrong with the points should be said before

    unit = float(np.exp(np.log(compute).mean()))
    start = (max(float(np.ptp(error)), 1e-3), 0.1, 0.3, max(float(error.min()) * 0.5, 0.0))
    try:
        bounds = ([0, 0, 0, 0], [np.inf, np.inf, 5, 1])
        found, _ = curve_fit(lambda x, *law: Law(*law).error(x), compute / unit, error, p0=start, bounds=bounds, maxfev=20_000)
    except RuntimeError as problem:
        raise ValueError(f"scaling: the fit does not converge ({problem}); the points may not follow a power law") from None
    a, b, alpha, floor = (float(value) for value in found)
    return Law(a * unit**alpha, b * unit, alpha, floor)


def read_points(path: Path) -> tuple[Array, Array]:
    """Columns `compute` (FLOP) and `error` (0..1) of a CSV file."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        points = np.array([(float(row["compute"]), float(row["error"])) for row in rows]).reshape(-1, 2)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a CSV with the columns compute and error") from None
    except OSError as problem:
        raise ValueError(f"{path}: cannot be read ({problem.strerror}); give a CSV with the columns compute and error") from None
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path}: needs the columns compute and error, all numbers ({problem})") from None
    return points[:, 0], points[:, 1]
