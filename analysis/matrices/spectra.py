"""Singular values of a run's matrices, from its initial weights to its last checkpoint, compared
with the law of random matrices.

Singular values are computed as roots of the eigenvalues of the smaller Gram matrix in float64.
Eigenvalues have an error of about 1e-15 of the largest eigenvalue. Singular values below NOISE x
the largest are rounding errors, and the effective rank skips them.

Columns for each matrix W and step (the effective matrix has `copies` times the stable and the
effective rank):

    gaussian_edge   largest singular value of a Gaussian matrix with these sides and Frobenius norm
    stable_rank     |W|_F^2 / sigma_max^2
    effective_rank  exp(H) of the singular values divided by their sum; null for large matrices
    distance        Kolmogorov distance between the squared singular values and the law of Marchenko
                    and Pastur for the variance of W; null for large matrices
    drift           |W - W0|_F / |W0|_F; null if the initial W0 is not known
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.sparse import csr_matrix

from analysis.matrices.weights import Array, Matrix, checkpoints_of, steps_of
from analysis.output import Result, draw_band, draw_legend
from data_prep.errors import UserError
from data_prep.images.lettering import legible
from finetune.looks import COLORS, GRAY, MARKERS, looks, panels
from pretrain.models.layers.sparse import largest_singular_value

NOISE = 1e-7
LONGEST_SIDE = 4096
"""Longest side of a Gram matrix (134 MB in float64; three are in memory). Larger matrices get only
their largest singular value."""
LARGEST_DENSE = 4096 * 4096
"""Largest number of entries of a sparse matrix that is multiplied as a dense matrix."""


def spectra(places: list[Path], *, quick: bool, device: torch.device) -> Result:
    runs, inputs = checkpoints_of(places, newest_only=quick)
    rows = pd.DataFrame(
        {
            "run": run,
            "step": step,
            **spectrum(matrix, initial=initial[n] if initial else None, device=device.type),
        }
        for run, _, step, matrices, initial in steps_of(runs, title="spectra")
        for n, matrix in enumerate(matrices)
    )
    return Result(rows, {"device": device.type}, draw(rows), inputs)


def spectrum(matrix: Matrix, *, initial: Matrix | None, device: str = "cpu") -> dict[str, Any]:
    weight, (rows, columns) = matrix.weight, matrix.weight.shape[-2:]
    values, frobenius = singular_values(weight, device=device), norm(weight)
    if values is None:
        slices = weight if weight.ndim == 3 else [weight]
        largest = max(largest_singular_value(csr_matrix(each)) for each in slices)
    else:
        largest = float(values[0])
    edge = frobenius * np.prod(weight.shape) ** -0.5 * (rows**0.5 + columns**0.5)
    found = {
        "block": matrix.block,
        "name": matrix.name,
        "rows": rows,
        "columns": columns,
        "slices": int(np.prod(weight.shape[:-2])),
        "copies": matrix.copies,
        "nonzero": int(np.count_nonzero(weight) if isinstance(weight, np.ndarray) else weight.nnz),
        "sigma_max": largest,
        "frobenius": frobenius,
        "gaussian_edge": float(edge),
        "stable_rank": (frobenius / largest) ** 2 if largest else 0.0,
        "effective_rank": None,
        "distance": None,
        "drift": None,
    }
    if values is not None:
        ratio = min(rows, columns) / max(rows, columns)
        found["effective_rank"] = effective_rank(values)
        found["distance"] = distance(values, ratio=ratio)
    if initial is not None:
        found["drift"] = norm(weight - initial.weight) / (norm(initial.weight) or 1.0)
    return found


def norm(weight: Array | csr_matrix) -> float:
    entries = weight if isinstance(weight, np.ndarray) else weight.data
    return float(np.linalg.norm(entries.ravel().astype(np.float64)))


def singular_values(weight: Array | csr_matrix, *, device: str = "cpu") -> Array | None:
    """Return the singular values of a matrix or a stack of matrices, the largest first. Return None
    if both sides are longer than LONGEST_SIDE."""
    kept, num_values = weight, int(np.prod(weight.shape) // max(weight.shape[-2:]))
    if not isinstance(kept, np.ndarray):  # empty rows and columns add only zeros
        kept = kept[kept.getnnz(1) > 0][:, kept.getnnz(0) > 0]
    if min(kept.shape[-2:]) > LONGEST_SIDE:
        return None
    if not isinstance(kept, np.ndarray) and np.prod(kept.shape) <= LARGEST_DENSE:
        kept = kept.toarray()
    kept = kept.astype(np.float64, copy=False)
    turned = kept.swapaxes(-1, -2) if isinstance(kept, np.ndarray) else kept.T
    is_tall = kept.shape[-2] >= kept.shape[-1]
    gram = turned @ kept if is_tall else kept @ turned  # numpy computes half of the product
    dense = gram if isinstance(gram, np.ndarray) else gram.toarray()
    squares = torch.linalg.eigvalsh(torch.from_numpy(dense).to(device)).cpu().numpy()
    values = np.zeros(num_values)
    values[: squares.size] = np.sort(np.sqrt(np.maximum(squares, 0)), axis=None)[::-1]
    return values


def effective_rank(values: Array) -> float:
    kept = values[values > NOISE * values.max()]
    fractions = kept / (kept.sum() or 1.0)
    return float(np.exp(-(fractions * np.log(fractions)).sum()))


def distance(values: Array, *, ratio: float) -> float:
    """Return the Kolmogorov distance between the squared singular values and Marchenko and Pastur's
    law with the same mean."""
    squares = np.sort(values.astype(np.float64) ** 2)
    if not squares.any():
        return 1.0
    law = np.interp(squares / squares.mean(), *marchenko_pastur(ratio), left=0.0, right=1.0)
    steps = np.arange(len(squares) + 1) / len(squares)
    return float(max(np.abs(law - steps[1:]).max(), np.abs(law - steps[:-1]).max()))


@lru_cache(maxsize=64)
def marchenko_pastur(ratio: float) -> tuple[Array, Array]:
    """Return x and the fraction of squared singular values below x times their mean. `ratio`: the
    shorter side of the matrices divided by the longer side.

    The density is sqrt((b - x)(x - a)) / (2 pi ratio x) between a and b = (1 -+ sqrt(ratio))^2. At
    ratio 1 the density is infinite at 0. Therefore the integral is over the angle t in
    x = 1 + ratio - 2 sqrt(ratio) cos t.
    """
    edges = np.linspace(0, np.pi, 8193)
    middles = (edges[1:] + edges[:-1]) / 2
    x = 1 + ratio - 2 * np.sqrt(ratio) * np.cos(middles)
    fractions = np.concatenate([[0.0], np.cumsum(np.sin(middles) ** 2 / x)])
    return 1 + ratio - 2 * np.sqrt(ratio) * np.cos(edges), fractions / fractions[-1]


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw each measure over the blocks, at the last step of each run. A second figure has the
    largest singular value over steps, for runs with three or more steps."""
    rows = rows[rows.block.notna()]
    if rows.empty:
        fix = "give an MLP, a Mixer or a SW-MLP"
        raise UserError("RUN", "the blocks have no matrices", fix, code="unsupported")
    sides = rows.slices * rows[["rows", "columns"]].min(axis=1)
    rows = rows.assign(
        edge=rows.sigma_max / rows.gaussian_edge.replace(0, 1),
        stable=rows.stable_rank / sides,
        effective=rows.effective_rank.astype(float) / sides,
        drift=rows.drift.astype(float).where(rows.step > 0),
    )
    titles = {
        "sigma_max": "largest singular value",
        "edge": "largest / Gaussian edge",
        "stable": "stable rank / side",
        "effective": "effective rank / side",
        "distance": "distance to Marchenko-Pastur",
        "drift": "change / initial norm",
    }
    figures = {"": draw_lines(rows, titles, x="block")}
    figures[""].axes[1].axhline(1, color=GRAY, lw=0.8)
    trained = rows[rows.groupby("run").step.transform("nunique") > 2]
    if len(trained):
        figures["training"] = draw_lines(trained, {"sigma_max": titles["sigma_max"]}, x="step")
    return figures


