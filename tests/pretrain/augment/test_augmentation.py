"""The complete augmentation: independent of rank, batch and resume, in timm's order, in the model's
dtype."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from pretrain.augment.augmentation import Normalization, pixel_order
from pretrain.augment.draws import Draws, Purpose
from pretrain.augment.erasing import draw_blocks
from pretrain.augment.mixing import PairMixer
from pretrain.config import AugmentSettings, PixelOrder
from tests.pretrain.augment.pictures import batch_of, draws_of, make, pictures

PAPER_A = AugmentSettings(
    crop_scale=(0.08, 1.0),
    crop_interpolation="random",
    auto_augment="rand-m9-mstd0.5-inc1",
    erase_probability=0.25,
    mixup_alpha=0.8,
    cutmix_alpha=1.0,
)
CIFAR = AugmentSettings(
    crop_padding=2,
    auto_augment="original",
    erase_probability=0.5,
    erase_mode="rand",
    erase_count=2,
    cutmix_alpha=1.0,
)
FLOATS = AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8)
COLORS = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
RESIZED = AugmentSettings(
    crop_padding=3, padding_mode="reflect", cutmix_alpha=0.5, mix_probability=0.5
)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    # Tolerance in levels of 255. Without MixUp (whose lerp may round differently in a vector's
    # tail) integer levels are bit-identical.
    [
        (PAPER_A, 1e-3),
        (PAPER_A.model_copy(update={"mixup_alpha": 0.0}), 0.0),
        (CIFAR, 0.0),
        (FLOATS, 1e-3),
        (RESIZED, 1e-3),
    ],
    ids=["Mixer paper", "Mixer paper without MixUp", "padding", "floats", "padding and resize"],
)
def test_pictures_do_not_depend_on_how_a_global_batch_is_cut(
    settings: AugmentSettings, tolerance: float
) -> None:
    augmentation = make(settings)
    stored, samples = pictures(48, 20 if settings is not CIFAR else 16), np.arange(48)
    whole = augmentation.prepare(batch_of(stored, samples))
    assert whole.weight_B is not None
    for cut in (2, 6, 24):
        parts = [
            augmentation.prepare(batch_of(stored, chunk)) for chunk in np.split(samples, 48 // cut)
        ]
        images = torch.cat([part.images_BCHW for part in parts])
        torch.testing.assert_close(images, whole.images_BCHW, rtol=0, atol=tolerance)
        for name in ("labels_B", "other_labels_B", "weight_B"):
            assert torch.equal(
                torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)
            ), name


@pytest.mark.parametrize(
    "settings", [PAPER_A, CIFAR, FLOATS], ids=["Mixer paper", "padding", "floats"]
)
def test_epochs_samples_and_seeds_change_the_pictures(settings: AugmentSettings) -> None:
    stored = pictures(1, 16).expand(64, -1, -1, -1)
    first = make(settings).prepare(batch_of(stored, np.arange(64))).images_BCHW
    assert torch.equal(first, make(settings).prepare(batch_of(stored, np.arange(64))).images_BCHW)
    assert len({tuple(picture.flatten().tolist()) for picture in first}) > 60
    for other in (
        make(settings).prepare(batch_of(stored, np.arange(64), epoch=1)),
        make(settings, seed=4).prepare(batch_of(stored, np.arange(64))),
    ):
        differ = (first != other.images_BCHW).flatten(1).any(dim=1)
        assert differ.float().mean() > 0.9


def test_no_number_is_drawn_twice() -> None:
    draws = draws_of(500)
    table = np.stack([draws.uniform(purpose) for purpose in Purpose])
    assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < 0.25
    assert len(np.unique(table)) == table.size
    several = draws.uniform(Purpose.ERASE_AREA, np.arange(3), np.arange(4))
    assert several.shape == (500, 3, 4) and len(np.unique(several)) == several.size
    alone = Draws((3, 0, 17)).uniform(Purpose.ERASE_AREA, np.arange(3), np.arange(4))
    assert np.array_equal(alone, several[17])


def test_the_order_is_crop_then_erase_then_mix() -> None:
    """Erased pixels are exactly 0 after normalization, and are mixed afterwards."""
    settings = AugmentSettings(
        flip_probability=0.0, erase_probability=1.0, erase_mode="const", mixup_alpha=0.8
    )
    normalization = Normalization((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    stored = pictures(40, 16)
    batch = batch_of(stored, np.arange(40))
    found = make(settings, normalization=normalization).prepare(batch).images_BCHW
    expected = reference.normalize(
        stored.permute(0, 3, 1, 2).float() / 255, *map(list, normalization)
    )
    blocks = draw_blocks(settings, draws_of(40), size=16)
    for place, row in enumerate(blocks.rows):
        top, left = int(blocks.top_nK[place, 0]), int(blocks.left_nK[place, 0])
        height, width = int(blocks.height_nK[place, 0]), int(blocks.width_nK[place, 0])
        expected[row, :, top : top + height, left : left + width] = 0
    mix = PairMixer(settings).draw(Draws((3, batch.mix_keys)), size=16)
    weight = torch.from_numpy(mix.weight).float().view(-1, 1, 1, 1)
    partner = torch.arange(40).view(-1, 2).flip(1).flatten()
    torch.testing.assert_close(
        found, weight * expected + (1 - weight) * expected[partner], rtol=0, atol=1e-5
    )


def test_auto_augment_fills_with_the_mean_color() -> None:
    """Translations of level 10 leave bars of the mean color."""
    mean = (0.2, 0.4, 0.6)
    settings = AugmentSettings(flip_probability=0.0, auto_augment="rand-m10-n1-p1-inc1")
    stored = torch.full((400, 16, 16, 3), 255, dtype=torch.uint8)
    found = make(settings, normalization=Normalization(mean, (1, 1, 1))).prepare(
        batch_of(stored, np.arange(400))
    )
    levels = (found.images_BCHW * 255 + torch.tensor(mean).view(1, 3, 1, 1) * 255).round()
    filled = (
        (levels == torch.tensor([51, 102, 153]).view(1, 3, 1, 1))
        .all(dim=1)
        .flatten(1)
        .float()
        .mean(dim=1)
    )
    assert 90 < (filled > 0).sum() < 180  # 5 of 15 operations
    assert 0.4 < filled.max() < 0.5  # 0.45 of a side


@pytest.mark.parametrize(
    "settings",
    [PAPER_A, CIFAR, FLOATS, AugmentSettings()],
    ids=["Mixer paper", "padding", "floats", "flips"],
)
def test_pixels_in_an_order_of_their_own_after_augmentation_or_before(
    settings: AugmentSettings,
) -> None:
    order = pixel_order(7, size=16)
    assert order.sort().values.tolist() == list(range(256)) and not torch.equal(
        order, pixel_order(8, size=16)
    )
    batch = batch_of(pictures(24, 16), np.arange(24))
    stored = batch.images_BHWC.reshape(24, 256, 3)[:, order].reshape(24, 16, 16, 3)
    after, before = (
        make(settings, pixels=PixelOrder(pixel_permutation=7, permute=place))
        for place in ("after", "before")
    )
    usual = make(settings)
    expected = usual.prepare(batch).images_BCHW.flatten(2)[:, :, order].reshape(24, 3, 16, 16)
    assert torch.equal(after.prepare(batch).images_BCHW, expected)
    expected = usual.prepare(replace(batch, images_BHWC=stored)).images_BCHW
    assert torch.equal(before.prepare(batch).images_BCHW, expected)
    expected = usual.plain(replace(batch, images_BHWC=stored)).images_BCHW
    assert torch.equal(after.plain(batch).images_BCHW, expected) and torch.equal(
        before.plain(batch).images_BCHW, expected
    )


def test_stored_pictures_are_never_changed() -> None:
    stored = pictures(24, 16)
    for settings in (
        PAPER_A,
        CIFAR,
        AugmentSettings(flip_probability=0.0, auto_augment="v0", erase_probability=1.0),
    ):
        batch = batch_of(stored, np.arange(24))
        make(settings).prepare(batch)
        assert torch.equal(batch.images_BHWC, stored)


@pytest.mark.parametrize("settings", [PAPER_A, CIFAR, FLOATS, AugmentSettings()])
def test_bf16_is_the_rounded_fp32(settings: AugmentSettings) -> None:
    batch = batch_of(pictures(16, 16), np.arange(16))
    exact, short = (
        make(settings, normalization=COLORS, dtype=dtype).prepare(batch).images_BCHW
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert short.dtype == torch.bfloat16 and short.shape == (16, 3, 16, 16)
    assert torch.equal(short, exact.to(torch.bfloat16))


@pytest.mark.parametrize(("settings", "kernel"), [(PAPER_A, "bicubic"), (FLOATS, "bilinear")])
@pytest.mark.parametrize("eval_crop", [None, 0.5])
def test_evaluation_cuts_upscales_and_normalizes_like_torchvision(
    settings: AugmentSettings, kernel: str, eval_crop: float | None
) -> None:
    stored = pictures(3, 12)
    settings = settings.model_copy(update={"eval_crop": eval_crop})
    ours = make(settings, size=24, normalization=COLORS).plain(batch_of(stored, np.arange(3)))
    central = reference.center_crop(
        stored.permute(0, 3, 1, 2).float(), [12 if not eval_crop else 6]
    )
    scaled = reference.resize(central, [24, 24], InterpolationMode(kernel), antialias=True)
    expected = reference.normalize(scaled.clamp(0, 255) / 255, *map(list, COLORS))
    torch.testing.assert_close(ours.images_BCHW, expected, rtol=0, atol=1e-4)
