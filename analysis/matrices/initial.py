"""Spectra of initial matrices, without any run: paper A's Figures 4 right and S.1.

gamma m x m matrices with connections of probability p, N(0, 1/(p m)). Paper A's (17) has their largest singular value near
sqrt(L+), L+ = c^2 + 3 c^2 sqrt(gamma) (1 - p) / q^2 with c = 1 + sqrt(gamma) and q^2 = p m. As it is printed that is too large
where gamma is not 1; with q^2 = p gamma m it is what one measures (docs/papers.md).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from analysis.matrices.spectra import singular_values
from data_prep.progress import progress
from finetune.looks import BLUE, GREY, RED, looks, panels
from pretrain.models.layers.sparse import draw_connections, largest_singular_value

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

OMEGA, GAMMA = 2**19, 2.0
SIDES = (
    (4, 360), (8, 252), (12, 203), (16, 173), (20, 152), (24, 136), (28, 124), (32, 113), (36, 104), (40, 96), (44, 89), (48, 83),
    (64, 64),
)  # fmt: skip
"""(C, S) of Figure 4."""
SPARSER, SPARSER_OMEGA = 1.5, 1_000
"""a of Figure S.1: m = Omega^((1 + a) / 2), p = Omega^-a."""


def sparse_matrix(width: int, *, gamma: float, density: float) -> "csr_matrix":
    """From torch's generator."""
    connections = draw_connections(width, num_outputs=round(gamma * width), density=density)
    return connections.matrix(torch.randn(len(connections.columns), dtype=torch.float64) / (density * width) ** 0.5)


def edge(*, gamma: float, density: float, q2: float) -> float:
    """sqrt(L+)"""
    c2 = (1 + gamma**0.5) ** 2
    return float((c2 + 3 * c2 * gamma**0.5 * (1 - density) / q2) ** 0.5)


def _laws(width: int, *, gamma: float, density: float) -> dict[str, float]:
    q2 = density * width
    return {
        "dense": 1 + gamma**0.5,
        "printed": edge(gamma=gamma, density=density, q2=q2),
        "with_gamma": edge(gamma=gamma, density=density, q2=q2 * gamma),
    }


def widths(
    sides: Sequence[tuple[int, int]] = SIDES, *, omega: float = OMEGA, gamma: float = GAMMA, seeds: int = 10
) -> list[dict[str, Any]]:
    """Figure 4 right: at fixed Omega, of the Mixer of each width (its two matrices) and of the SW-MLP as wide."""
    rows = []
    with progress("largest singular values", total=len(sides) * seeds, unit="matrices") as line, torch.random.fork_rng(devices=[]):
        for channels, tokens in sides:
            width = tokens * channels
            density = omega / (gamma * width**2)
            for seed in range(seeds):
                torch.manual_seed(seed)
                token, channel = (
                    np.linalg.norm(torch.randn(round(gamma * side), side, dtype=torch.float64).numpy(), 2) / side**0.5
                    for side in (tokens, channels)
                )
                sparse = largest_singular_value(sparse_matrix(width, gamma=gamma, density=density))
                facts = {"channels": channels, "tokens": tokens, "width": width, "density": density, "seed": seed}
                found = {"sw_mlp": sparse, "mixer_tokens": float(token), "mixer_channels": float(channel)}
                rows.append(facts | found | _laws(width, gamma=gamma, density=density) | {"hidden_width": gamma * width})
                line.advance(note=f"m {width:,}")
    return rows


def facts_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """At the greatest width: measured mean and deviation beside the laws."""
    widest = [row for row in rows if row["width"] == max(each["width"] for each in rows)]
    found = [row["sw_mlp"] for row in widest]
    return {
        "widest": {
            "width": widest[0]["width"],
            "measured": float(np.mean(found)),
            "deviation": float(np.std(found, ddof=1)) if len(found) > 1 else None,
            **{
                f"sqrt(L+) {name}" if name != "dense" else "1 + sqrt(gamma)": widest[0][name]
                for name in ("dense", "printed", "with_gamma")
            },
        },
        "seeds": len(widest),
    }


