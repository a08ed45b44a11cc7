"""Random numbers of the augmentation: each is a function of the picture (seed, epoch, sample) or
the pair, and of what it is for.

Nothing has a state, so what is drawn depends on no rank, worker, batch or resume. The numbers of
`Purpose` are part of a run's
identity: a new purpose gets a new number, and none is used again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri
from torch import Tensor

from pretrain.data.order import hash64, uniform

Floats = NDArray[np.float64]


class Purpose(IntEnum):
    CROP_AREA, CROP_RATIO, CROP_TOP, CROP_LEFT, FLIP, MIXUP, CROP_KERNEL = range(7)
    POLICY_STEP, POLICY_APPLIED, POLICY_MAGNITUDE, POLICY_SIGN, POLICY_KERNEL = range(7, 12)
    (
        ERASE,
        ERASE_COUNT,
        ERASE_AREA,
        ERASE_RATIO,
        ERASE_TOP,
        ERASE_LEFT,
        ERASE_COLOUR,
        ERASE_NOISE,
    ) = range(12, 20)
    MIX, SWITCH, CUTMIX, CUTMIX_ROW, CUTMIX_COLUMN = range(20, 25)
    PIXELS = 25


@dataclass(frozen=True)
class Draws:
    """Numbers for every picture (or pair) of a batch; `more` numbers several draws for one purpose,
    one array axis each."""

    keys: tuple[ArrayLike, ...]

    def uniform(self, purpose: Purpose, *more: ArrayLike) -> Floats:
        """In [0, 1): (B, *more)."""
        return uniform(*self._parts(purpose, more), after=self._after(more))

    def normal(self, purpose: Purpose, *more: ArrayLike) -> Floats:
        return np.asarray(ndtri(self.uniform(purpose, *more) + 2.0**-54))

    def integer(
        self, purpose: Purpose, count: int | NDArray[np.int64], *more: ArrayLike
    ) -> NDArray[np.int64]:
        """In 0..count-1."""
        return np.floor(self.uniform(purpose, *more) * count).astype(np.int64)

    def key(self, purpose: Purpose) -> NDArray[np.int64]:
        """64 bits a picture, for numbers that are made on the device."""
        return hash64(*self._parts(purpose, ()), after=self._hashed).view(np.int64)

    def of(self, rows: NDArray[np.int64]) -> "Draws":
        """For some of the pictures only."""
        return Draws(tuple(np.asarray(key)[rows] if np.ndim(key) else key for key in self.keys))

    @cached_property
    def _hashed(self) -> NDArray[np.uint64]:
        """The keys; whatever is drawn, once."""
        return hash64(*self.keys)

    def _after(self, more: tuple[ArrayLike, ...]) -> NDArray[np.uint64]:
        return np.asarray(_with_axes(self._hashed, sum(np.ndim(numbers) for numbers in more)))

    def _parts(self, purpose: Purpose, more: tuple[ArrayLike, ...]) -> list[ArrayLike]:
        """Each array on an axis of its own, so that what they share is hashed once."""
        axes = sum(np.ndim(numbers) for numbers in more)
        parts: list[ArrayLike] = [int(purpose)]
        for numbers in more:
            axes -= np.ndim(numbers)
            parts.append(_with_axes(numbers, axes))
        return parts


def _with_axes(numbers: ArrayLike, axes: int) -> ArrayLike:
    array = np.asarray(numbers)
    return array.reshape(array.shape + (1,) * axes) if array.ndim else array


def first_that(
    fits: NDArray[np.bool_], *tries: NDArray[Any]
) -> tuple[NDArray[np.bool_], list[NDArray[Any]]]:
    """Of several tries, along the last axis: whether one fits, and the numbers of the first that
    does."""
    first = np.expand_dims(fits.argmax(axis=-1), -1)
    return np.asarray(fits.any(axis=-1)), [
        np.take_along_axis(each, first, axis=-1)[..., 0] for each in tries
    ]


class BetaTable:
    """Beta(alpha, alpha) from uniform numbers: its inverse distribution function on an even
    grid."""

    def __init__(self, alpha: float):
        self._grid = np.linspace(0, 1, 4097)
        self._values = np.asarray(betaincinv(alpha, alpha, self._grid), np.float64)

    def __call__(self, uniform_numbers: Floats) -> Floats:
        return np.interp(uniform_numbers, self._grid, self._values)


_ALIGNMENT = 16


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """One tensor per array. On CUDA they are views of one buffer, copied from pinned memory: no
    synchronisation."""
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        in_bytes = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        buffer[places[name] : places[name] + array.nbytes].copy_(
            in_bytes
        )  # not through numpy: a fake tensor has no memory
    there = buffer.to(device, non_blocking=True)
    sent = {}
    for name, array in arrays.items():
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        sent[name] = there[places[name] : places[name] + array.nbytes].view(kind).view(array.shape)
    return sent
