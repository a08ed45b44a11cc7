"""Plot style of finetune and analysis. Figures fit a paper's column and suit color-blind readers.

Figures are drawn without pyplot, because pyplot keeps figures in memory.
"""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from data_prep.images.lettering import families
from data_prep.publish import write_atomic

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555")
BLUE, RED, GRAY = "#4477aa", "#cc6677", "#888888"
COLUMN, PAGE = 3.3, 6.9
"""Width of one column and of both columns of a paper, in inches."""
DPI = 220
"""Dots per inch of figures up to the width PAGE."""
SEQUENTIAL = "cividis"
"""Color map for values from low to high."""
MARKERS = "os^Dv<>PX*"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOOKS: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "wide-mlps",  # the same figure gives the same bytes
    "text.parse_math": False,  # a $ in a name is not TeX
}


def looks(*names: str) -> AbstractContextManager[None]:
    """Return a context that sets the plot style. The fonts have all letters of `names`."""
    return matplotlib.rc_context(_LOOKS | {"font.family": families(names)})


def panels(count: int, *, height: float = 2.3, most: int = 3) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with `count` panels, at most `most` in a row. The figure has column width if
    a row has one panel, otherwise page width."""
    columns = min(count, most)
    rows = -(-count // columns)
    figure = Figure(figsize=(COLUMN if columns == 1 else PAGE, rows * height))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def format_power(value: float, *, decimals: int = 1) -> str:
    """Return a short text for the value, for example 0.25, 10¹² or 2·10¹²."""
    if value <= 0 or 0.001 <= value < 1000:
        return f"{value:.3g}"
    digits, exponent = f"{value:.{decimals}e}".split("e")
    digits = digits.rstrip("0").removesuffix(".")
    front = "" if digits == "1" else f"{digits}·"
    return f"{front}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def set_log_ticks(axis: Axis, *, most: int = 10) -> None:
    """Set the ticks of a logarithmic axis and label them without TeX. `most`: largest number of
    labels if the axis spans less than a factor of 10."""
    low, high = axis.get_view_interval()
    many = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]) if high < 10 * low else many)
    axis.set_major_formatter(lambda value, _: format_power(value, decimals=2))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    write_atomic(path, file_of(figure, path.suffix[1:]).getvalue())


def file_of(figure: Figure, format: str = "png") -> io.BytesIO:
    dpi = 140 if figure.get_figwidth() > PAGE else DPI
    figure.savefig(
        drawn := io.BytesIO(),
        format=format,
        dpi=dpi,
        metadata={"Date": None} if format == "svg" else None,
    )
    return drawn
