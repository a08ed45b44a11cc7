"""Losses while training, over seeds: their band, and how far the last test loss is above the least
(overfit)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.points import Point
from analysis.sweeps.series import By, grouped, sd
from analysis.sweeps.statistics import Facts
from data_prep.errors import UserError


@dataclass(frozen=True)
class Band:
    """Of one line: over seeds at each epoch."""

    facet: str
    hue: str
    curve: str
    """train or test"""
    epochs: NDArray[Any]
    losses: NDArray[Any]
    """(seeds, epochs)"""

    @property
    def rows(self) -> Iterator[Facts]:
        for epoch, losses in zip(self.epochs.tolist(), self.losses.T.tolist(), strict=True):
            spread = {
                "sd": sd(losses),
                "min": min(losses),
                "max": max(losses),
                "num_seeds": len(losses),
            }
            yield {
                "facet": self.facet,
                "hue": self.hue,
                "curve": self.curve,
                "epochs": epoch,
                "mean": fmean(losses),
                **spread,
            }

    @property
    def facts(self) -> Facts:
        """The overfit of each seed, by its own least."""
        over = (self.losses[:, -1] - self.losses.min(axis=1)).tolist()
        return {
            "facet": self.facet,
            "hue": self.hue,
            "overfit_mean": fmean(over),
            "overfit_sd": sd(over),
            "overfit": over,
        }


def bands_of(points: Sequence[Point], by: By) -> list[Band]:
    """By hue and facet. Seeds whose steps differ are read off at those of the first one, as far as
    all of them go."""
    found = [point for point in points if point.train_losses or point.test_losses]
    if not found:
        raise UserError(
            "no point has curves: they are of the journal, which tracking.enabled: false does not"
            " keep"
        )
    bands = []
    for place in grouped(found, By("", by.hue, by.facet)):
        seeds = [point for points in place.points.values() for point in points]
        for curve in ("train", "test"):
            curves = [
                (getattr(point, f"{curve}_epochs"), getattr(point, f"{curve}_losses"))
                for point in seeds
            ]
            curves = [each for each in curves if each[0]]
            if not curves:
                continue
            begin, end = (
                max(epochs[0] for epochs, _ in curves),
                min(epochs[-1] for epochs, _ in curves),
            )
            common = np.array([epoch for epoch in curves[0][0] if begin <= epoch <= end])
            if not len(common):
                words = (
                    f"the {curve} curves of {seeds[0].run} and its other seeds have no epoch in"
                    " common"
                )
                raise UserError(f"{words}; make what they differ in a hue or a facet")
            bands.append(
                Band(
                    place.facet,
                    place.hue,
                    curve,
                    common,
                    np.stack([np.interp(common, *each) for each in curves]),
                )
            )
    return bands
