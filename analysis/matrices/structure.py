"""Distance of a matrix to the nearest Monarch and Kronecker matrix, compared with random matrices
with the same singular values.

The outputs of W[(s, c), (h, v)] form a grid S x C, the inputs a grid H x V, token by token. The
nearest matrix (in the Frobenius norm) consists of rank-1 approximations of slices of W. The
distance follows from the singular values of the slices:

    Monarch     L[c][s, h] R[h][c, v]   each slice over (s, v), one for every (c, h)
    Kronecker   A[s, h] B[c, v]         all entries as one matrix, (s, h) by (c, v)

A Kronecker matrix is also a Monarch matrix. The grid of a SW-MLP is tokens by channels; other grids
are as near to a square as the sides allow. If a side is prime, slices are vectors and every matrix
has the form. Such matrices are skipped.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.matrices.propositions import check_propositions
from analysis.matrices.spectra import LARGEST_DENSE, draw_lines, singular_values
from analysis.matrices.weights import Array, checkpoints_of, steps_of
from analysis.output import Result
from finetune.looks import GRAY
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.spec import SparseMlpSpec, nearest_divisor

Grid = tuple[int, int]
FORMS = ("monarch", "kronecker")


def distance(weight: Array | Tensor, form: str, *, out: Grid, into: Grid) -> float:
    """Return |W - nearest|_F / |W|_F, which is 0 for a matrix of this form. `out`, `into`: grids of
    outputs and inputs."""
    slices = slices_of(weight, form, out=out, into=into)
    is_tall = slices.shape[1] >= slices.shape[2]
    squares = torch.linalg.eigvalsh(slices.mT @ slices if is_tall else slices @ slices.mT)
    return math.sqrt(squares[:, :-1].clamp(min=0).sum() / squares.sum().clamp(min=1e-300))


def slices_of(weight: Array | Tensor, form: str, *, out: Grid, into: Grid) -> Tensor:
    """Return the matrices to approximate with rank 1, as (number, rows, columns)."""
    whole = torch.as_tensor(weight).double().reshape(*out, *into)  # s, c, h, v
    if form == "monarch":
        return whole.permute(1, 2, 0, 3).reshape(out[1] * into[0], out[0], into[1])
    return whole.permute(0, 2, 1, 3).reshape(1, out[0] * into[0], out[1] * into[1])


def of_equal_spectrum(
    values: Array, shape: Sequence[int], generator: np.random.Generator, *, device: str = "cpu"
) -> Tensor:
    """Return a random matrix U diag(sigma) V' with these singular values. U and V are uniform over
    matrices with orthonormal columns."""
    turned = []
    for side in shape:
        normal = torch.from_numpy(generator.standard_normal((side, len(values)))).to(device)
        orthogonal, triangle = torch.linalg.qr(normal)
        turned.append(orthogonal * triangle.diagonal().sign())  # QR without signs is not uniform
    product: Tensor = (turned[0] * torch.from_numpy(values).to(device)) @ turned[1].mT
    return product


def grid_of(side: int, *, tokens: int | None) -> Grid:
    rows = tokens if tokens and side % tokens == 0 else nearest_divisor(side, round(side**0.5))
    return rows, side // rows


def structure(places: list[Path], *, quick: bool, device: torch.device) -> Result:
    runs, inputs = checkpoints_of(places, newest_only=quick)
    rows = pd.DataFrame(distances(runs, randoms=1 if quick else 3, device=device.type))
    statements, minima = check_propositions(quick=quick)
    named = {"statements": statements, "minima": minima}
    facts = {name: frame.to_dict("records") for name, frame in named.items()}
    figures, printed = dict[str, Figure](), list[str | pd.DataFrame]([statements])
    if len(rows):
        figures[""] = draw(rows)
        left_out = rows[rows.random.isna() | (rows.random == 0)]
        if len(left_out):
            title = f"skipped matrices with a prime side or more than {LARGEST_DENSE:,} entries:"
            printed += [title, left_out[["run", "name", "form"]].drop_duplicates()]
    return Result(rows, facts | {"device": device.type}, figures, inputs, printed)


def distances(
    runs: dict[str, list[Checkpoint]], *, randoms: int, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each step, matrix and form (FORMS). Step 0 has the initial weights. The
    distance is nan for matrices above LARGEST_DENSE entries."""
    generator = np.random.default_rng(0)
    for run, card, step, matrices, _ in steps_of(runs, title="structure"):
        tokens = None
        if isinstance(card.model, SparseMlpSpec):
            tokens = (card.image_size // card.model.patch_size) ** 2
        for matrix in matrices:
            weight, shape, known = matrix.weight, matrix.weight.shape, list[Tensor]()
            if matrix.block is None or len(shape) > 2:
                continue
            out, into = (grid_of(side, tokens=tokens) for side in shape)
            if np.prod(shape) <= LARGEST_DENSE:
                dense = weight if isinstance(weight, np.ndarray) else weight.toarray()
                values = singular_values(dense, device=device)
                assert values is not None
                known.append(torch.from_numpy(dense).to(device))
                for _ in range(randoms):
                    known.append(of_equal_spectrum(values, shape, generator, device=device))
            for form in FORMS:
                found = [distance(each, form, out=out, into=into) for each in known]
                row = {"run": run, "step": step, "block": matrix.block, "name": matrix.name}
                row |= {"form": form, "out": list(out), "into": list(into)}
                row["distance"] = found[0] if found else np.nan
                row["random"] = np.mean(found[1:]) if found else np.nan
                row["random_sd"] = np.std(found[1:], ddof=1) if len(found) > 2 else np.nan
                yield row


def draw(rows: pd.DataFrame) -> Figure:
    """Draw each distance divided by the mean distance of random matrices. Below 1, the matrix is
    nearer to the form than a random matrix."""
    ratio = rows.distance / rows.random
    shown = rows.assign(**{form: ratio.where(rows.form == form) for form in FORMS})
    titles = {form: f"to the nearest {form.capitalize()} matrix" for form in FORMS}
    figure = draw_lines(shown, titles, x="block")
    for axes in figure.axes:
        axes.axhline(1, color=GRAY, lw=0.8)
    figure.axes[0].set_ylabel("distance / random distance")
    figure.axes[1].sharey(figure.axes[0])
    return figure
