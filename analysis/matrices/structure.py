"""How near a matrix is to a Monarch and to a Kronecker one, beside random matrices with the same singular values; Proposition 3.3.

Outputs are a grid of S x C, inputs one of H x V, token by token: W[(s, c), (h, v)]. Both nearest matrices (in the Frobenius norm)
are made of rank-1 approximations, so their distance needs the largest singular values of

    Monarch     L[c][s, h] R[h][c, v]   each slice over (s, v), one for every (c, h)
    Kronecker   A[s, h] B[c, v]         all entries as one matrix, (s, h) by (c, v): Van Loan and Pitsianis

A Kronecker matrix is a Monarch one. Of SW-MLPs the grid is tokens by channels, of others as near to a square as the sides allow.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.matrices.spectra import LARGEST_DENSE, singular_values
from analysis.matrices.weights import Array, Matrix, initial_model, matrices_of
from data_prep.images.lettering import legible
from data_prep.progress import progress
from finetune.looks import BLUE, GREY, MARKERS, looks, panels
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.models.spec import SparseMlpSpec, nearest_divisor

Grid = tuple[int, int]
FORMS = ("monarch", "kronecker")


def distance(weight: Array, form: str, *, out: Grid, into: Grid) -> float:
    """|W - nearest|_F / |W|_F: 0 of a matrix of that form."""
    slices = slices_of(weight, form, out=out, into=into)
    small = slices.transpose(0, 2, 1) @ slices if slices.shape[1] >= slices.shape[2] else slices @ slices.transpose(0, 2, 1)
    squares = np.linalg.eigvalsh(small)
    return float(np.sqrt(np.maximum(squares[:, :-1], 0).sum() / (squares.sum() or 1.0)))


def slices_of(weight: Array, form: str, *, out: Grid, into: Grid) -> Array:
    """(number, rows, columns), each to be made of rank 1."""
    whole: Array = weight.astype(np.float64).reshape(*out, *into)  # s, c, h, v
    if form == "monarch":
        return whole.transpose(1, 2, 0, 3).reshape(out[1] * into[0], out[0], into[1])
    return whole.transpose(0, 2, 1, 3).reshape(1, out[0] * into[0], out[1] * into[1])


def of_equal_spectrum(weight: Array, generator: np.random.Generator) -> Array:
    """U diag(sigma) V', with U and V drawn uniformly from all rotations."""
    values = singular_values(weight)
    assert values is not None
    turned = [_rotation(side, len(values), generator) for side in weight.shape]
    product: Array = (turned[0] * values) @ turned[1].T
    return product


def _rotation(rows: int, columns: int, generator: np.random.Generator) -> Array:
    orthogonal, triangle = np.linalg.qr(generator.standard_normal((rows, columns)))
    uniform: Array = orthogonal * np.sign(np.diag(triangle))  # QR alone favours some
    return uniform


def grid_of(side: int, *, tokens: int | None) -> Grid:
    rows = tokens if tokens and side % tokens == 0 else nearest_divisor(side, round(side**0.5))
    return rows, side // rows


