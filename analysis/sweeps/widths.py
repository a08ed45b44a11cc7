"""Figure 3 of the Mixer paper: width m, and density p of a SW-MLP of that width, against C at a
fixed Omega."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.output import Result
from data_prep.errors import UserError
from pretrain.models.cost import tokens_for, widest_side

LEAST = 4
"""Smallest number of tokens, and of channels."""


def widths(omegas: Mapping[str, float], gamma: float) -> Result:
    from analysis.sweeps.pictures import draw_widths

    frames = []
    for name, omega in omegas.items():
        side = int(widest_side(omega, gamma=gamma))
        if side <= LEAST:
            problem = f"{name} is too small: the widest Mixer has S = C = {side}"
            fix = f"give {gamma * (LEAST + 1) ** 3:g} or more"
            raise UserError("--omega", problem, fix, code="bad-value")
        narrow = np.unique(np.geomspace(LEAST, side, 60).round()).astype(int).tolist()
        shapes = {(side, tokens_for(omega, num_channels=side, gamma=gamma)) for side in narrow}
        shapes |= {
            (tokens, channels) for channels, tokens in shapes
        }  # the mirrored shape has the same Omega
        rows = pd.DataFrame(sorted(shapes), columns=["channels", "tokens"])
        rows["width"] = rows.channels * rows.tokens
        rows["density"] = omega / (gamma * rows.width.astype(float) ** 2)
        frames.append(rows.assign(omega_name=name, omega=omega, gamma=gamma))
    rows = pd.concat(frames, ignore_index=True)
    return Result(rows, {"omega": omegas, "gamma": gamma}, {"": draw_widths(rows)})
