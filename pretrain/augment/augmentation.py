"""Turn stored uint8 images into normalized float images on the training device, in batches.

The order is timm's: crop, flip, auto-augment (in integer levels, as PIL), normalize, random
erasing, MixUp or CutMix. Images do not depend on rank, worker or resume (draws.py). Integer levels
are equal in all implementations; float images agree within the rounding of a matrix product.

The papers' recipe (crop, flip, MixUp, normalize) is one pass: compiled loops on a CPU (on_cpu.py),
a kernel on a GPU (on_gpu.py). The kernel also resizes for other recipes.

B batch, H and W stored height and width, O output size, C colors.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pretrain.augment import on_cpu
from pretrain.augment.crops import (
    Boxes,
    Flags,
    central_boxes,
    draw_boxes,
    draw_flips,
    draw_kernels,
    draw_offsets,
    padded_crop,
    resample,
    resample_levels,
    whole_boxes,
)
from pretrain.augment.draws import Draws, Floats, Purpose
from pretrain.augment.erasing import draw_blocks, erase
from pretrain.augment.mixing import PairMixer
from pretrain.augment.operations import apply_plan
from pretrain.augment.plan import draw_plan
from pretrain.auto_augment import parse_policy
from pretrain.config import AugmentSettings, PixelOrder
from pretrain.data.loader import Batch, BufferPool
from pretrain.data.order import hash64

IN_PLACE = PixelOrder()


def pixel_order(seed: int, *, size: int) -> Tensor:
    """Return, for each pixel of a permuted square image, the index of its source pixel."""
    return torch.from_numpy(
        np.argsort(hash64(seed, int(Purpose.PIXELS), np.arange(size**2)), kind="stable")
    )


def kernels() -> ModuleType:
    from pretrain.augment import on_gpu

    return on_gpu


class Normalization(NamedTuple):
    """Mean and standard deviation of each color channel, for images on the scale 0..1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class Prepared:
    """Inputs of a training step: images, and one label each or a mixture of two labels."""

    images_BCHW: Tensor
    labels_B: Tensor
    other_labels_B: Tensor | None = None
    weight_B: Tensor | None = None
    """Weight of `labels_B` in the mixture. `other_labels_B` has the remaining weight."""


