"""The figures of sweeps, curves and widths."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.output import draw_band, draw_legend, mark
from analysis.sweeps.sweep import are_numbers
from data_prep.images.lettering import legible, short
from finetune.looks import GRAY, looks, panels, set_log_ticks


def draw_sweep(places: pd.DataFrame, lines: pd.DataFrame, title: str) -> Figure:
    """Draw mean and standard deviation over seeds. The band is one binomial standard error of the
    test images. A second panel shows RP minus normal, one dot per seed."""
    facets, hues = places.facet.unique().tolist(), places.hue.unique().tolist()
    is_number = are_numbers(places.x)
    values = sorted(places.x.unique()) if is_number else places.x.unique().tolist()
    shown = places.assign(at=places.x.astype(float) if is_number else places.x.map(values.index))
    has_pairs = places.minus_normal_mean.notna().any()
    with looks(*facets, *hues, *map(str, values)):
        figure, axes = panels(len(facets) * (1 + has_pairs), most=2 if has_pairs else 3)
        tops, changes = (axes[::2], axes[1::2]) if has_pairs else (axes, [])
        for (facet, hue), group in shown.groupby(["facet", "hue"], sort=False):
            number, place = hues.index(hue), facets.index(facet)
            beside = 0 if is_number else (number - (len(hues) - 1) / 2) * 0.12
            own = group.assign(at=group["at"] + beside)
            _draw_line(tops[place], own, mark(number), is_number=is_number)
            if has_pairs:
                style: dict[str, Any] = {"color": mark(number)["color"], "linestyle": ""}
                dots = own[["at", "minus_normal"]].explode("minus_normal").astype(float)
                changes[place].plot(dots["at"], 100 * dots.minus_normal, marker=".", ms=3, **style)
                means = 100 * own.minus_normal_mean
                changes[place].plot(own["at"], means, marker="_", ms=9, mew=1.5, **style)
        for line in lines.dropna(subset="at").itertuples() if "at" in lines else ():
            color, top = mark(hues.index(line.hue))["color"], tops[facets.index(line.facet)]
            top.axvline(line.at, color=color, linestyle="--", linewidth=0.8)
            top.axvspan(line.low, line.high, color=color, alpha=0.08, linewidth=0)
        for each in axes:
            _set_x_ticks(each, values, is_number=is_number)
            each.set_xlabel(legible(title))
        for each in changes:
            each.axhline(0, color=GRAY, linewidth=0.6)
            each.set_ylabel("RP - normal (points)")
        for top, facet in zip(tops, facets, strict=True):
            top.set(title=legible(facet), ylabel="test error (%)")
        draw_legend(figure, tops)
    return figure


def _draw_line(axes: Axes, own: pd.DataFrame, style: dict[str, Any], *, is_number: bool) -> None:
    means, band = 100 * own.error_mean, 100 * own.binomial_se.fillna(0)
    color, label = style["color"], legible(short(own.hue.iloc[0], length=32))
    style = {**style, "linestyle": "-" if is_number else "", "label": label}
    deviations = 100 * own.error_sd.fillna(0)
    axes.errorbar(own["at"], means, deviations, capsize=2, elinewidth=0.8, **style)
    if is_number and len(own) > 1:
        axes.fill_between(own["at"], means - band, means + band, color=color, alpha=0.12, lw=0)
    else:
        axes.errorbar(own["at"], means, band, linestyle="", color=color, alpha=0.25, elinewidth=4)


def _set_x_ticks(axes: Axes, values: list[Any], *, is_number: bool) -> None:
    """Set ticks, and a logarithmic scale if values range over a factor of 10 or more."""
    if is_number:
        if values[0] > 0 and values[-1] >= 10 * values[0]:
            axes.set_xscale("log")
            axes.minorticks_off()  # labels overlap
            axes.set_xticks(values[:: 1 + len(values) // 8])
            axes.xaxis.set_major_formatter("{x:,g}")
        return
    names = [legible(short(str(value), length=24)) for value in values]
    is_long = max(map(len, names)) * len(names) > 24
    place: dict[str, Any] = {"rotation": 40, "ha": "right"} if is_long else {}
    axes.set_xticks(range(len(names)), names, rotation_mode="anchor", **place)
    axes.set_xlim(-0.5, len(names) - 0.5)


def draw_curves(bands: pd.DataFrame) -> Figure:
    """Draw the range and the mean over seeds. Training losses are dashed. The accuracy has its own
    panel next to the losses."""
    facets, hues = bands.facet.unique().tolist(), bands.hue.unique().tolist()
    per_facet = 1 + int((bands.curve == "accuracy").any())
    with looks(*facets, *hues):
        count = len(facets) * per_facet
        figure, axes = panels(count, height=2.0, most=2 if per_facet == 2 else 3)
        for (facet, hue, curve), own in bands.groupby(["facet", "hue", "curve"], sort=False):
            style = mark(hues.index(hue)) | {"marker": "o" if len(own) == 1 else ""}
            style |= {"linestyle": "--" if curve == "train" else "-"}
            is_accuracy = curve == "accuracy"  # no label: it has the color of the test loss
            label = "" if is_accuracy else ", ".join(filter(None, [legible(hue), curve]))
            values = own[["min", "mean", "max"]].to_numpy().T * (100 if is_accuracy else 1)
            each = axes[per_facet * facets.index(facet) + is_accuracy]
            draw_band(each, own.epochs, *values, **style, label=label)
            each.set(title=legible(facet), xlabel="epochs")
        for number, each in enumerate(axes):
            each.set_ylabel("test accuracy (%)" if number % per_facet else "loss (nats)")
        draw_legend(figure, axes)
    return figure


def draw_widths(rows: pd.DataFrame) -> Figure:
    """Draw the width m, and the density p of a SW-MLP with the same width and Omega, against C."""
    titles = {"width": "effective width m = S C", "density": "density p = Ω / (γ m²)"}
    with looks():
        figure, both = panels(2)
        for axes, (key, title) in zip(both, titles.items(), strict=True):
            for number, (name, own) in enumerate(rows.groupby("omega_name", sort=False)):
                style = mark(number) | {"label": f"Ω = {name}"}
                axes.plot(own.channels, own[key], markevery=[int(own.width.argmax())], **style)
            axes.set(xscale="log", yscale="log", xlabel="channels C", ylabel=title)
            set_log_ticks(axes.xaxis, most=5)
            set_log_ticks(axes.yaxis)
        draw_legend(figure, both)
    return figure
