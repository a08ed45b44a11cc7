"""Spectra of initial matrices, without any run: Figures 4 right and S.1 of the Mixer paper.

The matrices are gamma m x m. A connection has probability p and weight N(0, 1/(p m)). Equation (17)
of the paper predicts the largest singular value sqrt(L+):

    L+ = c^2 + 3 c^2 sqrt(gamma) (1 - p) / q^2,   c = 1 + sqrt(gamma),   q^2 = p m

This value is too large for gamma > 1, too small for gamma < 1. It agrees with the measurement
if q^2 = p gamma m (docs/papers.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.matrices.spectra import NOISE, norm, singular_values
from analysis.output import Result, draw_legend, mark
from data_prep.progress import ProgressLine
from finetune.looks import BLUE, GRAY, looks, panels
from pretrain.models.layers.sparse import draw_connections, largest_singular_value

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Case = Mapping[str, Any]
"""Width, gamma and density of a matrix, and the (C, S) or exponent a that determine the width."""
OMEGA, GAMMA = 2**19, 2.0
SIDES = (
    (4, 360), (8, 252), (12, 203), (16, 173), (20, 152), (24, 136), (28, 124), (32, 113),
    (36, 104), (40, 96), (44, 89), (48, 83), (64, 64),
)  # fmt: skip
"""(C, S) of the Mixers in Figure 4."""
SPARSER, SPARSER_OMEGA = 1.5, 1_000
"""Values a and Omega of Figure S.1, center: m = Omega^((1 + a) / 2), p = Omega^-a."""
EXPONENTS = tuple(n / 4 for n in range(7))
"""Values of a in Figure S.1, right: our choice, because the paper's text has none."""
LAWS = {"dense": "1 + √γ", "printed": "√L₊, q² = pm (printed)", "with_gamma": "√L₊, q² = pγm"}


def sparse_matrix(case: Case) -> "csr_matrix":
    """Return a random matrix, drawn with torch's global generator."""
    width, gamma, density = case["width"], case["gamma"], case["density"]
    connections = draw_connections(width, num_outputs=round(gamma * width), density=density)
    weights = torch.randn(len(connections.columns), dtype=torch.float64)
    return connections.matrix(weights / (density * width) ** 0.5)


def _repeated(cases: Sequence[Case], *, seeds: int) -> Iterator[dict[str, Any]]:
    """Seed torch for each case and seed, and yield a row with the largest singular values that the
    laws predict."""
    title, total = "initial matrices", len(cases) * seeds
    with (
        ProgressLine(title, total=total, unit="matrices") as line,
        torch.random.fork_rng(devices=[]),
    ):
        for case, seed in product(cases, range(seeds)):
            torch.manual_seed(seed)
            width, gamma, density = case["width"], case["gamma"], case["density"]
            edge = 1 + gamma**0.5
            row = {**case, "hidden_width": gamma * width, "seed": seed, "dense": edge}
            for law, q2 in (("printed", density * width), ("with_gamma", density * gamma * width)):
                row[law] = edge * (1 + 3 * gamma**0.5 * (1 - density) / q2) ** 0.5
            yield row
            line.advance(note=f"m {width:,}")


def widths(
    sides: Sequence[tuple[int, int]] = SIDES,
    *,
    omega: float = OMEGA,
    gamma: float = GAMMA,
    seeds: int = 10,
) -> pd.DataFrame:
    """Return the rows of Figure 4 right: largest singular values of both matrices of a Mixer, and
    of the SW-MLP with equal width and Omega."""
    cases = [
        {"channels": channels, "tokens": tokens, "width": channels * tokens, "gamma": gamma}
        | {"density": omega / (gamma * (channels * tokens) ** 2)}
        for channels, tokens in sides
    ]
    rows = []
    for row in _repeated(cases, seeds=seeds):
        for name in ("tokens", "channels"):
            side = row[name]
            weight = torch.randn(round(gamma * side), side, dtype=torch.float64).numpy()
            row[f"mixer_{name}"] = float(np.linalg.norm(weight, 2) / side**0.5)
        rows.append(row | {"sw_mlp": largest_singular_value(sparse_matrix(row))})
    return pd.DataFrame(rows)


