"""Singular values of a run's matrices, from its initial weights to its last checkpoint, beside the
law of random ones.

All of them come from the eigenvalues of the small Gram matrix in float64, which takes a third of a
singular value decomposition's time. An eigenvalue is wrong by about 1e-15 of the largest one, so a
singular value of a thousandth of the largest by 1e-9 of itself; below 1e-7 of the largest they are
noise, and count in nothing that is measured here.

A row for each matrix W and step; of the effective matrix both ranks are `copies` times those of W:

    gaussian_edge   largest singular value of a dense Gaussian matrix with these sides and this Frobenius norm
    stable_rank     |W|_F^2 / sigma_max^2
    effective_rank  exp(H) of the singular values as shares of their sum; null, as the next, where
    the shorter side is too long distance        Kolmogorov's, of the squared singular values to
    Marchenko and Pastur's law of W's own variance drift           |W - W0|_F / |W0|_F; null where
    the initial W0 is not known
"""  # noqa: E501 (a table)

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import cycle, product
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.sparse import csr_matrix

from analysis.matrices.weights import Array, Matrix, steps_of
from analysis.output import draw_band
from data_prep.images.lettering import legible
from finetune.looks import COLOURS, GREY, MARKERS, looks, panels
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.models.layers.sparse import largest_singular_value

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]
LONGEST_SIDE = 4096
"""Of a Gram matrix: 134 MB of float64, of which three are there at once. Beyond it only the largest
singular value is computed."""
LARGEST_DENSE = 4096 * 4096
"""Entries that a sparse matrix is filled up to before it is multiplied."""


def spectra(runs: dict[str, list[Checkpoint]], *, device: str = "cpu") -> Iterator[Row]:
    for run, _, step, matrices, initial in steps_of(runs, what="spectra"):
        for number, matrix in enumerate(matrices):
            yield {
                "run": run,
                "step": step,
                **spectrum(matrix, initial=initial[number] if initial else None, device=device),
            }


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


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """Of each run's last step, block by block; and where there are three steps the largest singular
    value over them."""
    of_blocks = [row for row in rows if row["block"] is not None]
    if not of_blocks:
        raise ValueError(
            f"{rows[0]['run']}: has no blocks with matrices; give an MLP, a Mixer or a SW-MLP"
        )

    def per_side(name: str) -> Value:
        return lambda row: (
            row[name] and row[name] / (row["slices"] * min(row["rows"], row["columns"]))
        )

    shown: dict[str, Value] = {
        "largest singular value": lambda row: row["sigma_max"],
        "largest / Gaussian edge": lambda row: row["sigma_max"] / (row["gaussian_edge"] or 1),
        "stable rank / side": per_side("stable_rank"),
        "effective rank / side": per_side("effective_rank"),
        "distance to Marchenko-Pastur": lambda row: row["distance"],
        "drift from the initial": lambda row: row["drift"] if row["step"] else None,
    }
    figures = {"": draw_lines(of_blocks, shown, x="block")}
    figures[""].axes[1].axhline(1, color=GREY, lw=0.8)
    steps = {
        run: {row["step"] for row in of_blocks if row["run"] == run}
        for run in {row["run"] for row in of_blocks}
    }
    if trained := [row for row in of_blocks if len(steps[row["run"]]) > 2]:
        figures["training"] = draw_lines(
            trained, {"largest singular value": shown["largest singular value"]}, x="step"
        )
    return figures


def draw_lines(rows: Sequence[Row], shown: Mapping[str, Value], *, x: str) -> Figure:
    """A panel for each value; the lines of one run have one colour, those of one kind of matrix one
    mark. Over blocks: at the run's last step, pale what it began with; over steps: the mean of all
    blocks, and their range."""
    runs, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("run", "name"))
    last = {run: max(row["step"] for row in rows if row["run"] == run) for run in runs}
    colours, marks = (
        dict(zip(runs, cycle(COLOURS), strict=False)),
        dict(zip(names, cycle(MARKERS), strict=False)),
    )
    with looks(*runs):
        figure, axes = panels(len(shown), height=2.3 if len(shown) > 1 else 2.8)
        for panel, (title, value) in zip(axes, shown.items(), strict=True):
            for run, name in product(runs, names):
                own = [row for row in rows if (row["run"], row["name"]) == (run, name)]
                styles: dict[Any, dict[str, Any]] = {
                    0: {"ls": ":", "alpha": 0.4},
                    last[run]: {"marker": marks[name]},
                }
                for step, style in styles.items() if x == "block" else [(None, styles[last[run]])]:
                    groups: dict[int, list[float]] = {}
                    for row in own:
                        if step in (None, row["step"]) and (found := value(row)) is not None:
                            groups.setdefault(row[x], []).append(found)
                    low, mean, high = (
                        list(map(each, groups.values())) for each in (min, fmean, max)
                    )
                    draw_band(panel, [*groups], low, mean, high, color=colours[run], lw=1, **style)
            panel.set(title=title, xlabel=x)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        for run, colour in colours.items():
            axes[0].plot([], [], color=colour, label=legible(run))
        for name, mark in marks.items():
            axes[0].plot([], [], mark, color=GREY, label=name)
        if x == "block" and any(row["step"] < last[row["run"]] for row in rows):
            axes[0].plot([], [], ":", color=GREY, alpha=0.4, label="initial")
        figure.legend(loc="outside lower center", ncols=3 if len(shown) > 1 else 2)
    return figure
