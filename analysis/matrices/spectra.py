"""Singular values of a run's matrices, from its initial weights to its last checkpoint, compared
with the law of random matrices.

They are the roots of the eigenvalues of the small Gram matrix in float64, which takes a third of
the time of a singular value decomposition. An eigenvalue has an error of about 1e-15 of the largest
one, so a singular value of a thousandth of the largest has a relative error of 1e-9. Values below
1e-7 of the largest are noise and have no effect on any measure.

The columns of a row, for each matrix W and step (the effective matrix has `copies` times both
ranks):

    gaussian_edge   largest singular value of a Gaussian matrix with these sides and Frobenius norm
    stable_rank     |W|_F^2 / sigma_max^2
    effective_rank  exp(H) of the singular values divided by their sum; null for large matrices
    distance        Kolmogorov's distance between the squared singular values and Marchenko and
                    Pastur's law for the variance of W; null for large matrices
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
from analysis.output import Result, draw_band
from data_prep.errors import UserError
from data_prep.images.lettering import legible
from finetune.looks import COLOURS, GREY, MARKERS, looks, panels
from pretrain.models.layers.sparse import largest_singular_value

Row = Mapping[str, Any]
LONGEST_SIDE = 4096
"""Of a Gram matrix: 134 MB of float64, of which three are there at once. Beyond it only the largest
singular value is computed."""
LARGEST_DENSE = 4096 * 4096
"""Entries that a sparse matrix is filled up to before it is multiplied."""


def spectra(places: list[Path], *, quick: bool, device: torch.device) -> Result:
    runs, inputs = checkpoints_of(places, newest_only=quick)
    rows = pd.DataFrame(
        {
            "run": run,
            "step": step,
            **spectrum(matrix, initial=initial[n] if initial else None, device=device.type),
        }
        for run, _, step, matrices, initial in steps_of(runs, what="spectra")
        for n, matrix in enumerate(matrices)
    )
    return Result(rows, {"device": device.type}, draw(rows), inputs)


def spectrum(matrix: Matrix, *, initial: Matrix | None, device: str = "cpu") -> Row:
    weight, (rows, columns) = matrix.weight, matrix.weight.shape[-2:]
    values, frobenius = singular_values(weight, device=device), norm(weight)
    if values is None:
        largest = max(
            largest_singular_value(csr_matrix(each))
            for each in (weight if weight.ndim == 3 else [weight])
        )
    else:
        largest = float(values[0])
    return {
        "block": matrix.block,
        "name": matrix.name,
        "rows": rows,
        "columns": columns,
        "slices": int(np.prod(weight.shape[:-2])),
        "copies": matrix.copies,
        "nonzero": int(np.count_nonzero(weight) if isinstance(weight, np.ndarray) else weight.nnz),
        "sigma_max": largest,
        "frobenius": frobenius,
        "gaussian_edge": float(
            frobenius * np.prod(weight.shape) ** -0.5 * (rows**0.5 + columns**0.5)
        ),
        "stable_rank": (frobenius / largest) ** 2 if largest else 0.0,
        "effective_rank": None if values is None else effective_rank(values),
        "distance": (
            None
            if values is None
            else distance(values, ratio=min(rows, columns) / max(rows, columns))
        ),
        "drift": (
            None
            if initial is None
            else norm(weight - initial.weight) / (norm(initial.weight) or 1.0)
        ),
    }


def norm(weight: Array | csr_matrix) -> float:
    return float(
        np.linalg.norm(
            (weight if isinstance(weight, np.ndarray) else weight.data).ravel().astype(np.float64)
        )
    )


def singular_values(weight: Array | csr_matrix, *, device: str = "cpu") -> Array | None:
    """As many as the shorter side, the largest first; of several matrices those of all. None where
    the side is too long."""
    if weight.ndim == 3:
        found = [singular_values(each, device=device) for each in weight]
        return None if any(each is None for each in found) else -np.sort(-np.concatenate(found))  # type: ignore[arg-type]
    kept = weight
    if not isinstance(
        weight, np.ndarray
    ):  # empty rows and columns add singular values of 0 at most
        kept = weight[weight.getnnz(1) > 0][:, weight.getnnz(0) > 0]
    if min(kept.shape) > LONGEST_SIDE:
        return None
    if not isinstance(kept, np.ndarray) and np.prod(kept.shape) > LARGEST_DENSE:
        gram = kept.T @ kept if kept.shape[0] >= kept.shape[1] else kept @ kept.T
        squares = np.linalg.eigvalsh(gram.toarray())
    else:
        squares = squared_singular_values(
            kept if isinstance(kept, np.ndarray) else kept.toarray(), device=device
        )
    values = np.zeros(min(weight.shape))
    values[: len(squares)] = np.sqrt(np.maximum(squares, 0))[::-1]
    return values


def squared_singular_values(dense: Array, *, device: str) -> Array:
    """Ascending, of a matrix or of each of many: the eigenvalues of the smaller of W W' and W'W."""
    tall = (dense if dense.shape[-2] >= dense.shape[-1] else dense.swapaxes(-1, -2)).astype(
        np.float64, copy=False
    )
    if device == "cpu":
        return np.linalg.eigvalsh(
            tall.swapaxes(-1, -2) @ tall
        )  # of one matrix numpy computes half of the product
    on_device = torch.from_numpy(tall).to(device)
    found: Array = torch.linalg.eigvalsh(on_device.mT @ on_device).cpu().numpy()
    return found


def effective_rank(values: Array) -> float:
    shares = values[values > 0] / (values.sum() or 1.0)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def distance(values: Array, *, ratio: float) -> float:
    """The law is that of entries with W's own mean square, so a matrix that has only grown is as
    near as it was."""
    squares = np.sort(values.astype(np.float64) ** 2)
    if not squares.any():
        return 1.0
    law = np.interp(squares / squares.mean(), *marchenko_pastur(ratio), left=0.0, right=1.0)
    steps = np.arange(len(squares) + 1) / len(squares)
    return float(max(np.abs(law - steps[1:]).max(), np.abs(law - steps[:-1]).max()))


@lru_cache(maxsize=64)
def marchenko_pastur(ratio: float, num_points: int = 8192) -> tuple[Array, Array]:
    """(x, share below x) of the squared singular values over their mean, of a matrix whose shorter
    side is `ratio` of the longer.

    The density sqrt((b - x)(x - a)) / (2 pi ratio x) between a and b = (1 -+ sqrt(ratio))^2, summed
    over the angle t of x = 1 + ratio - 2 sqrt(ratio) cos t at the middles of small steps: at ratio
    1 it is infinite at 0.
    """
    edges = np.linspace(0, np.pi, num_points + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    x = 1 + ratio - 2 * np.sqrt(ratio) * np.cos(middles)
    shares = np.concatenate([[0.0], np.cumsum(np.sin(middles) ** 2 / x)])
    return 1 + ratio - 2 * np.sqrt(ratio) * np.cos(edges), shares / shares[-1]


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw each run's last step, block by block, and the largest singular value over steps if there
    are three steps."""
    rows = rows[rows.block.notna()]
    if rows.empty:
        fix = "give an MLP, a Mixer or a SW-MLP"
        raise UserError("RUN", "its blocks have no matrices", fix, code="unsupported")
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
        "drift": "drift from the initial",
    }
    figures = {"": draw_lines(rows, titles, x="block")}
    figures[""].axes[1].axhline(1, color=GREY, lw=0.8)
    trained = rows[rows.groupby("run").step.transform("nunique") > 2]
    if len(trained):
        figures["training"] = draw_lines(trained, {"sigma_max": titles["sigma_max"]}, x="step")
    return figures


