"""Paper A's Figure 3: at a fixed Omega, m of a Mixer against C, and p of the SW-MLP of that width
and Omega."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pretrain.models.cost import tokens_for, widest_side

LEAST = 4
"""Tokens, and channels."""


def rows_of(omegas: Mapping[str, float], *, gamma: float) -> list[dict[str, Any]]:
    rows = []
    for name, omega in omegas.items():
        side = int(widest_side(omega, gamma=gamma))
        if side <= LEAST:
            raise ValueError(
                f"--omega: {name} is too small with gamma {gamma:g}; the widest Mixer has S = C ="
                f" {side}"
            )
        narrow = np.unique(np.geomspace(LEAST, side, 60).round()).astype(int).tolist()
        shapes = {
            (channels, tokens_for(omega, num_channels=channels, gamma=gamma)) for channels in narrow
        }
        for channels, tokens in sorted(
            shapes | {(tokens, channels) for channels, tokens in shapes}
        ):  # Omega is the same
            width = tokens * channels
            place = {
                "omega_name": name,
                "omega": omega,
                "gamma": gamma,
                "channels": channels,
                "tokens": tokens,
            }
            rows.append({**place, "width": width, "density": omega / (gamma * width**2)})
    return rows
