"""Erase random blocks of normalized images, as in timm. K: most blocks of an image, B batch, n
erased images, O size, C colors.

The blocks of an image cover 2 % to a third of its area, and have aspect ratios from 0.3 to 1/0.3. A
block is filled with 0 (the mean color), one normally distributed color, or normal noise. Noise
depends on a key for the image and on the pixel's position, not on the batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.draws import Draws, Purpose, first_that, send
from pretrain.config import AugmentSettings, EraseMode

_MIN_AREA, _MAX_AREA = 0.02, 1 / 3
_MIN_RATIO = 0.3
_TRIES = 10

_GOLDEN, _M1, _M2 = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # constants of SplitMix64, as signed numbers


@dataclass(frozen=True)
class ErasedBlocks:
    """Erased blocks of the images `rows` of a batch. An unused block has height 0."""

    rows: NDArray[np.int64]
    top_nK: NDArray[np.int64]
    left_nK: NDArray[np.int64]
    height_nK: NDArray[np.int64]
    width_nK: NDArray[np.int64]
    colors_nKC: NDArray[np.float32]
    noise_keys_n: NDArray[np.int64]


def draw_blocks(settings: AugmentSettings, draws: Draws, *, size: int) -> ErasedBlocks:
    rows = np.flatnonzero(draws.uniform(Purpose.ERASE) < settings.erase_probability)
    draws = draws.of(rows)
    blocks, tries = np.arange(settings.erase_count), np.arange(_TRIES)
    count_n1 = 1 + draws.integer(Purpose.ERASE_COUNT, settings.erase_count)[:, None]
    share_nKT = _MIN_AREA + (_MAX_AREA - _MIN_AREA) * draws.uniform(
        Purpose.ERASE_AREA, blocks, tries
    )
    area_nKT = share_nKT * size**2 / count_n1[:, :, None]
    ratio_nKT = np.exp(
        math.log(_MIN_RATIO) * (1 - 2 * draws.uniform(Purpose.ERASE_RATIO, blocks, tries))
    )
    heights_nKT = np.round(np.sqrt(area_nKT * ratio_nKT))
    widths_nKT = np.round(np.sqrt(area_nKT / ratio_nKT))
    fits_nKT = (heights_nKT < size) & (widths_nKT < size)
    found_nK, sides = first_that(fits_nKT, heights_nKT, widths_nKT)
    drawn_nK = found_nK & (blocks[None, :] < count_n1)
    height_nK, width_nK = (np.where(drawn_nK, side_nK, 0).astype(np.int64) for side_nK in sides)
    top_nK = draws.integer(Purpose.ERASE_TOP, size - height_nK + 1, blocks)
    left_nK = draws.integer(Purpose.ERASE_LEFT, size - width_nK + 1, blocks)
    colors_nKC = draws.normal(Purpose.ERASE_COLOR, blocks, np.arange(3)).astype(np.float32)
    return ErasedBlocks(
        rows, top_nK, left_nK, height_nK, width_nK, colors_nKC, draws.key(Purpose.ERASE_NOISE)
    )


def erase(pictures_BCOO: Tensor, blocks: ErasedBlocks, *, mode: EraseMode) -> Tensor:
    if not len(blocks.rows):
        return pictures_BCOO
    _, colors, size, _ = pictures_BCOO.shape
    edges = {
        "rows": blocks.rows, "top": blocks.top_nK, "bottom": blocks.top_nK + blocks.height_nK,
        "left": blocks.left_nK, "right": blocks.left_nK + blocks.width_nK,
        "colors": blocks.colors_nKC, "keys": blocks.noise_keys_n,
    }  # fmt: skip
    sent = send(edges, pictures_BCOO.device)
    place_O = torch.arange(size, device=pictures_BCOO.device)
    inside_nKO1 = _between(place_O, sent["top"], sent["bottom"]).unsqueeze(-1)
    inside_nK1O = _between(place_O, sent["left"], sent["right"]).unsqueeze(-2)
    pictures_nCOO = pictures_BCOO.index_select(0, sent["rows"])
    if mode == "pixel":
        noise_nCOO = normal_noise(sent["keys"], colors * size * size).view(-1, colors, size, size)
        inside_n1OO = (inside_nKO1 & inside_nK1O).any(dim=1, keepdim=True)
        pictures_nCOO = torch.where(inside_n1OO, noise_nCOO, pictures_nCOO)
    else:
        for block in range(blocks.top_nK.shape[1]):
            inside_n1OO = (inside_nKO1[:, block] & inside_nK1O[:, block]).unsqueeze(1)
            fill = sent["colors"][:, block, :, None, None] if mode == "rand" else 0.0
            pictures_nCOO = torch.where(inside_n1OO, fill, pictures_nCOO)
    return pictures_BCOO.index_copy_(0, sent["rows"], pictures_nCOO)


def normal_noise(keys_n: Tensor, count: int) -> Tensor:
    """Return (n, count) normal random numbers. Each number uses 23 bits of the SplitMix64 sequence
    of its row's key."""
    place = torch.arange(1, count + 1, device=keys_n.device)
    state = keys_n.unsqueeze(-1) + place * _GOLDEN
    state = (state ^ _shifted(state, 30)) * _M1
    state = (state ^ _shifted(state, 27)) * _M2
    bits = _shifted(state ^ _shifted(state, 31), 41)
    normal: Tensor = torch.special.ndtri((bits.float() + 0.5) * 2.0**-23)
    return normal


def _shifted(values: Tensor, places: int) -> Tensor:
    """Shift right and insert zeros. torch's >> repeats the sign bit."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _between(place_O: Tensor, start_nK: Tensor, end_nK: Tensor) -> Tensor:
    return (place_O >= start_nK.unsqueeze(-1)) & (place_O < end_nK.unsqueeze(-1))
