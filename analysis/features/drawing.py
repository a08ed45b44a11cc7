"""The figures and tables of `analysis cka` and `analysis invariance`, drawn within `looks`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.table import Table

from analysis.features.cka import Group, diagonal
from analysis.features.invariance import QUICK_SHIFTS
from analysis.output import draw_band, mark, table_of
from data_prep.images.lettering import legible
from finetune.looks import GREY, SEQUENTIAL, panels

MOST_PANELS = 6
Row = Mapping[str, Any]
MEASURED = {"top1": ("top-1", ".1%"), "agreement": ("same", ".1%"), "cka": ("CKA", ".2f")}


def table_of_groups(groups: Sequence[Group]) -> Table:
    rows = []
    for facts in (group.facts for group in groups):
        spread, between = facts["diagonal_std_over_pairs"], facts["diagonal_interval_over_batches"]
        rows.append(
            [
                facts["model_a"],
                facts["model_b"],
                str(len(facts["pairs"])),
                f"{facts['diagonal']:.3f}",
            ]
            + [
                "" if spread is None else f"± {spread:.3f}",
                "no interval" if between is None else "{:.3f} to {:.3f}".format(*between),
            ]
            + [
                "-" if facts[name] is None else f"{facts[name]:.3f}"
                for name in ("ceiling_a", "ceiling_b", "floor")
            ]
        )
    columns = ("A", "B", "pairs", "diagonal", "SD", "95 % (batches)")
    return table_of((*columns, "ceiling A", "ceiling B", "floor"), rows, num_words=2)


def cka_figures(groups: Sequence[Group]) -> dict[str, Figure]:
    figures = {"heat": _heat(groups)}
    if len({group.facts["density"] for group in groups} - {None}) > 1:
        figures["density"] = _over_density(
            [group.facts for group in groups if group.facts["density"] is not None]
        )
    return figures


def _heat(groups: Sequence[Group]) -> Figure:
    """At most six, the sparsest and the densest among them."""
    shown = [
        groups[place]
        for place in np.unique(np.linspace(0, len(groups) - 1, MOST_PANELS).round().astype(int))
    ]
    figure, places = panels(len(shown), height=2.4)
    for axes, group in zip(places, shown, strict=True):
        image = axes.imshow(
            group.matrix_LM,
            cmap=SEQUENTIAL,
            vmin=0,
            vmax=1,
            interpolation="nearest",
            origin="lower",
        )
        rows, columns = zip(*diagonal(*group.matrix_LM.shape), strict=True)
        axes.plot(
            columns,
            rows,
            "o",
            markersize=2.5,
            color="white",
            markeredgecolor="black",
            markeredgewidth=0.4,
        )
        for axis, names, model in (
            (axes.yaxis, group.names[0], "model_a"),
            (axes.xaxis, group.names[1], "model_b"),
        ):
            _ticks(
                axis,
                [number + what[:1] for number, _, what in (name.partition(" ") for name in names)],
            )
            axis.set_label_text(f"mixings of\n{legible(group.facts[model])}", fontsize=6)
        axes.spines[:].set_visible(False)
        axes.set_title(f"mean of the diagonal {group.facts['diagonal']:.2f}", fontsize=7)
    bar = figure.colorbar(image, ax=places, shrink=0.8, aspect=25, pad=0.02, label="CKA")
    bar.outline.set_visible(False)
    return figure


def _ticks(axis: Any, names: Sequence[str]) -> None:
    """Of places 0, 1, ...: as many as have room."""
    step = -(-len(names) // 8)
    axis.set_ticks(range(0, len(names), step), names[::step])
    axis.set_tick_params(length=0)


def _over_density(known: Sequence[Row]) -> Figure:
    figure, (axes,) = panels(1, height=2.5)
    axes.set(
        xlabel="density p of the SW-MLP", ylabel="CKA, mean of the diagonal", ylim=(-0.04, 1.02)
    )
    axes.set_xscale("log", base=2)
    for number, model in enumerate(dict.fromkeys(facts["model_a"] for facts in known)):
        members, look = [facts for facts in known if facts["model_a"] == model], mark(number)
        densities, means, floors = (
            np.array([facts[name] for facts in members])
            for name in ("density", "diagonal", "floor")
        )
        sds, between = (
            [facts[f"diagonal_{name}"] for facts in members]
            for name in ("std_over_pairs", "interval_over_batches")
        )
        what, bounds = "± SD over pairs", np.array([sds, sds], float)
        if None in sds:
            what, bounds = (
                "95 % over batches" if any(between) else "no interval",
                abs(np.array([each or (np.nan, np.nan) for each in between]).T - means),
            )
        label = f"{legible(model)} ({what})"
        axes.errorbar(densities, means, yerr=np.nan_to_num(bounds), label=label, capsize=2, **look)
        if members[0]["ceiling_a"] is not None:
            axes.axhline(members[0]["ceiling_a"], color=look["color"], linestyle="--", linewidth=1)
        axes.plot(densities, floors, color=GREY, linestyle=":", linewidth=1)
    legend = {":": "floor: shuffled images"}
    if any(facts["ceiling_a"] is not None for facts in known):
        legend["--"] = "ceiling: other seeds of the first"
    for line, label in legend.items():
        axes.plot([], [], color=GREY, linestyle=line, linewidth=1, label=label)
    axes.xaxis.set_major_formatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else "1")
    axes.legend(loc="best")
    return figure


# ---- invariance


def table_of_changes(rows: pd.DataFrame) -> Table:
    """Return the mean over directions and seeds of each change, and of some shifts."""
    names = _names(rows)
    shown = rows[(rows.kind != "shift") | rows.amount.isin(QUICK_SHIFTS)]
    table = []
    for change, own in shown.groupby("change", sort=False):
        cells = [change]
        for run in names:
            same = own[own.run == run]
            for key, (_, form) in MEASURED.items():
                values = same[key].dropna()
                cells.append(f"{np.mean(np.stack(values)):{form}}" if len(values) else "")
        table.append(cells)
    header = ["", *(f"{name} {word}" for name in names.values() for word, _ in MEASURED.values())]
    return table_of(header, table)


def _names(rows: pd.DataFrame) -> dict[str, str]:
    """Return short names of the runs: the last part of their paths if these differ."""
    runs = rows.run.unique().tolist()
    ends = [Path(run).name for run in runs]
    return dict(zip(runs, ends if len({*ends}) == len(ends) else runs, strict=True))


def invariance_figures(rows: pd.DataFrame) -> dict[str, Figure]:
    return {"": _draw_changes(rows), "mixings": _draw_mixings(rows)}


def _draw_changes(rows: pd.DataFrame) -> Figure:
    names, views = _names(rows), sorted(rows.amount[rows.kind == "views"].unique())
    figure, axes = panels(4 + bool(views), height=2.3)
    titles = ("top-1", "same prediction as unshifted", "CKA, mean over mixings")
    others = rows.change[~rows.kind.isin(["shift", "views"])].unique().tolist()
    width = 0.8 / len(names)
    for number, (run, name) in enumerate(names.items()):
        own, look = rows[rows.run == run], mark(number) | {"markersize": 2.5}
        for each, key in zip(axes, MEASURED, strict=False):
            _draw_range(each, own, ("none", "shift"), key, label=legible(name), **look)
        bars = own[own.change.isin(others)]
        heights = np.arange(len(bars)) + (number - (len(names) - 1) / 2) * width
        error = {"xerr": bars.standard_error, "error_kw": {"linewidth": 0.8}}
        axes[3].barh(heights, bars.top1, width, color=look["color"], **error)
        if views:
            _draw_range(axes[4], own, ("views",), "top1", **look)
    for each, key, title in zip(axes, MEASURED, titles, strict=False):
        each.set(xlabel="shift (px); band: directions", ylabel=title, ylim=(-0.02, 1.02))
        each.yaxis.set_major_formatter("{x:.1f}" if key == "cka" else "{x:.0%}")
    axes[3].set_yticks(range(len(others)), others)
    axes[3].invert_yaxis()
    axes[3].set_xlabel("top-1 (± binomial error)")
    axes[3].xaxis.set_major_formatter("{x:.0%}")
    if views:
        axes[4].set(xlabel="views; band: their seeds", ylabel="top-1", xscale="log")
        axes[4].set_xticks(views, [f"{number:.0f}" for number in views])
        axes[4].xaxis.set_minor_locator(NullLocator())
        axes[4].yaxis.set_major_formatter("{x:.0%}")
    axes[0].legend(loc="best")
    return figure


def _draw_range(
    axes: Axes, rows: pd.DataFrame, kinds: Sequence[str], key: str, **look: Any
) -> None:
    """Draw the mean and the range over directions or seeds."""
    own = rows[rows.kind.isin(kinds)]
    values = own[key].map(np.mean).groupby(own.amount).agg(["min", "mean", "max"])
    draw_band(axes, values.index, values["min"], values["mean"], values["max"], **look)


def _draw_mixings(rows: pd.DataFrame) -> Figure:
    """Draw CKA with the unshifted images, mixing by mixing."""
    names = list(_names(rows).items())[:MOST_PANELS]
    figure, places = panels(len(names), height=2.4)
    for axes, (run, name) in zip(places, names, strict=True):
        shifted = rows[(rows.run == run) & rows.kind.isin(["none", "shift"])]
        means = shifted.groupby("amount").cka.apply(lambda values: np.mean([*values], axis=0))
        values = np.array([*means]).T
        image = axes.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto", origin="lower")
        _ticks(axes.xaxis, [f"{amount:.0f}" for amount in means.index])
        _ticks(axes.yaxis, [str(number + 1) for number in range(len(values))])
        axes.set(xlabel="shift in pixels", ylabel="mixing", title=legible(name))
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=places, aspect=25, pad=0.02, label="CKA with the unshifted images")
    return figure
