"""Figures of scaling: Figures 1 and 6 (compute), 7 (size and data) and 8 (allocation) of Scaling
MLPs, and the isoFLOP parabolas. Bands are the intervals of laws in size and data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from analysis.output import draw_band, draw_legend, mark
from analysis.scaling.allocation import Allocation, IsoFlop, around_least
from analysis.scaling.laws import Estimate, band_of, interval_of
from analysis.scaling.study import VARIABLES, Study
from data_prep.images.lettering import short
from finetune.looks import GRAY, format_power, panels, set_log_ticks

BLACK = "#222222"
COMPUTE = "C: 3 x MACs x samples"
LABELS = {"parameters": "P: parameters", "images": "N: different images"}


def draw(studies: Sequence[Study]) -> dict[str, Figure]:
    """Draw all figures. Call this function inside `with looks(...)`."""
    figures = {"compute": _draw_compute(studies)}
    if any(each.used[name].any() for each in studies for name in ("size", "data")):
        figures["size-data"] = _draw_size_and_data(studies)
    if any(isinstance(each, Allocation) for one in studies for each in one.drawn.values()):
        figures["allocation"] = _draw_allocation(studies)
    if curved := [(each, each.isoflop) for each in studies if isinstance(each.isoflop, IsoFlop)]:
        figures["isoflop"] = _draw_isoflop(curved)
    return figures


def _draw_compute(studies: Sequence[Study]) -> Figure:
    figure, axes = panels(len(studies), most=1, height=2.6)
    for axis, each in zip(axes, studies, strict=True):
        sample, on = each.sample, each.used["compute"]
        compute, sizes_N = sample.points["compute"], np.nan_to_num(sample.points["parameters"])
        sizes = np.unique(sizes_N).tolist()
        for number, size in enumerate(sizes):
            style = {"color": _shade(number, len(sizes)), "marker": mark(number)["marker"]}
            own = sizes_N == size
            label = (
                EngFormatter(places=1)(size) if size and number % -(-len(sizes) // 6) == 0 else None
            )
            axis.scatter(compute[own], sample.errors_N[own], s=9, lw=0, label=label, **style)
        axis.step(compute[on], sample.errors_N[on], where="post", color=GRAY, lw=0.8, zorder=0)
        _draw_law(axis, each, "compute", compute, color=BLACK)
        axis.set_title(f"{short(sample.name, length=42)}\n{_formula(each.drawn['compute'])}")
        _scale(axis, COMPUTE)
        if any(sizes):
            axis.legend(title="P", title_fontsize=7, handletextpad=0.1, labelspacing=0.25)
    return figure


def _draw_size_and_data(studies: Sequence[Study]) -> Figure:
    """Draw the law in P at the largest N and epochs T, and the law in N at the largest P and T."""
    figure, axes = panels(2, height=2.6)
    for axis, law, others in zip(axes, ("size", "data"), ("N", "P"), strict=True):
        variable, _ = VARIABLES[law]
        for number, each in enumerate(studies):
            held, found, style = each.used[law], each.drawn[law], mark(number)
            if held.any():  # a CSV has no P and N
                values = each.sample.points[variable][held]
                words = "no law fitted"
                if not isinstance(found, str):
                    words = f"alpha = {_with_interval(found, 'alpha')}"
                label = f"{each.sample.name}, {law}: {words}"
                axis.scatter(values, each.sample.errors_N[held], s=14, lw=0, label=label, **style)
                _draw_law(axis, each, law, values, color=style["color"])
        _scale(axis, f"{LABELS[variable]} (largest {others} and T)")
    draw_legend(figure, axes)
    return figure


def _draw_allocation(studies: Sequence[Study]) -> Figure:
    """Draw the best P and N, from the frontier at one number of epochs and from the minima of
    parabolas."""
    figure, axes = panels(2, height=2.6)
    for axis, (name, label) in zip(axes, LABELS.items(), strict=True):
        for number, each in enumerate(studies):
            color, marker = mark(number)["color"], mark(number)["marker"]
            ways = {"allocation": (f"T = {each.epochs:.3g}", "-"), "isoFLOP": ("isoFLOP", "--")}
            for law, (way, line) in ways.items():
                found = each.drawn[law]
                if isinstance(found, Allocation) and name in found.lines:
                    x = np.geomspace(found.compute_K.min(), found.compute_K.max(), 60)
                    y = np.exp(np.polyval(found.lines[name], np.log(x)))
                    words = f"{each.sample.name}, {way}: {label[0]} ∝ C^{found.lines[name][0]:.2f}"
                    axis.plot(x, y, label=words, color=color, ls=line)
                    dots: dict[str, Any] = {"facecolors": "none", "edgecolors": color}
                    axis.scatter(found.compute_K, found.best[name], s=16, marker=marker, **dots)
        _scale(axis, COMPUTE, f"best {label}")
    draw_legend(figure, axes)
    return figure


def _draw_isoflop(studies: Sequence[tuple[Study, IsoFlop]]) -> Figure:
    figure, axes = panels(len(studies), height=2.6)
    budgets = sorted({*np.concatenate([iso.budgets_K for _, iso in studies])})
    ends = budgets[0], budgets[len(budgets) // 2], budgets[-1]
    for axis, (each, iso) in zip(axes, studies, strict=True):
        for row, (budget, errors_P) in enumerate(zip(iso.budgets_K, iso.errors_KP, strict=True)):
            color = _shade(budgets.index(budget), len(budgets))
            label = f"C = {format_power(budget)}" if budget in ends else None
            axis.scatter(iso.sizes_P, errors_P, s=9, lw=0, color=color, label=label)
            if np.isfinite(iso.parabolas_K3[row, 0]):
                near = iso.sizes_P[around_least(errors_P)]
                x = np.geomspace(near.min(), near.max(), 60)
                y = np.exp(np.polyval(iso.parabolas_K3[row], np.log(x)))
                axis.plot(x, y, color=color, lw=0.9)
                if 0 < (least := y.argmin()) < len(x) - 1:
                    axis.plot(x[least], y[least], marker="x", color=BLACK, markersize=4)
        axis.set_title(short(each.sample.name, length=26))
        _scale(axis, LABELS["parameters"])
    draw_legend(figure, axes)
    return figure


def _draw_law(axis: Axes, each: Study, law: str, values: np.ndarray, *, color: str) -> None:
    found, x = each.drawn[law], np.geomspace(values.min(), values.max(), 80)
    if isinstance(found, Estimate) and found.fit is not None:
        y_BN = found.fit.predict({VARIABLES[law][0]: x})
        draw_band(axis, x, *band_of(y_BN), color=color)


def _formula(found: Estimate | str) -> str:
    if isinstance(found, str):
        return "no law fitted"
    known = {name: values_B[0] for name, values_B in found.parameters.items()}
    inside = f"({format_power(known['b'])} + C)" if known.get("b") else "C"
    floor = f" + {known['E_inf']:.3g}" if "E_inf" in known else ""
    return f"E = {format_power(known['a'])} {inside}^-{known['alpha']:.2f}{floor}"


def _with_interval(found: Estimate, name: str) -> str:
    values_B = found.parameters[name]
    low, high = interval_of(values_B)
    between = f" ({low:.2f} to {high:.2f})" if np.isfinite(low) else ""
    return f"{values_B[0]:.2f}{between}"


def _scale(axis: Axes, label: str, value: str = "error") -> None:
    axis.set(xlabel=label, ylabel=value)
    if not axis.has_data():
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "no points", transform=axis.transAxes, ha="center", color=GRAY)
        return
    axis.set(xscale="log", yscale="log")
    set_log_ticks(axis.xaxis, most=3)
    set_log_ticks(axis.yaxis)
    if value == "error":
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda number, _: f"{100 * number:.3g} %")


def _shade(number: int, count: int) -> Any:
    return colormaps["viridis"](0.9 * number / max(count - 1, 1))
