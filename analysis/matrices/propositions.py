"""Propositions 3.2 and 3.3 and Corollary 3.4 of the Mixer paper, checked on random matrices.

X is S x C, W is S x S and V is C x C. vec(X) is column after column, J vec(X) = vec(X^T).

    3.2   phi(phi(W X) V) is a MLP of width S C: vec of it is
          phi(J^T (I_S (x) V^T) phi(J (I_C (x) W) vec(X)))
    3.3   min over V, W of L(V (x) W) + lambda / 2 (|V|_F^2 + |W|_F^2)
          >= min over B of L(B) + lambda / (C S) |B|_1
    3.4   vec(phi(W X V)) = phi(M vec(X)) for the Monarch matrix M = J^T L J R with equal blocks,
          L = I_S (x) V^T and R = I_C (x) W

The two regularizers of 3.3 are also compared for each V and W. The paper does not name a loss: L is
the mean squared error or the logistic loss of a linear model with the weights B. The minimum over B
is of a convex function. The minimum over V and W is the least of several starts.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import minimize
from scipy.special import expit

from analysis.matrices.weights import Array
from finetune.looks import BLUE, looks, panels

SMALL = {
    "method": "L-BFGS-B",
    "jac": True,
    "options": {"maxiter": 5000, "ftol": 1e-13, "gtol": 1e-8},
}


def check_propositions(*, quick: bool) -> tuple[pd.DataFrame, dict[str, Any], Figure]:
    """Return one row for each statement, the facts, and the figure of Proposition 3.3."""
    equal, bound = equivalences(), bound_on_random_matrices()
    found = minima(repeats=1 if quick else 2)
    difference, ratio = "largest difference of both sides", "largest ratio of right to left side"
    cases = [
        ("Proposition 3.2", difference, equal.wide_mlp, 1e-10),
        ("Corollary 3.4", difference, equal.monarch, 1e-10),
        ("Proposition 3.3, minima", ratio, found.ratio, 1 + 1e-9),
        ("Proposition 3.3, each V and W", ratio, bound.ratio, 1 + 1e-12),
    ]
    table = pd.DataFrame(
        {
            "statement": name,
            "random cases": len(values),
            "measure": measure,
            "value": values.max(),
            "holds": "yes" if values.max() <= most else "no",
        }
        for name, measure, values, most in cases
    )
    facts = {"statements": table.to_dict("records"), "minima": found.to_dict("records")}
    of_minima = found.assign(kind="minima, " + found.loss)
    return table, facts, draw_bound(pd.concat([bound, of_minima], ignore_index=True))


# ---- Proposition 3.2 and Corollary 3.4 ------------


def commutation(tokens: int, channels: int) -> Array:
    order = np.arange(tokens * channels).reshape(channels, tokens).T.ravel()
    return np.eye(tokens * channels)[order]


def equivalences(*, draws: int = 40) -> pd.DataFrame:
    """Return the largest difference between both sides for random X, W and V."""
    generator, rows = np.random.default_rng(0), []
    for number in range(draws):
        tokens, channels = (int(side) for side in generator.integers(1, 13, 2))
        x, w, v = (
            generator.standard_normal(shape)
            for shape in ((tokens, channels), (tokens, tokens), (channels, channels))
        )
        phi = np.tanh if number % 2 else lambda values: np.maximum(values, 0)
        j = commutation(tokens, channels)
        right, left = np.kron(np.eye(channels), w), np.kron(np.eye(tokens), v.T)
        wide_mlp = phi(j.T @ left @ phi(j @ right @ x.ravel("F")))
        monarch = phi(j.T @ left @ j @ right @ x.ravel("F"))
        differences = {
            "wide_mlp": abs(phi(phi(w @ x) @ v).ravel("F") - wide_mlp).max(),
            "monarch": abs(phi(w @ x @ v).ravel("F") - monarch).max(),
        }
        rows.append({"tokens": tokens, "channels": channels, **differences})
    return pd.DataFrame(rows)


# ---- Proposition 3.3 ------------


class Loss(NamedTuple):
    """A convex loss of the weights B for inputs (width, samples) and targets of the same shape."""

    kind: str
    inputs: Array
    targets: Array

    def at(self, weights: Array) -> tuple[float, Array]:
        """Return the loss and its gradient."""
        outputs, num_samples = weights @ self.inputs, self.inputs.shape[1]
        if self.kind == "squares":
            errors = outputs - self.targets
            value = float((errors**2).sum()) / 2
        else:  # the targets are signs
            margins = self.targets * outputs
            value, errors = float(np.logaddexp(0, -margins).sum()), -self.targets * expit(-margins)
        return value / num_samples, errors @ self.inputs.T / num_samples


def minimum_over_weights(loss: Loss, strength: float) -> tuple[float, Array]:
    """Return the minimum of L(B) + strength |B|_1, and B: the difference of two parts that are not
    negative."""
    width = len(loss.inputs)

    def value(parts: Array) -> tuple[float, Array]:
        positive, negative = parts.reshape(2, width, width)
        found, gradient = loss.at(positive - negative)
        both = np.stack([gradient + strength, strength - gradient])
        return found + strength * float(parts.sum()), both.ravel()

    start = np.zeros(2 * width**2)
    best = minimize(value, start, bounds=[(0, None)] * len(start), **SMALL)
    positive, negative = best.x.reshape(2, width, width)
    return float(best.fun), positive - negative


def minimum_over_factors(
    loss: Loss, strength: float, *, sides: tuple[int, int], generator: np.random.Generator
) -> float:
    """Return the least of L(V (x) W) + strength / 2 (|V|_F^2 + |W|_F^2) over 4 random starts and
    V = W = 0. `sides`: C, S."""
    channels, tokens = sides

    def value(entries: Array) -> tuple[float, Array]:
        v = entries[: channels**2].reshape(channels, channels)
        w = entries[channels**2 :].reshape(tokens, tokens)
        found, gradient = loss.at(np.einsum("cd,st->csdt", v, w).reshape(2 * [channels * tokens]))
        of_pairs = gradient.reshape(channels, tokens, channels, tokens)
        of_v, of_w = np.einsum("csdt,st->cd", of_pairs, w), np.einsum("csdt,cd->st", of_pairs, v)
        slope = np.concatenate([of_v.ravel(), of_w.ravel()]) + strength * entries
        return found + strength / 2 * float(entries @ entries), slope

    size = channels**2 + tokens**2
    starts = generator.standard_normal((4, size))
    least = min(float(minimize(value, start, **SMALL).fun) for start in starts)
    return min(least, value(np.zeros(size))[0])


def minima(*, repeats: int) -> pd.DataFrame:
    """Return both minima for random losses: the inputs are Gaussian, the targets are those of a
    random Kronecker product with noise. lambda / (C S) is a fraction of the least value for which
    B = 0 is the minimum."""
    generator, rows = np.random.default_rng(0), []
    for kind, sides, fraction, _ in product(
        ("squares", "logistic"), ((2, 2), (2, 3), (3, 3)), (0.05, 0.5), range(repeats)
    ):
        width = sides[0] * sides[1]
        inputs, noise = generator.standard_normal((2, width, 4 * width))
        factors = [generator.standard_normal((side, side)) for side in sides]
        targets = np.kron(*factors) @ inputs + noise
        loss = Loss(kind, inputs, np.sign(targets) if kind == "logistic" else targets)
        strength = fraction * abs(loss.at(np.zeros((width, width)))[1]).max()
        left = minimum_over_factors(loss, strength * width, sides=sides, generator=generator)
        right, _ = minimum_over_weights(loss, strength)
        row = {"loss": kind, "channels": sides[0], "tokens": sides[1], "lambda": strength * width}
        rows.append(row | {"left": left, "right": right, "ratio": right / left})
    return pd.DataFrame(rows)


def both_sides(v: Array, w: Array) -> tuple[float, float]:
    """Return (|V|_F^2 + |W|_F^2) / 2 and |V (x) W|_1 / (C S) for V (S x S) and W (C x C); the first
    is never less. |V (x) W|_1 = |V|_1 |W|_1."""
    entries = len(v) * len(w)
    return float((v**2).sum() + (w**2).sum()) / 2, float(abs(v).sum() * abs(w).sum()) / entries


def bound_on_random_matrices(
    *, draws: int = 200, sides: tuple[int, ...] = (4, 16, 64)
) -> pd.DataFrame:
    """Return the ratio of the right to the left side for random V and W of several kinds."""
    generator, rows = np.random.default_rng(0), []
    for _ in range(draws):
        one, other = generator.choice(sides, 2)
        shapes = ((one, one), (other, other))
        gauss = [generator.standard_normal(shape) for shape in shapes]
        signs = [generator.choice([-1.0, 1.0], shape) for shape in shapes]
        kinds = {
            "Gaussian": gauss,
            "Gaussian, 10 % of the entries": [x * (generator.random(x.shape) < 0.1) for x in gauss],
            "Student's t, 2 degrees": [generator.standard_t(2, shape) for shape in shapes],
            "signs": signs,
            "signs, of equal norms": [x / len(x) for x in signs],
        }
        for kind, (v, w) in kinds.items():
            left, right = both_sides(v, w)
            rows.append({"kind": kind, "ratio": right / left if left else 0.0})
    return pd.DataFrame(rows)


def draw_bound(bound: pd.DataFrame) -> Figure:
    with looks():
        figure, (axes,) = panels(1, height=2.8)
        kinds = bound.kind.unique().tolist()
        jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(bound))
        axes.plot(bound.ratio, bound.kind.map(kinds.index) + jitter, ".", ms=2, color=BLUE)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_yticks(range(len(kinds)), kinds)
        axes.invert_yaxis()
        axes.set(xlabel="right / left side", xlim=(0, 1.05), title="Proposition 3.3")
    return figure
