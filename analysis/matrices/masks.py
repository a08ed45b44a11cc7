"""Figures 1 and S.9 of the Mixer paper: the nonzero entries of m x m effective matrices, m = S C.
An image's vector lists its tokens one after the other."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis.output import Result
from finetune.looks import PAGE, looks

Mask = NDArray[np.bool_]


def masks(tokens: int, channels: int, *, seed: int) -> Result:
    found = masks_of(tokens, channels, seed=seed)
    rows = pd.DataFrame(
        [
            {"mask": name, "width": len(mask), "connections": mask.sum(), "density": mask.mean()}
            for name, mask in found.items()
        ]
    )
    with looks():
        figure = Figure(figsize=(PAGE, 4.2))
        for axes, (name, mask) in zip(figure.subplots(2, 4).flat, found.items(), strict=True):
            axes.imshow(~mask, cmap="gray", interpolation="nearest", vmin=0, vmax=1)
            axes.spines[:].set_visible(True)
            axes.set(xticks=[], yticks=[], title=name, xlabel=f"{mask.mean():.1%} nonzero")
    facts = {"tokens": tokens, "channels": channels, "seed": seed}
    return Result(rows, facts, {"": figure})


def masks_of(tokens: int, channels: int, *, seed: int) -> dict[str, Mask]:
    """Return {name: mask}. A SW-MLP layer has on average (C S^2 + C^2 S) / 2 connections, the mean
    of both mixings."""
    generator = np.random.default_rng(seed)
    width = tokens * channels
    of_tokens = np.kron(np.ones((tokens, tokens), bool), np.eye(channels, dtype=bool))
    of_channels = np.kron(np.eye(tokens, dtype=bool), np.ones((channels, channels), bool))
    rp_tokens, rp_channels = (  # J2 M J1
        mask[generator.permutation(width)][:, generator.permutation(width)]
        for mask in (of_tokens, of_channels)
    )
    sparse, *two = generator.random((3, width, width)) < (tokens + channels) / 2 / width
    return {
        "token mixing, V ⊗ I": of_tokens,
        "channel mixing, I ⊗ W": of_channels,
        "both, (I ⊗ W)(V ⊗ I)": _product(of_channels, of_tokens),
        "SW-MLP, M ⊙ A": sparse,
        "RP token mixing": rp_tokens,
        "RP channel mixing": rp_channels,
        "both RP mixings": _product(rp_channels, rp_tokens),
        "two SW-MLP layers": _product(*two),
    }


def _product(left: Mask, right: Mask) -> Mask:
    return left.astype(np.float32) @ right.astype(np.float32) > 0
