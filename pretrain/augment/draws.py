"""Random numbers of the augmentation. Each number is a hash of a purpose and an image (seed, epoch,
sample) or a pair of images.

Numbers do not depend on ranks, workers, batches or a resume, because there is no generator's state.
If you add a purpose, give it an unused value of `Purpose`. Never change a value: resumed runs
depend on it.
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
        ERASE_COLOR,
        ERASE_NOISE,
    ) = range(12, 20)
    MIX, SWITCH, CUTMIX, CUTMIX_ROW, CUTMIX_COLUMN = range(20, 25)
    PIXELS = 25


@dataclass(frozen=True)
class Draws:
    """Random numbers for every image (or pair) of a batch. Each array in the arguments `more`
    contains indices of draws for one purpose, and adds its axes to the result."""

    keys: tuple[ArrayLike, ...]

    def uniform(self, purpose: Purpose, *more: ArrayLike) -> Floats:
        """Return uniform numbers in [0, 1). Their axes are B and the axes of `more`."""
        return uniform(*self._parts(purpose, more), after=self._after(more))

    def normal(self, purpose: Purpose, *more: ArrayLike) -> Floats:
        return np.asarray(ndtri(self.uniform(purpose, *more) + 2.0**-54))

    def integer(
        self, purpose: Purpose, count: int | NDArray[np.int64], *more: ArrayLike
    ) -> NDArray[np.int64]:
        """Return random integers from 0 to count - 1."""
        return np.floor(self.uniform(purpose, *more) * count).astype(np.int64)

    def key(self, purpose: Purpose) -> NDArray[np.int64]:
        """Return a 64-bit key for each image. The device generates random numbers from the key."""
        return hash64(*self._parts(purpose, ()), after=self._hashed).view(np.int64)

    def of(self, rows: NDArray[np.int64]) -> "Draws":
        """Return the `Draws` of the images at the indices `rows`."""
        return Draws(tuple(np.asarray(key)[rows] if np.ndim(key) else key for key in self.keys))

    @cached_property
    def _hashed(self) -> NDArray[np.uint64]:
        return hash64(*self.keys)

    def _after(self, more: tuple[ArrayLike, ...]) -> NDArray[np.uint64]:
        return np.asarray(_with_axes(self._hashed, sum(np.ndim(numbers) for numbers in more)))

    def _parts(self, purpose: Purpose, more: tuple[ArrayLike, ...]) -> list[ArrayLike]:
        """Return the purpose and the arrays, each with its own axis. They are hashed once for all
        images."""
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
    """Return a mask of the rows in which a try fits, and from each array in `tries` the values of
    the first fitting try. Tries are on the last axis."""
    first = np.expand_dims(fits.argmax(axis=-1), -1)
    return np.asarray(fits.any(axis=-1)), [
        np.take_along_axis(each, first, axis=-1)[..., 0] for each in tries
    ]


class BetaTable:
    """Inverse distribution function of Beta(alpha, alpha) on an equally spaced grid."""

    def __init__(self, alpha: float):
        self._grid = np.linspace(0, 1, 4097)
        self._values = np.asarray(betaincinv(alpha, alpha, self._grid), np.float64)

    def __call__(self, uniform_numbers: Floats) -> Floats:
        return np.interp(uniform_numbers, self._grid, self._values)


_ALIGNMENT = 16


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy the arrays to the device without synchronization. The results are views of one buffer
    that was copied from pinned memory."""
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        in_bytes = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        # not through numpy: a fake tensor has no memory
        buffer[places[name] : places[name] + array.nbytes].copy_(in_bytes)
    there = buffer.to(device, non_blocking=True)
    sent = {}
    for name, array in arrays.items():
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        sent[name] = there[places[name] : places[name] + array.nbytes].view(kind).view(array.shape)
    return sent
