"""Spectra of initial matrices, without any run: paper A's Figures 4 right and S.1.

gamma m x m matrices with connections of probability p, N(0, 1/(p m)). Paper A's (17) has their
largest singular value near sqrt(L+), L+ = c^2 + 3 c^2 sqrt(gamma) (1 - p) / q^2 with c = 1 +
sqrt(gamma) and q^2 = p m. As it is printed that is too large where gamma is not 1; with q^2 = p
gamma m it is what one measures (docs/papers.md).
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from analysis.matrices.spectra import Row, singular_values
from analysis.output import Result
from data_prep.progress import progress
from finetune.looks import BLUE, COLOURS, GREY, MARKERS, looks, panels
from pretrain.models.layers.sparse import draw_connections, largest_singular_value

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

OMEGA, GAMMA = 2**19, 2.0
SIDES = (
    (4, 360), (8, 252), (12, 203), (16, 173), (20, 152), (24, 136), (28, 124), (32, 113),
    (36, 104), (40, 96), (44, 89), (48, 83), (64, 64),
)  # fmt: skip
"""(C, S) of Figure 4."""
SPARSER, SPARSER_OMEGA = 1.5, 1_000
"""a of Figure S.1: m = Omega^((1 + a) / 2), p = Omega^-a."""
LAWS = {"dense": "1 + √γ", "printed": "√L₊, q² = pm (printed)", "with_gamma": "√L₊, q² = pγm"}


def sparse_matrix(case: Row) -> "csr_matrix":
    """From torch's generator."""
    width, gamma, density = case["width"], case["gamma"], case["density"]
    connections = draw_connections(width, num_outputs=round(gamma * width), density=density)
    return connections.matrix(
        torch.randn(len(connections.columns), dtype=torch.float64) / (density * width) ** 0.5
    )


def of_seeds(cases: Sequence[Row], *, seeds: int, measure: Callable[[Row], Row]) -> pd.DataFrame:
    """A row for each case (width, gamma, density) and seed of torch's generator, beside what the
    laws have."""
    rows = list[Row]()
    with (
        progress("initial matrices", total=len(cases) * seeds, unit="matrices") as line,
        torch.random.fork_rng(devices=[]),
    ):
        for case, seed in product(cases, range(seeds)):
            torch.manual_seed(seed)
            width, gamma, density = case["width"], case["gamma"], case["density"]
            edge = 1 + gamma**0.5
            printed, with_gamma = (
                edge * (1 + 3 * gamma**0.5 * (1 - density) / q2) ** 0.5
                for q2 in (density * width, density * gamma * width)
            )
            laws = {"dense": edge, "printed": printed, "with_gamma": with_gamma}
            rows.append(
                {**case, "hidden_width": gamma * width, "seed": seed, **laws, **measure(case)}
            )
            line.advance(note=f"m {width:,}")
    return pd.DataFrame(rows)


def widths(
    sides: Sequence[tuple[int, int]] = SIDES,
    *,
    omega: float = OMEGA,
    gamma: float = GAMMA,
    seeds: int = 10,
) -> pd.DataFrame:
    """Figure 4 right: at fixed Omega, of the Mixer of each width (its two matrices) and of the
    SW-MLP as wide."""
    cases = [
        {"channels": channels, "tokens": tokens, "width": channels * tokens, "gamma": gamma}
        | {"density": omega / (gamma * (channels * tokens) ** 2)}
        for channels, tokens in sides
    ]

    def measure(case: Row) -> Row:
        token, channel = (
            float(
                np.linalg.norm(
                    torch.randn(round(gamma * side), side, dtype=torch.float64).numpy(), 2
                )
                / side**0.5
            )
            for side in (case["tokens"], case["channels"])
        )
        return {
            "mixer_tokens": token,
            "mixer_channels": channel,
            "sw_mlp": largest_singular_value(sparse_matrix(case)),
        }

    return of_seeds(cases, seeds=seeds, measure=measure)


def figure_4(*, quick: bool) -> Result:
    """Return the rows, and for the greatest width the measured mean and deviation and the laws."""
    rows = widths(SIDES[::4] if quick else SIDES, seeds=2 if quick else 10)
    widest = rows[rows.width == rows.width.max()]
    measured = {"width": widest.width.iloc[0], "measured": widest.sw_mlp.mean()}
    measured |= {"deviation": widest.sw_mlp.std(), **widest[[*LAWS]].iloc[0]}
    facts = {"widest": measured, "seeds": len(widest)}
    return Result(rows, facts, {"": draw_widths(rows, title="Ω = 2^19, γ = 2")})


