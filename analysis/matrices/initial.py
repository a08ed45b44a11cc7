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
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from analysis.matrices.spectra import Row, singular_values
from data_prep.progress import progress
from finetune.looks import BLUE, COLOURS, GREY, MARKERS, looks, panels
from pretrain.models.layers.sparse import draw_connections, largest_singular_value

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

OMEGA, GAMMA = 2**19, 2.0
SIDES = (
    (4, 360),
    (8, 252),
    (12, 203),
    (16, 173),
    (20, 152),
    (24, 136),
    (28, 124),
    (32, 113),
    (36, 104),
    (40, 96),
    (44, 89),
    (48, 83),
    (64, 64),
)
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


def of_seeds(cases: Sequence[Row], *, seeds: int, measure: Callable[[Row], Row]) -> list[Row]:
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
    return rows


def widths(
    sides: Sequence[tuple[int, int]] = SIDES,
    *,
    omega: float = OMEGA,
    gamma: float = GAMMA,
    seeds: int = 10,
) -> list[Row]:
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


def figure_4(*, quick: bool) -> tuple[Sequence[Row], Row, Figure]:
    """Rows; at the greatest width the measured mean and deviation beside the laws; the picture."""
    rows = widths(SIDES[::4] if quick else SIDES, seeds=2 if quick else 10)
    widest = [row for row in rows if row["width"] == max(each["width"] for each in rows)]
    found = [row["sw_mlp"] for row in widest]
    measured = {
        "width": widest[0]["width"],
        "measured": float(np.mean(found)),
        "deviation": _sd(found),
    }
    facts = {"widest": measured | {name: widest[0][name] for name in LAWS}, "seeds": len(widest)}
    return rows, facts, draw_widths(rows, what="Ω = 2^19, γ = 2")


def figure_s1(*, quick: bool) -> tuple[Sequence[Row], Row, Figure]:
    centre = sparser(seeds=2 if quick else 50, whole=True)
    right = sparser(
        (0.5, 1.0, 1.5), omegas=(100, 300, 1_000, 3_000), seeds=2 if quick else 10, whole=False
    )
    return [*centre, *right], {"seeds": len(centre)}, draw_sparser(centre, right)


def draw_widths(rows: Sequence[Row], *, what: str) -> Figure:
    with looks():
        figure, (axes,) = panels(1, height=2.9)
        measured = {
            "sw_mlp": "SW-MLP",
            "mixer_tokens": "Mixer, token mixing",
            "mixer_channels": "Mixer, channel mixing",
        }
        for (name, label), colour, mark in zip(measured.items(), COLOURS, MARKERS, strict=False):
            _over_seeds(axes, rows, "hidden_width", name, color=colour, fmt=mark, label=label)
        for (name, label), style in zip(LAWS.items(), ("-", ":", "--"), strict=True):
            law = sorted({(row["hidden_width"], row[name]) for row in rows})
            axes.plot(
                *zip(*law, strict=True),
                style,
                color=GREY if name == "dense" else "black",
                lw=1,
                label=label,
            )
        axes.set(xlabel="width of the hidden layer γm", ylabel="largest singular value", title=what)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _over_seeds(axes: Axes, rows: Sequence[Row], x: str, y: str, **style: Any) -> None:
    """Means and deviations."""
    at = sorted({row[x] for row in rows})
    groups = [[row[y] for row in rows if row[x] == each] for each in at]
    axes.errorbar(
        at,
        [float(np.mean(each)) for each in groups],
        [_sd(each) for each in groups],
        ms=4,
        capsize=2,
        **style,
    )


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def sparser(
    exponents: Sequence[float] = (SPARSER,),
    *,
    omegas: Sequence[int] = (SPARSER_OMEGA,),
    seeds: int,
    whole: bool,
) -> list[Row]:
    """Figure S.1, m x m matrices of about Omega connections. Centre: `whole`, all singular values,
    most rows without a connection. Right: the largest against Omega, as m and p follow from it; p m
    = Omega^((1 - a) / 2) grows, is 1, or vanishes.
    """

    def measure(case: Row) -> Row:
        matrix = sparse_matrix(case)
        values = singular_values(matrix) if whole else None
        found = {"connections": int(matrix.nnz)}
        if values is None:
            return found | {"sigma_max": largest_singular_value(matrix), "values": None}
        return found | {
            "sigma_max": float(values[0]),
            "values": values[values > 1e-7 * values[0]].tolist(),
        }

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


def draw_sparser(spectra: Sequence[Row], largest: Sequence[Row]) -> Figure:
    first = spectra[0]
    with looks():
        figure, (centre, right) = panels(2, height=2.6)
        values = np.concatenate([row["values"] for row in spectra])
        centre.hist(values, bins=60, color=BLUE, weights=np.full(len(values), 1 / len(spectra)))
        centre.axvline(2, color="black", lw=1, label="edge of a dense matrix, 1 + √γ = 2")
        scale = (first["density"] * first["width"]) ** -0.5
        centre.axvline(scale, color="black", lw=1, ls=":", label="deviation of one weight")
        title = (
            f"a = {first['a']:g}, Ω = {first['omega']:,}, m = {first['width']:,}; {len(spectra)}"
            " matrices"
        )
        centre.set(
            xlabel="singular value (those of 0 left out)", ylabel="number in a matrix", title=title
        )
        centre.legend()
        for number, a in enumerate(sorted({row["a"] for row in largest})):
            of_a = [row for row in largest if row["a"] == a]
            _over_seeds(
                right,
                of_a,
                "omega",
                "sigma_max",
                color=COLOURS[number],
                fmt=MARKERS[number],
                label=f"a = {a:g}",
            )
            law = sorted({(row["omega"], row["printed"]) for row in of_a})
            right.plot(*zip(*law, strict=True), "--", color=COLOURS[number], lw=1)
        right.plot([], [], "--", color=GREY, lw=1, label="√L₊")
        right.set(
            xscale="log", yscale="log", xlabel="connections Ω", ylabel="largest singular value"
        )
        right.set_title("γ = 1, m = Ω^((1+a)/2), p = Ω^-a")
        for axis in (right.xaxis, right.yaxis):
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(
                NullFormatter() if axis is right.xaxis else StrMethodFormatter("{x:,g}")
            )
        right.set_ylim(top=2 * right.get_ylim()[1])
        right.legend(loc="upper left", ncols=2)
    return figure
