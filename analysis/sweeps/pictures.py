"""The pictures of this room."""

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator

from analysis.output import draw_band, mark
from analysis.sweeps.curves import Band
from analysis.sweeps.series import TITLES, By, Place, Value
from analysis.sweeps.statistics import Facts
from data_prep.images.lettering import legible, short
from finetune.looks import COLUMN, GREY, PAGE, looks, panels

FEW = 8
"""Where that many values of x have room, each gets a tick."""


def draw_sweep(places: Sequence[Place], facts: Facts, by: By) -> Figure:
    """Errors over seeds, mean and SD; the band is the binomial error of that many pictures. Below,
    where there are pairs, what permuting changes, a dot for each seed."""
    facets, hues = (
        list(dict.fromkeys(place.facet for place in places)),
        list(dict.fromkeys(place.hue for place in places)),
    )
    scale = _Scale([place.x for place in places])
    optima = {
        (line["facet"], line["hue"]): line["optimum"] for line in facts["lines"] if scale.is_number
    }
    with looks(*facets, *hues, *(str(place.x) for place in places)):
        figure, tops, bottoms = _panels(
            len(facets), with_pairs=any(place.minus_normal for place in places)
        )
        for (panel, facet), (number, hue) in product(enumerate(facets), enumerate(hues)):
            own = [place for place in places if (place.facet, place.hue) == (facet, hue)]
            shift, style = (number - (len(hues) - 1) / 2) * 0.12, mark(number)
            colour = style["color"]
            _line(tops[panel], own, scale, shift=shift, style=style)
            if found := optima.get((facet, hue)):
                tops[panel].axvline(found["at"], color=colour, linestyle="--", linewidth=0.8)
                tops[panel].axvspan(
                    found["low"], found["high"], color=colour, alpha=0.08, linewidth=0
                )
            if paired := [place for place in own if place.minus_normal]:
                dots = [
                    (scale.at(place.x, shift), 100 * each)
                    for place in paired
                    for each in place.minus_normal.values()
                ]
                bottoms[panel].plot(
                    *zip(*dots, strict=True), ".", color=colour, markersize=3, alpha=0.6
                )
                means = [
                    (scale.at(place.x, shift), 100 * (place.row["minus_normal_mean"]))
                    for place in paired
                ]
                bottoms[panel].plot(
                    *zip(*means, strict=True), "_", color=colour, markersize=9, markeredgewidth=1.5
                )
        for axes in (*tops, *bottoms):
            scale.apply(axes)
        for top, bottom in zip(tops, bottoms, strict=False):
            bottom.axhline(0, color=GREY, linewidth=0.6)
            bottom.sharex(top)
            top.tick_params(labelbottom=False)
            bottoms[0].set_ylabel("RP - normal\n(points)")
        for top, lowest, facet in zip(tops, bottoms or tops, facets, strict=True):
            top.set_title(legible(facet))
            lowest.set_xlabel(legible(TITLES.get(by.x, by.x)))
        tops[0].set_ylabel("test error (%)")
        _legend(figure, tops)
    return figure


def _panels(count: int, *, with_pairs: bool) -> tuple[Figure, Sequence[Axes], Sequence[Axes]]:
    """Those above, and with pairs one below each."""
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