def draw_lines(rows: pd.DataFrame, titles: Mapping[str, str], *, x: str) -> Figure:
    """Draw a panel for each column, with a color for each run and a marker for each kind of matrix.
    `x` = "block" shows the last step and, pale, the initial weights. `x` = "step" shows mean and
    range over blocks."""
    colors = dict(zip(rows.run.unique(), cycle(COLORS), strict=False))
    markers = dict(zip(rows.name.unique(), cycle(MARKERS), strict=False))
    pale: dict[str, Any] = {"ls": ":", "alpha": 0.4}
    last = rows.groupby("run").step.transform("max")
    shown = rows if x == "step" else rows[rows.step.isin([0]) | (rows.step == last)]
    is_initial = (shown.step < last[shown.index]) & (x == "block")
    with looks(*colors):
        figure, axes = panels(len(titles), height=2.3 if len(titles) > 1 else 2.8)
        for panel, (column, title) in zip(axes, titles.items(), strict=True):
            known = shown.assign(value=shown[column].astype(float), initial=is_initial)
            parts = known.dropna(subset="value").groupby(["run", "name", "initial"], sort=False)
            for (run, name, initial), own in parts:
                values = own.groupby(x).value.agg(["min", "mean", "max"])
                style = pale if initial else {"marker": markers[name]}
                low, mean, high = (values[each] for each in values)
                draw_band(panel, values.index, low, mean, high, color=colors[run], lw=1, **style)
            panel.set(title=title, xlabel=x)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        for run, color in colors.items():
            axes[0].plot([], [], color=color, label=legible(run))
        for name, marker in markers.items():
            axes[0].plot([], [], marker, color=GRAY, label=name)
        if is_initial.any():
            axes[0].plot([], [], color=GRAY, label="initial", **pale)
        draw_legend(figure, axes[:1])
    return figure
