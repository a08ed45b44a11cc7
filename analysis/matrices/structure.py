"""How near a matrix is to a Monarch and to a Kronecker one, beside random matrices with the same
singular values; Proposition 3.3.

Outputs are a grid of S x C, inputs one of H x V, token by token: W[(s, c), (h, v)]. Both nearest
matrices (in the Frobenius norm) are made of rank-1 approximations, so their distance needs the
singular values of

    Monarch     L[c][s, h] R[h][c, v]   each slice over (s, v), one for every (c, h)
    Kronecker   A[s, h] B[c, v]         all entries as one matrix, (s, h) by (c, v) (Van Loan and
                                        Pitsianis)

A Kronecker matrix is a Monarch one. Of SW-MLPs the grid is tokens by channels, of others as near to
a square as the sides allow; where a side is prime, so that the slices are vectors, each matrix has
the form, and there is nothing to compare.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.matrices.spectra import LARGEST_DENSE, Row, draw_lines, singular_values
from analysis.matrices.weights import Array, checkpoints_of, steps_of
from analysis.output import Result
from finetune.looks import BLUE, GREY, looks, panels
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.spec import SparseMlpSpec, nearest_divisor

Grid = tuple[int, int]
FORMS = ("monarch", "kronecker")


def distance(weight: Array | Tensor, form: str, *, out: Grid, into: Grid) -> float:
    """|W - nearest|_F / |W|_F: 0 of a matrix of that form."""
    slices = slices_of(weight, form, out=out, into=into)
    squares = torch.linalg.eigvalsh(
        slices.mT @ slices if slices.shape[1] >= slices.shape[2] else slices @ slices.mT
    )
    return math.sqrt(squares[:, :-1].clamp(min=0).sum() / squares.sum().clamp(min=1e-300))


def slices_of(weight: Array | Tensor, form: str, *, out: Grid, into: Grid) -> Tensor:
    """(number, rows, columns), each to be made of rank 1."""
    whole = torch.as_tensor(weight).double().reshape(*out, *into)  # s, c, h, v
    if form == "monarch":
        return whole.permute(1, 2, 0, 3).reshape(out[1] * into[0], out[0], into[1])
    return whole.permute(0, 2, 1, 3).reshape(1, out[0] * into[0], out[1] * into[1])


def of_equal_spectrum(
    values: Array, shape: Sequence[int], generator: np.random.Generator, *, device: str = "cpu"
) -> Tensor:
    """U diag(sigma) V', with U and V drawn uniformly from all rotations."""
    turned = []
    for side in shape:
        normal = torch.from_numpy(generator.standard_normal((side, len(values)))).to(device)
        orthogonal, triangle = torch.linalg.qr(normal)
        turned.append(orthogonal * triangle.diagonal().sign())  # QR alone favours some
    product: Tensor = (turned[0] * torch.from_numpy(values).to(device)) @ turned[1].mT
    return product


def grid_of(side: int, *, tokens: int | None) -> Grid:
    rows = tokens if tokens and side % tokens == 0 else nearest_divisor(side, round(side**0.5))
    return rows, side // rows


def structure(places: list[Path], *, quick: bool, device: torch.device) -> Result:
    runs, inputs = checkpoints_of(places, newest_only=quick)
    rows = pd.DataFrame(distances(runs, randoms=1 if quick else 3, device=device.type))
    bound = bound_on_random_matrices()
    largest = {kind: max(ratios) for kind, ratios in bound.items()}
    holds = max(largest.values()) <= 1 + 1e-12
    facts = {"device": device.type, "proposition 3.3": {"holds": holds, "largest ratio": largest}}
    figures, printed = {"prop33": draw_bound(bound)}, []
    if len(rows):
        figures |= {"": draw(rows)}
        left_out = rows[rows.random.isna() | (rows.random == 0)]
        names = left_out.run + ", " + left_out["name"] + " (" + left_out.form + ")"
        if len(names):
            title = f"left out, with a prime side or more than {LARGEST_DENSE:,} entries:"
            printed = [title, *(f"  {name}" for name in names.unique())]
    return Result(rows, facts, figures, inputs, printed)


