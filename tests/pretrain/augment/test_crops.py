"""Crops compared with torchvision, PIL and OpenCV on the same boxes."""

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from pretrain.augment import on_cpu
from pretrain.augment.crops import (
    Boxes,
    axis_weights,
    draw_boxes,
    draw_offsets,
    padded_crop,
    resample,
    resample_levels,
    whole_boxes,
)
from pretrain.config import AugmentSettings, PaddingMode
from tests.pretrain.augment.pictures import draws_of, hard_pictures, pictures


def some_boxes(count: int, size: int) -> Boxes:
    generator = np.random.Generator(np.random.Philox(1))
    height, width = generator.integers(4, size + 1, count), generator.integers(4, size + 1, count)
    top, left = generator.integers(0, size + 1 - height), generator.integers(0, size + 1 - width)
    return Boxes(
        *(side.astype(np.float64) for side in (top, left, height, width)), np.arange(count) % 2 == 0
    )


def crop_of(boxes: Boxes, number: int) -> list[int]:
    return [int(side[number]) for side in (boxes.top, boxes.left, boxes.height, boxes.width)]


@pytest.mark.parametrize("cubic", [None, np.array([True, False, True, True, False, False])])
@pytest.mark.parametrize("size", [8, 13, 32, 48])
def test_crop_resize_and_flip_equal_torchvision(size: int, cubic: NDArray[np.bool_] | None) -> None:
    stored, boxes = pictures(6, 32), some_boxes(6, 32)
    ours = resample(stored, boxes, size=size, cubic=cubic)
    for number in range(6):
        kernel = (
            InterpolationMode.BICUBIC
            if cubic is not None and cubic[number]
            else InterpolationMode.BILINEAR
        )
        picture = stored[number].permute(2, 0, 1).float()
        crop = crop_of(boxes, number)
        expected = reference.resized_crop(
            picture, *crop, [size, size], interpolation=kernel, antialias=True
        )
        expected = reference.horizontal_flip(expected) if boxes.flip[number] else expected
        torch.testing.assert_close(
            ours[number], expected.clamp(0, 255), rtol=0, atol=2e-3
        )  # levels of 255


@pytest.mark.parametrize("size", [8, 13, 32, 48])
def test_levels_equal_pils_within_one(size: int) -> None:
    """PIL's weights have 22 bits, ours 15: values near .5 may round differently. Two calls resize
    the width first, because Pillow 13 can resize the height first."""
    stored = hard_pictures(32, 32)
    boxes, cubic = some_boxes(len(stored), 32), np.arange(len(stored)) % 3 == 0
    ours = resample_levels(torch.from_numpy(stored), boxes, size=size, cubic=cubic).numpy()
    assert ours.dtype == np.uint8 and ours.shape == (len(stored), size, size, 3)
    differing = []
    for number, picture in enumerate(stored):
        top, left, height, width = crop_of(boxes, number)
        kernel = Image.Resampling.BICUBIC if cubic[number] else Image.Resampling.BILINEAR
        cut = Image.fromarray(picture).crop((left, top, left + width, top + height))
        expected = np.asarray(cut.resize((size, height), kernel).resize((size, size), kernel))
        expected = expected[:, ::-1] if boxes.flip[number] else expected
        apart = np.abs(ours[number].astype(int) - expected)
        assert apart.max() <= 1, number
        differing.append((apart > 0).mean())
    assert np.mean(differing) < 0.02


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile before the first test's clock starts: numba has no cache in a new environment."""
    on_cpu.crop(pictures(1, 8), whole_boxes(1, 8), size=8, area=True)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("stored", [32, 40, 64, 96, 100])
def test_area_equals_opencvs_within_one_level(stored: int) -> None:
    """Complete images, and boxes with one enlarged and one shrunk side, by torch and by numba."""
    pictures_ = torch.from_numpy(hard_pictures(stored, stored))
    for boxes in (whole_boxes(len(pictures_), stored), some_boxes(len(pictures_), stored)):
        by_torch = resample(pictures_, boxes, size=64, area=True)
        torch.testing.assert_close(
            on_cpu.crop(pictures_, boxes, size=64, area=True), by_torch, rtol=0, atol=1e-2
        )
        levels = resample_levels(pictures_, boxes, size=64, area=True).permute(0, 3, 1, 2).float()
        for number, picture in enumerate(pictures_.numpy()):
            top, left, height, width = crop_of(boxes, number)
            cut = picture[top : top + height, left : left + width]
            theirs = torch.from_numpy(
                cv2.resize(cut, (64, 64), interpolation=cv2.INTER_AREA)
            ).permute(2, 0, 1)
            theirs = theirs.flip(-1) if boxes.flip[number] else theirs
            assert (by_torch[number] - theirs).abs().max() <= 1 and (
                levels[number] - theirs
            ).abs().max() <= 1


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("size", [8, 24, 96])
def test_fixed_point_sums_are_exact_in_any_order(size: int, cubic: bool) -> None:
    """All sums are exact in float32, so the order of summation never changes a level."""
    boxes, pixels = some_boxes(50, 64), pictures(50, 64).flatten(2).float()
    weights = axis_weights(
        torch.from_numpy(boxes.top).float(),
        torch.from_numpy(boxes.height).float(),
        torch.from_numpy(boxes.flip),
        stored_size=64,
        size=size,
        cubic_B=torch.full((50,), cubic),
        fixed_point=True,
    )
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(50, size), rtol=0, atol=1e-3)
    # the largest intermediate sum of any order
    assert (weights.abs().double() @ pixels.double()).max() * 2**15 <= 2**24
    assert torch.equal((weights @ pixels).double(), weights.double() @ pixels.double())


