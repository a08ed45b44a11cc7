"""Crop, resize and flip. B batch, H and W stored height and width, O output size, C colors.

A resized crop with its flip is one separable linear map per image: out = Wy @ image @ Wx^T. Each
output pixel has a row of weights (antialiased triangle or cubic filter as in torchvision and PIL,
or OpenCV's INTER_AREA). `resample` returns floats. `resample_levels` returns integer levels 0..255,
as PIL does. Its weights are fixed-point: every sum is exact in float32 in any order, and an image
does not depend on its batch.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pretrain.augment.draws import Draws, Floats, Purpose, first_that, send
from pretrain.config import AugmentSettings, PaddingMode
from pretrain.models.layers.products import products

Flags = NDArray[np.bool_]

_CROP_TRIES = 10
_LEVEL_BITS = 15
"""Fractional bits of a fixed-point weight. Float32's 24 bits then hold a sum of weights (up to 1.3
for cubic) times 8-bit pixels."""


@dataclass(frozen=True)
class Boxes:
    """One crop box per image, in pixels. `flip`: mirror the crop."""

    top: NDArray[np.float64]
    left: NDArray[np.float64]
    height: NDArray[np.float64]
    width: NDArray[np.float64]
    flip: Flags


def whole_boxes(count: int, size: int) -> Boxes:
    return central_boxes(size, np.ones(count), fraction=1.0)


def central_boxes(size: int, aspects_B: Floats, *, fraction: float) -> Boxes:
    """Return the central square of each original image, with `fraction` of its shorter side."""
    width, height = _largest(size, 1 / aspects_B, fraction=fraction)
    top, left = np.round((size - height) / 2), np.round((size - width) / 2)
    return Boxes(top, left, height, width, np.zeros(len(aspects_B), bool))


def _largest(size: int, ratio_B: Floats, *, fraction: float = 1.0) -> tuple[Floats, Floats]:
    """Return integer width and height of the largest boxes with these aspect ratios in a stored
    square, times `fraction`."""
    sides = np.minimum(1.0, ratio_B), np.minimum(1.0, 1 / ratio_B)
    width, height = (np.maximum(1.0, np.round(size * fraction * side)) for side in sides)
    return width, height


def draw_flips(settings: AugmentSettings, draws: Draws) -> Flags:
    return draws.uniform(Purpose.FLIP) < settings.flip_probability


def draw_boxes(
    settings: AugmentSettings, draws: Draws, *, stored_size: int, aspects_B: Floats
) -> Boxes:
    """Draw random resized crops as torchvision does. If none of ten random boxes fits, use a center
    crop.

    An image of aspect ratio a is stored as a square. In this square, a crop of aspect ratio r has
    the ratio r / a.
    """
    flip, count = draw_flips(settings, draws), len(aspects_B)
    if settings.crop_scale is None:
        return replace(central_boxes(stored_size, aspects_B, fraction=1.0), flip=flip)
    (low, high), (narrow, wide) = settings.crop_scale, settings.crop_ratio
    spread = math.log(wide) - math.log(narrow)
    found = np.zeros(count, bool)
    height = np.zeros(count)
    width = np.zeros(count)
    rows = np.arange(count)
    for tries in (np.arange(1), np.arange(1, 3), np.arange(3, _CROP_TRIES)):
        left_over = draws.of(rows) if tries[0] else draws
        area = stored_size**2 * (low + (high - low) * left_over.uniform(Purpose.CROP_AREA, tries))
        ratio = np.exp(math.log(narrow) + spread * left_over.uniform(Purpose.CROP_RATIO, tries))
        ratio = ratio / aspects_B[rows, None]
        widths, heights = np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))
        fits = (widths >= 1) & (heights >= 1) & (widths <= stored_size) & (heights <= stored_size)
        found[rows], (height[rows], width[rows]) = first_that(fits, heights, widths)
        rows = rows[~found[rows]]
        if not len(rows):
            break
    widest, tallest = _largest(stored_size, np.clip(aspects_B, narrow, wide) / aspects_B)
    height, width = np.where(found, height, tallest), np.where(found, width, widest)
    top = np.floor(draws.uniform(Purpose.CROP_TOP) * (stored_size - height + 1))
    left = np.floor(draws.uniform(Purpose.CROP_LEFT) * (stored_size - width + 1))
    center_top = np.floor((stored_size - height) / 2)
    center_left = np.floor((stored_size - width) / 2)
    return Boxes(
        np.where(found, top, center_top), np.where(found, left, center_left), height, width, flip
    )


def draw_kernels(settings: AugmentSettings, draws: Draws, *, count: int) -> Flags | None:
    """Return a mask of the images to resize with the cubic filter, or None if all use the bilinear
    filter."""
    if settings.crop_interpolation == "random":
        return draws.uniform(Purpose.CROP_KERNEL) < 0.5
    return np.ones(count, bool) if settings.crop_interpolation == "bicubic" else None


def resample(
    images_BHWC: Tensor, boxes: Boxes, *, size: int, cubic: Flags | None = None, area: bool = False
) -> Tensor:
    """Resize the boxes to `size` pixels: float (B, C, O, O). `area`: use OpenCV's INTER_AREA."""
    batch, height, width, colors = images_BHWC.shape
    rows_BOH, columns_BOW = _weights(images_BHWC, boxes, size=size, cubic=cubic, area=area)
    pictures_BHWC = images_BHWC.float()
    down_BOWC = _product(rows_BOH, pictures_BHWC.view(batch, height, width * colors)).view(
        batch, size, width, colors
    )
    across_BWOC = down_BOWC.permute(0, 2, 1, 3).reshape(batch, width, size * colors)
    out_BOOC = _product(columns_BOW, across_BWOC).view(batch, size, size, colors)
    out_BCOO = out_BOOC.permute(0, 3, 2, 1)
    return out_BCOO if cubic is None else out_BCOO.clamp(0, 255)  # the cubic filter can overshoot


