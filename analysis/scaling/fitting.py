"""Laws E = E_inf + sum of a_j u_j^-alpha_j, fitted by variable projection, thousands of resamples at a time.

Once the exponents (and what stands within u) are known, the factors a_j and E_inf follow by non-negative least squares in closed
form. So only the former, the shape, is searched: on a grid, then by Levenberg-Marquardt steps of at most three unknowns, for all
resamples in one batch. A variable is measured in units of its geometric mean. Squares are of the error, not of its logarithm.

B stands for resamples, K for columns (factors, then E_inf), Q for shape parameters, N for points.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Points = Mapping[str, Array]
"""Columns: compute, parameters, images, epochs."""

FLOOR = "E_inf"
GRIDS = {
    "exponent": np.geomspace(0.02, 4.0, 18),
    "offset": np.array([0.0, *np.geomspace(1e-4, 1e2, 13)]),
    "repeats": np.geomspace(0.3, 3e4, 10),
}
BOUNDS = {"exponent": (0.01, 5.0), "offset": (0.0, 1e3), "repeats": (0.1, 1e5)}
STARTS, ROUNDS = 8, 100
_CHUNK = 60_000
"""Resamples times points that are worked on at once: they stay in the cache."""


@dataclass(frozen=True)
class Term:
    """factor * u^-exponent: u is the variable, the variable plus an `offset`, or N_eff = N (1 + R (1 - e^(-(T-1)/R))), of less than
    one epoch what was seen."""

    variable: str
    factor: str
    exponent: str
    within: Literal["", "offset", "repeats"] = ""
    name: str = ""
    """Of what stands within."""

    def inside(self, points: Points, value_B: Array) -> tuple[Array, Array]:
        """u, and its slope in what stands within it."""
        x_N, value_B1 = points[self.variable], value_B[:, None]
        if self.within == "repeats":
            x_N, again_N = x_N * np.minimum(points["epochs"], 1), np.maximum(points["epochs"] - 1, 0)
            left_BN = np.exp(-again_N / value_B1)
            return x_N * (1 + value_B1 * (1 - left_BN)), x_N * (1 - left_BN - left_BN * again_N / value_B1)
        return x_N + value_B1, np.ones((len(value_B), len(x_N)))


@dataclass(frozen=True)
class Law:
    terms: tuple[Term, ...]
    floor: bool = True

    @cached_property
    def shape(self) -> dict[str, str]:
        """Which grid and bounds each parameter of the shape has."""
        found = {term.exponent: "exponent" for term in self.terms}
        return found | {term.name: term.within for term in self.terms if term.within}

    @cached_property
    def linear(self) -> list[str]:
        return [term.factor for term in self.terms] + [FLOOR] * self.floor

    @property
    def num_parameters(self) -> int:
        return len(self.shape) + len(self.linear)

    @cached_property
    def bounds(self) -> Array:
        return np.array([BOUNDS[kind] for kind in self.shape.values()]).T

    def columns(self, points: Points, shape_BQ: Array) -> tuple[Array, list[tuple[int, int, Array]]]:
        """BKN, and (shape parameter, column, slope of the column in it BN)."""
        names, slopes = list(self.shape), list[tuple[int, int, Array]]()
        columns_BKN = np.ones((len(shape_BQ), len(self.linear), len(points[self.terms[0].variable])))
        for column, term in enumerate(self.terms):
            exponent = names.index(term.exponent)
            alpha_B1 = shape_BQ[:, exponent, None]
            inner = names.index(term.name) if term.within else None
            u_BN, inner_slope_BN = term.inside(points, shape_BQ[:, inner] if inner is not None else np.zeros(len(shape_BQ)))
            log_BN = np.log(u_BN)
            columns_BKN[:, column] = power_BN = np.exp(-alpha_B1 * log_BN)
            slopes.append((exponent, column, -log_BN * power_BN))
            if inner is not None:
                slopes.append((inner, column, -alpha_B1 * power_BN / u_BN * inner_slope_BN))
        return columns_BKN, slopes


@dataclass(frozen=True)
class Fit:
    """One law for each resample."""

    law: Law
    units: Mapping[str, float]
    shape_BQ: Array
    linear_BK: Array
    squares_B: Array

    @cached_property
    def parameters(self) -> dict[str, Array]:
        """By name, in the units of the points."""
        found = dict(zip([*self.law.linear, *self.law.shape], np.hstack([self.linear_BK, self.shape_BQ]).T, strict=True))
        for term in self.law.terms:
            found[term.factor] = found[term.factor] * self.units[term.variable] ** found[term.exponent]
            if term.within == "offset":
                found[term.name] = found[term.name] * self.units[term.variable]
        return found

    @property
    def at_bounds(self) -> dict[str, Array]:
        """Of each parameter whether it is at an end of what it may be: a factor, E_inf or an offset of 0 is."""
        low, high = self.law.bounds
        shape = (self.shape_BQ <= low) | (self.shape_BQ >= high)
        return dict(zip([*self.law.linear, *self.law.shape], np.hstack([self.linear_BK <= 0, shape]).T, strict=True))

    def predict(self, points: Points) -> Array:
        columns_BKN, _ = self.law.columns(_scaled(points, self.units), self.shape_BQ)
        return np.asarray((self.linear_BK[:, None] @ columns_BKN)[:, 0])


def fit(law: Law, points: Points, errors_N: Array) -> Fit:
    """To the points as they are: the whole grid, and its best places polished."""
    units = {term.variable: float(np.exp(np.log(points[term.variable]).mean())) for term in law.terms}
    grid_BQ = np.array(list(product(*(GRIDS[kind] for kind in law.shape.values()))))
    squares_B = _squares_of_grid(law, _scaled(points, units), errors_N, grid_BQ, np.ones(len(errors_N)))
    starts_BQ = grid_BQ[_best_by_axis(squares_B, law)[:STARTS]]
    found = _polish(law, _scaled(points, units), errors_N, np.ones((len(starts_BQ), len(errors_N))), starts_BQ)
    best = np.argmin(found[2])
    return Fit(law, units, *(each[best : best + 1] for each in found))


def fit_resamples(
    law: Law, points: Points, errors_N: Array, weights_BN: Array, *, advance: Callable[[int], None] = lambda _: None
) -> Fit:
    """To each resample, given by how often it has each point. They start from the best of the grid's places that are best for all
    resamples together at some value of a parameter: all values of each are tried."""
    weights_N = weights_BN.mean(axis=0)
    used = weights_N > 0
    points, errors_N, weights_N = {name: values[used] for name, values in points.items()}, errors_N[used], weights_N[used]
    weights_BN = weights_BN[:, used]
    units = {term.variable: float(np.exp(np.log(points[term.variable]).mean())) for term in law.terms}
    scaled = _scaled(points, units)
    grid_BQ = np.array(list(product(*(GRIDS[kind] for kind in law.shape.values()))))
    grid_BQ = grid_BQ[_best_by_axis(_squares_of_grid(law, scaled, errors_N, grid_BQ, weights_N), law)]
    columns_GKN, _ = law.columns(scaled, grid_BQ)
    products = (columns_GKN[:, :, None] * columns_GKN[:, None]).reshape(-1, len(errors_N))
    num_columns, pieces = len(law.linear), list[tuple[Array, Array, Array]]()
    size = max(1, _CHUNK // len(errors_N))
    for first in range(0, len(weights_BN), size):
        weights = weights_BN[first : first + size]
        gram = (products @ weights.T).T.reshape(len(weights), len(grid_BQ), num_columns, num_columns)
        right = np.moveaxis(columns_GKN @ (weights * errors_N).T, -1, 0)
        starts = np.argmax((right * _non_negative(gram, right)).sum(-1), axis=1)
        pieces.append(_polish(law, scaled, errors_N, weights, grid_BQ[starts]))
        advance(len(weights))
    return Fit(law, units, *(np.concatenate(each) for each in zip(*pieces, strict=True)))


def _scaled(points: Points, units: Mapping[str, float]) -> Points:
    return {name: values / units.get(name, 1.0) for name, values in points.items()}


def _squares_of_grid(law: Law, points: Points, errors_N: Array, grid_BQ: Array, weights_N: Array) -> Array:
    size = max(1, _CHUNK // len(errors_N))
    pieces = [grid_BQ[first : first + size] for first in range(0, len(grid_BQ), size)]
    return np.concatenate([_project(law, points, errors_N, weights_N[None], piece)[-1] for piece in pieces])


def _best_by_axis(squares_B: Array, law: Law) -> NDArray[np.intp]:
    """Places of the grid, the best first: of each value of each parameter the best place."""
    sides = [len(GRIDS[kind]) for kind in law.shape.values()]
    cube, numbers = squares_B.reshape(sides), np.arange(prod(sides)).reshape(sides)
    found = set[int]()
    for axis, side in enumerate(sides):
        rows = np.moveaxis(cube, axis, 0).reshape(side, -1)
        which = np.moveaxis(numbers, axis, 0).reshape(side, -1)
        found |= set(which[np.arange(side), rows.argmin(axis=1)].tolist())
    places = np.array(sorted(found))
    return places[np.argsort(squares_B[places], kind="stable")]


def _non_negative(gram: Array, right: Array) -> Array:
    """Least squares without negative factors, of many small systems: of every choice of columns the best that has none."""
    size = right.shape[-1]
    best, gain = np.zeros_like(right), np.zeros(right.shape[:-1])
    gram = gram * (1 + 1e-12 * np.eye(size))  # two equal columns can be solved
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


def _project(
    law: Law, points: Points, errors_N: Array, weights_BN: Array, shape_BQ: Array
) -> tuple[Array, list[tuple[int, int, Array]], Array, Array, Array]:
    """Columns with their slopes, the best factors, what is left of the errors, and its squares."""
    columns_BKN, slopes = law.columns(points, shape_BQ)
    weighted_BKN = columns_BKN * weights_BN[:, None]
    linear_BK = _non_negative(weighted_BKN @ columns_BKN.mT, weighted_BKN @ errors_N)
    rest_BN = errors_N - (linear_BK[:, None] @ columns_BKN)[:, 0]
    return columns_BKN, slopes, linear_BK, rest_BN, (weights_BN * rest_BN**2).sum(-1)


def _polish(law: Law, points: Points, errors_N: Array, weights_BN: Array, shape_BQ: Array) -> tuple[Array, Array, Array]:
    """Levenberg-Marquardt steps of the shape, the factors projected out (Kaufman); who has arrived leaves the batch."""
    found_BQ, (low, high) = shape_BQ.copy(), law.bounds
    *_, linear, _, squares = state = _project(law, points, errors_N, weights_BN, found_BQ)
    found_BK, found_B = linear.copy(), squares.copy()
    live, weights, shape, damping = np.arange(len(found_BQ)), weights_BN, found_BQ.copy(), np.full(len(found_BQ), 1e-3)
    for _ in range(ROUNDS):
        normal, gradient = _normal_equations(*state[:-1], weights=weights, num_shape=shape.shape[1])
        stuck = (shape <= low) & (gradient <= 0) | (shape >= high) & (gradient >= 0)
        normal = np.where(stuck[:, None] | stuck[..., None], 0.0, normal)
        diagonal = np.einsum("bqq->bq", normal)
        diagonal += np.where(stuck | (diagonal <= 0), 1.0, damping[:, None] * diagonal)
        step = np.linalg.solve(normal, np.where(stuck, 0.0, gradient)[..., None])[..., 0]
        tried = np.clip(shape + step, low, high)
        after = _project(law, points, errors_N, weights, tried)
        before_B, after_B = state[-1], after[-1]
        better = after_B < before_B
        damping = np.where(better, np.maximum(damping / 5, 1e-12), damping * 4)
        moved = live[better]
        found_BQ[moved], found_BK[moved], found_B[moved] = tried[better], after[2][better], after_B[better]
        arrived = better & (after_B > (1 - 1e-10) * before_B) | (damping > 1e8) | stuck.all(-1)
        live, weights, damping = live[~arrived], weights[~arrived], damping[~arrived]
        if not len(live):
            break
        shape, state = found_BQ[live], _chosen(state, after, better=better, stay=~arrived)
    return found_BQ, found_BK, found_B


def _chosen(before: tuple, after: tuple, *, better: NDArray[np.bool_], stay: NDArray[np.bool_]) -> tuple:  # type: ignore[type-arg]
    """Of two projections row by row the better, of those that stay."""

    def choose(old: Array, new: Array) -> Array:
        return np.asarray(np.where(better[stay].reshape(-1, *[1] * (old.ndim - 1)), new[stay], old[stay]))

    slopes = [(which, column, choose(old, new)) for (which, column, old), (*_, new) in zip(before[1], after[1], strict=True)]
    columns, *rest = (choose(old, new) for old, new in zip(before[:1] + before[2:], after[:1] + after[2:], strict=True))
    return (columns, slopes, *rest)


def _normal_equations(
    columns_BKN: Array, slopes: list[tuple[int, int, Array]], linear_BK: Array, rest_BN: Array, *, weights: Array, num_shape: int
) -> tuple[Array, Array]:
    """BQQ and BQ of the tangents, without what the columns in use can follow."""
    tangents_BQN = np.zeros((len(rest_BN), num_shape, rest_BN.shape[1]))
    for which, column, slope_BN in slopes:
        tangents_BQN[:, which] += linear_BK[:, column, None] * slope_BN
    used = np.where((linear_BK > 0)[..., None], columns_BKN, 0.0)
    weighted = used * weights[:, None]
    gram = weighted @ used.mT
    gram += (linear_BK <= 0)[..., None] * np.eye(gram.shape[-1]) + 1e-12 * gram * np.eye(gram.shape[-1])
    tangents_BQN -= np.linalg.solve(gram, weighted @ tangents_BQN.mT).mT @ used
    weighted = tangents_BQN * weights[:, None]
    return weighted @ tangents_BQN.mT, (weighted @ rest_BN[..., None])[..., 0]