def distances(
    runs: dict[str, list[Checkpoint]], *, randoms: int, device: str = "cpu"
) -> Iterator[Row]:
    """Yield a row for each matrix of a block, step and form; step 0 has the initial weights. The
    distance of a matrix that is too large is null."""
    generator = np.random.default_rng(0)
    for run, card, step, matrices, _ in steps_of(runs, what="structure"):
        tokens = (
            (card.image_size // card.model.patch_size) ** 2
            if isinstance(card.model, SparseMlpSpec)
            else None
        )
        for matrix in matrices:
            shape, known = matrix.weight.shape, list[Tensor]()
            if matrix.block is None or len(shape) > 2:
                continue
            out, into = (grid_of(side, tokens=tokens) for side in shape)
            if np.prod(shape) <= LARGEST_DENSE:
                dense = (
                    matrix.weight
                    if isinstance(matrix.weight, np.ndarray)
                    else matrix.weight.toarray()
                )
                values = singular_values(dense, device=device)
                assert values is not None
                known = [torch.from_numpy(dense).to(device)]
                known += [
                    of_equal_spectrum(values, shape, generator, device=device)
                    for _ in range(randoms)
                ]
            for form in FORMS:
                found = [distance(each, form, out=out, into=into) for each in known]
                yield {
                    "run": run,
                    "step": step,
                    "block": matrix.block,
                    "name": matrix.name,
                    "form": form,
                    "out": list(out),
                    "into": list(into),
                    "distance": found[0] if found else None,
                    "random": fmean(found[1:]) if found else None,
                    "random_sd": stdev(found[1:]) if len(found) > 2 else None,
                }


def draw(rows: pd.DataFrame) -> Figure:
    """Draw distances divided by those of the random matrices: below 1 is nearer to the form."""
    ratio = rows.distance.astype(float) / rows.random.astype(float)
    shown = rows.assign(**{form: ratio.where(rows.form == form) for form in FORMS})
    titles = {form: f"to the nearest {form.capitalize()} matrix" for form in FORMS}
    figure = draw_lines(shown, titles, x="block")
    for axes in figure.axes:
        axes.axhline(1, color=GREY, lw=0.8)
    figure.axes[0].set_ylabel("distance / random distance")
    figure.axes[1].sharey(figure.axes[0])
    return figure


# ---- Proposition 3.3: weight decay of a Mixer's two matrices bounds the 1-norm of their Kronecker
# product ------------


def both_sides(v: Array, w: Array) -> tuple[float, float]:
    """(|V|_F^2 + |W|_F^2) / 2 and |V (x) W|_1 / (C S), of V (S x S) and W (C x C); the first is
    never less. |V (x) W|_1 is
    |V|_1 |W|_1: the product is not made."""
    return float((v**2).sum() + (w**2).sum()) / 2, float(np.abs(v).sum() * np.abs(w).sum()) / (
        len(v) * len(w)
    )


def bound_on_random_matrices(
    *, draws: int = 200, sides: tuple[int, ...] = (4, 16, 64)
) -> dict[str, list[float]]:
    """Right over left, of random V and W of several kinds and sizes."""
    generator = np.random.default_rng(0)
    kinds: dict[str, Callable[[tuple[int, int]], Array]] = {
        "Gaussian": generator.standard_normal,
        "Gaussian, 10 % of the entries": lambda shape: (
            generator.standard_normal(shape) * (generator.random(shape) < 0.1)
        ),
        "Student's t, 2 degrees": lambda shape: generator.standard_t(2, shape),
        "signs": lambda shape: generator.choice([-1.0, 1.0], shape),
        "signs, of equal norms": lambda shape: generator.choice([-1.0, 1.0], shape) / shape[0],
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, _ in product(kinds, range(draws)):
        left, right = both_sides(
            *(kinds[kind]((side, side)) for side in generator.choice(sides, 2))
        )
        found[kind].append(right / left if left else 0.0)
    return found


def draw_bound(found: Mapping[str, Sequence[float]]) -> Figure:
    with looks():
        figure, (axes,) = panels(1, height=2.4)
        for number, ratios in enumerate(found.values()):
            jitter = np.random.default_rng(number).uniform(-0.3, 0.3, len(ratios))
            axes.plot(ratios, number + jitter, ".", ms=2, color=BLUE)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.set(
            xlabel="‖V⊗W‖₁ / CS, of\n(‖V‖² + ‖W‖²) / 2", xlim=(0, 1.05), title="Proposition 3.3"
        )
    return figure
