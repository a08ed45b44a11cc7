"""Propositions 3.2 and 3.3 and Corollary 3.4 of the Mixer paper, checked on random matrices.

X is S x C, W is S x S and V is C x C. vec(X) stacks the columns of X. J vec(X) = vec(X^T). (x) is
the Kronecker product, and phi an activation. In 3.3, L(B) is a loss of weights B.

    3.2   vec(phi(phi(W X) V)) = phi(J^T L phi(J R vec(X))), L = I_S (x) V^T, R = I_C (x) W
    3.4   vec(phi(W X V)) = phi(M vec(X)), M = J^T L J R, a Monarch matrix with equal blocks
    3.3   min over V, W of L(V (x) W) + lambda / 2 (|V|_F^2 + |W|_F^2)
          >= min over B of L(B) + lambda / (C S) |B|_1

For 3.3, checks compare both regularizers for random V and W, and both minima if L is the mean
squared error of a linear model. The minimum over V and W is the least value from several starts.
"""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from analysis.matrices.weights import Array

EXACT: dict[str, Any] = {"jac": True, "options": {"maxiter": 5000, "ftol": 1e-13, "gtol": 1e-8}}


def check_propositions(*, quick: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return one row for each statement, and the minima of Proposition 3.3."""
    equal, bound, found = equivalences(), bounds(), minima(repeats=1 if quick else 4)
    cases = {
        "Proposition 3.2: difference of both sides": (equal.wide_mlp, 1e-10),
        "Corollary 3.4: difference of both sides": (equal.monarch, 1e-10),
        "Proposition 3.3, each V and W: right / left side": (bound.ratio, 1 + 1e-12),
        "Proposition 3.3, minima: right / left side": (found.right / found.left, 1 + 1e-9),
    }
    rows = [
        (name, len(values), values.max(), "yes" if values.max() <= most else "no")
        for name, (values, most) in cases.items()
    ]
    return pd.DataFrame(rows, columns=["statement", "random cases", "largest", "holds"]), found


def commutation(tokens: int, channels: int) -> Array:
    order = np.arange(tokens * channels).reshape(channels, tokens).T.ravel()
    return np.eye(tokens * channels)[order]


def equivalences(*, draws: int = 40) -> pd.DataFrame:
    """Return a row for each random X, W and V: the largest errors of identities 3.2 and 3.4."""
    generator, rows = np.random.default_rng(0), []
    for number in range(draws):
        tokens, channels = (int(side) for side in generator.integers(1, 13, 2))
        shapes = (tokens, channels), (tokens, tokens), (channels, channels)
        x, w, v = map(generator.standard_normal, shapes)
        phi = np.tanh if number % 2 else lambda values: np.maximum(values, 0)
        j = commutation(tokens, channels)
        left, right = j.T @ np.kron(np.eye(tokens), v.T), j @ np.kron(np.eye(channels), w)
        inner = right @ x.ravel("F")
        sides = (phi(phi(w @ x) @ v), phi(left @ phi(inner))), (phi(w @ x @ v), phi(left @ inner))
        rows.append([abs(one.ravel("F") - other).max() for one, other in sides])
    return pd.DataFrame(rows, columns=["wide_mlp", "monarch"])


def both_sides(v: Array, w: Array) -> tuple[float, float]:
    """Return (|V|_F^2 + |W|_F^2) / 2 and |V (x) W|_1 / (C S) = |V|_1 |W|_1 / (C S)."""
    entries = len(v) * len(w)
    return float((v**2).sum() + (w**2).sum()) / 2, float(abs(v).sum() * abs(w).sum()) / entries


def bounds(*, draws: int = 300) -> pd.DataFrame:
    """Return the right side of 3.3 divided by the left side, without L, for three kinds of random V
    and W."""
    generator, rows = np.random.default_rng(0), []
    for _ in range(draws):
        gauss = [
            generator.standard_normal((side, side)) for side in generator.choice([4, 16, 64], 2)
        ]
        equal = [np.sign(each) / len(each) for each in gauss]
        kinds = {"Gaussian": gauss, "cubes": [each**3 for each in gauss], "signs": equal}
        for kind, pair in kinds.items():
            left, right = both_sides(*pair)
            rows.append({"kind": kind, "ratio": right / left})
    return pd.DataFrame(rows)


def mean_squares(weights: Array, inputs: Array, targets: Array) -> tuple[float, Array]:
    """Return half of the mean squared error of a linear model and its gradient."""
    errors, count = weights @ inputs - targets, inputs.shape[1]
    return float((errors**2).sum()) / (2 * count), errors @ inputs.T / count


def minimum_over_weights(inputs: Array, targets: Array, strength: float) -> float:
    """Return the minimum of L(B) + strength |B|_1. The optimizer sees B as the difference of two
    nonnegative matrices."""
    shape = 2, len(inputs), len(inputs)

    def value(parts: Array) -> tuple[float, Array]:
        loss, slope = mean_squares(np.subtract(*parts.reshape(shape)), inputs, targets)
        return loss + strength * float(parts.sum()), np.stack([slope, -slope]).ravel() + strength

    start = np.zeros(np.prod(shape))
    best = minimize(value, start, method="L-BFGS-B", bounds=[(0, None)] * len(start), **EXACT)
    return float(best.fun)


def minimum_over_factors(
    inputs: Array, targets: Array, strength: float, *, sides: tuple[int, int]
) -> float:
    """Return the least L(V (x) W) + strength / 2 (|V|_F^2 + |W|_F^2) from four random starts and at
    V = W = 0. `sides`: C, S."""
    squares = [side**2 for side in sides]

    def value(entries: Array) -> tuple[float, Array]:
        of_each = np.split(entries, squares[:1])
        v, w = (part.reshape(2 * [round(len(part) ** 0.5)]) for part in of_each)
        loss, slope = mean_squares(np.kron(v, w).astype(float), inputs, targets)
        of_pairs = slope.reshape(*sides, *sides)
        of_v, of_w = np.einsum("csdt,st->cd", of_pairs, w), np.einsum("csdt,cd->st", of_pairs, v)
        decay = strength / 2 * float(entries @ entries)
        return loss + decay, np.concatenate([of_v, of_w], None) + strength * entries

    starts = np.random.default_rng(0).standard_normal((4, sum(squares)))
    least = [float(minimize(value, start, method="L-BFGS-B", **EXACT).fun) for start in starts]
    return min(*least, value(np.zeros(sum(squares)))[0])


def minima(*, repeats: int) -> pd.DataFrame:
    """Return both minima for Gaussian inputs and noisy targets of a random V (x) W. `strength` is
    lambda / (C S): 5 % and 50 % of the smallest strength at which B = 0 is the minimum.
    """
    generator, rows = np.random.default_rng(0), []
    for sides, fraction, _ in product(((2, 2), (2, 3), (3, 3)), (0.05, 0.5), range(repeats)):
        width = sides[0] * sides[1]
        inputs, noise = generator.standard_normal((2, width, 4 * width))
        targets = (
            np.kron(*(generator.standard_normal((side, side)) for side in sides)) @ inputs + noise
        )
        slope = mean_squares(np.zeros((width, width)), inputs, targets)[1]
        strength = fraction * float(abs(slope).max())
        left = minimum_over_factors(inputs, targets, strength * width, sides=sides)
        right = minimum_over_weights(inputs, targets, strength)
        about = {"channels": sides[0], "tokens": sides[1], "strength": strength}
        rows.append({**about, "left": left, "right": right})
    return pd.DataFrame(rows)
