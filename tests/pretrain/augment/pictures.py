"""Images and batches for the tests of the augmentation."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.augment.draws import Draws
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batch

PLAIN = Normalization((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


def pictures(count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)


def hard_pictures(height: int, width: int) -> NDArray[np.uint8]:
    """Return nine difficult images, shape (9, H, W, 3): noise, slopes, flat, black, white, low
    contrast, extremes."""
    generator = np.random.Generator(np.random.Philox(5))
    y, x = np.mgrid[:height, :width]
    gray = generator.integers(0, 256, (height, width, 1))
    kinds = [
        generator.integers(0, 256, (height, width, 3)),
        generator.integers(0, 256, (height, width, 3)),
        np.stack([x * 255 // width, y * 255 // height, (x + y) * 127 // width % 256], axis=-1),
        np.full((height, width, 3), 77),
        np.zeros((height, width, 3)),
        np.full((height, width, 3), 255),
        generator.integers(100, 140, (height, width, 3)),
        generator.integers(0, 2, (height, width, 3)) * 255,
        np.repeat(gray, 3, axis=2),
    ]
    return np.stack(kinds).astype(np.uint8)


def make(
    settings: AugmentSettings,
    *,
    size: int = 16,
    seed: int = 3,
    normalization: Normalization = PLAIN,
    **where: Any,
) -> Augmentation:
    where = {"device": torch.device("cpu"), "dtype": torch.float32, **where}
    return Augmentation(settings, seed=seed, image_size=size, normalization=normalization, **where)


def batch_of(images: Tensor, samples: NDArray[np.int64], *, epoch: int = 0) -> Batch:
    rows = torch.from_numpy(samples)
    epochs = np.full(len(samples), epoch)
    return Batch(images[rows], rows % 5, epochs, samples, samples // 2)


def draws_of(count: int) -> Draws:
    samples = np.arange(count)
    return Draws((3, np.zeros_like(samples), samples))
