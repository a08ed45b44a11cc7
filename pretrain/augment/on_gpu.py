"""Crop, resize, flip, MixUp and normalise a batch on a GPU in one pass, and what else of augmentation is memory traffic there.

Triton kernels beside the plain torch forms that they must equal: `gathered` beside `resample`, `resample_levels` and MixUp (and
on_cpu.py), `moved` beside `operations._move`, `noise` beside `erasing.normal_noise`. A program makes a block of output pixels
from the taps that count: uint8 is read, the model's type is written, and nothing as large as a batch lies in between. One program
makes both pictures of a pair that MixUp mixes. Where the last bit decides about a level, divisions are IEEE's and no product is
fused with a sum: levels are those of the plain form bit for bit. Floats agree within rounding.

They are custom operators: under fake tensors there are shapes, and nothing is launched. Not yet run on a GPU: tests run the
kernels in Triton's interpreter, and compile them for one.
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
"""Output pixels of a program of four warps: each thread has four pixels of three colours under way."""
_ONE = tl.constexpr(32768.0)
"""Of fixed-point weights, as `_LEVEL_BITS` of crops.py."""
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 below 2^22 that goes there and back is rounded to a whole number, ties to even, as torch's round."""


def crop_mix_normalise(
    images_BHWC: Tensor,
    boxes: "Boxes",
    *,
    size: int,
    colours_23: Tensor | None = None,
    weights: NDArray[np.float64] | None = None,
    dtype: torch.dtype = torch.float32,
    cubic: "Flags | None" = None,
    area: bool = False,
    levels: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As on_cpu's, of pictures on a GPU, with means and scales there; and `weights`, there. `levels`: as `resample_levels`."""
    table_7B = np.zeros((7, len(images_BHWC)), np.float32)
    for row, values in enumerate((boxes.top, boxes.left, boxes.height, boxes.width, boxes.flip, weights, cubic)):
        if values is not None:
            table_7B[row] = values
    sent_7B = send({"boxes": table_7B}, images_BHWC.device)["boxes"]
    how = (size, torch.uint8 if levels else dtype, weights is not None, area, cubic is not None, levels)
    pictures: Tensor = gathered(images_BHWC, sent_7B, colours_23, *how)
    return pictures, None if weights is None else sent_7B[5]


@torch.library.custom_op("wide_mlps::gathered", mutates_args=())
def gathered(
    images_BHWC: Tensor,
    boxes_7B: Tensor,
    colours_23: Tensor | None,
    size: int,
    dtype: torch.dtype,
    mixed: bool,
    area: bool,
    cubic: bool,
    levels: bool,
) -> Tensor:
    """(B, C, O, O); of levels (B, O, O, C)."""
    images_BHWC = images_BHWC.contiguous()
    out, (batch, stored) = _empty(images_BHWC, size, dtype, levels), images_BHWC.shape[:2]
    assert images_BHWC.shape == (batch, stored, stored, 3) and images_BHWC.dtype == torch.uint8, tuple(images_BHWC.shape)
    assert boxes_7B.shape == (7, batch) and boxes_7B.is_contiguous() and not (mixed and batch % 2), tuple(boxes_7B.shape)
    if out.numel():
        blocks = triton.cdiv(size**2, _BLOCK)
        ratio = max(stored / size, 1.0)
        taps = math.ceil(ratio) + 1 if area else math.ceil(ratio * (4 if cubic else 2))  # no box is larger than its picture
        kind = {"TAPS": taps, "MIXED": mixed, "AREA": area, "CUBIC": cubic, "LEVELS": levels, "NORMALISED": colours_23 is not None}
        colours = boxes_7B if colours_23 is None else colours_23  # a pointer there must be
        with torch.cuda.device_of(out):
            _gather[(blocks * batch // (1 + mixed),)](
                images_BHWC, boxes_7B, colours, out, batch, stored, size, blocks, **kind, BLOCK=_BLOCK, enable_fp_fusion=not levels
            )
    return out


gathered.register_fake(
    lambda images, _boxes, _colours, size, dtype, _mixed, _area, _cubic, levels: _empty(images, size, dtype, levels)
)


def _empty(images_BHWC: Tensor, size: int, dtype: torch.dtype, levels: bool) -> Tensor:
    return images_BHWC.new_empty((len(images_BHWC), *((size, size, 3) if levels else (3, size, size))), dtype=dtype)


@triton.jit
def _gather(
    images, boxes, colours, out, count, stored, size, blocks,
    TAPS: tl.constexpr, MIXED: tl.constexpr, AREA: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr,
    NORMALISED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) // blocks * (2 if MIXED else 1)
    pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_pixel = pixel < size * size
    place = tl.minimum(pixel, size * size - 1)
    y, x = place // size, place % size
    red, green, blue = _made(images, boxes, count, number, y, x, is_pixel, stored, size, TAPS, AREA, CUBIC, LEVELS)
    if LEVELS:
        at = out + number.to(tl.int64) * (size * size * 3) + pixel * 3
        tl.store(at, red.to(tl.uint8), is_pixel)
        tl.store(at + 1, green.to(tl.uint8), is_pixel)
        tl.store(at + 2, blue.to(tl.uint8), is_pixel)
    else:
        if MIXED:
            red2, green2, blue2 = _made(images, boxes, count, number + 1, y, x, is_pixel, stored, size, TAPS, AREA, CUBIC, LEVELS)
            own, own2 = tl.load(boxes + 5 * count + number), tl.load(boxes + 5 * count + number + 1)
            at = (out, colours, number + 1, pixel, is_pixel, size)
            _finish(at, 0, red2 * own2 + red * (1 - own2), NORMALISED)
            _finish(at, 1, green2 * own2 + green * (1 - own2), NORMALISED)
            _finish(at, 2, blue2 * own2 + blue * (1 - own2), NORMALISED)
            red = red * own + red2 * (1 - own)
            green = green * own + green2 * (1 - own)
            blue = blue * own + blue2 * (1 - own)
        at = (out, colours, number, pixel, is_pixel, size)
        _finish(at, 0, red, NORMALISED)
        _finish(at, 1, green, NORMALISED)
        _finish(at, 2, blue, NORMALISED)


@triton.jit
def _finish(at, COLOUR: tl.constexpr, value, NORMALISED: tl.constexpr):
    out, colours, number, pixel, is_pixel, size = at
    if NORMALISED:
        value = (value - tl.load(colours + COLOUR)) * tl.load(colours + 3 + COLOUR)
    place = out + (number.to(tl.int64) * 3 + COLOUR) * (size * size) + pixel
    tl.store(place, value.to(out.dtype.element_ty), is_pixel)


@triton.jit
def _made(
    images, boxes, count, number, y, x, is_pixel, stored, size,
    TAPS: tl.constexpr, AREA: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One picture's colours at the output's (y, x), on the scale 0..255."""
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
        u = _settled(_share(i, row, down, stored, cubic, enlarged, AREA, CUBIC, LEVELS), down_total, LEVELS)
        red_i, green_i, blue_i = nothing, nothing, nothing
        for j in range(TAPS):
            v = _settled(_share(j, column, across, stored, cubic, enlarged, AREA, CUBIC, LEVELS), across_total, LEVELS)
            counts, at = is_pixel & (u != 0) & (v != 0), images + ((row + i) * stored + column + j) * 3
            red_i += v * tl.load(at, counts, 0).to(tl.float32)
            green_i += v * tl.load(at + 1, counts, 0).to(tl.float32)
            blue_i += v * tl.load(at + 2, counts, 0).to(tl.float32)
        red += u * _level(red_i, LEVELS)
        green += u * _level(green_i, LEVELS)
        blue += u * _level(blue_i, LEVELS)
    if not LEVELS:
        once = tl.div_rn(1.0, down_total * across_total)
        red, green, blue = red * once, green * once, blue * once
        if CUBIC:  # overshoots
            red, green, blue = tl.clamp(red, 0.0, 255.0), tl.clamp(green, 0.0, 255.0), tl.clamp(blue, 0.0, 255.0)
    return _level(red, LEVELS), _level(green, LEVELS), _level(blue, LEVELS)


@triton.jit
def _axis(at, start, extent, size, cubic, AREA: tl.constexpr, CUBIC: tl.constexpr):
    """Of output pixels: the first pixel that counts, and what `_share` must know."""
    ratio = tl.div_rn(extent, size * 1.0)
    if AREA:  # divided last, so that what lies on a pixel's edge is there exactly
        begin, end = tl.div_rn(at * extent, size * 1.0), tl.div_rn((at + 1) * extent, size * 1.0)
        first, known = start + tl.floor(begin), (start, begin, end, end)
    else:
        width = tl.maximum(ratio, 1.0)
        reach = width * tl.where(cubic, 2.0, 1.0) if CUBIC else width
        centre = start + (at + 0.5) * ratio
        first, known = tl.floor(tl.maximum(centre - reach, start) + 0.5), (start, centre, width, start + extent)
    return first.to(tl.int32), known


@triton.jit
def _share(k, first, known, stored, cubic, enlarged, AREA: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr):
    """The weight of the `k`-th pixel that counts, not yet divided by their sum, as `axis_weights` has it."""
    pixel = first + k
    if AREA:
        start, begin, end, _ = known
        place = tl.where(enlarged, first, pixel) - start
        covered = tl.maximum(tl.minimum(place + 1, end) - tl.maximum(place, begin), 0.0)
        share = tl.div_rn(covered, end - begin)
        share = tl.where(enlarged & (k > 0), tl.where(k == 1, 1 - share, 0.0), share)
        share = tl.where(pixel < stored, share, 0.0)
    else:
        start, centre, width, end = known
        middle = pixel + 0.5
        distance = tl.abs(middle - centre)
        distance = tl.div_rn(distance, width) if LEVELS else distance * tl.div_rn(1.0, width)
        share = tl.maximum(1 - distance, 0.0)
        if CUBIC:
            near = (1.5 * distance - 2.5) * distance * distance + 1
            far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
            share = tl.where(cubic, tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0)), share)
        share = tl.where((middle > start) & (middle < end), share, 0.0)
    if LEVELS:
        share = (share * _ONE + _WHOLE) - _WHOLE
    return share


@triton.jit
def _settled(share, total, LEVELS: tl.constexpr):
    """Of fixed-point weights: divided by their sum. Floats are, once, at the end."""
    return ((tl.div_rn(share * _ONE, total) + _WHOLE) - _WHOLE) / _ONE if LEVELS else share


@triton.jit
def _level(value, LEVELS: tl.constexpr):
    return tl.clamp(tl.floor(value + 0.5), 0.0, 255.0) if LEVELS else value


@torch.library.custom_op("wide_mlps::moved", mutates_args=())
def moved(pictures_nHWC: Tensor, matrices_n6: Tensor, fill_C: Tensor, taps: int) -> Tensor:
    """As `operations._move`, nearest, linear or cubic by the number of taps: all in float64, without an array of it."""
    pictures_nHWC, matrices_n6 = pictures_nHWC.contiguous(), matrices_n6.double().contiguous()
    out, (count, height, width, _) = torch.empty_like(pictures_nHWC), pictures_nHWC.shape
    assert out.shape == (count, height, width, 3) and matrices_n6.shape == (count, 6) and taps in (1, 2, 4), tuple(out.shape)
    blocks = triton.cdiv(height * width, _BLOCK)
    if out.numel():
        with torch.cuda.device_of(out):
            _move[(blocks * count,)](
                pictures_nHWC, matrices_n6, fill_C, out, height, width, blocks, TAPS=taps, BLOCK=_BLOCK, enable_fp_fusion=False
            )
    return out


moved.register_fake(lambda pictures, _matrices, _fill, _taps: torch.empty_like(pictures, memory_format=torch.contiguous_format))


@triton.jit
def _move(pictures, matrices, fill, out, height, width, blocks, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0) // blocks
    pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_pixel = pixel < height * width
    x, y = (pixel % width).to(tl.float64) + 0.5, (pixel // width).to(tl.float64) + 0.5
    matrices += number * 6
    u = tl.load(matrices) * x + tl.load(matrices + 1) * y + tl.load(matrices + 2)
    v = tl.load(matrices + 3) * x + tl.load(matrices + 4) * y + tl.load(matrices + 5)
    inside = is_pixel & (u >= 0) & (u < width) & (v >= 0) & (v < height)
    if TAPS > 1:
        u, v = u - 0.5, v - 0.5
    left, top = tl.floor(u), tl.floor(v)
    first = number.to(tl.int64) * (height * width * 3)
    for colour in tl.static_range(3):
        known = (pictures + first + colour, left, top, height, width, inside)
        if TAPS == 1:
            found = _tap(known, 0, 0)
        elif TAPS == 2:
            found = _along(known, 0, u - left, TAPS)
            found = found + (_along(known, 1, u - left, TAPS) - found) * (v - top)
        else:
            above, near = _along(known, -1, u - left, TAPS), _along(known, 0, u - left, TAPS)
            found = _keys(above, near, _along(known, 1, u - left, TAPS), _along(known, 2, u - left, TAPS), v - top)
        level = tl.minimum(tl.maximum(found, 0.0), 255.0).to(tl.int32).to(tl.uint8)
        tl.store(out + first + colour + pixel * 3, tl.where(inside, level, tl.load(fill + colour)), is_pixel)


@triton.jit
def _along(known, ROW: tl.constexpr, share, TAPS: tl.constexpr):
    one, two = _tap(known, ROW, 0), _tap(known, ROW, 1)
    return one + (two - one) * share if TAPS == 2 else _keys(_tap(known, ROW, -1), one, two, _tap(known, ROW, 2), share)


@triton.jit
def _tap(known, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """The border repeats."""
    colour, left, top, height, width, inside = known
    row = tl.minimum(tl.maximum(top + ROW, 0.0), height - 1.0).to(tl.int32)
    column = tl.minimum(tl.maximum(left + COLUMN, 0.0), width - 1.0).to(tl.int32)
    return tl.load(colour + (row * width + column) * 3, inside, 0).to(tl.float64)


@triton.jit
def _keys(v1, v2, v3, v4, share):
    difference = v1 - v2
    return v2 + share * (v3 - v1 + share * (2 * difference + v3 - v4 + share * (v4 - v3 - difference)))


@torch.library.custom_op("wide_mlps::noise", mutates_args=())
def noise(keys_n: Tensor, count: int) -> Tensor:
    """(n, count) numbers in (0, 1), of which `erasing.normal_noise` makes normal ones."""
    out = keys_n.new_empty((len(keys_n), count), dtype=torch.float32)
    blocks = triton.cdiv(count, _BLOCK)
    if out.numel():
        with torch.cuda.device_of(out):
            _noise[(blocks * len(keys_n),)](keys_n.contiguous(), out, count, blocks, BLOCK=_BLOCK)
    return out


noise.register_fake(lambda keys, count: keys.new_empty((len(keys), count), dtype=torch.float32))


@triton.jit
def _noise(keys, out, count, blocks, BLOCK: tl.constexpr):
    number = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(keys + number).to(tl.uint64) + (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    bits = ((state ^ (state >> 31)) >> 41).to(tl.int32)
    tl.store(out + number.to(tl.int64) * count + place, (bits.to(tl.float32) + 0.5) * (1 / 8388608), place < count)
