"""Operations on colours, in whole levels 0..255, rounded where PIL does it. n pictures, H W height and width, C colours.

Most of them look a level up in a table, so they are one lookup for all pictures: the tables of INVERT, POSTERIZE, SOLARIZE,
SOLARIZE_ADD and BRIGHTNESS are known on the host, those of AUTOCONTRAST, EQUALIZE and CONTRAST follow from the picture.
Every result equals PIL's bit for bit (tests/pretrain/augment/test_operations.py), but for Pillow-SIMD's rounding of grey: in one
colour of 500 it is a level off Pillow's, and so off ours, which moves COLOR by a level there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.plan import Operation

LEVELS = np.arange(256)


def fixed_tables(operations_n: NDArray[np.int64], strengths_n: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The 256 levels that the levels become, for what needs no look at the picture: (n, 256)."""
    tables = np.empty((len(operations_n), 256), np.uint8)
    for operation, table in _FIXED.items():
        here = operations_n == operation
        if here.any():
            tables[here] = table(strengths_n[here, None])
    return tables


def _posterized(bits: NDArray[np.float64]) -> NDArray[np.int64]:
    dropped = 8 - np.clip(bits.astype(np.int64), 0, 8)
    return LEVELS >> dropped << dropped


def _brightened(factor: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(factor.astype(np.float32) * LEVELS.astype(np.float32), 0, 255)


_FIXED: dict[Operation, Callable[[NDArray[np.float64]], NDArray[Any]]] = {
    Operation.INVERT: lambda _: 255 - LEVELS,
    Operation.POSTERIZE: _posterized,
    Operation.SOLARIZE: lambda threshold: np.where(threshold > LEVELS, LEVELS, 255 - LEVELS),
    Operation.SOLARIZE_ADD: lambda added: np.where(LEVELS < 128, np.minimum(LEVELS + added, 255), LEVELS),
    Operation.BRIGHTNESS: _brightened,
}
FIXED = tuple(_FIXED)
"""The operations of `fixed_tables`."""


def look_up(pictures_nHWC: Tensor, tables_nCL: Tensor) -> Tensor:
    return tables_nCL.reshape(-1).index_select(0, _table_places(pictures_nHWC).view(-1)).view(pictures_nHWC.shape)


def autocontrast_tables(pictures_nHWC: Tensor) -> Tensor:
    """The darkest level of a channel becomes 0, the lightest 255; a flat channel stays."""
    low_nC1 = pictures_nHWC.amin(dim=(1, 2)).double().unsqueeze(-1)
    high_nC1 = pictures_nHWC.amax(dim=(1, 2)).double().unsqueeze(-1)
    scale_nC1 = torch.full_like(low_nC1, 255) / (high_nC1 - low_nC1)  # 255 / x would be 255 * (1 / x)
    levels_L = torch.arange(256, device=pictures_nHWC.device, dtype=torch.float64)
    stretched_nCL = levels_L * scale_nC1 + -low_nC1 * scale_nC1
    return torch.where(high_nC1 > low_nC1, stretched_nCL.trunc().clamp(0, 255), levels_L).to(torch.uint8)


def equalize_tables(pictures_nHWC: Tensor) -> Tensor:
    """As many pixels in every stretch of levels."""
    count, height, width, colours = pictures_nHWC.shape
    device = pictures_nHWC.device
    places = _table_places(pictures_nHWC).view(-1).long()
    histogram = torch.zeros(count * colours * 256, dtype=torch.int32, device=device)
    histogram_nCL = histogram.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32)).view(
        count, colours, 256
    )
    up_to_nCL = histogram_nCL.cumsum(dim=-1, dtype=torch.int32)
    highest_nC = pictures_nHWC.amax(dim=(1, 2)).long().unsqueeze(-1)
    step_nC1 = (height * width - histogram_nCL.gather(-1, highest_nC)) // 255
    equal_nCL = (step_nC1 // 2 + up_to_nCL - histogram_nCL) // step_nC1.clamp(min=1)
    levels_L = torch.arange(256, device=device, dtype=torch.int32)
    return torch.where(step_nC1 > 0, equal_nCL.clamp(max=255), levels_L).to(torch.uint8)


def contrast_tables(pictures_nHWC: Tensor, factors_n: Tensor) -> Tensor:
    """Away from (or towards) the mean brightness of the picture."""
    grey_nHW = _grey(pictures_nHWC)
    pixels = grey_nHW[0].numel()
    mean_n1 = (2 * grey_nHW.sum(dim=(1, 2)).unsqueeze(-1) + pixels) // (2 * pixels)
    levels_L = torch.arange(256, device=pictures_nHWC.device, dtype=torch.float32)
    tables_nL = _blend(mean_n1.float(), levels_L, factors_n.view(-1, 1))
    return tables_nL.unsqueeze(1).expand(-1, pictures_nHWC.shape[-1], -1)


def saturate(pictures_nHWC: Tensor, factors_n: Tensor) -> Tensor:
    """0 is grey, 1 the picture, above 1 more colourful."""
    grey_nHW1 = _grey(pictures_nHWC).float().unsqueeze(-1)
    return _blend(grey_nHW1, pictures_nHWC.float(), factors_n.view(-1, 1, 1, 1))


def sharpen(pictures_nHWC: Tensor, factors_n: Tensor) -> Tensor:
    """0 is smoothed, 1 the picture, above 1 sharper. The filter is 3x3, its middle weighs 5 of 13; the border stays."""
    values = pictures_nHWC.int()
    columns = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    around = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:]
    smooth = values.clone()
    smooth[:, 1:-1, 1:-1] = (2 * (around + 4 * values[:, 1:-1, 1:-1]) + 13) // 26
    return _blend(smooth.float(), values.float(), factors_n.view(-1, 1, 1, 1))


def _blend(start: Tensor, end: Tensor, factor: Tensor) -> Tensor:
    """From `start` (0) to `end` (1) and beyond."""
    return (start + factor * (end - start)).clamp_(0, 255).to(torch.uint8)


def _grey(pictures_nHWC: Tensor) -> Tensor:
    """ITU-R 601 brightness in PIL's fixed point."""
    red, green, blue = pictures_nHWC.int().unbind(-1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _table_places(pictures_nHWC: Tensor) -> Tensor:
    """Where each level stands in flat tables (n, C, 256)."""
    count, _, _, colours = pictures_nHWC.shape
    start = torch.arange(count * colours, device=pictures_nHWC.device, dtype=torch.int32) * 256
    return pictures_nHWC.int() + start.view(count, 1, 1, colours)
