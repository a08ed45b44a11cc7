"""The pictures and tables of `analysis cka` and `analysis invariance`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.features.cka import Group, diagonal
from analysis.features.invariance import QUICK_SHIFTS
from analysis.output import draw_band, mark
from analysis.tables.pages import show
from data_prep.images.lettering import legible
from finetune.looks import GREY, SEQUENTIAL, panels

MOST_PANELS = 6
Row = Mapping[str, Any]
MEASURED = {"top1": ("top-1", ".1%"), "agreement": ("same", ".1%"), "cka": ("CKA", ".2f")}


def print_groups(groups: Sequence[Group]) -> None:
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
    show(
        ["A", "B", "pairs", "diagonal", "SD", "95 % (batches)", "ceiling A", "ceiling B", "floor"],
        rows,
        num_words=2,
    )


def cka_figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """Within `looks`."""
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
    legend = {":": "floor: shuffled pictures"}
    if any(facts["ceiling_a"] is not None for facts in known):
        legend["--"] = "ceiling: other seeds of the first"
    for line, label in legend.items():
        axes.plot([], [], color=GREY, linestyle=line, linewidth=1, label=label)
    axes.xaxis.set_major_formatter(lambda value, _: f"1/{1 / value:,.0f}" if value < 1 else "1")
    axes.legend(loc="best")
    return figure


# ---- invariance
# --------------------------------------------------------------------------------------------------


def print_changes(rows: Sequence[Row]) -> None:
    """The mean over directions and seeds; of the shifts some."""
    names, table = _names(rows), []
    for name in dict.fromkeys(
        _name(row) for row in rows if row["kind"] != "shift" or row["amount"] in QUICK_SHIFTS
    ):
        cells = [name]
        for run in names:
            same = [row for row in rows if (row["run"], _name(row)) == (run, name)]
            for key, (_, form) in MEASURED.items():
                cells.append(
                    f"{np.mean([row[key] for row in same]):{form}}"
                    if same and key in same[0]
                    else ""
                )
        table.append(cells)
    show(
        ["", *(f"{name} {word}" for name in names.values() for word, _ in MEASURED.values())], table
    )


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """Of runs: the last part of the path, where that tells them apart."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    ends = [Path(run).name for run in runs]
    return dict(zip(runs, ends if len({*ends}) == len(ends) else runs, strict=True))


def _name(row: Row) -> str:
    kind, amount = row["kind"], row["amount"]
    names = {
        "none": "as it is",
        "shift": f"shift by {amount:.0f} px",
        "crop": f"middle {amount:.0%}",
        "views": f"views: {amount:.0f}",
    }
    return names.get(kind, f"{kind} {row['direction']}".strip())


def invariance_figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Within `looks`."""
    return {"": _answers(rows), "mixings": _by_mixing(rows)}


def _answers(rows: Sequence[Row]) -> Figure:
    names, views = _names(rows), sorted({row["amount"] for row in rows if row["kind"] == "views"})
    figure, axes = panels(4 + bool(views), height=2.3)
    curves = list(
        zip(
            axes,
            MEASURED,
            ("top-1", "same answer as unshifted", "CKA, mean over mixings"),
            strict=False,
        )
    )
    others = list(
        dict.fromkeys(_name(row) for row in rows if row["kind"] not in ("shift", "views"))
    )
    width = 0.8 / len(names)
    for number, (run, name) in enumerate(names.items()):
        own, look = [row for row in rows if row["run"] == run], mark(number)
        for place, key, _ in curves:
            _curve(place, own, ("none", "shift"), key, label=legible(name), markersize=2.5, **look)
        bars = [row for row in own if _name(row) in others]
        heights, errors = ([row[key] for row in bars] for key in ("top1", "standard_error"))
        places = np.arange(len(bars)) + (number - (len(names) - 1) / 2) * width
        axes[3].barh(
            places, heights, width, xerr=errors, error_kw={"linewidth": 0.8}, color=look["color"]
        )
        if views:
            _curve(axes[4], own, ("views",), "top1", markersize=2.5, **look)
    for place, key, label in curves:
        place.set(xlabel="shift (px); band: directions", ylabel=label, ylim=(-0.02, 1.02))
        place.yaxis.set_major_formatter("{x:.1f}" if key == "cka" else "{x:.0%}")
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


def _curve(axes: Axes, rows: Sequence[Row], kinds: Sequence[str], key: str, **look: Any) -> None:
    """The mean, and from the least to the most, of directions or seeds."""
    amounts = sorted({row["amount"] for row in rows if row["kind"] in kinds})
    values = [
        [np.mean(row[key]) for row in rows if row["kind"] in kinds and row["amount"] == amount]
        for amount in amounts
    ]
    draw_band(
        axes,
        amounts,
        *([form(each) for each in values] for form in (np.min, np.mean, np.max)),
        **look,
    )


def _by_mixing(rows: Sequence[Row]) -> Figure:
    """CKA with the unshifted picture, mixing by mixing."""
    names = list(_names(rows).items())[:MOST_PANELS]
    figure, places = panels(len(names), height=2.4)
    for axes, (run, name) in zip(places, names, strict=True):
        shifted = [row for row in rows if row["run"] == run and row["kind"] in ("none", "shift")]
        amounts = sorted({row["amount"] for row in shifted})
        values = np.array(
            [
                np.mean([row["cka"] for row in shifted if row["amount"] == amount], axis=0)
                for amount in amounts
            ]
        ).T
        image = axes.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto", origin="lower")
        _ticks(axes.xaxis, [f"{amount:.0f}" for amount in amounts])
        _ticks(axes.yaxis, [str(number + 1) for number in range(len(values))])
        axes.set(xlabel="shift in pixels", ylabel="mixing", title=legible(name))
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=places, aspect=25, pad=0.02, label="CKA with the picture as it is")
    return figure
