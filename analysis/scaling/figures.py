"""Pictures of scaling: paper B's Figures 1 and 6 (compute), 7 (size and data) and 8 (allocation),
and the isoFLOP parabolas. Bands are the percentile intervals of the resamples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.output import draw_band, mark
from analysis.scaling.allocation import Allocation, IsoFlop, around_least
from analysis.scaling.laws import Estimate, band_of
from analysis.scaling.study import VARIABLES, Study
from finetune.looks import GREY, panels

BLACK = "#222222"
COMPUTE = "C: 3 x multiply-adds x samples"
LABELS = {"parameters": "P: parameters", "images": "N: different pictures"}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FEW = 6
"""So many sizes all stand in the legend; of more the least and the greatest."""


def draw(studies: Sequence[Study]) -> dict[str, Figure]:
    """Within `looks`, as their being saved."""
    figures = {"compute": _compute(studies)}
    if any(each.used[name].any() for each in studies for name in ("size", "data")):
        figures["size-data"] = _size_and_data(studies)
    if any(
        isinstance(each.drawn(law), Allocation)
        for each in studies
        for law in ("allocation", "isoFLOP")
    ):
        figures["allocation"] = _allocation(studies)
    if curved := [(each, each.isoflop) for each in studies if isinstance(each.isoflop, IsoFlop)]:
        figures["isoflop"] = _isoflop(curved)
    return figures


def _compute(studies: Sequence[Study]) -> Figure:
    """Figures 1 and 6: all points, the frontier, its law."""
    figure, axes = panels(len(studies), most=1, height=2.6)
    for axis, each in zip(axes, studies, strict=True):
        points, errors_N, on = each.sample.points, each.sample.errors_N, each.used["compute"] > 0
        sizes = np.unique(points["parameters"][np.isfinite(points["parameters"])])
        for number, size in enumerate(sizes):
            of, is_named = (
                points["parameters"] == size,
                len(sizes) <= FEW or number in (0, len(sizes) - 1),
            )
            look = mark(number) | {
                "color": _shade(number, len(sizes)),
                "label": EngFormatter(places=1)(size) if is_named else None,
            }
            axis.scatter(points["compute"][of], errors_N[of], s=9, linewidths=0, alpha=0.75, **look)
        if not len(sizes):
            axis.scatter(points["compute"], errors_N, s=9, color=GREY, linewidths=0)
        axis.step(
            points["compute"][on], errors_N[on], where="post", color=GREY, linewidth=0.8, zorder=0
        )
        _law(axis, each, "compute", points["compute"], color=BLACK)
        axis.set_title(f"{each.sample.name}\n{_formula(each)}")
        _scale(axis, COMPUTE)
        if len(sizes):
            axis.legend(title="P", title_fontsize=7, handletextpad=0.1, labelspacing=0.25)
    return figure


def _size_and_data(studies: Sequence[Study]) -> Figure:
    """Figure 7: the same law in P and in N, all else the largest."""
    figure, axes = panels(2, height=2.6)
    for axis, law, others in zip(axes, ("size", "data"), ("N", "P"), strict=True):
        variable, _ = VARIABLES[law]
        for number, each in enumerate(studies):
            held, found, look = each.used[law] > 0, each.drawn(law), mark(number)
            if held.any():  # a CSV knows neither
                values, said = each.sample.points[variable][held], "too few for a law"
                if not isinstance(found, str):
                    said = f"alpha = {_with_interval(found, 'alpha')}"
                axis.scatter(
                    values,
                    each.sample.errors_N[held],
                    s=14,
                    label=f"{each.sample.name}: {said}",
                    linewidths=0,
                    **look,
                )
                _law(axis, each, law, values, color=look["color"])
        _scale(axis, f"{LABELS[variable]} (largest {others} and T)", legend_above=True)
    return figure


def _allocation(studies: Sequence[Study]) -> Figure:
    """Figure 8: which P and N the frontier has at one number of epochs, and the minima of the
    parabolas."""
    figure, axes = panels(2, height=2.6)
    for axis, (name, label) in zip(axes, LABELS.items(), strict=True):
        for number, each in enumerate(studies):
            look = mark(number)
            for law, way, style in (
                ("allocation", f"T = {each.epochs:.3g}", "-"),
                ("isoFLOP", "isoFLOP", "--"),
            ):
                found = each.drawn(law)
                if isinstance(found, Allocation) and name in found.lines:
                    x = np.geomspace(found.compute.min(), found.compute.max(), 60)
                    said = (
                        f"{each.sample.name}, {way}: C^{_with_interval(found, f'{name} exponent')}"
                    )
                    values_BN = np.exp(found.lines[name] @ [np.ones_like(x), np.log(x)])
                    draw_band(
                        axis,
                        x,
                        *band_of(values_BN),
                        color=look["color"],
                        linestyle=style,
                        label=said,
                    )
                    open_marks: dict[str, Any] = {
                        "facecolors": "none",
                        "edgecolors": look["color"],
                        "marker": look["marker"],
                    }
                    axis.scatter(
                        found.compute, found.best[name], s=16, linewidths=0.8, **open_marks
                    )
        _scale(axis, COMPUTE, f"best {label}", legend_above=True)
    return figure


def _isoflop(studies: Sequence[tuple[Study, IsoFlop]]) -> Figure:
    """The parabolas, with their minima inside."""
    figure, axes = panels(len(studies), height=2.6)
    for axis, (each, iso) in zip(axes, studies, strict=True):
        last = len(iso.budgets_K) - 1
        for row, (budget, errors_P) in enumerate(zip(iso.budgets_K, iso.errors_KP, strict=True)):
            look = {
                "color": _shade(row, last + 1),
                "label": f"C = {_power(budget)}" if row in (0, last // 2, last) else None,
            }
            axis.scatter(iso.sizes_P, errors_P, s=9, linewidths=0, **look)
            if np.isfinite(errors_P).sum() >= 3:
                near = iso.sizes_P[around_least(errors_P)]
                x = np.geomspace(near.min(), near.max(), 60)
                y = np.polyval(iso.parabolas_K3[row], np.log(x))
                axis.plot(x, y, color=look["color"], linewidth=0.9)
                if 0 < (least := y.argmin()) < len(x) - 1:
                    axis.plot(x[least], y[least], marker="x", color=BLACK, markersize=4)
        axis.set_title(each.sample.name)
        _scale(axis, LABELS["parameters"])
        axis.legend(handletextpad=0.1)
    return figure


def _law(axis: Axes, each: Study, law: str, values: np.ndarray, *, color: str) -> None:
    found, x = each.drawn(law), np.geomspace(values.min(), values.max(), 80)
    if isinstance(found, Estimate):
        draw_band(axis, x, *band_of(found.fit.predict({VARIABLES[law][0]: x})), color=color)


def _formula(each: Study) -> str:
    found = each.drawn("compute")
    if isinstance(found, str):
        return "points too few for a law"
    known = found.facts["parameters"]
    inside = f"({_power(known['b'])} + C)" if known.get("b") else "C"
    factor = f"{known['a']:.3g}" if 0.001 <= known["a"] < 1000 else _power(known["a"])
    return f"E = {factor} {inside}^-{known['alpha']:.2f}" + (
        f" + {known['E_inf']:.3g}" if "E_inf" in known else ""
    )


def _with_interval(found: Estimate | Allocation, name: str) -> str:
    between = found.facts["intervals_95"].get(name)
    return f"{found.facts['parameters'][name]:.2f}" + (
        f" ({between[0]:.2f} to {between[1]:.2f})" if between else ""
    )


def _scale(axis: Axes, label: str, value: str = "error", *, legend_above: bool = False) -> None:
    axis.set(xlabel=label, ylabel=value)
    if not axis.has_data():
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "no points", transform=axis.transAxes, ha="center", color=GREY)
        return
    axis.set(xscale="log", yscale="log")
    for each, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        each.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
        each.set_major_formatter(lambda value, _: _power(value))
        each.set_minor_locator(NullLocator())
    if value == "error":
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(
            MaxNLocator(10, steps=[1, 2, 5, 10]) if high < 10 * low else LogLocator(subs=(1, 2, 5))
        )
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    if legend_above:  # beside no curve
        axis.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            handletextpad=0.4,
            labelspacing=0.25,
            borderaxespad=0.2,
        )


def _power(value: float) -> str:
    """10¹², 2·10¹²."""
    if value <= 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    front = "" if digits == "1.0" else f"{digits.removesuffix('.0')}·"
    return f"{front}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def _shade(number: int, of: int) -> Any:
    """From dark to light, told apart without colour."""
    return colormaps["viridis"](0.9 * number / max(of - 1, 1))
