"""How the pictures of the two upper floors look. They are drawn without pyplot, which would keep them: a process may draw as many
as it likes."""

from contextlib import AbstractContextManager
from typing import Any

import matplotlib

from data_prep.images.lettering import families

BLUE, RED, GREY = "#4477aa", "#cc6677", "#888888"
_LOOKS: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
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
