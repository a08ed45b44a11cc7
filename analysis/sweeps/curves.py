"""Losses while training, over seeds: their band, and how far the last test loss is above the least (overfit)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from analysis.points import Point
from analysis.sweeps.series import By, Reader, Value, in_words
from data_prep.settings import UserError

Curve = Literal["train", "test"]


@dataclass(frozen=True)
class Band:
    """Of one line: over seeds at each epoch."""

    facet: tuple[Value, ...]
    hue: tuple[Value, ...]
    curve: Curve
    epochs: NDArray[Any]
    losses: NDArray[Any]
    """(seeds, epochs)"""

    @property
    def mean(self) -> NDArray[Any]:
        return np.asarray(self.losses.mean(axis=0))

    @property
    def low(self) -> NDArray[Any]:
        return np.asarray(self.losses.min(axis=0))

    @property
    def high(self) -> NDArray[Any]:
        return np.asarray(self.losses.max(axis=0))

    @property
    def overfit(self) -> list[float]:
        """Of each seed, by its own least."""
        return (self.losses[:, -1] - self.losses.min(axis=1)).tolist()  # type: ignore[no-any-return]

    def rows(self, by: By) -> list[dict[str, Any]]:
        sd = self.losses.std(axis=0, ddof=1).tolist() if len(self.losses) > 1 else [None] * len(self.epochs)
        names = {"facet": in_words(self.facet, by.facet), "hue": in_words(self.hue, by.hue), "curve": self.curve}
        return [
            {
                **names,
                "epochs": float(epoch),
                "mean": float(self.mean[at]),
                "sd": sd[at],
                "min": float(self.low[at]),
                "max": float(self.high[at]),
                "num_seeds": len(self.losses),
            }
            for at, epoch in enumerate(self.epochs)
        ]

    def facts(self, by: By) -> dict[str, Any]:
        over = self.overfit
        spread = {"overfit_mean": fmean(over), "overfit_sd": stdev(over) if len(over) > 1 else None}
        return {"facet": in_words(self.facet, by.facet), "hue": in_words(self.hue, by.hue), **spread, "overfit": over}


def bands_of(points: Sequence[Point], by: By) -> list[Band]:
    """Seeds whose steps differ are read off at those of the first one."""
    read = Reader(points)
    read.check((*by.hue, *by.facet))
    found = [point for point in points if point.train_losses or point.test_losses]
    if not found:
        raise UserError("no point has curves: they are of the journal, which tracking.enabled: false does not keep")
    groups: dict[tuple[Any, Any], list[Point]] = defaultdict(list)
    for point in found:
        groups[read.all(point, by.facet), read.all(point, by.hue)].append(point)
    bands = []
    for (facet, hue), own in groups.items():
        seeds = [(point.seed, point.own_seed) for point in own]
        if len(set(seeds)) < len(seeds):
            again = [point.run for point in own if seeds.count((point.seed, point.own_seed)) > 1][:2]
            words = in_words((*hue, *facet), (*by.hue, *by.facet)) or "no hue or facet"
            raise UserError(f"{again[0]} and {again[1]} are one seed of {words}; make what they differ in a hue or a facet")
        for curve in ("train", "test"):
            curves = [(getattr(point, f"{curve}_epochs"), getattr(point, f"{curve}_losses")) for point in own]
            curves = [each for each in curves if each[0]]
            if curves:
                epochs = np.array(curves[0][0])
                bands.append(Band(facet, hue, curve, epochs, np.stack([np.interp(epochs, *each) for each in curves])))
    order = [list(dict.fromkeys(each)) for each in zip(*groups, strict=True)]
    return sorted(bands, key=lambda band: (order[0].index(band.facet), order[1].index(band.hue)))
