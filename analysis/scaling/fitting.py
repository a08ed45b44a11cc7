"""Laws E = E_inf + sum of a_j u_j^-alpha_j, fitted by variable projection to thousands of sets of
errors at the same points.

Exponents and parameters inside u are called the shape (at most three parameters). For a known
shape, non-negative least squares give the factors a_j and E_inf in closed form. A grid search, then
Levenberg-Marquardt steps find the shape, for all sets of errors in one batch. Variables are divided
by their geometric mean. Fits minimize squared errors of E, not of log E.

Shapes: B sets of errors, K columns (factors, then E_inf), Q shape parameters, N points.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Points = Mapping[str, Array]
"""Values of the columns compute, parameters, images, epochs and samples."""

FLOOR = "E_inf"
GRIDS = {
    "exponent": np.geomspace(0.02, 4.0, 18),
    "offset": np.array([0.0, *np.geomspace(1e-4, 1e2, 13)]),
    "repeats": np.geomspace(0.3, 3e4, 10),
}
BOUNDS = {"exponent": (0.01, 5.0), "offset": (0.0, 1e3), "repeats": (0.1, 1e5)}
ROUNDS = 100
_CHUNK = 60_000
"""Largest product of sets of errors and points in a batch. Such a batch fits into the CPU cache."""


@dataclass(frozen=True)
class Term:
    """The term factor * u^-exponent. If `within` is empty, u is the variable. "offset": u is the
    variable plus a parameter. "repeats": u is N_eff = N (1 + R (1 - e^(-(T-1)/R))) for N images and
    T epochs, or N T if T < 1."""

    variable: str
    factor: str
    exponent: str
    within: Literal["", "offset", "repeats"] = ""
    name: str = ""
    """Name of the parameter inside u."""

    def inside(self, points: Points, value_B1: Array) -> tuple[Array, Array]:
        """Return u, and its derivative with respect to the parameter inside u."""
        x_N = points[self.variable]
        if self.within == "repeats":
            x_N = x_N * np.minimum(points["epochs"], 1)
            again_N = np.maximum(points["epochs"] - 1, 0)
            left_BN = np.exp(-again_N / value_B1)
            slope_BN = x_N * (1 - left_BN - left_BN * again_N / value_B1)
            return x_N * (1 + value_B1 * (1 - left_BN)), slope_BN
        return x_N + value_B1, np.ones_like(x_N)


@dataclass(frozen=True)
class Law:
    terms: tuple[Term, ...]
    floor: bool = True

    @cached_property
    def shape(self) -> dict[str, str]:
        """Shape parameter -> its key in GRIDS and BOUNDS."""
        found = {term.exponent: "exponent" for term in self.terms}
        return found | {term.name: term.within for term in self.terms if term.within}

    @cached_property
    def linear(self) -> list[str]:
        return [term.factor for term in self.terms] + [FLOOR] * self.floor

    @property
    def names(self) -> list[str]:
        return [*self.linear, *self.shape]

    @property
    def num_parameters(self) -> int:
        return len(self.names)

    @cached_property
    def bounds(self) -> Array:
        return np.array([BOUNDS[kind] for kind in self.shape.values()]).T

    def columns(self, points: Points, shape_BQ: Array) -> tuple[Array, Array]:
        """Return the least-squares columns (B, K, N) and their derivatives with respect to the
        shape (B, Q, K, N)."""
        names, size = list(self.shape), (len(self.linear), len(points[self.terms[0].variable]))
        columns_BKN = np.ones((len(shape_BQ), *size))
        slopes_BQKN = np.zeros((*shape_BQ.shape, *size))
        for column, term in enumerate(self.terms):
            exponent = names.index(term.exponent)
            inner_B1 = shape_BQ[:, [names.index(term.name)]] if term.within else np.zeros((1, 1))
            u_BN, slope_BN = term.inside(points, inner_B1)
            log_BN, alpha_B1 = np.log(u_BN), shape_BQ[:, [exponent]]
            columns_BKN[:, column] = power_BN = np.exp(-alpha_B1 * log_BN)
            slopes_BQKN[:, exponent, column] = -log_BN * power_BN
            if term.within:
                inner = names.index(term.name)
                slopes_BQKN[:, inner, column] = -alpha_B1 * power_BN / u_BN * slope_BN
        return columns_BKN, slopes_BQKN


@dataclass(frozen=True)
class Fit:
    """A law, fitted to each set of errors."""

    law: Law
    units: Mapping[str, float]
    shape_BQ: Array
    linear_BK: Array
    squares_B: Array

    @cached_property
    def parameters(self) -> dict[str, Array]:
        values = np.hstack([self.linear_BK, self.shape_BQ]).T
        found = dict(zip(self.law.names, values, strict=True))
        for term in self.law.terms:
            unit = self.units[term.variable]
            found[term.factor] = found[term.factor] * unit ** found[term.exponent]
            if term.within == "offset":
                found[term.name] = found[term.name] * unit
        return found

    @property
    def at_bounds(self) -> dict[str, Array]:
        """Parameter -> True for each fit with this parameter at an end of its range (factors and
        E_inf: 0)."""
        low, high = self.law.bounds
        shape = (self.shape_BQ <= low) | (self.shape_BQ >= high)
        return dict(zip(self.law.names, np.hstack([self.linear_BK <= 0, shape]).T, strict=True))

    def predict(self, points: Points) -> Array:
        columns_BKN, _ = self.law.columns(_scaled(points, self.units), self.shape_BQ)
        return np.asarray((self.linear_BK[:, None] @ columns_BKN)[:, 0])


def fit(law: Law, points: Points, errors_BN: Array) -> Fit:
    """Fit the law to each set of errors. Each fit starts from its best point among the grid points
    that `_good_places` chooses for the first set."""
    errors_BN = np.atleast_2d(errors_BN)
    variables = [term.variable for term in law.terms]
    units = {name: float(np.exp(np.log(points[name]).mean())) for name in variables}
    scaled = _scaled(points, units)
    grid_BQ = _good_places(law, scaled, errors_BN[:1])
    columns_GKN, _ = law.columns(scaled, grid_BQ)
    gram = (columns_GKN @ columns_GKN.mT)[None]
    pieces = list[tuple[Array, ...]]()
    for errors in np.array_split(errors_BN, -(-errors_BN.size // _CHUNK)):
        right = np.moveaxis(columns_GKN @ errors.T, -1, 0)
        starts = np.argmax((right * _non_negative(gram, right)).sum(-1), axis=1)
        pieces.append(_polish(law, scaled, errors, grid_BQ[starts]))
    return Fit(law, units, *(np.concatenate(each) for each in zip(*pieces, strict=True)))


def _scaled(points: Points, units: Mapping[str, float]) -> Points:
    return {name: values / units.get(name, 1.0) for name, values in points.items()}


def _good_places(law: Law, points: Points, errors_BN: Array) -> Array:
    """Return the best grid point for each value of each parameter."""
    grid_BQ = np.array(list(product(*(GRIDS[kind] for kind in law.shape.values()))))
    pieces = np.array_split(grid_BQ, -(-len(grid_BQ) * errors_BN.size // _CHUNK))
    squares_B = np.concatenate([_project(law, points, errors_BN, piece)[2] for piece in pieces])
    alike = [np.flatnonzero(column == value) for column in grid_BQ.T for value in np.unique(column)]
    return np.asarray(grid_BQ[np.unique([places[squares_B[places].argmin()] for places in alike])])


def _non_negative(gram: Array, right: Array) -> Array:
    """Solve many small non-negative least-squares problems: try each choice of columns and keep the
    best solution without negative factors."""
    size = right.shape[-1]
    best, gain = np.zeros_like(right), np.zeros(right.shape[:-1])
    gram = gram * (1 + 1e-12 * np.eye(size))  # allows two equal columns
    for choice in product((True, False), repeat=size):
        held = np.array(choice)
        if not held.any():
            continue
        system = np.where(held[:, None] & held, gram, np.eye(size))
        found = np.linalg.solve(system, np.where(held, right, 0.0)[..., None])[..., 0]
        reduced = np.where((found >= 0).all(-1), (found * right).sum(-1), 0.0)
        best = np.where((reduced > gain)[..., None], found, best)
        gain = np.maximum(gain, reduced)
    return best


def _project(law: Law, points: Points, errors_BN: Array, shape_BQ: Array) -> tuple[Array, ...]:
    """Return the shape, its best factors, the sums of squares, the residuals, the columns and their
    derivatives."""
    columns_BKN, slopes_BQKN = law.columns(points, shape_BQ)
    right_BK = (columns_BKN @ errors_BN[..., None])[..., 0]
    linear_BK = _non_negative(columns_BKN @ columns_BKN.mT, right_BK)
    rest_BN = errors_BN - (linear_BK[:, None] @ columns_BKN)[:, 0]
    return shape_BQ, linear_BK, (rest_BN**2).sum(-1), rest_BN, columns_BKN, slopes_BQKN


def _polish(law: Law, points: Points, errors_BN: Array, shape_BQ: Array) -> tuple[Array, ...]:
    """Take Levenberg-Marquardt steps of the shape, with the factors projected out (Kaufman).
    Converged fits leave the batch."""
    low, high = law.bounds
    live, damping = np.arange(len(shape_BQ)), np.full(len(shape_BQ), 1e-3)
    state = _project(law, points, errors_BN, shape_BQ)
    found = tuple(each.copy() for each in state[:3])
    for _ in range(ROUNDS):
        shape, _, before, *_ = state
        normal, gradient = _normal_equations(state)
        stuck = (shape <= low) & (gradient <= 0) | (shape >= high) & (gradient >= 0)
        normal = np.where(stuck[:, None] | stuck[..., None], 0.0, normal)
        diagonal = np.einsum("bqq->bq", normal)
        diagonal += np.where(stuck | (diagonal <= 0), 1.0, damping[:, None] * diagonal)
        step = np.linalg.solve(normal, np.where(stuck, 0.0, gradient)[..., None])[..., 0]
        after = _project(law, points, errors_BN[live], np.clip(shape + step, low, high))
        better = after[2] < before
        for kept, new in zip(found, after, strict=False):
            kept[live[better]] = new[better]
        damping = np.where(better, np.maximum(damping / 5, 1e-12), damping * 4)
        stay = ~(better & (after[2] > (1 - 1e-10) * before) | (damping > 1e8) | stuck.all(-1))
        if not stay.any():
            break
        live, damping = live[stay], damping[stay]
        state = tuple(
            np.where(better[stay].reshape(-1, *[1] * (new.ndim - 1)), new[stay], old[stay])
            for old, new in zip(state, after, strict=True)
        )
    return found


def _normal_equations(state: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the normal equations (B, Q, Q) and gradient (B, Q) for the shape. The span of the
    columns in use is projected out."""
    _, linear_BK, _, rest_BN, columns_BKN, slopes_BQKN = state
    tangents_BQN = np.einsum("bk,bqkn->bqn", linear_BK, slopes_BQKN)
    used = np.where((linear_BK > 0)[..., None], columns_BKN, 0.0)
    gram, unit = used @ used.mT, np.eye(linear_BK.shape[1])
    gram += (linear_BK <= 0)[..., None] * unit + 1e-12 * gram * unit
    tangents_BQN -= np.linalg.solve(gram, used @ tangents_BQN.mT).mT @ used
    return tangents_BQN @ tangents_BQN.mT, (tangents_BQN @ rest_BN[..., None])[..., 0]
