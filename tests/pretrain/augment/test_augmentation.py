"""Augmentation against torchvision on the same parameters, and independent of rank, batch and resume."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.crops import Boxes, draw_boxes, resample, whole_boxes
from pretrain.augment.draws import Draws
from pretrain.augment.settings import AugmentSettings
from pretrain.loader import Batch

PLAIN = Normalisation((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


def pictures(count: int, size: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)


def make(settings: AugmentSettings, *, size: int, seed: int = 3) -> Augmentation:
    device = torch.device("cpu")
    return Augmentation(settings, seed=seed, image_size=size, normalisation=PLAIN, device=device, dtype=torch.float32)


def batch_of(images: Tensor, samples: NDArray[np.int64], *, epoch: int = 0) -> Batch:
    rows = torch.from_numpy(samples)
    epochs = np.full(len(samples), epoch)
    return Batch(images[rows], rows % 5, epochs, samples, samples // 2)


@pytest.mark.parametrize("size", [8, 13, 32, 48])
def test_crop_resize_and_flip_equal_torchvision(size: int) -> None:
    stored = pictures(6, 32)
    generator = np.random.Generator(np.random.Philox(1))
    height, width = generator.integers(4, 33, 6), generator.integers(4, 33, 6)
    top, left = generator.integers(0, 33 - height), generator.integers(0, 33 - width)
    flip = np.array([True, False, True, False, True, False])
    boxes = Boxes(*(side.astype(np.float64) for side in (top, left, height, width)), flip)
    ours = resample(stored, boxes, size=size)
    for number in range(6):
        crop = [int(side[number]) for side in (top, left, height, width)]
        picture = stored[number].permute(2, 0, 1).float()
        expected = reference.resized_crop(picture, *crop, [size, size], antialias=True)
        expected = reference.horizontal_flip(expected) if flip[number] else expected
        torch.testing.assert_close(ours[number], expected, rtol=0, atol=2e-3)  # of 255


def test_the_whole_box_at_the_stored_size_is_the_picture_itself() -> None:
    stored = pictures(3, 16)
    assert torch.equal(resample(stored, whole_boxes(3, 16), size=16), stored.permute(0, 3, 1, 2).float())


def test_boxes_are_inside_and_have_the_areas_and_ratios_asked_for() -> None:
    settings = AugmentSettings(crop_scale=(0.3, 0.7), crop_ratio=(0.5, 2.0))
    samples = np.arange(4000)
    boxes = draw_boxes(settings, Draws((3, np.zeros_like(samples), samples)), count=4000, stored_size=64)
    assert (boxes.top >= 0).all() and (boxes.top + boxes.height <= 64).all()
    assert (boxes.left >= 0).all() and (boxes.left + boxes.width <= 64).all()
    area, ratio = boxes.height * boxes.width / 64**2, boxes.width / boxes.height
    assert area.min() > 0.28 and area.max() < 0.72 and area.std() > 0.08
    assert 0.45 < ratio.min() < 0.6 and 1.7 < ratio.max() < 2.2
    assert 0.45 < boxes.flip.mean() < 0.55


@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_pictures_do_not_depend_on_how_a_global_batch_is_cut(alpha: float) -> None:
    augmentation = make(AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=alpha), size=16)
    stored, samples = pictures(24, 20), np.arange(24)
    whole = augmentation.prepare(batch_of(stored, samples))
    for cut in (2, 4, 8, 12):
        parts = [augmentation.prepare(batch_of(stored, chunk)) for chunk in np.split(samples, 24 // cut)]
        torch.testing.assert_close(
            torch.cat([part.images_BCHW for part in parts]), whole.images_BCHW, rtol=0, atol=1e-3
        )
        if alpha:
            assert torch.equal(torch.cat([part.weight_B for part in parts]), whole.weight_B)  # type: ignore[misc, arg-type]


def test_epochs_samples_and_seeds_change_the_pictures() -> None:
    settings = AugmentSettings(crop_scale=(0.4, 1.0))
    stored = pictures(1, 20).expand(16, -1, -1, -1)
    first = make(settings, size=16).prepare(batch_of(stored, np.arange(16))).images_BCHW
    assert len({tuple(picture.flatten().tolist()) for picture in first}) == 16
    for other in (
        make(settings, size=16).prepare(batch_of(stored, np.arange(16), epoch=1)),
        make(settings, size=16, seed=4).prepare(batch_of(stored, np.arange(16))),
    ):
        assert not torch.equal(first, other.images_BCHW)


def test_mixup_mixes_neighbours_by_the_weight_it_reports() -> None:
    augmentation = make(AugmentSettings(flip_probability=0.0, mixup_alpha=0.8), size=8)
    stored = pictures(4000, 8)
    batch = batch_of(stored, np.arange(4000))
    mixed = augmentation.prepare(batch)
    assert mixed.weight_B is not None and mixed.other_labels_B is not None
    weight, plain = mixed.weight_B.view(-1, 1, 1, 1), stored.permute(0, 3, 1, 2).float()
    partner = torch.arange(4000).view(-1, 2).flip(1).flatten()
    torch.testing.assert_close(mixed.images_BCHW, weight * plain + (1 - weight) * plain[partner], rtol=0, atol=1e-3)
    assert torch.equal(mixed.other_labels_B, batch.labels_B[partner])
    drawn = mixed.weight_B[::2]
    assert torch.equal(drawn, mixed.weight_B[1::2])
    # Beta(0.8, 0.8): mean 1/2, variance 1 / (4 (2 alpha + 1))
    assert abs(drawn.mean() - 0.5) < 0.03 and abs(drawn.var() - 1 / (4 * 2.6)) < 0.01


def test_evaluation_normalises_and_upscales_like_torchvision() -> None:
    stored = pictures(3, 12)
    normalisation = Normalisation((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    device = torch.device("cpu")
    augmentation = Augmentation(
        AugmentSettings(), seed=0, image_size=24, normalisation=normalisation, device=device, dtype=torch.float32
    )
    ours = augmentation.plain(batch_of(stored, np.arange(3))).images_BCHW
    scaled = reference.resize(stored.permute(0, 3, 1, 2).float() / 255, [24, 24], antialias=True)
    expected = reference.normalize(scaled, list(normalisation.mean), list(normalisation.std))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
