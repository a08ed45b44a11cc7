"""Crop, resize, flip, mix and normalize a batch on a CPU, in loops that numba compiles.

The images equal `resample` (bilinear, or INTER_AREA), MixUp and normalization in float32. Nearly
all weights in the matrix products of `resample` are zero; these loops use only the other weights,
in one pass. At 64 px they process 61,000 images per CPU second, and the matrix products 5,400.

The two images of a MixUp pair are computed together, one output row at a time:

1. Resize the source rows of the output row horizontally, into a ring buffer of a few float rows per
   color. One 8-byte load reads two RGB neighbors of an output pixel, so the code needs a
   little-endian CPU and spare bytes after the last image.
2. Resize vertically, mix, normalize and round in loops over contiguous floats.

A pair needs 12 KB at 64 px and 43 KB at 224 px and stays in the core's cache. LLVM vectorizes the
loops, because each loop has at most four arrays, unsigned indices, and inner axes that are
contiguous by type.

The loops release the GIL. Several threads call them, each with an even number of images. Numba's
own threads are not used: they do not survive a fork and compete with torch's threads. Compiling
takes seconds once per kind of CPU. Numba keeps the result in `__pycache__` or ~/.cache; if both are
read-only, every process compiles.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.compiled import Compiled

if TYPE_CHECKING:
    from pretrain.augment.crops import Boxes

assert sys.byteorder == "little"

Function = TypeVar("Function", bound=Callable[..., object])
Colors = tuple[float, float, float]
Bits = NDArray[np.uint16]
Words = NDArray[np.uint64]
Floats = NDArray[np.float32]
Scratch = tuple[Floats, Floats, Floats, Floats, Floats, Floats, NDArray[np.int64], Words, Words]

# "contract" allows a * b + c in one instruction; "numpy" avoids a branch for division by zero
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
_FIRST, _SECOND, _THIRD = np.uint32(0), np.uint32(8), np.uint32(16)
_BYTE, _HALF, _ONE = np.uint32(255), np.uint32(0x7FFF), np.uint32(1)
_PIXEL = np.uint64(24)


def crop_mix_normalize(
    images_BHWC: Tensor,
    boxes: "Boxes",
    *,
    size: int,
    mean: Colors,
    scale: Colors,
    weights: NDArray[np.float64] | None,
    dtype: torch.dtype,
    area: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Crop, resize, mix and normalize: return (B, 3, size, size).

    Pairs are mixed as w[i] x[i] + (1 - w[i]) x[i ^ 1], then normalized as (x - mean) * scale.
    Images are uint8 and square. `weights=None`: do not mix. `dtype`: float32, or bfloat16 rounded
    to nearest even. `out`: memory for the result.
    """
    _check(images_BHWC, boxes, weights)
    assert dtype in (torch.float32, torch.bfloat16), dtype
    batch, stored, shape = len(images_BHWC), images_BHWC.shape[1], (len(images_BHWC), 3, size, size)
    out = torch.empty(shape, dtype=dtype) if out is None else out
    assert out.shape == shape and out.dtype == dtype and out.is_contiguous(), (
        f"out is {tuple(out.shape)} {out.dtype}"
    )
    if batch == 0:
        return out
    boxes_4B = np.stack([boxes.top, boxes.left, boxes.height, boxes.width]).astype(np.float64)
    taps = _most_taps(boxes_4B[2:].max() / size)
    words, tail_words, in_tail = _words(images_BHWC, spare=3 * taps + 8)
    rounds = dtype == torch.bfloat16
    _augment(
        words,
        tail_words,
        batch - in_tail,
        stored,
        boxes_4B,
        np.array(boxes.flip, np.bool_),
        area,
        np.ones(batch) if weights is None else np.array(weights, np.float64),
        1 if weights is None else 2,
        np.array(scale, np.float32),
        (-np.array(mean, np.float64) * np.array(scale, np.float64)).astype(np.float32),
        _scratch(size, taps),
        np.zeros((3, 2), np.int64),
        np.empty((0, 3, size, size), np.float32) if rounds else out.numpy(),
        out.view(torch.uint16).numpy() if rounds else np.empty((0, 3, size, size), np.uint16),
    )
    return out


def crop(images_BHWC: Tensor, boxes: "Boxes", *, size: int, area: bool = False) -> Tensor:
    """Resize the boxes to `size` pixels: float32 (B, 3, size, size) on the scale 0..255."""
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return crop_mix_normalize(
        images_BHWC,
        boxes,
        size=size,
        mean=zero,
        scale=one,
        weights=None,
        dtype=torch.float32,
        area=area,
    )


