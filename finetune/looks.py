"""How the pictures of the two upper floors look. They are drawn without pyplot, which would keep them: a process may draw as many
as it likes."""

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from data_prep.images.lettering import families
from data_prep.publish import write_atomic

BLUE, RED, GREY = "#4477aa", "#cc6677", "#888888"
_LOOKS: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"]),  # also of the colour-blind
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a $ in a name is a $
}


def looks(*names: str) -> AbstractContextManager[None]:
    """While a figure is made and saved; it has letters for the names, as `legible` gives them."""
    return matplotlib.rc_context(_LOOKS | {"font.family": families(names)})


def save(figure: Figure, path: Path) -> None:
    """It appears whole, in the format that its ending names."""
    write_atomic(path, file_of(figure, path.suffix[1:]).getvalue())


def file_of(figure: Figure, format: str = "png") -> io.BytesIO:
    figure.savefig(drawn := io.BytesIO(), format=format, dpi=140)
    return drawn
