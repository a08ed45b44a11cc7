"""How the pictures of the upper floors look: fit for a paper's column, on white (a dark browser
shows them as they are), in colours that colour-blind people tell apart, and in markers as well.
They are drawn without pyplot, which would keep them: a process may draw as many as it likes."""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from data_prep.images.lettering import families
from data_prep.publish import write_atomic

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555")
BLUE, RED, GREY = "#4477aa", "#cc6677", "#888888"
COLUMN, PAGE = 3.3, 6.9
"""Inches: of a paper's column, and of both."""
DPI = 220
"""Of pictures that fit a page."""
SEQUENTIAL, DIVERGING = "cividis", "RdBu_r"
"""Colour maps: of what has a least value, and of what has a middle."""
MARKERS = "os^Dv<>PX*"
_LOOKS: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "wide-mlps",  # the same picture is the same file
    "text.parse_math": False,  # a $ in a name is a $
}


def looks(*names: str) -> AbstractContextManager[None]:
    """While a figure is made and saved; it has letters for the names, as `legible` gives them."""
    return matplotlib.rc_context(_LOOKS | {"font.family": families(names)})


def panels(count: int, *, height: float = 2.3, most: int = 3) -> tuple[Figure, Sequence[Axes]]:
    """Of a paper: one in a column, several across the page, at most so many in a row. Within
    `looks`."""
    columns = min(count, most)
    rows = -(-count // columns)
    figure = Figure(figsize=(COLUMN if columns == 1 else PAGE, rows * height))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def save(figure: Figure, path: Path) -> None:
    """It appears whole, in the format that its ending names."""
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
