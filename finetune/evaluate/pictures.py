"""The pictures of an evaluation: who is taken for whom, whether the confidence is earned, what more views bring.

Figures without pyplot, which would keep them: a process may draw as many as it likes.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from data_prep.publish import write_atomic
from finetune.evaluate.answers import Floats
from finetune.evaluate.scoring import OTHER, Calibration, Confusion, Moment

matplotlib.use("Agg")
CONFUSION_PNG, CALIBRATION_PNG, VIEWS_PNG = "confusion.png", "calibration.png", "views.png"
MOST_NAMED, MOST_COUNTED, MOST_SHOWN, NUM_BLOCKS = 40, 12, 200, 100
"""So many classes have their names written; have their shares written into the cells; have a cell each. Else: so many blocks."""
BLUE, RED, GREY = "#4477aa", "#cc6677", "#888888"


def save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    write_atomic(path, buffer.getvalue())


def draw_confusion(confusion: Confusion, *, title: str) -> Figure:
    """Rows are the true classes; colour is the share of the row."""
    size = len(confusion.names)
    counts = confusion.matrix(num_blocks=None if size <= MOST_SHOWN else NUM_BLOCKS)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(3.2 + 0.24 * size, 4.5, 12)) if size <= MOST_NAMED else 8.0
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot()
    # the square root shows what is rare; linear colours would show a white square with a diagonal
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest", aspect="equal")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, aspect=30, format=PercentFormatter(1, decimals=0))
    bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1])
    bar.set_label("share of the class's pictures", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    _name_axes(axes, confusion, counts)
    if max(shares.shape) <= MOST_COUNTED:
        _write_shares(axes, shares)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[:].set_visible(False)
    return figure


def _name_axes(axes: Axes, confusion: Confusion, counts: Floats) -> None:
    size = len(confusion.names)
    axes.set_ylabel("true class", fontsize=9)
    axes.set_xlabel("answer", fontsize=9)
    axes.tick_params(labelsize=8, length=0)
    if size <= MOST_NAMED:
        names = [short(name) for name in confusion.names]
        axes.set_yticks(range(size), names)
        columns = [*names, OTHER][: counts.shape[1]]
        axes.set_xticks(range(len(columns)), columns, rotation=90)
        return
    if size > MOST_SHOWN:
        note = f"{size:,} classes in {NUM_BLOCKS} blocks of neighbours"
        axes.set_ylabel(f"true class ({note})", fontsize=9)
        number = FuncFormatter(lambda place, _: f"{max(0, round(place * size / NUM_BLOCKS)):,}")
        axes.xaxis.set_major_formatter(number)
        axes.yaxis.set_major_formatter(number)
    if confusion.has_others:
        axes.axvline(counts.shape[0] - 0.5, color=GREY, linewidth=0.5)
        axes.set_xlabel(f"answer (the last column: {OTHER.strip('()')} classes of the model)", fontsize=9)


def _write_shares(axes: Axes, shares: Floats) -> None:
    for (row, column), share in np.ndenumerate(shares):
        if share > 0:
            colour = "white" if share > 0.35 else "black"
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)


def short(name: str, *, length: int = 20) -> str:
    """Without its middle: names of one kind often begin alike, and end alike."""
    half = length // 2
    return name if len(name) <= length else f"{name[:half]}…{name[1 - half :]}"


def draw_calibration(bins: Calibration, *, title: str) -> Figure:
    figure = Figure(figsize=(5.2, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    edges = np.linspace(0, 1, len(bins.counts) + 1)
    filled, width = bins.counts > 0, edges[1]
    lefts, accuracies, confidences = edges[:-1][filled], bins.accuracies[filled], bins.confidences[filled]
    style = {"width": width, "align": "edge", "edgecolor": "white", "linewidth": 0.8}
    above.bar(lefts, accuracies, color=BLUE, label="accuracy", **style)
    gap = {"color": "none", "edgecolor": RED, "hatch": "////", "linewidth": 0.6, "width": width, "align": "edge"}
    above.bar(lefts, np.abs(confidences - accuracies), bottom=np.minimum(accuracies, confidences), label="gap", **gap)
    above.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="confidence = accuracy")
    above.set_ylabel("accuracy", fontsize=9)
    above.set_ylim(0, 1)
    above.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    above.legend(fontsize=8, frameon=False, loc="upper left")
    facts = f"ECE {bins.expected_error:.2%}, largest gap {bins.max_error:.1%}, {len(bins.counts)} bins"
    above.set_title(f"{title}\n{facts}", fontsize=9, loc="left")
    below.bar(edges[:-1], bins.counts, color=GREY, **style)
    below.set_ylabel("images", fontsize=9)
    below.set_xlabel("confidence: the probability of the answer", fontsize=9)
    below.set_xlim(0, 1)
    below.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    below.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    _plainly(above, below)
    return figure


def draw_views(moments: Sequence[Moment], *, title: str) -> Figure:
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    counts = [moment.num_views for moment in moments]
    marked = [count for count in counts if count == counts[-1] or 1.3 * count < counts[-1]]
    panels = figure.subplots(1, 2)
    top1s, losses = [moment.top1 for moment in moments], [moment.loss for moment in moments]
    for axes, name, values, colour in zip(panels, ("top-1", "loss"), (top1s, losses), (BLUE, RED), strict=True):
        axes.plot(counts, values, marker="o", markersize=4, color=colour)
        axes.annotate(
            f"{values[-1]:.1%}" if name == "top-1" else f"{values[-1]:.3f}",
            (counts[-1], values[-1]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
        axes.set_xscale("log")
        axes.set_xticks(marked, [f"{count:,}" for count in marked])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("views", fontsize=9)
        axes.set_title(name, fontsize=9, loc="left")
        axes.margins(0.12, 0.2)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    _plainly(*panels)
    return figure


def _plainly(*panels: Axes) -> None:
    for axes in panels:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