def _check(images_BHWC: Tensor, boxes: "Boxes", weights: NDArray[np.float64] | None) -> None:
    """Check the arguments, because the loops below do not check bounds."""
    batch, stored = len(images_BHWC), images_BHWC.shape[1]
    assert images_BHWC.dtype == torch.uint8 and images_BHWC.device.type == "cpu", (
        images_BHWC.dtype,
        images_BHWC.device,
    )
    assert images_BHWC.shape == (batch, stored, stored, 3), (
        f"images of {tuple(images_BHWC.shape)} are not square and RGB"
    )
    sides = (boxes.top, boxes.left, boxes.height, boxes.width, boxes.flip)
    assert all(side.shape == (batch,) for side in sides), (
        f"boxes for {[len(side) for side in sides]} images of {batch}"
    )
    for start, extent in ((boxes.top, boxes.height), (boxes.left, boxes.width)):
        is_inside = (start >= 0) & (extent >= 1) & (start + extent <= stored)
        assert is_inside.all(), (
            f"a box leaves its image of {stored} pixels, or is smaller than one pixel"
        )
    assert weights is None or (weights.shape == (batch,) and batch % 2 == 0), (
        f"{len(weights)} weights for pairs of {batch} images"
    )


def _most_taps(ratio: float) -> int:
    """Return an even upper bound for the number of source pixels (taps) of an output pixel."""
    return 2 * ((int(np.ceil(2 * max(ratio, 1.0))) + 2) // 2)


def _words(images_BHWC: Tensor, *, spare: int) -> tuple[Words, Words, int]:
    """Return a view of the images as 8-byte words: word i begins at byte i. Also return such a view
    of a padded copy of the last images, and the number of copied images.

    A load may read `spare` bytes after its image. These bytes are multiplied by zero.
    """
    flat = images_BHWC.contiguous().numpy().reshape(-1)
    picture = flat.size // len(images_BHWC)
    in_tail = min(len(images_BHWC), 1 + spare // picture)
    tail = np.zeros(in_tail * picture + spare + 8, np.uint8)
    tail[: in_tail * picture] = flat[flat.size - in_tail * picture :]
    whole = flat if in_tail < len(images_BHWC) else tail
    return _view(whole), _view(tail), in_tail


def _view(flat: NDArray[np.uint8]) -> Words:
    return np.ndarray((flat.size - 7,), np.uint64, flat, 0, (1,))


def _inner(function: Function) -> Function:
    """Compile a function that is inlined into its caller and cached with it."""
    return cast(
        Function, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    )


@_inner
def _taps(
    start: float,
    extent: float,
    mirror: bool,
    stored: int,
    first: NDArray[np.int64] | Words,
    weights: Floats,
) -> int:
    """Compute the first source pixel and the weights (taps, O) of each output pixel, as
    `axis_weights` does. Return the largest number of taps."""
    size = first.shape[0]
    ratio = extent / size
    support = max(ratio, 1.0)
    most = 1
    for o in range(size):
        at = size - 1 - o if mirror else o
        center = start + (o + 0.5) * ratio
        # the first pixel that may have a weight; rounding may give the pixel before it, whose
        # weight is then not positive
        low = max(int(max(center - support, start) - 0.5), 0)
        taps, total = 0, 0.0
        for pixel in range(low, stored):
            middle = pixel + 0.5
            if middle >= start + extent or middle >= center + support:
                break
            weight = 1 - abs(middle - center) / support
            if weight > 0 and middle > start:
                low = pixel if taps == 0 else low
                weights[taps, at] = weight
                total += weight
                taps += 1
        first[at] = low
        most = max(most, taps)
        _settle(weights, at, taps, total)
    return most


@_inner
def _area_taps(
    start: float,
    extent: float,
    mirror: bool,
    stored: int,
    enlarged: bool,
    first: NDArray[np.int64] | Words,
    weights: Floats,
) -> int:
    """Do the same for INTER_AREA, as `_covered` does."""
    size = first.shape[0]
    most = 1
    for o in range(size):
        at = size - 1 - o if mirror else o
        begin, end = start + o * extent / size, start + (o + 1) * extent / size
        low, taps, total = int(begin), 0, 0.0
        for pixel in range(low, stored):
            share = min(pixel + 1.0, end) - max(float(pixel), begin)
            if share <= 0:
                break
            weights[taps, at] = share
            total += share
            taps += 1
        if enlarged and taps > 2:
            weights[1, at] = total - weights[0, at]
            taps = 2
        first[at] = low
        most = max(most, taps)
        _settle(weights, at, taps, total)
    return most


@_inner
def _settle(weights: Floats, at: int, taps: int, total: float) -> None:
    for k in range(taps):
        weights[k, at] /= total
    for k in range(taps, weights.shape[0]):
        weights[k, at] = 0


@_inner
def _color(pixel: np.uint32, shift: np.uint32) -> np.float32:
    return np.float32(np.int32((pixel >> shift) & _BYTE))


@_inner
def _across(
    words: Words,
    start: np.uint64,
    offsets: Words,
    weights: Floats,
    taps: int,
    near: Words,
    row: Floats,
) -> None:
    """Resize one source row, from byte `start` on, horizontally into three color planes (3, O)."""
    size = near.shape[0]
    row[:] = 0
    for k in range(0, taps, 2):
        for x in range(size):
            near[x] = words[start + np.uint64(3 * k) + offsets[x]]
        for x in range(size):
            one, two = np.uint32(near[x]), np.uint32(near[x] >> _PIXEL)
            u, v = weights[k, x], weights[k + 1, x]
            row[0, x] += _color(one, _FIRST) * u + _color(two, _FIRST) * v
            row[1, x] += _color(one, _SECOND) * u + _color(two, _SECOND) * v
            row[2, x] += _color(one, _THIRD) * u + _color(two, _THIRD) * v


@_inner
def _down(ring: Floats, at: int, weights: Floats, o: int, taps: int, row: Floats) -> None:
    """Resize vertically: sum `taps` rows of the ring, from source row `at` on, into one output row
    of three color planes."""
    rows = ring.shape[0]
    one, two = ring[at % rows], ring[(at + 1) % rows]
    u, v = weights[0, o], weights[1, o]
    for x in range(row.shape[0]):
        row[x] = one[x] * u + two[x] * v
    for k in range(2, taps):
        more, u = ring[(at + k) % rows], weights[k, o]
        for x in range(row.shape[0]):
            row[x] += more[x] * u


@_inner
def _finish(
    own: Floats,
    other: Floats,
    share: float,
    scale: Floats,
    shift: Floats,
    out: Floats,
    b: int,
    o: int,
) -> None:
    for c in range(3):
        mine, his, line = own[c], other[c], out[b, c, o]
        u, v, w = np.float32(share * scale[c]), np.float32((1 - share) * scale[c]), shift[c]
        for x in range(line.shape[0]):
            line[x] = mine[x] * u + his[x] * v + w


@_inner
def _finish_rounded(
    own: Floats,
    other: Floats,
    share: float,
    scale: Floats,
    shift: Floats,
    out: Bits,
    b: int,
    o: int,
) -> None:
    """Mix and normalize as `_finish`, then round to bfloat16 bits (nearest, ties to even)."""
    for c in range(3):
        mine, his, line = own[c], other[c], out[b, c, o]
        u, v, w = np.float32(share * scale[c]), np.float32((1 - share) * scale[c]), shift[c]
        for x in range(line.shape[0]):
            bits = np.float32(mine[x] * u + his[x] * v + w).view(np.uint32)
            line[x] = np.uint16((bits + _HALF + ((bits >> _THIRD) & _ONE)) >> _THIRD)


def _scratch(size: int, taps: int) -> Scratch:
    """Allocate the working memory of two images. Inside `_augment`, this code would take seconds
    longer to compile."""
    ring, rows = np.zeros((2, taps, 3 * size), np.float32), np.zeros((2, 3 * size), np.float32)
    return (
        ring,
        ring.reshape(2, taps, 3, size),
        rows,
        rows.reshape(2, 3, size),
        np.zeros((2, taps, size), np.float32),
        np.zeros((2, taps, size), np.float32),
        np.zeros((2, size), np.int64),
        np.zeros((2, size), np.uint64),
        np.zeros(size, np.uint64),
    )


@partial(Compiled, options=_OPTIONS)
def _augment(
    words: Words,
    tail_words: Words,
    tail_from: int,
    stored: int,
    boxes: NDArray[np.float64],
    flip: NDArray[np.bool_],
    area: bool,
    shares: NDArray[np.float64],
    together: int,
    scale: Floats,
    shift: Floats,
    scratch: Scratch,
    counts: NDArray[np.int64],
    out32: Floats,
    out16: Bits,
) -> None:
    """Compute `together` images at a time (1, or the 2 of a pair), one output row after another."""
    ring, ring_planes, rows, row_planes, down, across, first, offsets, near = scratch
    tall, wide, made = counts[0], counts[1], counts[2]
    size, most = near.shape[0], ring.shape[1]
    for pair in range(0, flip.shape[0], together):
        for i in range(together):
            b = pair + i
            if area:
                enlarged = min(boxes[2, b], boxes[3, b]) < size
                tall[i] = _area_taps(
                    boxes[0, b], boxes[2, b], False, stored, enlarged, first[i], down[i]
                )
                wide[i] = _area_taps(
                    boxes[1, b], boxes[3, b], flip[b], stored, enlarged, offsets[i], across[i]
                )
            else:
                tall[i] = _taps(boxes[0, b], boxes[2, b], False, stored, first[i], down[i])
                wide[i] = _taps(boxes[1, b], boxes[3, b], flip[b], stored, offsets[i], across[i])
            made[i] = first[i, 0]
            for x in range(size):
                offsets[i, x] *= np.uint64(3)
        for o in range(size):
            for i in range(together):
                b, at = pair + i, first[i, o]
                source = words if b < tail_from else tail_words
                picture = b if b < tail_from else b - tail_from
                until = min(at + tall[i], stored)
                for y in range(made[i], until):
                    start = np.uint64((picture * stored + y) * stored * 3)
                    _across(
                        source,
                        start,
                        offsets[i],
                        across[i],
                        wide[i],
                        near,
                        ring_planes[i, y % most],
                    )
                made[i] = max(until, made[i])
                _down(ring[i], at, down[i], o, tall[i], rows[i])
            for i in range(together):
                b, own, other = pair + i, row_planes[i], row_planes[i ^ (together - 1)]
                if out16.shape[0]:
                    _finish_rounded(own, other, shares[b], scale, shift, out16, b, o)
                else:
                    _finish(own, other, shares[b], scale, shift, out32, b, o)
