"""Figure 3 of the Mixer paper: at a fixed Omega, m of a Mixer and p of the SW-MLP of that width,
against C."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.output import Result
from data_prep.errors import UserError
from pretrain.models.cost import tokens_for, widest_side

LEAST = 4
"""Tokens, and channels."""


def widths(omegas: Mapping[str, float], gamma: float) -> Result:
    from analysis.sweeps.pictures import draw_widths

    rows = rows_of(omegas, gamma)
    return Result(rows, {"omega": omegas, "gamma": gamma}, {"": draw_widths(rows)})


def rows_of(omegas: Mapping[str, float], gamma: float) -> pd.DataFrame:
    frames = []
    for name, omega in omegas.items():
        side = int(widest_side(omega, gamma=gamma))
        if side <= LEAST:
            raise UserError(
                "--omega",
                f"{name} is too small with gamma {gamma:g}: the widest Mixer has S = C = {side}",
                f"give at least the Omega of S = C = {LEAST + 1}",
                code="bad-value",
            )
        narrow = np.unique(np.geomspace(LEAST, side, 60).round()).astype(int).tolist()
        shapes = {
            (channels, tokens_for(omega, num_channels=channels, gamma=gamma)) for channels in narrow
        }
        shapes |= {(tokens, channels) for channels, tokens in shapes}  # of the same Omega
        rows = pd.DataFrame(sorted(shapes), columns=["channels", "tokens"])
        rows["width"] = rows.channels * rows.tokens
        rows["density"] = omega / (gamma * rows.width.astype(float) ** 2)
        frames.append(rows.assign(omega_name=name, omega=omega, gamma=gamma))
    return pd.concat(frames, ignore_index=True)
