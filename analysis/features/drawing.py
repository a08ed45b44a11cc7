"""The pictures and tables of `analysis cka` and `analysis invariance`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.console import Console

from analysis.features.cka import Group, diagonal
from analysis.features.invariance import QUICK_SHIFTS, mean_of
from analysis.tables.pages import for_console
from data_prep.images.lettering import legible
from finetune.looks import COLUMN, GREY, MARKERS, SEQUENTIAL, panels

MOST_PANELS = 6
Row = Mapping[str, Any]
MEASURED = {"top1": ".1%", "agreement": ".1%", "cka": ".2f"}


def print_groups(groups: Sequence[Group]) -> None:
    header = ["A", "B", "pairs", "diagonal", "95 % (batches)", "ceiling A", "ceiling B", "floor"]
    rows = []
    for group in groups:
        spread = "" if group.std is None else f" ± {group.std:.3f}"
        between = "no interval" if group.interval is None else "{:.3f} to {:.3f}".format(*group.interval)
        ceilings = ["-" if ceiling is None else f"{ceiling:.3f}" for ceiling in group.ceilings]
        values = [f"{group.mean:.3f}{spread}", between, *ceilings, f"{group.floor:.3f}"]
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
        densities, means = [group.density or 0.0 for group in members], [group.mean for group in members]
        has_seeds = all(group.std is not None for group in members)
        bounds = [
            (group.std, group.std) if has_seeds else (group.mean - low, high - group.mean)
            for group in members
            for low, high in [group.interval or (group.mean, group.mean)]
        ]
        style: dict[str, Any] = {"color": colour, "marker": MARKERS[number % len(MARKERS)], "capsize": 2}
        label = f"{legible(model)} ({'± SD over pairs' if has_seeds else '95 % over batches'})"
        axes.errorbar(densities, means, yerr=np.array(bounds, float).T.clip(0), label=label, **style)
        ceiling = members[0].ceilings[0]
        if ceiling is not None:
            axes.axhline(ceiling, color=colour, linestyle="--", linewidth=1)
        axes.plot(densities, [group.floor for group in members], color=GREY, linestyle=":", linewidth=1)
    for line, label in (("--", "ceiling: the Mixer's other seeds"), (":", "floor: shuffled pictures")):
        axes.plot([], [], color=GREY, linestyle=line, linewidth=1, label=label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else "1"))
    axes.legend(loc="best")
    return figure


# ---- invariance --------------------------------------------------------------------------------------------------------


def print_changes(rows: Sequence[Row]) -> None:
    """The mean over directions and seeds; of the shifts some."""
    names, table = _names(rows), []
    for place in dict.fromkeys(map(_place, rows)):
        if place[0] == "shift" and place[1] not in QUICK_SHIFTS:
            continue
        cells = [_name(*place)]
        for run in names:
            same = [row for row in rows if row["run"] == run and _place(row) == place]
            for key, form in MEASURED.items():
                values = [float(np.mean(row[key])) for row in same if row.get(key) is not None]
                cells.append(f"{np.mean(values):{form}}" if values else "")
        table.append(cells)
    header = ["", *(f"{name} {end}".strip() for name in names.values() for end in ("top-1", "same", "CKA"))]
    Console(width=None if sys.stdout.isatty() else 120).print(for_console(header, table))


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """Of runs: the last part of the path, where that tells them apart."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    ends = [Path(run).name for run in runs]
    return dict(zip(runs, ends if len({*ends}) == len(ends) else runs, strict=True))


def _place(row: Row) -> tuple[str, float, str]:
    return row["kind"], row["amount"], "" if row["kind"] == "shift" else row["direction"]


def _name(kind: str, amount: float, direction: str) -> str:
    names = {
        "none": "as it is",
        "shift": f"shift by {amount:.0f} px",
        "crop": f"middle {amount:.0%}",
        "views": f"{amount:.0f} views",
    }
    return names.get(kind, f"{kind} {direction}".strip())