def draw_lines(rows: pd.DataFrame, titles: Mapping[str, str], *, x: str) -> Figure:
    """Draw a panel for each column. The lines of a run have one color, those of a kind of matrix
    one marker. Over blocks: the run's last step, and pale its initial weights; over steps: the mean
    and range over all blocks."""
    runs, names = rows.run.unique().tolist(), rows.name.unique().tolist()
    colors, markers = (
        dict(zip(keys, cycle(values), strict=False))
        for keys, values in ((runs, COLOURS), (names, MARKERS))
    )
    pale: dict[str, Any] = {"ls": ":", "alpha": 0.4}
    is_last = rows.step == rows.groupby("run").step.transform("max")
    with looks(*runs):
        figure, axes = panels(len(titles), height=2.3 if len(titles) > 1 else 2.8)
        for panel, (column, title) in zip(axes, titles.items(), strict=True):
            known = rows.assign(value=rows[column].astype(float)).dropna(subset="value")
            for (run, name), own in known.groupby(["run", "name"], sort=False):
                of_steps = [(own, {"marker": markers[name]})]
                if x == "block":
                    last = own[is_last[own.index]]
                    of_steps = [(own[own.step == 0], pale), (last, of_steps[0][1])]
                for part, style in of_steps:
                    values = part.groupby(x).value.agg(["min", "mean", "max"])
                    low, mean, high = (values[each] for each in values)
                    color = {"color": colors[run], "lw": 1}
                    draw_band(panel, values.index, low, mean, high, **color, **style)
            panel.set(title=title, xlabel=x)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        for run, color in colors.items():
            axes[0].plot([], [], color=color, label=legible(run))
        for name, marker in markers.items():
            axes[0].plot([], [], marker, color=GREY, label=name)
        if x == "block" and not is_last.all():
            axes[0].plot([], [], color=GREY, label="initial", **pale)
        figure.legend(loc="outside lower center", ncols=3 if len(titles) > 1 else 2)
    return figure
