"""Batch augmentation on the training device: stored uint8 pictures in, normalised float pictures out.

Crop, resize and flip are one separable linear map per picture: out = Wy @ image @ Wx^T, with a row of weights for each output
pixel (antialiased triangle filter, as torchvision's and PIL's bilinear). All random numbers are hashes of (seed, epoch, sample),
so the pictures do not depend on rank, worker or resume. B batch, H/W height and width in, O out, C colours.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv
from torch import Tensor

from pretrain.config import AugmentSettings
from pretrain.counter import uniform
from pretrain.loader import Batch

_CROP_AREA, _CROP_RATIO, _CROP_TOP, _CROP_LEFT, _FLIP, _MIXUP = range(6)
_CROP_TRIES = 10


class Normalisation(NamedTuple):
    """Channel mean and standard deviation on the scale 0..1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class Boxes:
    """One crop per picture, in pixels; `flip` mirrors it."""

    top: NDArray[np.float64]
    left: NDArray[np.float64]
    height: NDArray[np.float64]
    width: NDArray[np.float64]
    flip: NDArray[np.bool_]


@dataclass(frozen=True)
class Prepared:
    """What a training step needs: pictures, and labels as a mixture of two."""

    images_BCHW: Tensor
    labels_B: Tensor
    other_labels_B: Tensor | None = None
    weight_B: Tensor | None = None
    """Share of `labels_B`; the rest belongs to `other_labels_B`."""