class _Scale:
    """Where a value of x stands: a number at its place, by its logarithm where they span more than
    tenfold; words side by side."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.is_number = all(isinstance(value, int | float) for value in values)
        self._values: list[Any] = (
            sorted(set(values)) if self.is_number else list(dict.fromkeys(values))
        )
        self._is_log = (
            self.is_number and self._values[0] > 0 and self._values[-1] >= 10 * self._values[0]
        )

    def at(self, value: Any, shift: float = 0.0) -> float:
        return float(value) if self.is_number else self._values.index(value) + shift

    def apply(self, axes: Axes) -> None:
        if not self.is_number:
            names = [legible(short(str(value), length=24)) for value in self._values]
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
        if self._is_log:
            _log(
                axes, "x", base=2 if all(np.log2(value) % 1 == 0 for value in self._values) else 10
            )
        places = np.log(self._values) if self._is_log else np.array(self._values)
        is_clear = len(places) < 2 or np.diff(places).min() > (places[-1] - places[0]) / (FEW + 2)
        if is_clear and (self._is_log or all(value == round(value) for value in self._values)):
            axes.xaxis.set_major_locator(FixedLocator(self._values))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{value:,.10g}" if value < 1e5 else f"{value:.1e}"
            )


def _log(axes: Axes, which: Literal["x", "y"], *, base: int = 10) -> None:
    """With numbers in plain letters: those of matplotlib are formulas, which `looks` leaves as they
    are written."""
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log", base=base)
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(LogFormatter(base=base))


def _line(
    axes: Axes, places: Sequence[Place], scale: _Scale, *, shift: float, style: dict[str, Any]
) -> None:
    if not places:
        return
    x, means = (
        [scale.at(place.x, shift) for place in places],
        np.array([100 * place.mean for place in places]),
    )
    sds, label = (
        [100 * (place.row["error_sd"] or 0.0) for place in places],
        legible(short(places[0].hue, length=32)),
    )
    line = "-" if scale.is_number else ""
    axes.errorbar(
        x, means, yerr=sds, label=label, capsize=2, elinewidth=0.8, linestyle=line, **style
    )
    spread = np.array([100 * (place.binomial or 0.0) for place in places])
    if scale.is_number and len(places) > 1:
        axes.fill_between(
            x, means - spread, means + spread, color=style["color"], alpha=0.12, linewidth=0
        )
    else:
        axes.errorbar(
            x, means, yerr=spread, linestyle="", color=style["color"], alpha=0.25, elinewidth=4
        )


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Once, above all panels, where there is more than one line."""
    found = {
        label: handle
        for each in axes
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    if any(found):
        columns = max(
            1, min(len(found), int(figure.get_figwidth() * 14 / (6 + max(map(len, found)))))
        )
        figure.legend([*found.values()], [*found], loc="outside upper center", ncols=columns)


def draw_curves(bands: Sequence[Band]) -> Figure:
    """Bands from the least to the greatest over seeds, the mean in them; training dashed."""
    facets, hues = (
        list(dict.fromkeys(band.facet for band in bands)),
        list(dict.fromkeys(band.hue for band in bands)),
    )
    with looks(*facets, *hues):
        figure, axes = panels(len(facets), height=2.0)
        for band in bands:
            panel, style = axes[facets.index(band.facet)], mark(hues.index(band.hue))
            style |= {
                "linestyle": "-" if band.curve == "test" else "--",
                "marker": "o" if len(band.epochs) == 1 else "",
            }
            style |= {"label": ", ".join(filter(None, [legible(band.hue), band.curve]))}
            draw_band(
                panel,
                band.epochs,
                band.losses.min(0),
                band.losses.mean(0),
                band.losses.max(0),
                **style,
            )
            panel.set(title=legible(band.facet), xlabel="epochs")
        axes[0].set_ylabel("loss (nats)")
        _legend(figure, axes)
    return figure


def draw_widths(rows: Sequence[Facts]) -> Figure:
    """Paper A's Figure 3: m, and the p of a SW-MLP of that width and Omega, against C."""
    titles = {"width": "effective width m = S C", "density": "density p = Ω / (γ m²)"}
    with looks():
        figure, both = panels(2)
        for (axes, key), (number, name) in product(
            zip(both, titles, strict=True),
            enumerate(dict.fromkeys(row["omega_name"] for row in rows)),
        ):
            own = [row for row in rows if row["omega_name"] == name]
            widest = max(range(len(own)), key=lambda at: own[at]["width"])
            places = [row["channels"] for row in own], [row[key] for row in own]
            axes.plot(*places, label=f"Ω = {name}", markevery=[widest], **mark(number))
            axes.set(xlabel="channels C", ylabel=titles[key])
            _log(axes, "x")
            _log(axes, "y")
        _legend(figure, both)
    return figure
