"""Random erasing compared with a loop over images and blocks, and with timm's distributions."""

import math

import numpy as np
import pytest
import torch
from timm.data.random_erasing import RandomErasing

from pretrain.augment.erasing import ErasedBlocks, draw_blocks, erase, normal_noise
from pretrain.config import AugmentSettings, EraseMode
from pretrain.data.order import hash64
from tests.pretrain.augment.pictures import draws_of

SIZE = 32


def blocks_of(probability: float, *, count: int, pictures: int) -> ErasedBlocks:
    settings = AugmentSettings(erase_probability=probability, erase_count=count)
    return draw_blocks(settings, draws_of(pictures), size=SIZE)


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
@pytest.mark.parametrize("count", [1, 3])
def test_erasing_equals_a_loop(mode: EraseMode, count: int) -> None:
    stored = torch.randn(60, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    blocks = blocks_of(0.5, count=count, pictures=60)
    noise = normal_noise(torch.from_numpy(blocks.noise_keys_n), 3 * SIZE * SIZE).view(
        -1, 3, SIZE, SIZE
    )
    expected = stored.clone()
    assert 15 < len(blocks.rows) < 45
    for place, row in enumerate(blocks.rows):
        for block in range(count):
            top, left = blocks.top_nK[place, block], blocks.left_nK[place, block]
            height, width = blocks.height_nK[place, block], blocks.width_nK[place, block]
            area = (slice(None), slice(top, top + height), slice(left, left + width))
            color = torch.from_numpy(blocks.colors_nKC[place, block]).view(3, 1, 1)
            expected[row][area] = {
                "const": torch.zeros(1),
                "rand": color,
                "pixel": noise[place][area],
            }[mode]
    found = erase(stored.clone(), blocks, mode=mode)
    assert torch.equal(found, expected) and not torch.equal(found, stored)


def test_blocks_have_timms_shapes() -> None:
    """Fractions of the erased area and of the erased images, compared with timm's generator."""
    torch.manual_seed(0)
    theirs = RandomErasing(probability=0.4, mode="const", device="cpu")
    erased = theirs(torch.ones(3000, 1, SIZE, SIZE)).eq(0).float().mean(dim=(1, 2, 3)).numpy()
    blocks = blocks_of(0.4, count=1, pictures=20_000)
    assert abs(len(blocks.rows) / 20_000 - 0.4) < 0.015 and abs((erased > 0).mean() - 0.4) < 0.03
    area = (blocks.height_nK * blocks.width_nK)[:, 0] / SIZE**2
    assert abs(area.mean() - erased[erased > 0].mean()) < 0.01
    assert abs(area.std() - erased[erased > 0].std()) < 0.01
    assert 0.015 < area.min() < 0.03 and 0.32 < area.max() < 0.36
    spread = np.log(blocks.height_nK / blocks.width_nK)[:, 0]
    assert abs(spread.mean()) < 0.03 and np.abs(spread).max() < math.log(1 / 0.3) + 0.5
    assert (blocks.top_nK >= 0).all() and (blocks.top_nK + blocks.height_nK <= SIZE).all()
    assert (blocks.left_nK >= 0).all() and (blocks.left_nK + blocks.width_nK <= SIZE).all()
    assert (blocks.top_nK + blocks.height_nK == SIZE).any() and (blocks.top_nK == 0).any()


def test_several_blocks_share_the_area() -> None:
    blocks = blocks_of(1.0, count=4, pictures=8000)
    number = (blocks.height_nK > 0).sum(axis=1)
    assert np.abs(np.bincount(number, minlength=5)[1:] / 8000 - 0.25).max() < 0.02
    for count in (1, 4):
        area = (blocks.height_nK * blocks.width_nK)[number == count].sum(axis=1) / SIZE**2
        assert abs(area.mean() - (0.02 + 1 / 3) / 2) < 0.01


def test_noise_is_splitmix64_and_normal() -> None:
    """The counter module's sequence for the key, and the moments of a normal distribution."""
    keys = np.array([1, -5, 2**62], np.int64)
    noise = normal_noise(torch.from_numpy(keys), 200_000).numpy()
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = keys.view(np.uint64)[:, None] + np.arange(1, 5, dtype=np.uint64) * golden
        # hash64(x) mixes golden + golden + x
        bits = hash64(state - golden - golden) >> np.uint64(41)
    from scipy.special import ndtri

    np.testing.assert_allclose(
        noise[:, :4], ndtri((bits.astype(float) + 0.5) / 2**23), rtol=0, atol=1e-5
    )
    assert np.isfinite(noise).all() and np.abs(noise).max() > 4
    for row in noise:
        assert (
            abs(row.mean()) < 0.01 and abs(row.std() - 1) < 0.01 and abs((row**4).mean() - 3) < 0.1
        )
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 0.01
