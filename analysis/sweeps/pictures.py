"""The figures of sweeps, curves and widths."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator

from analysis.output import draw_band, mark
from data_prep.images.lettering import legible, short
from finetune.looks import COLUMN, GREY, PAGE, looks, panels

MOST_TICKS = 8


def draw_sweep(places: pd.DataFrame, facts: dict[str, Any], title: str) -> Figure:
    """Draw mean and SD over seeds; the band is the binomial error of the test images. A lower
    panel shows what permuting changes, one dot per seed."""
    facets, hues = places.panel.unique().tolist(), places.line.unique().tolist()
    is_number = places.x.map(lambda value: isinstance(value, int | float)).all()
    values = sorted(places.x.unique()) if is_number else places.x.unique().tolist()
    has_pairs = places.minus_normal_mean.notna().any()
    with looks(*facets, *hues, *map(str, values)):
        figure, tops, bottoms = _axes(len(facets), with_pairs=has_pairs)
        for (panel, line), own in places.groupby(["panel", "line"], sort=False):
            number, top = hues.index(line), tops[facets.index(panel)]
            x = own.x
            if not is_number:
                x = own.x.map(values.index) + (number - (len(hues) - 1) / 2) * 0.12
            x = x.astype(float)
            _draw_line(top, own, x, mark(number), is_number=is_number)
            if has_pairs:
                style: dict[str, Any] = {"color": mark(number)["color"], "linestyle": ""}
                dots = pd.DataFrame({"x": x, "y": own.minus_normal}).explode("y")
                bottom = bottoms[facets.index(panel)]
                bottom.plot(
                    dots.x, 100 * dots.y.astype(float), marker=".", ms=3, alpha=0.6, **style
                )
                bottom.plot(x, 100 * own.minus_normal_mean, marker="_", ms=9, mew=1.5, **style)
        for line in facts["lines"]:
            if found := line["optimum"]:
                color = mark(hues.index(line["hue"]))["color"]
                top = tops[facets.index(line["facet"])]
                top.axvline(found["at"], color=color, linestyle="--", linewidth=0.8)
                top.axvspan(found["low"], found["high"], color=color, alpha=0.08, linewidth=0)
        for axes in (*tops, *bottoms):
            _set_x_ticks(axes, values, is_number=is_number)
        for top, bottom in zip(tops, bottoms, strict=False):
            bottom.axhline(0, color=GREY, linewidth=0.6)
            bottom.sharex(top)
            top.tick_params(labelbottom=False)
            bottoms[0].set_ylabel("RP - normal\n(points)")
        for top, lowest, facet in zip(tops, bottoms or tops, facets, strict=True):
            top.set_title(legible(facet))
            lowest.set_xlabel(legible(title))
        tops[0].set_ylabel("test error (%)")
        _draw_legend(figure, tops)
    return figure


def _axes(count: int, *, with_pairs: bool) -> tuple[Figure, Sequence[Axes], Sequence[Axes]]:
    """Return the upper axes, and with pairs one lower axes for each."""
    if not with_pairs:
        return *panels(count), []
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(COLUMN if count == 1 else PAGE, 3.0 * rows))
    grid = figure.subplots(2 * rows, columns, squeeze=False, height_ratios=[3, 1] * rows)
    tops, bottoms = grid[0::2].ravel().tolist(), grid[1::2].ravel().tolist()
    for unused in (*tops[count:], *bottoms[count:]):
        unused.set_axis_off()
    return figure, tops[:count], bottoms[:count]


def _draw_line(
    axes: Axes, own: pd.DataFrame, x: pd.Series, style: dict[str, Any], *, is_number: bool
) -> None:
    means, band = 100 * own.error_mean, 100 * own.binomial_se.fillna(0)
    line = {"linestyle": "-" if is_number else "", **style}
    label = legible(short(own.line.iloc[0], length=32))
    deviations = 100 * own.error_sd.fillna(0)
    axes.errorbar(x, means, yerr=deviations, label=label, capsize=2, elinewidth=0.8, **line)
    color = style["color"]
    if is_number and len(own) > 1:
        axes.fill_between(x, means - band, means + band, color=color, alpha=0.12, linewidth=0)
    else:
        axes.errorbar(x, means, yerr=band, linestyle="", color=color, alpha=0.25, elinewidth=4)


def _set_x_ticks(axes: Axes, values: list[Any], *, is_number: bool) -> None:
    """Use a logarithmic scale over more than tenfold, and a tick for each value if there is
    room."""
    if not is_number:
        names = [legible(short(str(value), length=24)) for value in values]
        is_long = max(map(len, names)) * len(names) > 24
        axes.set_xticks(
            range(len(names)),
            names,
            rotation=40 * is_long,
            ha="right" if is_long else "center",
            rotation_mode="anchor",
        )
        axes.set_xlim(-0.5, len(names) - 0.5)
        return
    is_log = values[0] > 0 and values[-1] >= 10 * values[0]
    if is_log:
        _set_log(axes, "x", base=2 if (np.log2(values) % 1 == 0).all() else 10)
    places = np.log(values) if is_log else np.array(values)
    gap = (places[-1] - places[0]) / (MOST_TICKS + 2)
    are_whole = all(value == round(value) for value in values)
    if (is_log or are_whole) and (len(places) < 2 or np.diff(places).min() > gap):
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(
            lambda value, _: f"{value:,.10g}" if value < 1e5 else f"{value:.1e}"
        )


def _set_log(axes: Axes, which: Literal["x", "y"], *, base: int = 10) -> None:
    """Use plain digits: matplotlib's own labels are formulas, which `looks` does not render."""
    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(LogFormatter(base=base))


def _draw_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend for all panels if there is more than one line."""
    handles = {
        label: handle
        for each in axes
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    if any(handles):
        longest = max(map(len, handles))
        columns = max(1, min(len(handles), int(figure.get_figwidth() * 14 / (6 + longest))))
        figure.legend([*handles.values()], [*handles], loc="outside upper center", ncols=columns)


def draw_curves(bands: pd.DataFrame) -> Figure:
    """Draw the range and the mean over seeds; training is dashed."""
    facets, hues = bands.panel.unique().tolist(), bands.line.unique().tolist()
    with looks(*facets, *hues):
        figure, axes = panels(len(facets), height=2.0)
        for (panel, line, curve), own in bands.groupby(["panel", "line", "curve"], sort=False):
            style = mark(hues.index(line)) | {"marker": "o" if len(own) == 1 else ""}
            style |= {"linestyle": "-" if curve == "test" else "--"}
            style |= {"label": ", ".join(filter(None, [legible(line), curve]))}
            each = axes[facets.index(panel)]
            draw_band(each, own.epochs, own["min"], own["mean"], own["max"], **style)
            each.set(title=legible(panel), xlabel="epochs")
        axes[0].set_ylabel("loss (nats)")
        _draw_legend(figure, axes)
    return figure


def draw_widths(rows: pd.DataFrame) -> Figure:
    """Draw m, and the p of a SW-MLP of that width and Omega, against C."""
    titles = {"width": "effective width m = S C", "density": "density p = Ω / (γ m²)"}
    with looks():
        figure, both = panels(2)
        for axes, (key, title) in zip(both, titles.items(), strict=True):
            for number, (name, own) in enumerate(rows.groupby("omega_name", sort=False)):
                widest = [int(own.width.argmax())]
                label = f"Ω = {name}"
                axes.plot(own.channels, own[key], label=label, markevery=widest, **mark(number))
            axes.set(xlabel="channels C", ylabel=title)
            _set_log(axes, "x")
            _set_log(axes, "y")
        _draw_legend(figure, both)
    return figure
