"""Figure 3 of the Mixer paper: width m, and density p of a SW-MLP of that width, against C at a
fixed Omega."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from analysis.output import Result
from data_prep.errors import UserError
from pretrain.models.cost import tokens_for, widest_side

LEAST = 4
"""Smallest number of tokens, and of channels."""


def widths(omegas: Mapping[str, float], gamma: float, channels: Iterable[int] = ()) -> Result:
    """Return the shapes of Mixers. Print the widest Mixer, and a Mixer for each of `channels`."""
    from analysis.sweeps.pictures import draw_widths

    frames, printed = list[pd.DataFrame](), list[pd.DataFrame]()
    for name, omega in omegas.items():
        side = int(widest_side(omega, gamma=gamma))
        if side <= LEAST:
            problem = f"{name} is too small: the widest Mixer has S = C = {side}"
            fix = f"give {gamma * (LEAST + 1) ** 3:g} or more"
            raise UserError("--omega", problem, fix, code="bad-value")
        narrow = np.unique(np.geomspace(LEAST, side, 60).round()).astype(int).tolist()
        shapes, chosen = (
            [(each, tokens_for(omega, num_channels=each, gamma=gamma)) for each in numbers]
            for numbers in (narrow, [side, *channels])
        )
        mirrored = [shape[::-1] for shape in shapes]  # the mirrored shape has the same Omega
        for found, kept in ((sorted({*shapes, *mirrored}), frames), (chosen, printed)):
            rows = pd.DataFrame(found, columns=["channels", "tokens"])
            rows["width"] = rows.channels * rows.tokens
            rows["density"] = omega / (gamma * rows.width.astype(float) ** 2)
            kept.append(rows.assign(omega_name=name, omega=omega, gamma=gamma))
    rows = pd.concat(frames, ignore_index=True)
    facts = {"omega": omegas, "gamma": gamma}
    return Result(rows, facts, {"": draw_widths(rows)}, printed=[pd.concat(printed)])
