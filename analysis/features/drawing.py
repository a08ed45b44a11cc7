"""The figures of `analysis cka` and `analysis invariance`. Call these functions inside `with
looks(...)`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.output import draw_band, draw_legend, mark
from data_prep.images.lettering import legible, short
from finetune.looks import GRAY, SEQUENTIAL, panels

MOST_PANELS = 6
MEASURED = ("top1", "agreement", "cka")


def draw_cka(entries: pd.DataFrame, groups: pd.DataFrame) -> dict[str, Figure]:
    figures = {"heat": _draw_heat(entries, groups)}
    if groups.density.nunique() > 1:
        figures["density"] = _draw_density(groups[groups.density.notna()])
    return figures


def _draw_heat(entries: pd.DataFrame, groups: pd.DataFrame) -> Figure:
    """Draw a heat map of the mean CKA for each pair of architectures: at most six, including the
    sparsest and the densest."""
    places = np.unique(np.linspace(0, len(groups) - 1, MOST_PANELS).round().astype(int))
    figure, axes_of = panels(len(places), height=2.4)
    for axes, group in zip(axes_of, groups.iloc[places].itertuples(), strict=True):
        own = entries[(entries.model_a == group.model_a) & (entries.model_b == group.model_b)]
        means = own.groupby(["mixing_a", "mixing_b"], sort=False)[["cka", "on_diagonal"]].mean()
        matrix, marks = means.cka.unstack(sort=False), means.on_diagonal.unstack(sort=False)
        image = _draw_matrix(axes, matrix.to_numpy())
        rows, columns = np.nonzero(marks.to_numpy())
        edge: dict[str, Any] = {"markeredgecolor": "black", "markeredgewidth": 0.4}
        axes.plot(columns, rows, "o", markersize=2.5, color="white", **edge)
        for axis, names, model in (
            (axes.yaxis, matrix.index, group.model_a),
            (axes.xaxis, matrix.columns, group.model_b),
        ):
            parts = (name.partition(" ") for name in names)
            _set_ticks(axis, [number + kind[:1] for number, _, kind in parts])
            axis.set_label_text(f"mixings of\n{legible(short(model, length=32))}", fontsize=6)
        axes.set_title(f"mean of the diagonal: {group.diagonal:.2f}", fontsize=7)
    figure.colorbar(image, ax=axes_of, shrink=0.8, aspect=25, pad=0.02, label="CKA")
    return figure


def _draw_matrix(axes: Axes, values: np.ndarray) -> Any:
    axes.spines[:].set_visible(False)
    return axes.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto", origin="lower")


def _set_ticks(axis: Any, names: Sequence[str]) -> None:
    step = -(-len(names) // 8)
    axis.set_ticks(range(0, len(names), step), names[::step])
    axis.set_tick_params(length=0)


def _draw_density(groups: pd.DataFrame) -> Figure:
    """Draw the mean CKA of the diagonal against density. Error bars: SD over pairs, or
    for only one pair the interval over batches."""
    figure, (axes,) = panels(1, height=2.5)
    axes.set(xlabel="density p of the SW-MLP", ylabel="CKA, mean of the diagonal")
    axes.set_ylim(-0.04, 1.02)
    axes.set_xscale("log", base=2)
    for number, (model, own) in enumerate(groups.groupby("model_a")):
        style, noun = mark(number), "± SD over pairs"
        bounds = np.array([own.sd, own.sd])
        if own.sd.isna().any():
            noun = "95 % interval over batches" if own.low.notna().any() else "no interval"
            bounds = np.array([own.diagonal - own.low, own.high - own.diagonal])
        label = f"{legible(model)} ({noun})"
        axes.errorbar(
            own.density, own.diagonal, np.nan_to_num(bounds), label=label, capsize=2, **style
        )
        for ceiling in own.ceiling_a.dropna().unique():
            axes.axhline(ceiling, color=style["color"], linestyle="--", linewidth=1)
            label = "ceiling: two seeds of the first network"
            axes.plot([], [], color=GRAY, linestyle="--", linewidth=1, label=label)
        label = "floor: shuffled images"
        axes.plot(own.density, own.floor, color=GRAY, linestyle=":", linewidth=1, label=label)
    axes.xaxis.set_major_formatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else "1")
    draw_legend(figure, [axes])
    return figure


def means_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the means over directions and seeds for each run and change."""
    means = rows.assign(cka=rows.cka.map(np.mean)).groupby(["run", "change"], sort=False)
    return means[list(MEASURED)].mean().reset_index()


