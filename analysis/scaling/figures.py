"""Pictures of scaling: paper B's Figures 1 and 6 (compute), 7 (size and data) and 8 (allocation), and the isoFLOP parabolas. Bands
are the percentile intervals of the resamples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from analysis.scaling.allocation import IsoFlop, Line, around_least
from analysis.scaling.fitting import FLOOR, Array
from analysis.scaling.laws import Estimate, fullest
from analysis.scaling.study import VARIABLES, Study, allocations
from finetune.looks import GREY

WIDE, HIGH = 3.3, 2.6
BLACK = "#222222"
COMPUTE = "C: 3 x multiply-adds x samples"
LABELS = {"size": "P: parameters", "data": "N: different pictures", "compute": COMPUTE}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MARKERS = "osD^vP"
_TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, *(0.2 + 0.05 * number for number in range(17))]


def draw(studies: Sequence[Study]) -> dict[str, Figure]:
    """Within `looks`, as their being saved."""
    figures = {"compute": _compute(studies)}
    if any(each.used[name].any() for each in studies for name in ("size", "data")):
        figures["size-data"] = _size_and_data(studies)
    if any(True for each in studies for _ in allocations(each)):
        figures["allocation"] = _allocation(studies)
    if curved := [each for each in studies if isinstance(each.isoflop, IsoFlop)]:
        figures["isoflop"] = _isoflop(curved)
    return figures


@contextmanager
def _panels(rows: int, columns: int) -> Iterator[tuple[Figure, list[Axes]]]:
    figure = Figure(figsize=(WIDE * columns, HIGH * rows))
    yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _compute(studies: Sequence[Study]) -> Figure:
    """Figures 1 and 6: all points, the frontier, its law."""
    with _panels(len(studies), 1) as (figure, axes):
        for axis, each in zip(axes, studies, strict=True):
            points, errors_N, on = each.sample.points, each.sample.errors_N, each.frontier_N > 0
            sizes = np.unique(points["parameters"][np.isfinite(points["parameters"])])
            for number, size in enumerate(sizes):
                of = points["parameters"] == size
                label = _short(size) if number in (0, len(sizes) - 1) or len(sizes) <= 6 else None
                look: dict[str, Any] = {"color": _shade(number, len(sizes)), "marker": MARKERS[number % len(MARKERS)]}
                axis.scatter(points["compute"][of], errors_N[of], s=9, linewidths=0, alpha=0.75, label=label, **look)
            if not len(sizes):
                axis.scatter(points["compute"], errors_N, s=9, color=GREY, linewidths=0)
            axis.step(points["compute"][on], errors_N[on], where="post", color=GREY, linewidth=0.8, zorder=0)
            found = fullest(each.laws["compute"])
            _law(axis, found, "compute", points["compute"], color=BLACK)
            axis.set_title(f"{each.sample.name}\n{_formula(found, 'C')}", fontsize=8)
            _scale(axis, COMPUTE)
            if len(sizes):
                axis.legend(title="P", title_fontsize=7, handletextpad=0.1, labelspacing=0.25)
        return figure


def _size_and_data(studies: Sequence[Study]) -> Figure:
    """Figure 7: the same law in P and in N, all else the largest."""
    with _panels(1, 2) as (figure, axes):
        for axis, name in zip(axes, ("size", "data"), strict=True):
            variable, _ = VARIABLES[name]
            for number, each in enumerate(studies):
                held, color = each.used[name] > 0, f"C{number}"
                if not held.any():
                    continue  # a CSV knows neither
                values, found = each.sample.points[variable][held], fullest(each.laws[name])
                alpha = _exponent(found) if isinstance(found, Estimate) else "too few for a law"
                label = f"{each.sample.name}: {alpha}"
                look: dict[str, Any] = {"color": color, "marker": MARKERS[number % len(MARKERS)]}
                axis.scatter(values, each.sample.errors_N[held], s=14, label=label, linewidths=0, **look)
                _law(axis, found, variable, values, color=color)
            _scale(axis, f"{LABELS[name]} (largest {'N' if name == 'size' else 'P'} and T)")
            _legend_above(axis)
        return figure


def _allocation(studies: Sequence[Study]) -> Figure:
    """Figure 8: which P and N the frontier has at one number of epochs."""
    with _panels(1, 2) as (figure, axes):
        for axis, name in zip(axes, ("parameters", "images"), strict=True):
            for number, each in enumerate(studies):
                for way, found in allocations(each):
                    if name in found.lines:
                        about = "isoFLOP" if way == "isoFLOP" else f"T = {each.epochs:.3g}"
                        look = {"color": f"C{number}", "linestyle": "--" if way == "isoFLOP" else "-"}
                        label = f"{each.sample.name}, {about}"
                        _line(
                            axis,
                            found.lines[name],
                            found.compute,
                            found.best[name],
                            label=label,
                            look=look,
                            marker=MARKERS[number % 6],
                        )
            _scale(axis, COMPUTE, "best " + LABELS["size" if name == "parameters" else "data"])
            _legend_above(axis)
        return figure


def _isoflop(studies: Sequence[Study]) -> Figure:
    """The parabolas, with their minima inside."""
    with _panels(1, len(studies)) as (figure, axes):
        for axis, each in zip(axes, studies, strict=True):
            iso = each.isoflop
            assert isinstance(iso, IsoFlop)
            for row, budget in enumerate(iso.budgets_K):
                color, known = _shade(row, len(iso.budgets_K)), np.isfinite(iso.errors_KP[row])
                label = f"C = {_power(budget)}" if row in (0, len(iso.budgets_K) // 2, len(iso.budgets_K) - 1) else None
                axis.scatter(iso.sizes_P[known], iso.errors_KP[row, known], s=9, color=color, linewidths=0, label=label)
                if known.sum() >= 3:
                    near = iso.sizes_P[around_least(iso.errors_KP[row])]
                    x = np.geomspace(near.min(), near.max(), 60)
                    y = np.polyval(iso.parabolas_K3[row], np.log(x))
                    axis.plot(x, y, color=color, linewidth=0.9)
                    if 0 < (least := y.argmin()) < len(x) - 1:
                        axis.plot(x[least], y[least], marker="x", color=BLACK, markersize=4)
            axis.set_title(each.sample.name, fontsize=8)
            _scale(axis, LABELS["size"])
            axis.legend(handletextpad=0.1)
        return figure


def _law(axis: Axes, found: Estimate | str, variable: str, values: Array, *, color: str) -> None:
    if isinstance(found, str):
        return
    x = np.geomspace(values.min(), values.max(), 80)
    if found.resampled is not None:
        axis.fill_between(x, *found.band({variable: x}), color=color, alpha=0.18, linewidth=0)
    axis.plot(x, found.fit.predict({variable: x})[0], color=color, linewidth=1.2)


def _line(axis: Axes, line: Line, compute: Array, best: Array, *, label: str, look: dict[str, Any], marker: str) -> None:
    x = np.geomspace(compute.min(), compute.max(), 60)
    low, middle, high = line.at(x)
    if line.has_interval:
        axis.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    interval = line.facts().get("interval_95")
    words = f"C^{line.exponents_B[0]:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
    axis.plot(x, middle, linewidth=1.1, label=f"{label}: {words}", **look)
    axis.scatter(compute, best, s=16, facecolors="none", edgecolors=look["color"], linewidths=0.8, marker=marker)


def _formula(found: Estimate | str, variable: str) -> str:
    """With its exponent and its interval."""
    if isinstance(found, str):
        return "points too few for a law"
    inside = f"({_power(found.values['b'])} + {variable})" if found.values.get("b") else variable
    floor = f" + {found.values[FLOOR]:.3g}" if FLOOR in found.values else ""
    return f"E = {_plain(found.values['a'])} {inside}^-{found.values['alpha']:.2f}{floor}"


def _exponent(found: Estimate) -> str:
    between = found.intervals.get("alpha")
    return f"alpha = {found.values['alpha']:.2f}" + (f" ({between[0]:.2f} to {between[1]:.2f})" if between else "")


def _legend_above(axis: Axes) -> None:
    """Beside no curve."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), handletextpad=0.4, labelspacing=0.25, borderaxespad=0.2)


def _scale(axis: Axes, label: str, value: str = "error") -> None:
    axis.set(xlabel=label, ylabel=value)
    if not axis.has_data():
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "no points", transform=axis.transAxes, ha="center", color=GREY)
        return
    axis.set(xscale="log", yscale="log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axis.xaxis.set_minor_locator(NullLocator())
    if value == "error":
        low, high = axis.get_ylim()
        ticks = [each for each in _TICKS if low <= each <= high]
        axis.yaxis.set_major_locator(FixedLocator(ticks[:: 1 + len(ticks) // 10]))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    else:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axis.yaxis.set_minor_locator(NullLocator())


def _power(value: float) -> str:
    """10¹², 2·10¹²."""
    if value <= 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    front = "" if digits == "1.0" else f"{digits.removesuffix('.0')}·"
    return f"{front}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def _plain(value: float) -> str:
    return f"{value:.3g}" if 0.001 <= value < 1000 else _power(value)


def _short(size: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f}"


def _shade(number: int, of: int) -> Any:
    """From dark to light, told apart without colour."""
    return colormaps["viridis"](0.9 * number / max(of - 1, 1))
