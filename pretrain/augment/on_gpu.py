"""Crop, resize, flip, mix and normalize a batch on a GPU in one pass.

Results of the Triton kernel `_gather` must equal `resample`, `resample_levels` and MixUp (and
on_cpu.py). One Triton program makes a block of output pixels from stored uint8 pixels, in the
model's dtype. For `mixup_pairing: adjacent` it makes both images of a pair. For `ffcv` it computes
an image and the previous image, and writes only their mixture. Levels equal torch's bit for bit:
divisions are IEEE's and no product is fused with a sum.

The kernel is a custom operator, so fake tensors launch nothing.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.draws import send

if TYPE_CHECKING:
    from pretrain.augment.crops import Boxes, Flags

_BLOCK = 512
"""Output pixels of one Triton program with four warps: four pixels per thread."""
NO_MIXING, PAIRS, PREVIOUS = 0, 1, 2
"""Values of the kernel's argument MIXING."""
_ONE = tl.constexpr(32768.0)
"""The number 1 as a fixed-point weight: 2^`_LEVEL_BITS` of crops.py."""
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23. Adding and subtracting it rounds a float32 below 2^22, as torch.round does."""


def crop_mix_normalize(
    images_BHWC: Tensor,
    boxes: "Boxes",
    *,
    size: int,
    colors_23: Tensor | None = None,
    weights: NDArray[np.float64] | None = None,
    dtype: torch.dtype = torch.float32,
    cubic: "Flags | None" = None,
    area: bool = False,
    levels: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the images as on_cpu.py does, and the weights on the GPU.

    `levels`: return integer levels as `resample_levels`. If there is one weight per image, mix
    pairs of images. If there is one weight fewer, mix each image except the first with the previous
    image (`mixup_pairing: ffcv`).
    """
    count, side = len(images_BHWC), (size, size)
    mixing = NO_MIXING if weights is None else PAIRS if len(weights) == count else PREVIOUS
    table_7B = np.zeros((7, count), np.float32)
    for row, values in enumerate(
        (boxes.top, boxes.left, boxes.height, boxes.width, boxes.flip, weights, cubic)
    ):
        if values is not None:
            table_7B[row, count - len(values) :] = values
    sent_7B = send({"boxes": table_7B}, images_BHWC.device)["boxes"]
    num_made = count - (mixing == PREVIOUS)
    out = images_BHWC.new_empty(
        (num_made, *side, 3) if levels else (num_made, 3, *side),
        dtype=torch.uint8 if levels else dtype,
    )
    gather(out, images_BHWC.contiguous(), sent_7B, colors_23, mixing, area, cubic is not None)
    return out, None if weights is None else sent_7B[5, count - len(weights) :]


