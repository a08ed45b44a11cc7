"""Random numbers of the augmentation: each is a function of the picture (seed, epoch, sample) or the pair, and of what it is for.

Nothing has a state, so what is drawn depends on no rank, worker, batch or resume. The numbers of `Purpose` are part of a run's
identity: a new purpose gets a new number, and none is used again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri
from torch import Tensor

from pretrain.data.order import hash64, uniform

Floats = NDArray[np.float64]


class Purpose(IntEnum):
    CROP_AREA = 0
    CROP_RATIO = 1
    CROP_TOP = 2
    CROP_LEFT = 3
    FLIP = 4
    MIXUP = 5
    CROP_KERNEL = 6
    POLICY_STEP = 7
    POLICY_APPLIED = 8
    POLICY_MAGNITUDE = 9
    POLICY_SIGN = 10
    POLICY_KERNEL = 11
    ERASE = 12
    ERASE_COUNT = 13
    ERASE_AREA = 14
    ERASE_RATIO = 15
    ERASE_TOP = 16
    ERASE_LEFT = 17
    ERASE_COLOUR = 18
    ERASE_NOISE = 19
    MIX = 20
    SWITCH = 21
    CUTMIX = 22
    CUTMIX_ROW = 23
    CUTMIX_COLUMN = 24


@dataclass(frozen=True)
class Draws:
    """Numbers for every picture (or pair) of a batch; `more` numbers several draws for one purpose, one array axis each."""

    keys: tuple[ArrayLike, ...]

    def uniform(self, purpose: Purpose, *more: ArrayLike) -> Floats:
        """In [0, 1): (B, *more)."""
        return uniform(*self._parts(purpose, more))

    def normal(self, purpose: Purpose, *more: ArrayLike) -> Floats:
        return np.asarray(ndtri(self.uniform(purpose, *more) + 2.0**-54))

    def integer(self, purpose: Purpose, count: int | NDArray[np.int64], *more: ArrayLike) -> NDArray[np.int64]:
        """In 0..count-1."""
        return np.floor(self.uniform(purpose, *more) * count).astype(np.int64)

    def key(self, purpose: Purpose) -> NDArray[np.int64]:
        """64 bits a picture, for numbers that are made on the device."""
        return hash64(*self._parts(purpose, ())).view(np.int64)

    def of(self, rows: NDArray[np.int64]) -> "Draws":
        """For some of the pictures only."""
        return Draws(tuple(np.asarray(key)[rows] if np.ndim(key) else key for key in self.keys))

    def _parts(self, purpose: Purpose, more: tuple[ArrayLike, ...]) -> list[ArrayLike]:
        """Each array on an axis of its own, so that what they share is hashed once."""
        axes = sum(np.ndim(numbers) for numbers in more)
        parts: list[ArrayLike] = [_with_axes(key, axes) for key in self.keys]
        parts.append(int(purpose))
        for numbers in more:
            axes -= np.ndim(numbers)
            parts.append(_with_axes(numbers, axes))
        return parts


def _with_axes(numbers: ArrayLike, axes: int) -> ArrayLike:
    array = np.asarray(numbers)
    return array.reshape(array.shape + (1,) * axes) if array.ndim else array


class BetaTable:
    """Beta(alpha, alpha) from uniform numbers: its inverse distribution function on an even grid."""

    def __init__(self, alpha: float):
        self._values = np.asarray(betaincinv(alpha, alpha, np.linspace(0, 1, 4097)), np.float64) if alpha > 0 else None

    def __call__(self, uniform_numbers: Floats) -> Floats:
        assert self._values is not None
        return np.interp(uniform_numbers, np.linspace(0, 1, len(self._values)), self._values)


_ALIGNMENT = 16


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """One tensor per array. On CUDA they are views of one buffer, copied from pinned memory: no synchronisation."""
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_host = buffer.numpy()
    for name, array in arrays.items():
        on_host[places[name] : places[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = buffer.to(device, non_blocking=True)
    return {
        name: there[places[name] : places[name] + array.nbytes].view(_torch_type(array)).view(array.shape)
        for name, array in arrays.items()
    }


def _torch_type(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