def resample_levels(
    images_BHWC: Tensor, boxes: Boxes, *, size: int, cubic: Flags | None = None, area: bool = False
) -> Tensor:
    """Resize to integer levels, uint8 (B, O, O, C), as PIL: first across, then down, rounded after
    each pass."""
    batch, height, width, colors = images_BHWC.shape
    rows_BOH, columns_BOW = _weights(
        images_BHWC, boxes, size=size, cubic=cubic, area=area, fixed_point=True
    )
    across_BWHC = images_BHWC.permute(0, 2, 1, 3).float()
    narrow_BOHC = _levels(_product(columns_BOW, across_BWHC.reshape(batch, width, height * colors)))
    down_BHOC = narrow_BOHC.view(batch, size, height, colors).permute(0, 2, 1, 3)
    out_BOOC = _levels(_product(rows_BOH, down_BHOC.reshape(batch, height, size * colors)))
    return out_BOOC.view(batch, size, size, colors).to(torch.uint8)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices without TF32, even if the model uses TF32 at the same time."""
    with products(in_tf32=False) if left.is_cuda else nullcontext():
        return torch.bmm(left, right)


def axis_weights(
    start_B: Tensor,
    extent_B: Tensor,
    flip_B: Tensor,
    *,
    stored_size: int,
    size: int,
    cubic_B: Tensor | None = None,
    enlarged_B: Tensor | None = None,
    fixed_point: bool = False,
) -> Tensor:
    """Return the weights (B, O, stored_size) of an antialiased resize of [start, start + extent) to
    `size` pixels.

    `enlarged_B`: if set, use INTER_AREA. An entry is True if the image's box is enlarged in width
    or height. Fixed-point weights have 15 fractional bits, before and after the division by their
    sum.
    """
    device = start_B.device
    start_B11, extent_B11 = start_B.view(-1, 1, 1), extent_B.view(-1, 1, 1)
    out_1O1 = torch.arange(size, device=device, dtype=torch.float32).view(1, -1, 1)
    out_BO1 = torch.where(flip_B.view(-1, 1, 1), size - 1 - out_1O1, out_1O1)
    pixel_11H = torch.arange(stored_size, device=device, dtype=torch.float32).view(1, 1, -1) + 0.5
    if enlarged_B is None:
        ratio_B11 = extent_B11 / size
        center_BO1 = start_B11 + (out_BO1 + 0.5) * ratio_B11
        distance_BOH = (pixel_11H - center_BO1).abs() / ratio_B11.clamp(min=1.0)
        weights_BOH = (1 - distance_BOH).clamp(min=0)
        if cubic_B is not None:
            weights_BOH = torch.where(cubic_B.view(-1, 1, 1), _cubic(distance_BOH), weights_BOH)
        inside_B1H = (pixel_11H > start_B11) & (pixel_11H < start_B11 + extent_B11)
        weights_BOH = weights_BOH * inside_B1H
    else:
        # divide last, so that pixel edges are exact
        begin_BO1, end_BO1 = out_BO1 * extent_B11 / size, (out_BO1 + 1) * extent_B11 / size
        weights_BOH = _covered(
            pixel_11H - 0.5 - start_B11, begin_BO1, end_BO1, enlarged_B.view(-1, 1, 1)
        )
    if not fixed_point:
        return weights_BOH / weights_BOH.sum(dim=-1, keepdim=True)
    one = float(2**_LEVEL_BITS)
    whole_BOH = (weights_BOH * one).round_()
    return (whole_BOH * one / whole_BOH.sum(dim=-1, keepdim=True)).round_() / one


def padded_crop(
    images_BHWC: Tensor,
    top: NDArray[np.int64],
    left: NDArray[np.int64],
    *,
    flip: Flags,
    padding: int,
    mode: PaddingMode,
) -> Tensor:
    """Pad the images, crop squares of the stored size at (top, left), and flip."""
    _, height, width, _ = images_BHWC.shape
    rows_BH = top[:, None] + np.arange(height)
    columns_BW = left[:, None] + np.arange(width)
    columns_BW = np.where(flip[:, None], columns_BW[:, ::-1], columns_BW)
    if mode == "reflect":
        rows_BH = _reflected(rows_BH - padding, height)
        columns_BW = _reflected(columns_BW - padding, width)
    else:
        images_BHWC = pad(images_BHWC, (0, 0, padding, padding, padding, padding))
    sent = send({"rows": rows_BH, "columns": columns_BW}, images_BHWC.device)
    pictures = torch.arange(len(images_BHWC), device=images_BHWC.device)
    return images_BHWC[
        pictures[:, None, None], sent["rows"][:, :, None], sent["columns"][:, None, :]
    ]


def draw_offsets(
    settings: AugmentSettings, draws: Draws
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    places = 2 * settings.crop_padding + 1
    return draws.integer(Purpose.CROP_TOP, places), draws.integer(Purpose.CROP_LEFT, places)


def _reflected(places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Reflect positions at the first and the last pixel, without repeating these pixels."""
    period = max(2 * size - 2, 1)
    around = places % period
    return np.minimum(around, period - around) if size > 1 else np.zeros_like(places)