def distances(runs: dict[str, list[Checkpoint]], *, randoms: int) -> Iterator[dict[str, Any]]:
    """A row for each matrix of a block, step and form; at step 0 the initial weights."""
    generator = np.random.default_rng(0)
    with progress("structure", total=sum(map(len, runs.values())), unit="checkpoints") as line:
        for run, checkpoints in runs.items():
            card, begun = checkpoints[0].card, initial_model(checkpoints[0])
            models = [(0, begun)] if begun is not None else []
            for step, model in [*models, *((opened.card.step, None) for opened in checkpoints)]:
                opened = next((each for each in checkpoints if each.card.step == step), checkpoints[0])
                for matrix in matrices_of(model or load_model(opened), card.model, image_size=card.image_size):
                    tokens = None
                    if isinstance(card.model, SparseMlpSpec):
                        tokens = (card.image_size // card.model.patch_size) ** 2
                    if matrix.block is not None and matrix.weight.ndim == 2 and np.prod(matrix.weight.shape) <= LARGEST_DENSE:
                        facts = {"run": run, "step": step, "block": matrix.block, "name": matrix.name}
                        yield from (facts | each for each in _of_matrix(matrix, tokens, randoms=randoms, generator=generator))
                line.advance(int(step > 0), note=f"{run}, step {step:,}")


def _of_matrix(matrix: Matrix, tokens: int | None, *, randoms: int, generator: np.random.Generator) -> Iterator[dict[str, Any]]:
    weight = matrix.weight if isinstance(matrix.weight, np.ndarray) else matrix.weight.toarray()
    out, into = (grid_of(side, tokens=tokens) for side in weight.shape)
    others = [of_equal_spectrum(weight, generator) for _ in range(randoms)]
    for form in FORMS:
        of_others = [distance(each, form, out=out, into=into) for each in others]
        yield {
            "form": form,
            "out": list(out),
            "into": list(into),
            "distance": distance(weight, form, out=out, into=into),
            "random": float(np.mean(of_others)),
            "random_sd": float(np.std(of_others, ddof=1)) if randoms > 1 else None,
        }


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Of each run's last step, as shares of the random matrices' distance: below 1 is nearer to the form than chance has it."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    with looks(*runs):
        figure, both = panels(2, height=2.6)
        for axes, form in zip(both, FORMS, strict=True):
            for number, run in enumerate(runs):
                last = max(row["step"] for row in rows if row["run"] == run)
                for name, mark in zip(names, cycle(MARKERS), strict=False):
                    for step, style in ((last, {"ls": "-", "marker": mark}), (0, {"ls": ":", "alpha": 0.4})):
                        of_run = [
                            row for row in rows if (row["run"], row["name"], row["form"], row["step"]) == (run, name, form, step)
                        ]
                        if of_run:
                            shares = [row["distance"] / row["random"] for row in of_run]
                            label = f"{legible(run)}, {name}" if step and form == FORMS[0] else None
                            axes.plot(
                                [row["block"] for row in of_run], shares, color=f"C{number % 6}", ms=4, lw=1, label=label, **style
                            )
            axes.axhline(1, color=GREY, lw=0.8)
            axes.set(xlabel="block", title=f"to the nearest {form.capitalize()} matrix")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        both[1].sharey(both[0])
        both[0].set_ylabel("distance, of random ones'")
        both[0].plot([], [], ":", color=GREY, label="initial")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


# ---- Proposition 3.3: weight decay of a Mixer's two matrices bounds the 1-norm of their Kronecker product ------------


def both_sides(v: Array, w: Array) -> tuple[float, float]:
    """(|V|_F^2 + |W|_F^2) / 2 and |V (x) W|_1 / (C S), of V (S x S) and W (C x C); the first is never less. |V (x) W|_1 is
    |V|_1 |W|_1: the product is not made."""
    return float((v**2).sum() + (w**2).sum()) / 2, float(np.abs(v).sum() * np.abs(w).sum()) / (len(v) * len(w))


def bound_on_random_matrices(*, draws: int = 200, sides: tuple[int, ...] = (4, 16, 64)) -> dict[str, list[float]]:
    """Right over left, of random V and W of several kinds and sizes."""
    generator = np.random.default_rng(0)
    kinds: dict[str, Callable[[tuple[int, int]], Array]] = {
        "Gaussian": generator.standard_normal,
        "Gaussian, 10 % of the entries": lambda shape: generator.standard_normal(shape) * (generator.random(shape) < 0.1),
        "Student's t, 2 degrees": lambda shape: generator.standard_t(2, shape),
        "signs": lambda shape: generator.choice([-1.0, 1.0], shape),
        "signs, of equal norms": lambda shape: generator.choice([-1.0, 1.0], shape) / shape[0],
    }
    found: dict[str, list[float]] = {}
    for kind, draw_one in kinds.items():
        for _ in range(draws):
            tokens, channels = generator.choice(sides, 2)
            left, right = both_sides(draw_one((tokens, tokens)), draw_one((channels, channels)))
            found.setdefault(kind, []).append(right / left if left else 0.0)
    return found


def bound_facts(found: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "holds in": min(float(np.mean(np.array(ratios) <= 1 + 1e-12)) for ratios in found.values()),
        "largest ratio": {kind: max(ratios) for kind, ratios in found.items()},
    }


def draw_bound(found: dict[str, list[float]]) -> Figure:
    with looks():
        figure, (axes,) = panels(1, height=2.4)
        for number, ratios in enumerate(found.values()):
            jitter = np.random.default_rng(number).uniform(-0.3, 0.3, len(ratios))
            axes.plot(ratios, number + jitter, ".", ms=2, color=BLUE)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.set(xlabel="‖V⊗W‖₁ / CS, of\n(‖V‖² + ‖W‖²) / 2", xlim=(0, 1.05), title="Proposition 3.3")
    return figure
