"""The pictures of this room. Within `looks`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.sweeps.curves import Band
from analysis.sweeps.series import TITLES, By, Difference, Line, Place, Value, in_words, lines_of
from data_prep.images.lettering import legible, short
from finetune.looks import COLOURS, COLUMN, GREY, MARKERS, PAGE, panels

FEW = 8
"""Where that many values of x have room, each gets a tick."""


def draw_sweep(places: Sequence[Place], by: By, pairs: Sequence[Difference]) -> Figure:
    """Errors over seeds, mean and SD; the band is the binomial error of that many pictures. Below, where there are pairs, what
    permuting changes, a dot for each seed."""
    facets = list(dict.fromkeys(place.facet for place in places))
    hues = list(dict.fromkeys(place.hue for place in places))
    figure, tops, bottoms = _panels(len(facets), with_pairs=bool(pairs))
    scale = _Scale([place.x for place in places])
    lines = {(line.facet, line.hue): line for line in lines_of(places, by)}
    for facet, top, bottom in zip(facets, tops, bottoms, strict=True):
        for number, hue in enumerate(hues):
            own = [place for place in places if (place.facet, place.hue) == (facet, hue)]
            shift = (number - (len(hues) - 1) / 2) * 0.12
            if own:
                _line(top, own, scale, shift=shift, number=number, label=legible(short(in_words(hue, by.hue), length=32)))
                _optimum(top, lines[facet, hue], scale, number)
            dots = [(scale.at(pair.place.x, shift), list(pair.by_seed.values())) for pair in pairs if pair.place in own]
            if dots and bottom is not None:
                for at, values in dots:
                    bottom.plot(
                        [at] * len(values), [100 * each for each in values], ".", color=_colour(number), markersize=3, alpha=0.6
                    )
                means = [100 * float(np.mean(values)) for _, values in dots]
                bottom.plot([at for at, _ in dots], means, "_", color=_colour(number), markersize=9, markeredgewidth=1.5)
        top.set_title(legible(in_words(facet, by.facet)))
        for axes in (top, bottom):
            if axes is not None:
                scale.apply(axes)
        if bottom is not None:
            bottom.axhline(0, color=GREY, linewidth=0.6)
            bottom.sharex(top)
            top.tick_params(labelbottom=False)
        (bottom or top).set_xlabel(legible(TITLES.get(by.x, by.x)))
    tops[0].set_ylabel("test error (%)")
    if bottoms[0] is not None:
        bottoms[0].set_ylabel("RP - normal\n(points)")
    _legend(figure, tops)
    return figure


def _panels(count: int, *, with_pairs: bool) -> tuple[Figure, list[Axes], list[Axes | None]]:
    if not with_pairs:
        figure, axes = panels(count)
        return figure, list(axes), [None] * count
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(COLUMN if count == 1 else PAGE, 3.0 * rows))
    grid = figure.subplots(2 * rows, columns, squeeze=False, height_ratios=[3, 1] * rows)
    tops, bottoms = grid[0::2].ravel().tolist(), grid[1::2].ravel().tolist()
    for unused in (*tops[count:], *bottoms[count:]):
        unused.set_axis_off()
    return figure, tops[:count], bottoms[:count]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


class _Scale:
    """Where a value of x stands: a number at its place, by its logarithm where they span more than tenfold; words side by side."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.is_number = all(isinstance(value, int | float) for value in values)
        self._values: list[Any] = sorted(set(values)) if self.is_number else list(dict.fromkeys(values))
        self._is_log = self.is_number and self._values[0] > 0 and self._values[-1] >= 10 * self._values[0]

    def at(self, value: Any, shift: float = 0.0) -> float:
        return float(value) if self.is_number else self._values.index(value) + shift

    def apply(self, axes: Axes) -> None:
        if not self.is_number:
            names = [legible(short(str(value), length=24)) for value in self._values]
            is_long = max(map(len, names)) * len(names) > 24
            axes.set_xticks(
                range(len(names)), names, rotation=40 * is_long, ha="right" if is_long else "center", rotation_mode="anchor"
            )
            axes.set_xlim(-0.5, len(names) - 0.5)
            return
        if self._is_log:
            axes.set_xscale("log", base=2 if all(np.log2(value) % 1 == 0 for value in self._values) else 10)
        places = np.log(self._values) if self._is_log else np.array(self._values)
        is_clear = len(places) < 2 or np.diff(places).min() > (places[-1] - places[0]) / (FEW + 2)
        if is_clear and (self._is_log or all(value == round(value) for value in self._values)):
            axes.xaxis.set_major_locator(FixedLocator(self._values))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}" if value < 1e5 else f"{value:.1e}")


