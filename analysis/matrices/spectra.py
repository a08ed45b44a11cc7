"""Singular values of a run's matrices, from its initial weights to its last checkpoint, beside the law of random ones.

All of them come from the eigenvalues of the small Gram matrix in float64, which takes a third of a singular value decomposition's
time. An eigenvalue is wrong by about 1e-15 of the largest one, so a singular value of a thousandth of the largest by 1e-9 of
itself; below 1e-7 of the largest they are noise, and count in nothing that is measured here.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.sparse import csr_matrix

from analysis.matrices.weights import Array, Matrix, initial_model, matrices_of
from data_prep.images.lettering import legible
from data_prep.progress import progress
from finetune.looks import MARKERS, looks, panels
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import load_model
from pretrain.models.layers.sparse import largest_singular_value

LONGEST_SIDE = 4096
"""Of a Gram matrix: 134 MB of float64, of which three are there at once. Beyond it only the largest singular value is computed."""
LARGEST_DENSE = 4096 * 4096
"""Entries that a sparse matrix is filled up to before it is multiplied."""


@dataclass(frozen=True)
class Spectrum:
    """Of one matrix W at one step; stable and effective rank of the effective matrix are `copies` times those of W."""

    run: str
    step: int
    block: int | None
    name: str
    rows: int
    columns: int
    copies: int
    nonzero: int
    sigma_max: float
    frobenius: float
    gaussian_edge: float
    """The largest singular value of a dense Gaussian matrix with these sides and this Frobenius norm: Marchenko-Pastur's edge."""
    stable_rank: float
    """|W|_F^2 / sigma_max^2"""
    effective_rank: float | None
    """exp(H) of the singular values as shares of their sum; this and the next are None where the shorter side is too long."""
    distance: float | None
    """Kolmogorov's, of the squared singular values to Marchenko and Pastur's law of W's own variance: 0 of a random matrix."""
    drift: float | None
    """|W - W0|_F / |W0|_F; None where the initial W0 is not known."""


def spectra(runs: dict[str, list[Checkpoint]], *, device: str = "cpu") -> Iterator[Spectrum]:
    with progress("spectra", total=sum(map(len, runs.values())), unit="checkpoints") as line:
        for run, checkpoints in runs.items():
            card, begun = checkpoints[0].card, initial_model(checkpoints[0])
            size = card.image_size
            initial = [] if begun is None else list(matrices_of(begun, card.model, image_size=size))
            for matrix in initial:
                yield spectrum(matrix, run=run, step=0, initial=matrix, device=device)
            for opened in checkpoints:
                for number, matrix in enumerate(matrices_of(load_model(opened), card.model, image_size=size)):
                    before = initial[number] if initial else None
                    yield spectrum(matrix, run=run, step=opened.card.step, initial=before, device=device)
                line.advance(note=f"{run}, step {opened.card.step:,}")


def spectrum(matrix: Matrix, *, run: str, step: int, initial: Matrix | None, device: str = "cpu") -> Spectrum:
    weight, (rows, columns) = matrix.weight, matrix.weight.shape[-2:]
    values = singular_values(weight, device=device)
    of_weight = norm(weight)
    if values is None:
        largest = max(largest_singular_value(csr_matrix(each)) for each in (weight if weight.ndim == 3 else [weight]))
    else:
        largest = float(values[0])
    num_entries = int(np.prod(weight.shape))
    return Spectrum(
        run=run,
        step=step,
        block=matrix.block,
        name=matrix.name,
        rows=rows,
        columns=columns,
        copies=matrix.copies,
        nonzero=int(np.count_nonzero(weight) if isinstance(weight, np.ndarray) else weight.nnz),
        sigma_max=largest,
        frobenius=of_weight,
        gaussian_edge=of_weight * (num_entries**-0.5) * (rows**0.5 + columns**0.5),
        stable_rank=(of_weight / largest) ** 2 if largest else 0.0,
        effective_rank=None if values is None else effective_rank(values),
        distance=None if values is None else distance(values, rows=rows, columns=columns),
        drift=None if initial is None else norm(weight - initial.weight) / (norm(initial.weight) or 1.0),
    )


