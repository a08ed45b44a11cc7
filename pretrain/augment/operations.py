"""Apply a plan of operations to images. In each step of the plan (a layer), all images with the
same operation are gathered, changed together and written back.

The host assigns the operations to images, and copies all numbers of a plan at once. No result
depends on the order of a sum, so an image does not depend on its batch.

Colors change in integer levels 0..255, rounded as in PIL. Most color operations are lookups in
tables of levels. The tables of some operations (`FIXED`) are known on the host; other tables depend
on the image. Every result equals PIL's bit for bit, except for the operation COLOR: Pillow-SIMD
rounds the gray of one color in 500 differently.

Rotation, shear and translation are one affine sampling with a matrix for each image, in float64 as
in PIL. The center of each output pixel is mapped into the image. An output pixel whose center falls
outside the image gets the fill color. Near the border, the border pixels repeat.

n images with the same operation, H W height and width, C colors, L levels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.draws import Floats, send
from pretrain.augment.plan import Operation, OperationPlan

Arrays = dict[str, NDArray[Any]]
Ints = NDArray[np.int64]
Change = Callable[[Tensor, Tensor], Tensor]
"""Function of n images and one strength per image that returns changed images, or tables of
levels."""

LEVELS = np.arange(256)


def apply_plan(pictures_BHWC: Tensor, plan: OperationPlan, *, fill_C: Tensor) -> Tensor:
    """Apply the plan to the uint8 images in place. `fill_C`: color of pixels that come from outside
    the image."""
    _, height, width, _ = pictures_BHWC.shape
    layers = [
        _arrays(plan, layer, height=height, width=width) for layer in range(len(plan.operations_LB))
    ]
    together = {
        f"{layer}.{name}": array
        for layer, arrays in enumerate(layers)
        for name, array in arrays.items()
    }
    if not together:
        return pictures_BHWC
    sent = send(together, pictures_BHWC.device)
    for layer, arrays in enumerate(layers):
        _apply_layer(
            pictures_BHWC, {name: sent[f"{layer}.{name}"] for name in arrays}, fill_C=fill_C
        )
    return pictures_BHWC


def _arrays(plan: OperationPlan, layer: int, *, height: int, width: int) -> Arrays:
    operations = plan.operations_LB[layer]
    strengths = plan.strengths_LB[layer]
    cubic = plan.cubic_LB[layer]
    moved = np.isin(operations, GEOMETRIC)
    kinds = {operation.name: operations == operation for operation in (*TABLES, *CHANGES)}
    kinds |= {"fixed": np.isin(operations, FIXED)}
    kinds |= (
        {"nearest": moved} if plan.nearest else {"linear": moved & ~cubic, "cubic": moved & cubic}
    )
    arrays: Arrays = {}
    for name, chosen in kinds.items():
        rows = np.flatnonzero(chosen)
        if not len(rows):
            continue
        arrays[name], known = rows, strengths[rows].astype(np.float32)
        if name == "fixed":
            known = fixed_tables(operations[rows], strengths[rows])
        elif name in TAPS:
            known = matrices(operations[rows], strengths[rows], height=height, width=width)
        arrays[f"{name}.known"] = known
    return arrays


def _apply_layer(pictures_BHWC: Tensor, sent: dict[str, Tensor], *, fill_C: Tensor) -> None:
    """Apply one step of the plan. The order of operations does not matter, because each image has
    one operation. All tables use one lookup."""

    def result(name: str, change: Change) -> Tensor:
        return change(pictures_BHWC.index_select(0, sent[name]), sent[f"{name}.known"])

    tables = {
        operation.name: result(operation.name, make)
        for operation, make in TABLES.items()
        if operation.name in sent
    }
    if "fixed" in sent:
        tables["fixed"] = sent["fixed.known"].unsqueeze(1).expand(-1, pictures_BHWC.shape[-1], -1)
    if tables:
        rows = torch.cat([sent[name] for name in tables])
        pictures_BHWC.index_copy_(
            0, rows, look_up(pictures_BHWC.index_select(0, rows), torch.cat(list(tables.values())))
        )
    changes: dict[str, Change] = {operation.name: change for operation, change in CHANGES.items()}
    changes |= {name: partial(move, sampling=name, fill_C=fill_C) for name in TAPS}
    for name, change in changes.items():
        if name in sent:
            pictures_BHWC.index_copy_(0, sent[name], result(name, change))


def fixed_tables(operations_n: Ints, strengths_n: Floats) -> NDArray[np.uint8]:
    """Return the tables (n, 256) of operations whose tables do not depend on the image."""
    tables = np.empty((len(operations_n), 256), np.uint8)
    for operation, table in _FIXED.items():
        here = operations_n == operation
        if here.any():
            tables[here] = table(strengths_n[here, None])
    return tables


def _posterized(bits: Floats) -> Ints:
    dropped = 8 - np.clip(bits.astype(np.int64), 0, 8)
    return LEVELS >> dropped << dropped


def _brightened(factor: Floats) -> NDArray[np.float32]:
    return np.clip(factor.astype(np.float32) * LEVELS.astype(np.float32), 0, 255)


_FIXED: dict[Operation, Callable[[Floats], NDArray[Any]]] = {
    Operation.INVERT: lambda _: 255 - LEVELS,
    Operation.POSTERIZE: _posterized,
    Operation.SOLARIZE: lambda threshold: np.where(threshold > LEVELS, LEVELS, 255 - LEVELS),
    Operation.SOLARIZE_ADD: lambda added: np.where(
        LEVELS < 128, np.minimum(LEVELS + added, 255), LEVELS
    ),
    Operation.BRIGHTNESS: _brightened,
}
FIXED = tuple(_FIXED)


def look_up(pictures_nHWC: Tensor, tables_nCL: Tensor) -> Tensor:
    return (
        tables_nCL.reshape(-1)
        .index_select(0, _table_places(pictures_nHWC).view(-1))
        .view(pictures_nHWC.shape)
    )


def autocontrast_tables(pictures_nHWC: Tensor, _: Tensor) -> Tensor:
    """Return tables that map a channel's darkest level to 0 and its lightest to 255. Constant
    channels do not change."""
    low_nC1 = pictures_nHWC.amin(dim=(1, 2)).double().unsqueeze(-1)
    high_nC1 = pictures_nHWC.amax(dim=(1, 2)).double().unsqueeze(-1)
    # 255 / x would be computed as 255 * (1 / x)
    scale_nC1 = torch.full_like(low_nC1, 255) / (high_nC1 - low_nC1)
    levels_L = torch.arange(256, device=pictures_nHWC.device, dtype=torch.float64)
    stretched_nCL = levels_L * scale_nC1 + -low_nC1 * scale_nC1
    return torch.where(high_nC1 > low_nC1, stretched_nCL.trunc().clamp(0, 255), levels_L).to(
        torch.uint8
    )


def equalize_tables(pictures_nHWC: Tensor, _: Tensor) -> Tensor:
    count, height, width, colors = pictures_nHWC.shape
    device = pictures_nHWC.device
    places = _table_places(pictures_nHWC).view(-1).long()
    histogram = torch.zeros(count * colors * 256, dtype=torch.int32, device=device)
    histogram_nCL = histogram.scatter_add_(
        0, places, torch.ones_like(places, dtype=torch.int32)
    ).view(count, colors, 256)
    up_to_nCL = histogram_nCL.cumsum(dim=-1, dtype=torch.int32)
    highest_nC = pictures_nHWC.amax(dim=(1, 2)).long().unsqueeze(-1)
    step_nC1 = (height * width - histogram_nCL.gather(-1, highest_nC)) // 255
    equal_nCL = (step_nC1 // 2 + up_to_nCL - histogram_nCL) // step_nC1.clamp(min=1)
    levels_L = torch.arange(256, device=device, dtype=torch.int32)
    return torch.where(step_nC1 > 0, equal_nCL.clamp(max=255), levels_L).to(torch.uint8)


def contrast_tables(pictures_nHWC: Tensor, factors_n: Tensor) -> Tensor:
    """Return tables that move levels away from (or toward) the mean brightness of the image."""
    gray_nHW = _gray(pictures_nHWC)
    pixels = gray_nHW[0].numel()
    mean_n1 = (2 * gray_nHW.sum(dim=(1, 2)).unsqueeze(-1) + pixels) // (2 * pixels)
    levels_L = torch.arange(256, device=pictures_nHWC.device, dtype=torch.float32)
    tables_nL = _blend(mean_n1.float(), levels_L, factors_n.view(-1, 1))
    return tables_nL.unsqueeze(1).expand(-1, pictures_nHWC.shape[-1], -1)


def saturate(pictures_nHWC: Tensor, factors_n: Tensor) -> Tensor:
    """Interpolate (or extrapolate) from gray (factor 0) to the image (factor 1)."""
    gray_nHW1 = _gray(pictures_nHWC).float().unsqueeze(-1)
    return _blend(gray_nHW1, pictures_nHWC.float(), factors_n.view(-1, 1, 1, 1))


def sharpen(pictures_nHWC: Tensor, factors_n: Tensor) -> Tensor:
    """Interpolate (or extrapolate) from a smoothed image (factor 0) to the image (factor 1). The
    3x3 filter has center weight 5 of 13 and keeps the border."""
    values = pictures_nHWC.int()
    columns = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    around = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:]
    smooth = values.clone()
    smooth[:, 1:-1, 1:-1] = (2 * (around + 4 * values[:, 1:-1, 1:-1]) + 13) // 26
    return _blend(smooth.float(), values.float(), factors_n.view(-1, 1, 1, 1))


TABLES: dict[Operation, Change] = {
    Operation.AUTOCONTRAST: autocontrast_tables,
    Operation.EQUALIZE: equalize_tables,
    Operation.CONTRAST: contrast_tables,
}
"""Functions that make tables from images, by operation."""
CHANGES: dict[Operation, Change] = {Operation.COLOR: saturate, Operation.SHARPNESS: sharpen}


def _blend(start: Tensor, end: Tensor, factor: Tensor) -> Tensor:
    """Interpolate (or extrapolate) from `start` (factor 0) to `end` (factor 1)."""
    return (start + factor * (end - start)).clamp_(0, 255).to(torch.uint8)


def _gray(pictures_nHWC: Tensor) -> Tensor:
    """Return ITU-R 601 brightness in PIL's fixed point."""
    red, green, blue = pictures_nHWC.int().unbind(-1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _table_places(pictures_nHWC: Tensor) -> Tensor:
    """Return the index of each pixel's level in the flattened tables (n, C, 256)."""
    count, _, _, colors = pictures_nHWC.shape
    start = torch.arange(count * colors, device=pictures_nHWC.device, dtype=torch.int32) * 256
    return pictures_nHWC.int() + start.view(count, 1, 1, colors)


_TOGETHER_ON_CPU = 8
"""Number of images that are changed together on a CPU. Eight images of 64 px fit in a core's cache.
"""
TAPS = {"nearest": range(1), "linear": range(2), "cubic": range(-1, 3)}
"""Positions of the sampled pixels, relative to the upper left sampled pixel."""
GEOMETRIC = tuple(operation for operation in Operation if operation >= Operation.ROTATE)


def matrices(operations_n: Ints, strengths_n: Floats, *, height: int, width: int) -> Floats:
    """Return (n, 6) matrices (a, b, c, d, e, f). Output pixel (x, y) samples the image at (a x + b
    y + c, d x + e y + f)."""

    def only(operation: Operation) -> Floats:
        return np.where(operations_n == operation, strengths_n, 0.0)

    angle = -np.radians(only(Operation.ROTATE) % 360.0)
    # rounding makes a quarter turn exact
    cosine, sine = np.round(np.cos(angle), 15), np.round(np.sin(angle), 15)
    x, y = width / 2, height / 2
    right = only(Operation.TRANSLATE_X) * width + np.trunc(only(Operation.SHIFT_X) * width)
    lower = only(Operation.TRANSLATE_Y) * height + np.trunc(only(Operation.SHIFT_Y) * height)
    across = (cosine, sine + only(Operation.SHEAR_X), cosine * -x + sine * -y + x + right)
    down = (-sine + only(Operation.SHEAR_Y), cosine, -sine * -x + cosine * -y + y + lower)
    return np.stack([*across, *down], axis=1)


def move(pictures_nHWC: Tensor, matrices_n6: Tensor, *, sampling: str, fill_C: Tensor) -> Tensor:
    if pictures_nHWC.device.type != "cpu":
        return _move(pictures_nHWC, matrices_n6, sampling=sampling, fill_C=fill_C)
    parts = (
        slice(first, first + _TOGETHER_ON_CPU)
        for first in range(0, len(pictures_nHWC), _TOGETHER_ON_CPU)
    )
    return torch.cat(
        [
            _move(pictures_nHWC[part], matrices_n6[part], sampling=sampling, fill_C=fill_C)
            for part in parts
        ]
    )


def _move(pictures_nHWC: Tensor, matrices_n6: Tensor, *, sampling: str, fill_C: Tensor) -> Tensor:
    count, height, width, colors = pictures_nHWC.shape
    device = pictures_nHWC.device
    x_W = torch.arange(width, device=device, dtype=torch.float64) + 0.5
    y_H1 = (torch.arange(height, device=device, dtype=torch.float64) + 0.5).unsqueeze(-1)
    a, b, c, d, e, f = matrices_n6.double().view(count, 6, 1, 1).unbind(1)
    x_nHW, y_nHW = a * x_W + b * y_H1 + c, d * x_W + e * y_H1 + f
    inside_nHW = (x_nHW >= 0) & (x_nHW < width) & (y_nHW >= 0) & (y_nHW < height)
    taps = TAPS[sampling]
    if sampling != "nearest":
        x_nHW, y_nHW = x_nHW - 0.5, y_nHW - 0.5
    left_nHW, top_nHW = x_nHW.floor(), y_nHW.floor()
    right_of_nHW1 = (x_nHW - left_nHW).unsqueeze(-1)
    below_nHW1 = (y_nHW - top_nHW).unsqueeze(-1)
    columns = [(left_nHW + tap).clamp(0, width - 1).int() for tap in taps]
    first = torch.arange(count, device=device, dtype=torch.int32).view(-1, 1, 1) * (height * width)
    flat = pictures_nHWC.reshape(-1, colors)
    blend = BLENDS[sampling]
    rows = []
    for tap in taps:
        row = first + (top_nHW + tap).clamp(0, height - 1).int() * width
        values = (
            flat.index_select(0, (row + column).view(-1)).view(pictures_nHWC.shape).double()
            for column in columns
        )
        rows.append(blend(*values, right_of_nHW1))
    found = blend(*rows, below_nHW1).clamp_(0, 255).to(torch.uint8)
    return torch.where(inside_nHW.unsqueeze(-1), found, fill_C)


def _linear(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    return first + (second - first) * share


def _only(value: Tensor, _: Tensor) -> Tensor:
    return value


def _cubic(v1: Tensor, v2: Tensor, v3: Tensor, v4: Tensor, share: Tensor) -> Tensor:
    """Interpolate from v2 (position 0) to v3 (1) by PIL's cubic convolution with a = -1."""
    difference = v1 - v2
    return v2 + share * (
        v3 - v1 + share * (2 * difference + v3 - v4 + share * (v4 - v3 - difference))
    )


BLENDS: dict[str, Callable[..., Tensor]] = {"nearest": _only, "linear": _linear, "cubic": _cubic}