def sparser(
    exponents: Sequence[float], omegas: Sequence[int], *, seeds: int, with_all_values: bool
) -> pd.DataFrame:
    """Return the rows of Figure S.1: all nonzero singular values, or only the largest one, of m x m
    matrices with about Omega connections. A matrix Z is divided by the root of the mean diagonal
    entry of Z Z^T (D.1). For a = 0 (dense), the largest value tends to 2."""
    cases = [
        {"a": a, "omega": omega, "width": round(omega ** ((1 + a) / 2))}
        | {"density": omega**-a, "gamma": 1.0}
        for a, omega in product(exponents, omegas)
    ]
    rows = []
    for row in _repeated(cases, seeds=seeds):
        matrix = sparse_matrix(row)
        matrix /= norm(matrix) / row["width"] ** 0.5
        row["connections"] = int(matrix.nnz)
        values = singular_values(matrix) if with_all_values else None
        if values is None:
            row["sigma_max"] = largest_singular_value(matrix)
        else:  # most rows have no connection
            row["sigma_max"] = values[0]
            row["values"] = values[values > NOISE * values[0]].tolist()
        rows.append(row)
    return pd.DataFrame(rows)


def figure_4(*, quick: bool) -> Result:
    """Return Figure 4 right. Its `facts` describe the greatest width."""
    rows = widths(SIDES[::4] if quick else SIDES, seeds=2 if quick else 10)
    widest = rows[rows.width == rows.width.max()]
    measured = {"width": widest.width.iloc[0], "measured": widest.sw_mlp.mean()}
    measured |= {"deviation": widest.sw_mlp.std(), **widest[[*LAWS]].iloc[0]}
    facts = {"widest": measured, "seeds": len(widest)}
    return Result(rows, facts, {"": draw_widths(rows, title="Ω = 2^19, γ = 2")})


def figure_s1(*, quick: bool) -> Result:
    center = sparser((SPARSER,), (SPARSER_OMEGA,), seeds=2 if quick else 50, with_all_values=True)
    omegas, seeds = (SPARSER_OMEGA // 10, SPARSER_OMEGA, SPARSER_OMEGA * 10), 2 if quick else 10
    right = sparser(EXPONENTS, omegas, seeds=seeds, with_all_values=False)
    rows = pd.concat([center, right], ignore_index=True)
    facts = {"seeds": {"center": len(center), "right": seeds}}
    return Result(rows, facts, {"": draw_sparser(center, right)})


def draw_widths(rows: pd.DataFrame, *, title: str) -> Figure:
    by_width = rows.groupby("hidden_width")
    measured = {
        "mixer_tokens": "Mixer, token mixing",
        "mixer_channels": "Mixer, channel mixing",
        "sw_mlp": "SW-MLP",
    }
    with looks():
        figure, (axes,) = panels(1, height=2.9)
        for number, (name, label) in enumerate(measured.items()):
            _draw_over_seeds(axes, by_width[name], number, label)
        for (name, label), line in zip(LAWS.items(), ("-", ":", "--"), strict=True):
            law, color = by_width[name].first(), GRAY if name == "dense" else "black"
            axes.plot(law.index, law, line, color=color, lw=1, label=label)
        axes.set(xlabel="width of the hidden layer γm", ylabel="largest singular value")
        axes.set_title(title)
        draw_legend(figure, [axes])
    return figure


def _draw_over_seeds(axes: Axes, seeds: Any, number: int, label: str) -> None:
    means, deviations = seeds.mean(), seeds.std().fillna(0)
    style: dict[str, Any] = mark(number) | {"linestyle": "", "label": label}
    axes.errorbar(means.index, means, deviations, ms=4, capsize=2, **style)


def draw_sparser(spectra: pd.DataFrame, largest: pd.DataFrame) -> Figure:
    first, count = spectra.iloc[0], len(spectra)
    with looks():
        figure, (center, right) = panels(2, height=2.6)
        values = np.concatenate([*spectra["values"]])
        center.hist(values, bins=60, color=BLUE, weights=np.full(len(values), 1 / count))
        center.axvline(2, color="black", lw=1, label="edge of a dense matrix, 1 + √γ = 2")
        scale = (first.density * first.width) ** -0.5
        center.axvline(scale, color="black", lw=1, ls=":", label="SD of a nonzero weight")
        title = f"a = {first.a:g}, Ω = {first.omega:,}, m = {first.width:,}; {count} matrices"
        center.set(xlabel="singular value (without zeros)", ylabel="number per matrix")
        center.set_title(title)
        for number, (omega, own) in enumerate(largest.groupby("omega")):
            _draw_over_seeds(right, own.groupby("a").sigma_max, number, f"Ω = {omega:,}")
        right.axhline(2, color=GRAY, lw=1, label="dense matrix (a = 0) in the limit: 2")
        right.set(xlabel="a", ylabel="largest singular value", ylim=(0, None))
        right.set_title("γ = 1, m = Ω^((1+a)/2), p = Ω^-a")
        draw_legend(figure, [center, right])
    return figure