def _names(rows: pd.DataFrame) -> dict[str, str]:
    runs = rows.run.unique().tolist()
    ends = [Path(run).name for run in runs]
    return dict(zip(runs, ends if len({*ends}) == len(ends) else runs, strict=True))


def draw_changes(rows: pd.DataFrame) -> Figure:
    names, views = _names(rows), sorted(rows.amount[rows.kind == "views"].unique())
    figure, axes = panels(4 + bool(views), height=2.3)
    titles = ("top-1", "same prediction as unshifted", "CKA, mean of mixings")
    others = rows.change[~rows.kind.isin(["shift", "views"])].unique().tolist()
    width = 0.8 / len(names)
    for number, (run, name) in enumerate(names.items()):
        own, style = rows[rows.run == run], mark(number) | {"markersize": 2.5}
        shifted = own[own.kind.isin(["none", "shift"])]
        for each, key in zip(axes, MEASURED, strict=False):
            _draw_range(each, shifted, key, label=legible(name), **style)
        bars = own[own.change.isin(others)]
        heights = np.arange(len(bars)) + (number - (len(names) - 1) / 2) * width
        axes[3].barh(heights, bars.top1, width, color=style["color"], xerr=bars.standard_error)
        if views:
            _draw_range(axes[4], own[own.kind == "views"], "top1", **style)
    for each, key, title in zip(axes, MEASURED, titles, strict=False):
        each.set(xlabel="shift (px); band: 4 directions", ylabel=title, ylim=(-0.02, 1.02))
        each.yaxis.set_major_formatter("{x:.1f}" if key == "cka" else "{x:.0%}")
    axes[3].set_yticks(range(len(others)), others)
    axes[3].invert_yaxis()
    axes[3].set_xlabel("top-1 (± binomial error)")
    axes[3].xaxis.set_major_formatter("{x:.0%}")
    if views:
        axes[4].set(xlabel="views; band: seeds", ylabel="top-1", xscale="log")
        axes[4].set_xticks(views, [f"{number:.0f}" for number in views])
        axes[4].xaxis.set_minor_locator(NullLocator())
        axes[4].yaxis.set_major_formatter("{x:.0%}")
    draw_legend(figure, axes[:1])
    return figure


def _draw_range(axes: Axes, rows: pd.DataFrame, key: str, **style: Any) -> None:
    values = rows[key].map(np.mean).groupby(rows.amount).agg(["min", "mean", "max"])
    draw_band(axes, values.index, values["min"], values["mean"], values["max"], **style)


def draw_mixings(rows: pd.DataFrame) -> Figure:
    names = list(_names(rows).items())[:MOST_PANELS]
    figure, axes_of = panels(len(names), height=2.4)
    for axes, (run, name) in zip(axes_of, names, strict=True):
        shifted = rows[(rows.run == run) & rows.kind.isin(["none", "shift"])]
        means = shifted.groupby("amount").cka.apply(lambda values: np.mean([*values], axis=0))
        image = _draw_matrix(axes, np.array([*means]).T)
        _set_ticks(axes.xaxis, [f"{amount:.0f}" for amount in means.index])
        _set_ticks(axes.yaxis, [str(number + 1) for number in range(len(means.iloc[0]))])
        axes.set(xlabel="shift in pixels", ylabel="mixing", title=legible(short(name, length=26)))
    label = "CKA with the unshifted images"
    figure.colorbar(image, ax=axes_of, aspect=25, pad=0.02, label=label)
    return figure