class Augmentation:
    """Turns stored batches into model inputs, for training (`prepare`) and for evaluation (`plain`)."""

    def __init__(
        self,
        settings: AugmentSettings,
        *,
        seed: int,
        image_size: int,
        normalisation: Normalisation,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.settings, self.seed, self.image_size, self.device, self.dtype = settings, seed, image_size, device, dtype
        self._mean = torch.tensor(normalisation.mean, device=device).mul(255).view(1, 3, 1, 1)
        self._scale = torch.tensor([1 / (255 * max(std, 1e-6)) for std in normalisation.std], device=device).view(
            1, 3, 1, 1
        )
        self._lambdas = _beta_table(settings.mixup_alpha)

    def prepare(self, batch: Batch) -> Prepared:
        images, labels = self._move(batch.images_BHWC), self._move(batch.labels_B)
        stored = images.shape[1]
        if self.settings.crop_scale is not None or self.settings.flip_probability > 0 or stored != self.image_size:
            pictures = resample(images, self.boxes(batch, stored_size=stored), size=self.image_size)
        else:
            pictures = images.permute(0, 3, 1, 2).float()
        pictures = self._normalise(pictures)
        if self.settings.mixup_alpha <= 0:
            return Prepared(pictures.to(self.dtype), labels)
        return self._mix(pictures, labels, batch)

    def plain(self, batch: Batch) -> Prepared:
        images = self._move(batch.images_BHWC)
        stored = images.shape[1]
        pictures = images.permute(0, 3, 1, 2).float()
        if stored != self.image_size:
            pictures = resample(images, whole_boxes(len(images), stored), size=self.image_size)
        return Prepared(self._normalise(pictures).to(self.dtype), self._move(batch.labels_B))

    def boxes(self, batch: Batch, *, stored_size: int) -> Boxes:
        """Random resized crops, as torchvision draws them: ten tries at an area and a ratio that fit, else the centre."""
        seed, epochs, samples = self.seed, batch.epochs, batch.samples
        flip = uniform(seed, epochs, samples, _FLIP) < self.settings.flip_probability
        boxes = whole_boxes(len(samples), stored_size)
        if self.settings.crop_scale is None:
            return Boxes(boxes.top, boxes.left, boxes.height, boxes.width, flip)
        (low, high), (narrow, wide) = self.settings.crop_scale, self.settings.crop_ratio
        height, width = self._fallback(boxes, stored_size)
        open_ = np.ones(len(samples), bool)
        for attempt in range(_CROP_TRIES):
            area = stored_size**2 * (low + (high - low) * uniform(seed, epochs, samples, _CROP_AREA, attempt))
            spread = math.log(wide) - math.log(narrow)
            ratio = np.exp(math.log(narrow) + spread * uniform(seed, epochs, samples, _CROP_RATIO, attempt))
            w, h = np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))
            fits = open_ & (w >= 1) & (h >= 1) & (w <= stored_size) & (h <= stored_size)
            width, height = np.where(fits, w, width), np.where(fits, h, height)
            open_ &= ~fits
        top = np.floor(uniform(seed, epochs, samples, _CROP_TOP) * (stored_size - height + 1))
        left = np.floor(uniform(seed, epochs, samples, _CROP_LEFT) * (stored_size - width + 1))
        centre_top, centre_left = np.floor((stored_size - height) / 2), np.floor((stored_size - width) / 2)
        return Boxes(np.where(open_, centre_top, top), np.where(open_, centre_left, left), height, width, flip)

    def _fallback(self, boxes: Boxes, stored_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The largest centre crop of an allowed ratio (a square picture has ratio 1)."""
        narrow, wide = self.settings.crop_ratio
        height = boxes.height if narrow <= 1 else np.full_like(boxes.height, round(stored_size / narrow))
        width = boxes.width if wide >= 1 else np.full_like(boxes.width, round(stored_size * wide))
        return height, width

    def _mix(self, pictures: Tensor, labels: Tensor, batch: Batch) -> Prepared:
        """Each picture is mixed with its neighbour (positions 2j and 2j + 1), both with the same share of the other."""
        drawn = np.interp(uniform(self.seed, batch.pairs, _MIXUP), np.linspace(0, 1, len(self._lambdas)), self._lambdas)
        weight = self._move(torch.from_numpy(drawn).float())
        partner = torch.arange(len(labels), device=self.device) ^ 1
        mixed = torch.lerp(pictures[partner], pictures, weight.view(-1, 1, 1, 1))
        return Prepared(mixed.to(self.dtype), labels, labels[partner], weight)

    def _normalise(self, pictures: Tensor) -> Tensor:
        return (pictures - self._mean) * self._scale

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def whole_boxes(count: int, size: int) -> Boxes:
    zero, full = np.zeros(count), np.full(count, float(size))
    return Boxes(zero, zero, full, full, np.zeros(count, bool))


def resample(images_BHWC: Tensor, boxes: Boxes, *, size: int) -> Tensor:
    """The boxes of the pictures at `size` pixels: float (B, C, O, O)."""
    batch, height, width, colours = images_BHWC.shape
    device = images_BHWC.device
    rows_BOH = axis_weights(
        boxes.top, boxes.height, np.zeros(batch, bool), stored_size=height, size=size, device=device
    )
    columns_BOW = axis_weights(boxes.left, boxes.width, boxes.flip, stored_size=width, size=size, device=device)
    pictures_BHWC = images_BHWC.float()
    down_BOWC = torch.bmm(rows_BOH, pictures_BHWC.view(batch, height, width * colours)).view(
        batch, size, width, colours
    )
    across_BWOC = down_BOWC.permute(0, 2, 1, 3).reshape(batch, width, size * colours)
    out_BOOC = torch.bmm(columns_BOW, across_BWOC).view(batch, size, size, colours)
    return out_BOOC.permute(0, 3, 2, 1)


def axis_weights(
    start: NDArray[np.float64],
    extent: NDArray[np.float64],
    flip: NDArray[np.bool_],
    *,
    stored_size: int,
    size: int,
    device: torch.device,
) -> Tensor:
    """(B, O, stored_size) weights of an antialiased bilinear resize of [start, start + extent) to `size` pixels."""
    start_B11 = torch.from_numpy(start).float().to(device).view(-1, 1, 1)
    extent_B11 = torch.from_numpy(extent).float().to(device).view(-1, 1, 1)
    flip_B11 = torch.from_numpy(flip).to(device).view(-1, 1, 1)
    out_1O1 = torch.arange(size, device=device, dtype=torch.float32).view(1, -1, 1)
    out_BO1 = torch.where(flip_B11, size - 1 - out_1O1, out_1O1)
    ratio_B11 = extent_B11 / size
    centre_BO1 = start_B11 + (out_BO1 + 0.5) * ratio_B11
    pixel_11H = torch.arange(stored_size, device=device, dtype=torch.float32).view(1, 1, -1) + 0.5
    support_B11 = ratio_B11.clamp(min=1.0)
    weights_BOH = (1 - (pixel_11H - centre_BO1).abs() / support_B11).clamp(min=0)
    inside_B1H = (pixel_11H > start_B11) & (pixel_11H < start_B11 + extent_B11)
    weights_BOH = weights_BOH * inside_B1H
    return weights_BOH / weights_BOH.sum(dim=-1, keepdim=True)


def _beta_table(alpha: float) -> NDArray[np.float64]:
    """The inverse distribution function of Beta(alpha, alpha) on an even grid, to draw by looking up."""
    return np.asarray(betaincinv(alpha, alpha, np.linspace(0, 1, 4097)), np.float64) if alpha > 0 else np.zeros(2)