@torch.library.custom_op("wide_mlps::gather", mutates_args=("out",))
def gather(
    out: Tensor,
    images_BHWC: Tensor,
    boxes_7B: Tensor,
    colors_23: Tensor | None,
    mixing: int,
    area: bool,
    cubic: bool,
) -> None:
    """Fill `out`: (B, C, O, O), or (B, O, O, C) for levels. `PREVIOUS` fills B - 1 images."""
    (batch, stored), size, levels = images_BHWC.shape[:2], out.shape[2], out.dtype == torch.uint8
    assert images_BHWC.shape == (batch, stored, stored, 3) and images_BHWC.dtype == torch.uint8, (
        tuple(images_BHWC.shape)
    )
    assert boxes_7B.shape == (7, batch) and not (mixing == PAIRS and batch % 2), batch
    if not out.numel():
        return
    blocks = triton.cdiv(size**2, _BLOCK)
    ratio = max(stored / size, 1.0)
    taps = math.ceil(ratio) + 1 if area else math.ceil(ratio * (4 if cubic else 2))
    kind = {"TAPS": taps, "MIXING": mixing, "AREA": area, "CUBIC": cubic, "LEVELS": levels}
    kind["NORMALIZED"] = colors_23 is not None
    colors = boxes_7B if colors_23 is None else colors_23  # a pointer is required
    with torch.cuda.device_of(out):
        _gather[(blocks * (len(out) // 2 if mixing == PAIRS else len(out)),)](
            images_BHWC,
            boxes_7B,
            colors,
            out,
            batch,
            stored,
            size,
            blocks,
            **kind,
            BLOCK=_BLOCK,
            enable_fp_fusion=not levels,
        )


@triton.jit
def _gather(
    images,
    boxes,
    colors,
    out,
    count,
    stored,
    size,
    blocks,
    TAPS: tl.constexpr,
    MIXING: tl.constexpr,
    AREA: tl.constexpr,
    CUBIC: tl.constexpr,
    LEVELS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) // blocks * (2 if MIXING == 1 else 1)
    pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_pixel = pixel < size * size
    place = tl.minimum(pixel, size * size - 1)
    y, x = place // size, place % size
    red, green, blue = _made(
        images, boxes, count, number, y, x, is_pixel, stored, size, TAPS, AREA, CUBIC, LEVELS
    )
    if LEVELS:
        at = out + number.to(tl.int64) * (size * size * 3) + pixel * 3
        tl.store(at, red.to(tl.uint8), is_pixel)
        tl.store(at + 1, green.to(tl.uint8), is_pixel)
        tl.store(at + 2, blue.to(tl.uint8), is_pixel)
    else:
        if MIXING > 0:
            red2, green2, blue2 = _made(
                images,
                boxes,
                count,
                number + 1,
                y,
                x,
                is_pixel,
                stored,
                size,
                TAPS,
                AREA,
                CUBIC,
                LEVELS,
            )
            own, own2 = tl.load(boxes + 5 * count + number), tl.load(boxes + 5 * count + number + 1)
            at = (out, colors, number + 1 if MIXING == 1 else number, pixel, is_pixel, size)
            _finish(at, 0, red2 * own2 + red * (1 - own2), NORMALIZED)
            _finish(at, 1, green2 * own2 + green * (1 - own2), NORMALIZED)
            _finish(at, 2, blue2 * own2 + blue * (1 - own2), NORMALIZED)
            red = red * own + red2 * (1 - own)
            green = green * own + green2 * (1 - own)
            blue = blue * own + blue2 * (1 - own)
        if MIXING < 2:
            at = (out, colors, number, pixel, is_pixel, size)
            _finish(at, 0, red, NORMALIZED)
            _finish(at, 1, green, NORMALIZED)
            _finish(at, 2, blue, NORMALIZED)


@triton.jit
def _finish(at, COLOR: tl.constexpr, value, NORMALIZED: tl.constexpr):
    out, colors, number, pixel, is_pixel, size = at
    if NORMALIZED:
        value = (value - tl.load(colors + COLOR)) * tl.load(colors + 3 + COLOR)
    place = out + (number.to(tl.int64) * 3 + COLOR) * (size * size) + pixel
    tl.store(place, value.to(out.dtype.element_ty), is_pixel)


@triton.jit
def _made(
    images, boxes, count, number, y, x, is_pixel, stored, size,
    TAPS: tl.constexpr, AREA: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return the colors of one image at output pixel (y, x), on the scale 0..255."""
    top, left = tl.load(boxes + number), tl.load(boxes + count + number)
    height, width = tl.load(boxes + 2 * count + number), tl.load(boxes + 3 * count + number)
    x = tl.where(tl.load(boxes + 4 * count + number) > 0, size - 1 - x, x)
    cubic, enlarged = tl.load(boxes + 6 * count + number) > 0, (height < size) | (width < size)
    row, down = _axis(y, top, height, size, cubic, AREA, CUBIC)
    column, across = _axis(x, left, width, size, cubic, AREA, CUBIC)
    nothing = y * 0.0
    down_total, across_total = nothing, nothing
    for k in range(TAPS):
        down_total += _share(k, row, down, stored, cubic, enlarged, AREA, CUBIC, LEVELS)
        across_total += _share(k, column, across, stored, cubic, enlarged, AREA, CUBIC, LEVELS)
    images += number.to(tl.int64) * (stored * stored * 3)
    red, green, blue = nothing, nothing, nothing
    for i in range(TAPS):
        u = _settled(
            _share(i, row, down, stored, cubic, enlarged, AREA, CUBIC, LEVELS), down_total, LEVELS
        )
        red_i, green_i, blue_i = nothing, nothing, nothing
        for j in range(TAPS):
            v = _settled(
                _share(j, column, across, stored, cubic, enlarged, AREA, CUBIC, LEVELS),
                across_total,
                LEVELS,
            )
            counts, at = (
                is_pixel & (u != 0) & (v != 0),
                images + ((row + i) * stored + column + j) * 3,
            )
            red_i += v * tl.load(at, counts, 0).to(tl.float32)
            green_i += v * tl.load(at + 1, counts, 0).to(tl.float32)
            blue_i += v * tl.load(at + 2, counts, 0).to(tl.float32)
        red += u * _level(red_i, LEVELS)
        green += u * _level(green_i, LEVELS)
        blue += u * _level(blue_i, LEVELS)
    if not LEVELS:
        once = tl.div_rn(1.0, down_total * across_total)
        red, green, blue = red * once, green * once, blue * once
        if CUBIC:  # the filter can overshoot
            red, green, blue = (
                tl.clamp(red, 0.0, 255.0),
                tl.clamp(green, 0.0, 255.0),
                tl.clamp(blue, 0.0, 255.0),
            )
    return _level(red, LEVELS), _level(green, LEVELS), _level(blue, LEVELS)


@triton.jit
def _axis(at, start, extent, size, cubic, AREA: tl.constexpr, CUBIC: tl.constexpr):
    """Return the first stored pixel of each output pixel on one axis, and the numbers that `_share`
    needs."""
    ratio = tl.div_rn(extent, size * 1.0)
    if AREA:  # divide last, so that pixel edges are exact
        begin, end = tl.div_rn(at * extent, size * 1.0), tl.div_rn((at + 1) * extent, size * 1.0)
        first, known = start + tl.floor(begin), (start, begin, end, end)
    else:
        width = tl.maximum(ratio, 1.0)
        reach = width * tl.where(cubic, 2.0, 1.0) if CUBIC else width
        center = start + (at + 0.5) * ratio
        first, known = (
            tl.floor(tl.maximum(center - reach, start) + 0.5),
            (start, center, width, start + extent),
        )
    return first.to(tl.int32), known


@triton.jit
def _share(
    k,
    first,
    known,
    stored,
    cubic,
    enlarged,
    AREA: tl.constexpr,
    CUBIC: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Return the weight of the `k`-th stored pixel before division by the sum, as in
    `axis_weights`."""
    pixel = first + k
    if AREA:
        start, begin, end, _ = known
        place = tl.where(enlarged, first, pixel) - start
        covered = tl.maximum(tl.minimum(place + 1, end) - tl.maximum(place, begin), 0.0)
        share = tl.div_rn(covered, end - begin)
        share = tl.where(enlarged & (k > 0), tl.where(k == 1, 1 - share, 0.0), share)
        share = tl.where(pixel < stored, share, 0.0)
    else:
        start, center, width, end = known
        middle = pixel + 0.5
        distance = tl.abs(middle - center)
        distance = tl.div_rn(distance, width) if LEVELS else distance * tl.div_rn(1.0, width)
        share = tl.maximum(1 - distance, 0.0)
        if CUBIC:
            near = (1.5 * distance - 2.5) * distance * distance + 1
            far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
            share = tl.where(
                cubic, tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0)), share
            )
        share = tl.where((middle > start) & (middle < end), share, 0.0)
    if LEVELS:
        share = (share * _ONE + _WHOLE) - _WHOLE
    return share


@triton.jit
def _settled(share, total, LEVELS: tl.constexpr):
    """Divide fixed-point weights by their sum. Float weights are divided once, at the end."""
    return ((tl.div_rn(share * _ONE, total) + _WHOLE) - _WHOLE) / _ONE if LEVELS else share


@triton.jit
def _level(value, LEVELS: tl.constexpr):
    return tl.clamp(tl.floor(value + 0.5), 0.0, 255.0) if LEVELS else value