def figure_s1(*, quick: bool) -> Result:
    center = sparser(seeds=2 if quick else 50, with_all_values=True)
    omegas = (100, 300, 1_000, 3_000)
    right = sparser((0.5, 1.0, 1.5), omegas, seeds=2 if quick else 10, with_all_values=False)
    rows = pd.concat([center, right], ignore_index=True)
    return Result(rows, {"seeds": len(center)}, {"": draw_sparser(center, right)})


def draw_widths(rows: pd.DataFrame, *, title: str) -> Figure:
    measured = {
        "mixer_tokens": "Mixer, token mixing",
        "mixer_channels": "Mixer, channel mixing",
        "sw_mlp": "SW-MLP",
    }
    with looks():
        figure, (axes,) = panels(1, height=2.9)
        for (name, label), color, marker in zip(measured.items(), COLOURS, MARKERS, strict=False):
            style = {"color": color, "fmt": marker, "label": label}
            _draw_over_seeds(axes, rows.groupby("hidden_width")[name], **style)
        for (name, label), line in zip(LAWS.items(), ("-", ":", "--"), strict=True):
            law = rows.groupby("hidden_width")[name].first()
            color = GREY if name == "dense" else "black"
            axes.plot(law.index, law, line, color=color, lw=1, label=label)
        axes.set(xlabel="width of the hidden layer γm", ylabel="largest singular value")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _draw_over_seeds(axes: Axes, groups: Any, **style: Any) -> None:
    """Draw means and deviations."""
    means, deviations = groups.mean(), groups.std().fillna(0)
    axes.errorbar(means.index, means, deviations, ms=4, capsize=2, **style)


def sparser(
    exponents: Sequence[float] = (SPARSER,),
    omegas: Sequence[int] = (SPARSER_OMEGA,),
    *,
    seeds: int,
    with_all_values: bool,
) -> pd.DataFrame:
    """Return the m x m matrices of Figure S.1 with about Omega connections. Center: all singular
    values; most rows have no connection. Right: the largest against Omega. p m =
    Omega^((1 - a) / 2) grows, is 1, or vanishes.
    """

    def measure(case: Row) -> Row:
        matrix = sparse_matrix(case)
        row = {"connections": int(matrix.nnz)}
        values = singular_values(matrix) if with_all_values else None
        if values is None:
            return row | {"sigma_max": largest_singular_value(matrix)}
        nonzero = values[values > 1e-7 * values[0]]
        return row | {"sigma_max": float(values[0]), "values": nonzero.tolist()}

    cases = [
        {
            "a": a,
            "omega": omega,
            "width": round(omega ** ((1 + a) / 2)),
            "density": omega**-a,
            "gamma": 1.0,
        }
        for a, omega in product(exponents, omegas)
    ]
    return of_seeds(cases, seeds=seeds, measure=measure)


def draw_sparser(spectra: pd.DataFrame, largest: pd.DataFrame) -> Figure:
    first, count = spectra.iloc[0], len(spectra)
    with looks():
        figure, (center, right) = panels(2, height=2.6)
        values = np.concatenate([*spectra["values"]])
        center.hist(values, bins=60, color=BLUE, weights=np.full(len(values), 1 / count))
        center.axvline(2, color="black", lw=1, label="edge of a dense matrix, 1 + √γ = 2")
        scale = (first.density * first.width) ** -0.5
        center.axvline(scale, color="black", lw=1, ls=":", label="deviation of one weight")
        title = f"a = {first.a:g}, Ω = {first.omega:,}, m = {first.width:,}; {count} matrices"
        center.set(xlabel="singular value (without zeros)", ylabel="number in a matrix")
        center.set_title(title)
        center.legend()
        for number, (a, own) in enumerate(largest.groupby("a")):
            color, groups = COLOURS[number], own.groupby("omega")
            style = {"color": color, "fmt": MARKERS[number], "label": f"a = {a:g}"}
            _draw_over_seeds(right, groups.sigma_max, **style)
            law = groups.printed.first()
            right.plot(law.index, law, "--", color=color, lw=1)
        right.plot([], [], "--", color=GREY, lw=1, label="√L₊")
        right.set(xscale="log", yscale="log", xlabel="connections Ω")
        right.set(ylabel="largest singular value", title="γ = 1, m = Ω^((1+a)/2), p = Ω^-a")
        for axis in (right.xaxis, right.yaxis):
            axis.set_major_formatter("{x:,g}")
        right.xaxis.set_minor_formatter(NullFormatter())
        right.yaxis.set_minor_formatter(StrMethodFormatter("{x:,g}"))
        right.set_ylim(top=2 * right.get_ylim()[1])
        right.legend(loc="upper left", ncols=2)
    return figure