class Augmentation:
    """Turn stored batches into model inputs for training (`prepare`) and evaluation (`plain`)."""

    def __init__(
        self,
        settings: AugmentSettings,
        *,
        seed: int,
        image_size: int,
        normalization: Normalization,
        device: torch.device,
        dtype: torch.dtype,
        pixels: PixelOrder = IN_PLACE,
    ):
        self.settings = settings
        self.seed = seed
        self.image_size = image_size
        self.device = device
        self.dtype = dtype
        self.normalization = normalization
        self._is_permuted_first, self._order_P = pixels.permute == "before", None
        if pixels.pixel_permutation is not None:
            self._order_P = pixel_order(pixels.pixel_permutation, size=image_size).to(device)
        self._mean = torch.tensor(normalization.mean, device=device).mul(255).view(1, 3, 1, 1)
        self._scale = torch.tensor(
            [1 / (255 * max(std, 1e-6)) for std in normalization.std], device=device
        ).view(1, 3, 1, 1)
        mean_levels = [min(255, round(255 * mean)) for mean in normalization.mean]
        self._fill_C = torch.tensor(mean_levels, dtype=torch.uint8, device=device)
        self._policy = parse_policy(settings.auto_augment) if settings.auto_augment else None
        self._mixer = PairMixer(settings) if settings.mixing else None
        self._buffers = BufferPool()
        self._on_cpu = device.type == "cpu"
        self._kernels = kernels() if device.type == "cuda" else None
        self._colors_23 = torch.stack([self._mean, self._scale]).view(2, 3)
        self._area = settings.crop_interpolation == "area"
        is_on_cpu = self._on_cpu and not settings.mixes_previous
        self._in_one_pass = settings.is_crop_flip_mixup and (bool(self._kernels) or is_on_cpu)

    def prepare(self, batch: Batch) -> Prepared:
        if self._order_P is not None and self._is_permuted_first:
            images = self._permuted_levels(batch, self._order_P)
            return self._augmented(replace(batch, images_BHWC=images, aspects_B=None))
        return self._in_order(self._augmented(batch))

    def plain(self, batch: Batch) -> Prepared:
        return self._in_order(self._plain(batch))

    def _in_order(self, prepared: Prepared) -> Prepared:
        if self._order_P is None:
            return prepared
        images = prepared.images_BCHW
        return replace(
            prepared, images_BCHW=images.flatten(2).index_select(2, self._order_P).view_as(images)
        )

    def _permuted_levels(self, batch: Batch, order_P: Tensor) -> Tensor:
        images, (boxes, cubic) = self._move(batch.images_BHWC), self._plain_boxes(batch, fraction=1)
        if not self._are_complete(boxes, stored=images.shape[1]):
            images = self._resampled(images, boxes, cubic=cubic, levels=True)
        return images.flatten(1, 2).index_select(1, order_P).view_as(images)

    def _augmented(self, batch: Batch) -> Prepared:
        draws, labels = Draws((self.seed, batch.epochs, batch.samples)), self._move(batch.labels_B)
        drawn = (
            self._mixer.draw(Draws((self.seed, batch.mix_keys)), size=self.image_size)
            if self._mixer
            else None
        )
        weight = None
        if self._in_one_pass:
            images = batch.images_BHWC
            boxes = draw_boxes(
                self.settings, draws, stored_size=images.shape[1], aspects_B=_aspects(batch)
            )
            pictures, weight = self._finished(
                images, boxes, weights=drawn.weight if drawn else None
            )
        else:
            pictures = self._normalize(self._cropped(batch, draws))
            if self.settings.erase_probability > 0:
                blocks = draw_blocks(self.settings, draws, size=self.image_size)
                pictures = erase(pictures, blocks, mode=self.settings.erase_mode)
            if self._mixer and drawn:
                pictures, weight = self._mixer.mix(pictures, drawn)
        labels, others = self._mixer.with_partners(labels) if self._mixer else (labels, None)
        return Prepared(pictures.to(self.dtype), labels, others, weight)

    def _finished(
        self, images_BHWC: Tensor, boxes: Boxes, *, weights: Floats | None
    ) -> tuple[Tensor, Tensor | None]:
        """Crop, mix and normalize in one pass. Return images and weights of their labels."""
        size, dtype, area = self.image_size, self.dtype, self._area
        if self._kernels:
            made: tuple[Tensor, Tensor | None] = self._kernels.crop_mix_normalize(
                self._move(images_BHWC),
                boxes,
                size=size,
                colors_23=self._colors_23,
                weights=weights,
                dtype=dtype,
                area=area,
            )
            return made
        mean, scale = (tuple(values.flatten().tolist()) for values in (self._mean, self._scale))
        out = self._buffers.empty(len(images_BHWC), 3, size, size, dtype=dtype)
        pictures = on_cpu.crop_mix_normalize(
            images_BHWC,
            boxes,
            size=size,
            mean=mean,
            scale=scale,
            weights=weights,
            dtype=dtype,
            area=area,
            out=out,
        )
        return pictures, None if weights is None else torch.from_numpy(weights).float()

    def _resampled(
        self, images_BHWC: Tensor, boxes: Boxes, *, cubic: Flags | None, levels: bool = False
    ) -> Tensor:
        if self._kernels:
            pictures, _ = self._kernels.crop_mix_normalize(
                images_BHWC,
                boxes,
                size=self.image_size,
                cubic=cubic,
                area=self._area,
                levels=levels,
            )
            return torch.as_tensor(pictures)
        if self._on_cpu and cubic is None and not levels:
            return on_cpu.crop(images_BHWC, boxes, size=self.image_size, area=self._area)
        make = resample_levels if levels else resample
        return make(images_BHWC, boxes, size=self.image_size, cubic=cubic, area=self._area)

    def _plain(self, batch: Batch) -> Prepared:
        boxes, cubic = self._plain_boxes(batch, fraction=self.settings.plain_crop)
        if (self._on_cpu or self._kernels) and cubic is None:
            return Prepared(
                self._finished(batch.images_BHWC, boxes, weights=None)[0],
                self._move(batch.labels_B),
            )
        images = self._move(batch.images_BHWC)
        pictures = images.permute(0, 3, 1, 2).float()
        if not self._are_complete(boxes, stored=images.shape[1]):
            pictures = self._resampled(images, boxes, cubic=cubic)
        return Prepared(self._normalize(pictures).to(self.dtype), self._move(batch.labels_B))

    def _plain_boxes(self, batch: Batch, *, fraction: float) -> tuple[Boxes, Flags | None]:
        """Return the central square of each image, with `fraction` of its shorter side. Also return
        a mask of the images to resize with a cubic filter, or None for the bilinear filter."""
        settings, count = self.settings, len(batch.images_BHWC)
        boxes = central_boxes(batch.images_BHWC.shape[1], _aspects(batch), fraction=fraction)
        return boxes, np.ones(count, bool) if settings.plain_filter == "bicubic" else None

    def _are_complete(self, boxes: Boxes, *, stored: int) -> bool:
        extents = np.concatenate([boxes.height, boxes.width])
        return stored == self.image_size and bool((extents == stored).all())

    def _cropped(self, batch: Batch, draws: Draws) -> Tensor:
        """Return cropped, flipped and auto-augmented images: float (B, C, O, O) on the scale
        0..255."""
        settings, images_BHWC = self.settings, self._move(batch.images_BHWC)
        count, stored = images_BHWC.shape[:2]
        boxes = draw_boxes(settings, draws, stored_size=stored, aspects_B=_aspects(batch))
        if settings.crop_padding:
            top, left = draw_offsets(settings, draws)
            images_BHWC = padded_crop(
                images_BHWC,
                top,
                left,
                flip=draw_flips(settings, draws),
                padding=settings.crop_padding,
                mode=settings.padding_mode,
            )
            boxes = whole_boxes(count, stored)
        kernels = draw_kernels(settings, draws, count=count)
        if self._policy is not None:
            levels = self._resampled(images_BHWC, boxes, cubic=kernels, levels=True)
            levels = apply_plan(levels, draw_plan(self._policy, draws), fill_C=self._fill_C)
            return levels.permute(0, 3, 1, 2).float()
        if not boxes.flip.any() and self._are_complete(boxes, stored=stored):
            return images_BHWC.permute(0, 3, 1, 2).float()
        return self._resampled(images_BHWC, boxes, cubic=kernels)

    def _normalize(self, pictures: Tensor) -> Tensor:
        return (pictures - self._mean) * self._scale

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def _aspects(batch: Batch) -> Floats:
    return np.ones(len(batch.images_BHWC)) if batch.aspects_B is None else batch.aspects_B