def norm(weight: Array | csr_matrix) -> float:
    return float(np.linalg.norm((weight if isinstance(weight, np.ndarray) else weight.data).ravel().astype(np.float64)))


def singular_values(weight: Array | csr_matrix, *, device: str = "cpu") -> Array | None:
    """As many as the shorter side, the largest first; of several matrices those of all. None where the side is too long."""
    num_values = int(np.prod(weight.shape[:-2])) * min(weight.shape[-2:])
    if weight.ndim == 3:
        found = [singular_values(each, device=device) for each in weight]
        return None if any(each is None for each in found) else -np.sort(-np.concatenate(found))  # type: ignore[arg-type]
    kept = weight if isinstance(weight, np.ndarray) else _without_empty(weight)
    if min(kept.shape) > LONGEST_SIDE:
        return None
    values = np.zeros(num_values)
    if kept.size:
        found_here = np.sqrt(np.maximum(_eigenvalues(kept, device=device), 0))[::-1]
        values[: len(found_here)] = found_here
    return values


def _without_empty(weight: csr_matrix) -> csr_matrix:
    """Rows and columns: they add singular values of 0 at most."""
    rows, columns = (weight.getnnz(axis) > 0 for axis in (1, 0))
    return weight[rows][:, columns]


def _eigenvalues(weight: Array | csr_matrix, *, device: str) -> Array:
    """Of the smaller of W W' and W'W, ascending."""
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    if not isinstance(tall, np.ndarray) and np.prod(tall.shape) > LARGEST_DENSE:
        gram = (tall.T @ tall).toarray()
    else:
        dense = (tall if isinstance(tall, np.ndarray) else tall.toarray()).astype(np.float64, copy=False)
        if device != "cpu":
            on_device = torch.from_numpy(dense).to(device)
            on_gpu: Array = torch.linalg.eigvalsh(on_device.T @ on_device).cpu().numpy()
            return on_gpu
        gram = dense.T @ dense  # numpy computes half of it
    if not np.isfinite(gram.trace()):
        raise ValueError("the weights are not finite; take an earlier checkpoint")
    found: Array = np.linalg.eigvalsh(gram)
    return found


def effective_rank(values: Array) -> float:
    shares = values[values > 0] / (values.sum() or 1.0)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def distance(values: Array, *, rows: int, columns: int) -> float:
    """The law is that of entries with W's own mean square, so a matrix that has only grown is as near as it was."""
    squares = np.sort(values.astype(np.float64) ** 2)
    if not squares.any():
        return 1.0
    places, shares = marchenko_pastur(min(rows, columns) / max(rows, columns))
    law = np.interp(squares / squares.mean(), places, shares, left=0.0, right=1.0)
    steps = np.arange(len(squares) + 1) / len(squares)
    return float(max(np.abs(law - steps[1:]).max(), np.abs(law - steps[:-1]).max()))