def _line(axes: Axes, places: Sequence[Place], scale: _Scale, *, shift: float, number: int, label: str) -> None:
    x, means = [scale.at(place.x, shift) for place in places], np.array([100 * place.mean for place in places])
    style: dict[str, Any] = {"color": _colour(number), "marker": MARKERS[number % len(MARKERS)]}
    sds = [100 * (place.sd or 0.0) for place in places]
    axes.errorbar(x, means, yerr=sds, label=label, capsize=2, elinewidth=0.8, linestyle="-" if scale.is_number else "", **style)
    spread = np.array([100 * (place.binomial or 0.0) for place in places])
    if scale.is_number and len(places) > 1:
        axes.fill_between(x, means - spread, means + spread, color=style["color"], alpha=0.12, linewidth=0)
    else:
        axes.errorbar(x, means, yerr=spread, linestyle="", color=style["color"], alpha=0.25, elinewidth=4)


def _optimum(axes: Axes, line: Line, scale: _Scale, number: int) -> None:
    found = line.optimum
    if found is None or not scale.is_number:
        return
    axes.axvline(found.at, color=_colour(number), linestyle="--", linewidth=0.8)
    axes.axvspan(found.low, found.high, color=_colour(number), alpha=0.08, linewidth=0)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Once, above all panels, where there is more than one line."""
    found: Mapping[str, Any] = {
        label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    if [label for label in found if label]:
        columns = max(1, min(len(found), int(figure.get_figwidth() * 14 / (6 + max(map(len, found))))))
        figure.legend([*found.values()], [*found], loc="outside upper center", ncols=columns)


def draw_curves(bands: Sequence[Band], by: By) -> Figure:
    """Bands from the least to the greatest over seeds, the mean in them; training dashed."""
    facets, hues = list(dict.fromkeys(band.facet for band in bands)), list(dict.fromkeys(band.hue for band in bands))
    figure, axes = panels(len(facets), height=2.0)
    for facet, panel in zip(facets, axes, strict=True):
        for band in [band for band in bands if band.facet == facet]:
            colour = _colour(hues.index(band.hue))
            words = ", ".join(filter(None, [legible(in_words(band.hue, by.hue)), band.curve]))
            style = "-" if band.curve == "test" else "--"
            panel.plot(band.epochs, band.mean, style, color=colour, label=words, marker="o" if len(band.epochs) == 1 else "")
            panel.fill_between(band.epochs, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
        panel.set_title(legible(in_words(facet, by.facet)))
        panel.set_xlabel("epochs")
    axes[0].set_ylabel("loss (nats)")
    _legend(figure, axes)
    return figure


def draw_widths(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Paper A's Figure 3: m, and the p of a SW-MLP of that width and Omega, against C."""
    figure, (left, right) = panels(2, most=2)
    for number, name in enumerate(dict.fromkeys(row["omega_name"] for row in rows)):
        own = [row for row in rows if row["omega_name"] == name]
        style: dict[str, Any] = {"color": _colour(number), "label": f"Ω = {name}"}
        channels = [row["channels"] for row in own]
        left.plot(channels, [row["width"] for row in own], **style)
        right.plot(channels, [row["density"] for row in own], **style)
        widest = max(own, key=lambda row: row["width"])
        left.plot(widest["channels"], widest["width"], MARKERS[number % len(MARKERS)], color=style["color"])
        right.plot(widest["channels"], widest["density"], MARKERS[number % len(MARKERS)], color=style["color"])
    for axes, title in ((left, "effective width m = S C"), (right, "density p = Ω / (gamma m²)")):
        axes.set(xscale="log", yscale="log", xlabel="channels C", ylabel=title)
    _legend(figure, [left])
    return figure