def draw_widths(rows: list[dict[str, Any]], *, what: str) -> Figure:
    at = sorted({row["hidden_width"] for row in rows})
    by_width = [[row for row in rows if row["hidden_width"] == each] for each in at]
    with looks():
        figure, (axes,) = panels(1, height=2.9)
        marks = (("sw_mlp", "SW-MLP", BLUE, "o"), ("mixer_tokens", "Mixer, token mixing", RED, "s"))
        for name, label, colour, mark in (*marks, ("mixer_channels", "Mixer, channel mixing", "#228833", "^")):
            values = [np.array([row[name] for row in group]) for group in by_width]
            spread = [each.std(ddof=1) if len(each) > 1 else 0.0 for each in values]
            axes.errorbar(at, [each.mean() for each in values], spread, fmt=mark, ms=3.5, color=colour, capsize=2, label=label)
        for name, label, style in (
            ("dense", "1 + √γ", "-"),
            ("printed", "√L₊, q² = pm (printed)", ":"),
            ("with_gamma", "√L₊, q² = pγm", "--"),
        ):
            axes.plot(
                at, [group[0][name] for group in by_width], style, color=GREY if name == "dense" else "black", lw=1, label=label
            )
        axes.set(xlabel="width of the hidden layer γm", ylabel="largest singular value", title=what)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def sparser(*, a: float = SPARSER, omega: int = SPARSER_OMEGA, seeds: int = 50) -> list[dict[str, Any]]:
    """Figure S.1 centre: all singular values of an m x m matrix that has about Omega connections, most rows without any."""
    width, density, rows = round(omega ** ((1 + a) / 2)), omega**-a, []
    with progress("spectra of sparse matrices", total=seeds, unit="matrices") as line, torch.random.fork_rng(devices=[]):
        for seed in range(seeds):
            torch.manual_seed(seed)
            matrix = sparse_matrix(width, gamma=1.0, density=density)
            values = singular_values(matrix)
            assert values is not None
            facts = {"a": a, "omega": omega, "width": width, "density": density, "seed": seed, "connections": int(matrix.nnz)}
            rows.append(facts | {"sigma_max": float(values[0]), "values": values[values > 1e-7 * values[0]].tolist()})
            line.advance()
    return rows


def exponents(
    exponents: Sequence[float] = (0.5, 1.0, 1.5), *, omegas: Sequence[int] = (100, 300, 1_000, 3_000), seeds: int = 10
) -> list[dict[str, Any]]:
    """The largest one against Omega, as m and p follow from it: p m = Omega^((1 - a) / 2) grows, stays at 1, or vanishes."""
    rows = []
    with progress("largest singular values", total=len(exponents) * len(omegas) * seeds, unit="matrices") as line:
        for a in exponents:
            for omega in omegas:
                width, density = round(omega ** ((1 + a) / 2)), omega**-a
                with torch.random.fork_rng(devices=[]):
                    for seed in range(seeds):
                        torch.manual_seed(seed)
                        found = largest_singular_value(sparse_matrix(width, gamma=1.0, density=density))
                        facts = {"a": a, "omega": omega, "width": width, "density": density, "seed": seed}
                        rows.append(facts | {"sigma_max": found} | _laws(width, gamma=1.0, density=density))
                        line.advance()
    return rows


def draw_sparser(spectra: list[dict[str, Any]], largest: list[dict[str, Any]]) -> Figure:
    first = spectra[0]
    with looks():
        figure, (centre, right) = panels(2, height=2.6)
        values = np.concatenate([row["values"] for row in spectra])
        centre.hist(values, bins=60, color=BLUE, weights=np.full(len(values), 1 / len(spectra)))
        scale = (first["density"] * first["width"]) ** -0.5
        centre.axvline(2, color="black", lw=1, label="edge of a dense matrix, 1 + √γ = 2")
        centre.axvline(scale, color="black", lw=1, ls=":", label="deviation of one weight")
        title = f"a = {first['a']:g}, Ω = {first['omega']:,}, m = {first['width']:,}; {len(spectra)} matrices"
        centre.set(xlabel="singular value (those of 0 left out)", ylabel="number in a matrix", title=title)
        centre.legend()
        for number, a in enumerate(sorted({row["a"] for row in largest})):
            of_a = [row for row in largest if row["a"] == a]
            at = sorted({row["omega"] for row in of_a})
            groups = [np.array([row["sigma_max"] for row in of_a if row["omega"] == omega]) for omega in at]
            law = [next(row["printed"] for row in of_a if row["omega"] == omega) for omega in at]
            spread = [each.std(ddof=1) if len(each) > 1 else 0.0 for each in groups]
            right.errorbar(
                at, [each.mean() for each in groups], spread, fmt="os^"[number % 3], ms=4, color=f"C{number}", label=f"a = {a:g}"
            )
            right.plot(at, law, "--", color=f"C{number}", lw=1)
        right.plot([], [], "--", color=GREY, lw=1, label="√L₊")
        right.set(
            xscale="log",
            yscale="log",
            xlabel="connections Ω",
            ylabel="largest singular value",
            title="γ = 1, m = Ω^((1+a)/2), p = Ω^-a",
        )
        for axis in (right.xaxis, right.yaxis):
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(NullFormatter() if axis is right.xaxis else StrMethodFormatter("{x:,g}"))
        right.set_ylim(top=2 * right.get_ylim()[1])
        right.legend(loc="upper left", ncols=2)
    return figure