@lru_cache(maxsize=64)
def marchenko_pastur(ratio: float, num_points: int = 8192) -> tuple[Array, Array]:
    """(x, share below x) of the squared singular values over their mean, of a matrix whose shorter side is `ratio` of the longer.

    The density sqrt((b - x)(x - a)) / (2 pi ratio x) between a and b = (1 -+ sqrt(ratio))^2, summed over the angle t of
    x = 1 + ratio - 2 sqrt(ratio) cos t at the middles of small steps: at ratio 1 it is infinite at 0.
    """
    edges = np.linspace(0, np.pi, num_points + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    x = 1 + ratio - 2 * np.sqrt(ratio) * np.cos(middles)
    shares = np.concatenate([[0.0], np.cumsum(np.sin(middles) ** 2 / x)])
    return 1 + ratio - 2 * np.sqrt(ratio) * np.cos(edges), shares / shares[-1]


def rows_of(found: list[Spectrum]) -> list[dict[str, Any]]:
    return [asdict(each) for each in found]


def draw(found: list[Spectrum]) -> Figure:
    """Of each run's last step, block by block; pale what it began with. The lines of one run have one colour, those of one kind of
    matrix one mark."""
    runs = list(dict.fromkeys(each.run for each in found))
    names = list(dict.fromkeys(each.name for each in found if each.block is not None))
    if not names:
        raise ValueError(f"{runs[0]}: has no blocks with matrices, so there is nothing to draw; give an MLP, a Mixer or a SW-MLP")
    shown: dict[str, Callable[[Spectrum], float | None]] = {
        "largest singular value": lambda each: each.sigma_max,
        "largest / Gaussian edge": lambda each: each.sigma_max / (each.gaussian_edge or 1),
        "stable rank / side": lambda each: each.stable_rank / min(each.rows, each.columns),
        "effective rank / side": lambda each: each.effective_rank and each.effective_rank / min(each.rows, each.columns),
        "distance to Marchenko-Pastur": lambda each: each.distance,
        "drift from the initial": lambda each: each.drift if each.step else None,
    }
    with looks(*runs):
        figure, axes = panels(len(shown))
        for panel, (title, value) in zip(axes, shown.items(), strict=True):
            for number, run in enumerate(runs):
                _draw_run(panel, [each for each in found if each.run == run], names, value, colour=f"C{number % 6}")
            panel.set_title(title)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[1].axhline(1, color="grey", lw=0.8)
        for panel in axes[3:]:
            panel.set_xlabel("block")
        for number, run in enumerate(runs):
            axes[0].plot([], [], color=f"C{number % 6}", label=legible(run))
        for name, mark in zip(names, cycle(MARKERS), strict=False):
            axes[0].plot([], [], mark, color="grey", label=name, ms=4, ls="none")
        axes[0].plot([], [], color="grey", alpha=0.4, ls=":", label="initial")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_run(panel: Axes, of_run: list[Spectrum], names: list[str], value: Any, *, colour: str) -> None:
    last = max(each.step for each in of_run)
    for name, mark in zip(names, cycle(MARKERS), strict=False):
        style: dict[str, Any] = {"ls": "-", "marker": mark, "ms": 4}
        for step in (last, 0):
            pairs = [(each.block, value(each)) for each in of_run if each.name == name and each.step == step]
            drawn = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
            if drawn:
                panel.plot(*zip(*drawn, strict=True), color=colour, lw=1, **style)
            style = {"ls": ":", "alpha": 0.4}


def draw_training(found: list[Spectrum]) -> Figure | None:
    """The largest singular value over the steps, a line for each kind of matrix: mean over the blocks, and their range. None where
    no run has three steps."""
    lines: dict[tuple[str, str], dict[int, list[float]]] = {}
    for each in found:
        if each.block is not None:
            lines.setdefault((each.run, each.name), {}).setdefault(each.step, []).append(each.sigma_max)
    lines = {key: steps for key, steps in lines.items() if len(steps) > 2}
    if not lines:
        return None
    with looks(*(run for run, _ in lines)):
        figure, (axes,) = panels(1, height=2.8)
        runs, names = (list(dict.fromkeys(each)) for each in zip(*lines, strict=True))
        for (run, name), steps in lines.items():
            colour, mark = f"C{runs.index(run) % 6}", MARKERS[names.index(name) % len(MARKERS)]
            low, mean, high = (list(map(each, steps.values())) for each in (min, np.mean, max))
            axes.plot(list(steps), mean, label=f"{legible(run)}, {name}", color=colour, marker=mark)
            axes.fill_between(list(steps), low, high, color=colour, alpha=0.15)
        axes.set(xlabel="step", ylabel="largest singular value", ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=1)
    return figure