def test_the_whole_box_at_the_stored_size_is_the_picture_itself() -> None:
    stored = pictures(3, 16)
    assert torch.equal(
        resample(stored, whole_boxes(3, 16), size=16), stored.permute(0, 3, 1, 2).float()
    )
    for cubic in (None, np.ones(3, bool)):
        assert torch.equal(
            resample_levels(stored, whole_boxes(3, 16), size=16, cubic=cubic), stored
        )


def test_boxes_are_inside_and_have_the_areas_and_ratios_asked_for() -> None:
    settings = AugmentSettings(crop_scale=(0.3, 0.7), crop_ratio=(0.5, 2.0))
    boxes = draw_boxes(settings, draws_of(4000), stored_size=64, aspects_B=np.ones(4000))
    assert (boxes.top >= 0).all() and (boxes.top + boxes.height <= 64).all()
    assert (boxes.left >= 0).all() and (boxes.left + boxes.width <= 64).all()
    area, ratio = boxes.height * boxes.width / 64**2, boxes.width / boxes.height
    assert area.min() > 0.28 and area.max() < 0.72 and area.std() > 0.08
    assert 0.45 < ratio.min() < 0.6 and 1.7 < ratio.max() < 2.2
    assert 0.45 < boxes.flip.mean() < 0.55


def test_a_box_that_fits_nowhere_is_the_largest_in_the_middle() -> None:
    settings = AugmentSettings(crop_scale=(1.0, 1.0), crop_ratio=(2.0, 2.0))
    boxes = draw_boxes(settings, draws_of(5), stored_size=64, aspects_B=np.ones(5))
    assert {crop_of(boxes, number).__str__() for number in range(5)} == {"[16, 0, 32, 64]"}


@pytest.mark.parametrize("aspect", [0.001, 0.4, 0.75, 1.5, 2.5, 60.0])
def test_boxes_of_a_squashed_image_are_those_of_the_image_itself(aspect: float) -> None:
    """Area, ratio, and the center crop if none fits, as torchvision draws them for an image of that
    shape."""
    scale, ratio = [0.08, 1.0], [3 / 4, 4 / 3]
    settings = AugmentSettings(crop_scale=(0.08, 1.0), flip_probability=0)
    image = torch.empty(1, round(6000 / max(1, aspect)), round(6000 * min(1, aspect)))
    _, height, width = image.shape
    torch.manual_seed(0)
    theirs = np.array([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(2000)])
    boxes = draw_boxes(
        settings, draws_of(2000), stored_size=8192, aspects_B=np.full(2000, width / height)
    )
    ours = np.stack([boxes.top, boxes.left, boxes.height, boxes.width], axis=1)
    sides = np.array([height, width, height, width])
    for quantile in (0.01, 0.25, 0.5, 0.75, 0.99):
        np.testing.assert_allclose(
            np.quantile(ours / 8192, quantile, axis=0),
            np.quantile(theirs / sides, quantile, axis=0),
            atol=0.06,
        )


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("padding", [1, 4, 11])
def test_crop_with_padding_equals_torchvision(mode: PaddingMode, padding: int) -> None:
    stored = pictures(40, 12)
    settings = AugmentSettings(crop_padding=padding, padding_mode=mode)
    top, left = draw_offsets(settings, draws_of(40))
    assert top.min() == left.min() == 0 or padding == 11
    assert top.min() >= 0 and top.max() <= 2 * padding and top.max() > padding
    flip = np.arange(40) % 2 == 0
    ours = padded_crop(stored, top, left, flip=flip, padding=padding, mode=mode)
    for number in range(40):
        around = reference.pad(stored[number].permute(2, 0, 1), [padding] * 4, padding_mode=mode)
        expected = reference.crop(around, int(top[number]), int(left[number]), 12, 12)
        expected = reference.horizontal_flip(expected) if flip[number] else expected
        assert torch.equal(ours[number], expected.permute(1, 2, 0))
