"""Rotation, shear and translation as one affine sampling with a matrix per picture. n pictures, H W height and width, C colours.

As PIL: output pixel centres are mapped into the picture; what falls outside is filled; inside, taps beyond the border repeat it,
and values are cut off to whole levels. All in float64, as PIL has it: with shifts such as 28.8 pixels one value in a hundred is
a whole level, and float32 would fall on its other side.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.plan import Operation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TOGETHER_ON_CPU = 8
"""Pictures of 64 pixels whose values stay in a core's cache from one step of the arithmetic to the next."""


GEOMETRIC = (
    Operation.ROTATE,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
)


def matrices(operations_n: Ints, strengths_n: Floats, *, height: int, width: int) -> Floats:
    """(n, 6), each (a, b, c, d, e, f): output (x, y) is taken from (a x + b y + c, d x + e y + f)."""

    def only(operation: Operation) -> Floats:
        return np.where(operations_n == operation, strengths_n, 0.0)

    angle = -np.radians(only(Operation.ROTATE) % 360.0)
    cosine, sine = np.round(np.cos(angle), 15), np.round(np.sin(angle), 15)  # a quarter turn is exact
    x, y = width / 2, height / 2  # about the middle
    return np.stack(
        [
            cosine,
            sine + only(Operation.SHEAR_X),
            cosine * -x + sine * -y + x + only(Operation.TRANSLATE_X) * width,
            -sine + only(Operation.SHEAR_Y),
            cosine,
            -sine * -x + cosine * -y + y + only(Operation.TRANSLATE_Y) * height,
        ],
        axis=1,
    )


def sample(pictures_nHWC: Tensor, matrices_n6: Tensor, *, cubic: bool, fill_C: Tensor) -> Tensor:
    if pictures_nHWC.device.type != "cpu":
        return _sample(pictures_nHWC, matrices_n6, cubic=cubic, fill_C=fill_C)
    parts = (slice(first, first + _TOGETHER_ON_CPU) for first in range(0, len(pictures_nHWC), _TOGETHER_ON_CPU))
    return torch.cat([_sample(pictures_nHWC[part], matrices_n6[part], cubic=cubic, fill_C=fill_C) for part in parts])


def _sample(pictures_nHWC: Tensor, matrices_n6: Tensor, *, cubic: bool, fill_C: Tensor) -> Tensor:
    count, height, width, colours = pictures_nHWC.shape
    device = pictures_nHWC.device
    x_W = torch.arange(width, device=device, dtype=torch.float64) + 0.5
    y_H1 = (torch.arange(height, device=device, dtype=torch.float64) + 0.5).unsqueeze(-1)
    a, b, c, d, e, f = matrices_n6.double().view(count, 6, 1, 1).unbind(1)
    x_nHW, y_nHW = a * x_W + b * y_H1 + c, d * x_W + e * y_H1 + f
    inside_nHW = (x_nHW >= 0) & (x_nHW < width) & (y_nHW >= 0) & (y_nHW < height)
    x_nHW, y_nHW = x_nHW - 0.5, y_nHW - 0.5
    left_nHW, top_nHW = x_nHW.floor(), y_nHW.floor()
    right_of_nHW1 = (x_nHW - left_nHW).unsqueeze(-1)
    below_nHW1 = (y_nHW - top_nHW).unsqueeze(-1)
    taps = range(-1, 3) if cubic else range(2)
    columns = [(left_nHW + tap).clamp(0, width - 1).int() for tap in taps]
    first = torch.arange(count, device=device, dtype=torch.int32).view(-1, 1, 1) * (height * width)
    flat = pictures_nHWC.reshape(-1, colours)
    blend: Callable[..., Tensor] = _cubic if cubic else _linear
    rows = []
    for tap in taps:
        row = first + (top_nHW + tap).clamp(0, height - 1).int() * width
        values = (
            flat.index_select(0, (row + column).view(-1)).view(pictures_nHWC.shape).double() for column in columns
        )
        rows.append(blend(*values, right_of_nHW1))
    found = blend(*rows, below_nHW1).clamp_(0, 255).to(torch.uint8)
    return torch.where(inside_nHW.unsqueeze(-1), found, fill_C)


def _linear(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    return first + (second - first) * share


def _cubic(v1: Tensor, v2: Tensor, v3: Tensor, v4: Tensor, share: Tensor) -> Tensor:
    """Through v2 (0) and v3 (1): the cubic convolution with a = -1 that PIL's transform uses (its resize has -1/2)."""
    difference = v1 - v2
    return v2 + share * (v3 - v1 + share * (2 * difference + v3 - v4 + share * (v4 - v3 - difference)))