def _weights(
    images_BHWC: Tensor,
    boxes: Boxes,
    *,
    size: int,
    cubic: Flags | None,
    area: bool,
    fixed_point: bool = False,
) -> tuple[Tensor, Tensor]:
    _, height, width, _ = images_BHWC.shape
    sides = {
        name: getattr(boxes, name).astype(np.float32) for name in ("top", "left", "height", "width")
    }
    flags = {"flip": boxes.flip, "never": np.zeros_like(boxes.flip)} | (
        {} if cubic is None else {"cubic": cubic}
    )
    if area:
        flags["enlarged"] = (boxes.height < size) | (boxes.width < size)
    sent = send({**sides, **flags}, images_BHWC.device)
    rows_BOH, columns_BOW = (
        axis_weights(
            sent[start],
            sent[extent],
            sent[flip],
            stored_size=stored_size,
            size=size,
            cubic_B=sent.get("cubic"),
            enlarged_B=sent.get("enlarged"),
            fixed_point=fixed_point,
        )
        for start, extent, flip, stored_size in (
            ("top", "height", "never", height),
            ("left", "width", "flip", width),
        )
    )
    return rows_BOH, columns_BOW


def _covered(start_B1H: Tensor, begin_BO1: Tensor, end_BO1: Tensor, enlarged_B11: Tensor) -> Tensor:
    """Return the fraction of each output pixel [begin, end) that each input pixel (at `start`)
    covers. If a side is enlarged, OpenCV reads at most two input pixels. The second pixel gets the
    remaining weight."""
    covered_BOH = (
        torch.minimum(start_B1H + 1, end_BO1) - torch.maximum(start_B1H, begin_BO1)
    ).clamp(min=0)
    share_BOH = covered_BOH / (end_BO1 - begin_BO1)
    is_first_BOH = (start_B1H <= begin_BO1) & (begin_BO1 < start_B1H + 1)
    is_second_BOH = (start_B1H - 1 <= begin_BO1) & (begin_BO1 < start_B1H)
    first_BOH = share_BOH * is_first_BOH
    two_BOH = first_BOH + is_second_BOH * (1 - first_BOH.sum(dim=-1, keepdim=True))
    return torch.where(enlarged_B11, two_BOH, share_BOH)


def _cubic(distance: Tensor) -> Tensor:
    """Compute Keys's kernel with a = -1/2, as antialiased bicubic in PIL and torchvision."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


def _levels(values: Tensor) -> Tensor:
    return (values + 0.5).floor_().clamp_(0, 255)