def invariance_figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Within `looks`."""
    return {"": _answers(rows), "mixings": _by_mixing(rows)}


def _answers(rows: Sequence[Row]) -> Figure:
    names, has_views = _names(rows), any(row["kind"] == "views" for row in rows)
    figure, axes = panels(4 + has_views, height=2.3)
    shifts: list[tuple[str, Callable[[Row], float]]] = [
        ("top-1", lambda row: row["top1"]),
        ("same answer as unshifted", lambda row: row["agreement"]),
        ("CKA, mean over mixings", lambda row: float(np.mean(row["cka"]))),
    ]
    others = [row for row in rows if row["run"] == rows[0]["run"] and row["kind"] not in ("shift", "views")]
    width = 0.8 / len(names)
    for number, (run, name) in enumerate(names.items()):
        own = [row for row in rows if row["run"] == run]
        style: dict[str, Any] = {"color": f"C{number % 7}", "label": legible(name)}
        marker = MARKERS[number % len(MARKERS)]
        for place, (_, value) in zip(axes, shifts, strict=False):
            _curve(place, [row for row in own if row["kind"] in ("none", "shift")], value, marker=marker, **style)
        found = {_name(*_place(row)): row for row in own}
        bars = [found[_name(*_place(row))] for row in others]
        heights, errors = ([row[key] for row in bars] for key in ("top1", "standard_error"))
        places = np.arange(len(bars)) + (number - (len(names) - 1) / 2) * width
        axes[3].barh(places, heights, width, xerr=errors, error_kw={"linewidth": 0.8}, **style)
        if has_views:
            _curve(axes[4], [row for row in own if row["kind"] == "views"], lambda row: row["top1"], marker=marker, **style)
    for place, (name, _) in zip(axes, shifts, strict=False):
        place.set(xlabel="shift in pixels (band: directions)", ylabel=name, ylim=(-0.02, 1.02))
    axes[3].set_yticks(range(len(others)), [_name(*_place(row)) for row in others])
    axes[3].invert_yaxis()
    axes[3].set_xlabel("top-1 (± binomial error)")
    if has_views:
        axes[4].set(xlabel="views (band: their seeds)", ylabel="top-1", xscale="log")
        axes[4].set_xticks(
            ticks := sorted({row["amount"] for row in rows if row["kind"] == "views"}), [f"{tick:.0f}" for tick in ticks]
        )
        axes[4].xaxis.set_minor_locator(NullLocator())
    for place in axes:
        percent = place.xaxis if place is axes[3] else place.yaxis
        if place is not axes[2]:
            percent.set_major_formatter("{x:.0%}")
    axes[0].legend(loc="best")
    return figure


def _curve(axes: Axes, rows: Sequence[Row], value: Callable[[Row], float], *, marker: str, **style: Any) -> None:
    """The mean, and from the least to the most of directions or seeds."""
    amounts, mean, least, most = mean_of(rows, value)
    axes.plot(amounts, mean, marker=marker, markersize=2.5, **style)
    axes.fill_between(amounts, least, most, color=style["color"], alpha=0.2, linewidth=0)


def _by_mixing(rows: Sequence[Row]) -> Figure:
    """CKA with the unshifted picture, mixing by mixing."""
    names = list(_names(rows).items())[:MOST_PANELS]
    figure, places = panels(len(names), height=2.4)
    for axes, (run, name) in zip(places, names, strict=True):
        shifted = [row for row in rows if row["run"] == run and row["kind"] in ("none", "shift")]
        amounts = sorted({row["amount"] for row in shifted})
        values = [np.mean([row["cka"] for row in shifted if row["amount"] == amount], axis=0) for amount in amounts]
        image = axes.imshow(np.array(values).T, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto", origin="lower")
        step = -(-len(amounts) // 9)
        axes.set_xticks(range(0, len(amounts), step), [f"{amount:.0f}" for amount in amounts[::step]])
        count = len(values[0])
        axes.set_yticks(range(0, count, -(-count // 8)), [str(number + 1) for number in range(0, count, -(-count // 8))])
        axes.set(xlabel="shift in pixels", ylabel="mixing", title=legible(name))
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=places, aspect=25, pad=0.02).set_label("CKA with the picture as it is")
    return figure
