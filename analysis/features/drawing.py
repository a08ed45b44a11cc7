"""The pictures and tables of `analysis cka` and `analysis invariance`."""

import sys
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console

from analysis.features.cka import Group, diagonal
from analysis.table_pages import for_console
from data_prep.images.lettering import legible
from finetune.looks import COLUMN, GREY, MARKERS, SEQUENTIAL, panels

MOST_PANELS = 6


def print_groups(groups: Sequence[Group]) -> None:
    header = ["A", "B", "pairs", "diagonal", "95 % (batches)", "ceiling A", "ceiling B", "floor"]
    rows = []
    for group in groups:
        spread = "" if group.std is None else f" ± {group.std:.3f}"
        low, high = group.interval
        ceilings = ["-" if ceiling is None else f"{ceiling:.3f}" for ceiling in group.ceilings]
        values = [f"{group.mean:.3f}{spread}", f"{low:.3f} to {high:.3f}", *ceilings, f"{group.floor:.3f}"]
        rows.append([*group.models, str(len(group.pairs)), *values])
    Console(width=None if sys.stdout.isatty() else 120).print(for_console(header, rows, num_words=2))


def cka_figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """Within `looks`."""
    figures = {"heat": _heat(groups)}
    if len({group.density for group in groups if group.density is not None}) > 1:
        figures["density"] = _over_density(groups)
    return figures


def _heat(groups: Sequence[Group]) -> Figure:
    """At most six, the sparsest and the densest among them."""
    shown = [groups[place] for place in sorted(set(np.linspace(0, len(groups) - 1, MOST_PANELS).round().astype(int).tolist()))]
    figure, places = panels(len(shown), height=2.4)
    for axes, group in zip(places, shown, strict=True):
        image = axes.imshow(group.matrix_LM, cmap=SEQUENTIAL, vmin=0, vmax=1, interpolation="nearest", origin="lower")
        for row, column in diagonal(*group.matrix_LM.shape):
            axes.plot(column, row, marker="o", markersize=2.5, color="white", markeredgecolor="black", markeredgewidth=0.4)
        for axis, names in ((axes.xaxis, group.names[1]), (axes.yaxis, group.names[0])):
            step = -(-len(names) // 8)
            axis.set_ticks(range(0, len(names), step), [_short(name) for name in names[::step]])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        first, second = (legible(model) for model in group.models)
        axes.set_xlabel(f"mixings of\n{second}", fontsize=6)
        axes.set_ylabel(f"mixings of\n{first}", fontsize=6)
        axes.set_title(f"mean of the diagonal {group.mean:.2f}", fontsize=7)
    bar = figure.colorbar(image, ax=places, shrink=0.8, aspect=25, pad=0.02)
    bar.set_label("CKA")
    bar.outline.set_visible(False)
    return figure


def _short(name: str) -> str:
    """`1t` and `1c` of a Mixer."""
    number, _, what = name.partition(" ")
    return number + what[:1]


def _over_density(groups: Sequence[Group]) -> Figure:
    figure = Figure(figsize=(COLUMN, 2.5))
    axes = figure.add_subplot(xlabel="density p of the SW-MLP", ylabel="CKA, mean of the diagonal", ylim=(-0.04, 1.02))
    axes.set_xscale("log", base=2)
    known = [group for group in groups if group.density is not None]
    for number, model in enumerate(dict.fromkeys(group.models[0] for group in known)):
        members, colour = [group for group in known if group.models[0] == model], f"C{number}"
        densities = [group.density or 0.0 for group in members]
        if all(group.std is not None for group in members):
            errors, note = np.array([[group.std] * 2 for group in members]).T, "± SD over seeds"
        else:
            errors, note = (
                np.array([[group.mean - group.interval[0], group.interval[1] - group.mean] for group in members]).T,
                "95 %",
            )
        means = [group.mean for group in members]
        label = f"{legible(model)} ({note})"
        axes.errorbar(
            densities,
            means,
            yerr=np.maximum(errors, 0),
            marker=MARKERS[number % len(MARKERS)],
            capsize=2,
            color=colour,
            label=label,
        )
        ceiling = members[0].ceilings[0]
        if ceiling is not None:
            axes.axhline(ceiling, color=colour, linestyle="--", linewidth=1)
        axes.plot(densities, [group.floor for group in members], color=GREY, linestyle=":", linewidth=1)
    for style, label in (("--", "ceiling: the Mixer's other seeds"), (":", "floor: shuffled pictures")):
        axes.plot([], [], color=GREY, linestyle=style, linewidth=1, label=label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else "1"))
    axes.legend(loc="best")
    return figure
