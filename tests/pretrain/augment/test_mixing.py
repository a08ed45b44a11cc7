"""MixUp and CutMix compared with timm's Mixup for the same lambdas and boxes, and their
distributions."""

import numpy as np
import pytest
import torch
from timm.data import mixup as timm_mixup

from pretrain.augment.draws import BetaTable, Draws, Purpose
from pretrain.augment.mixing import Mix, PairMixer
from pretrain.config import AugmentSettings
from tests.pretrain.augment.pictures import batch_of, make

SIZE = 24


def drawn(settings: AugmentSettings, *, pairs: int, size: int = SIZE) -> Mix:
    return PairMixer(settings).draw(Draws((3, np.repeat(np.arange(pairs), 2))), size=size)


def timm_order(count: int) -> list[int]:
    """Return our pairs (2j, 2j + 1) in timm's order, which pairs i with count - 1 - i."""
    return [*range(0, count, 2), *range(count - 1, 0, -2)]


def test_mixing_equals_timms_on_the_same_lambdas_and_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AugmentSettings(mixup_alpha=0.8, cutmix_alpha=1.0, mix_probability=0.9)
    mix, count = drawn(settings, pairs=20), 40
    stored = torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    ours, weight = PairMixer(settings).mix(stored, mix)
    cut = (mix.bottom > mix.top) & (mix.right > mix.left)
    assert 8 < cut.sum() < 32 and ((mix.blend < 1) & ~cut).sum() >= 8

    theirs = timm_mixup.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, mode="pair")
    # A CutMix box is empty for weight 1: timm and our code skip it.
    lambdas = mix.weight[::2].astype(np.float32)
    monkeypatch.setattr(theirs, "_params_per_elem", lambda pairs: (lambdas.copy(), cut[::2]))
    boxes = iter(
        [
            (mix.top[row], mix.bottom[row], mix.left[row], mix.right[row])
            for row in range(0, count, 2)
            if cut[row]
        ]
    )
    monkeypatch.setattr(timm_mixup, "rand_bbox", lambda *_, **__: next(boxes))
    order = timm_order(count)
    pictures_there = stored[order].clone()
    weight_there = theirs._mix_pair(pictures_there)
    torch.testing.assert_close(ours[order], pictures_there, rtol=0, atol=1e-6)
    torch.testing.assert_close(weight[order], weight_there[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [24, 7])
def test_boxes_are_timms(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The same center and lambda give timm's box and timm's corrected lambda."""
    settings = AugmentSettings(cutmix_alpha=1.0)
    mix = drawn(settings, pairs=300, size=size)
    pairs = Draws((3, np.repeat(np.arange(300), 2)))
    lambdas = BetaTable(1.0)(pairs.uniform(Purpose.CUTMIX))
    for row in range(0, 600, 2):
        center = iter(
            int(pairs.uniform(purpose)[row] * size)
            for purpose in (Purpose.CUTMIX_ROW, Purpose.CUTMIX_COLUMN)
        )
        monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(center))  # noqa: B023
        box, weight = timm_mixup.cutmix_bbox_and_lam((3, size, size), lambdas[row])
        assert (mix.top[row], mix.bottom[row], mix.left[row], mix.right[row]) == tuple(
            int(side) for side in box
        )
        assert mix.weight[row] == pytest.approx(weight, abs=1e-12)


def test_how_often_which_way() -> None:
    settings = AugmentSettings(
        mixup_alpha=0.8, cutmix_alpha=1.0, mix_probability=0.6, switch_probability=0.25
    )
    mix = drawn(settings, pairs=40_000)
    blended = mix.blend < 1
    cut = (mix.bottom > mix.top) & (mix.right > mix.left)
    assert not (blended & cut).any()
    assert abs(blended.mean() - 0.6 * 0.75) < 0.01
    assert abs(cut.mean() - 0.6 * 0.25) < 0.01  # boxes without pixels are rare
    assert (mix.weight[~blended & ~cut] == 1).all()


@pytest.mark.parametrize(
    ("field", "alpha"), [("mixup_alpha", 0.8), ("mixup_alpha", 0.2), ("cutmix_alpha", 1.0)]
)
def test_lambda_is_beta_distributed(field: str, alpha: float) -> None:
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)). CutMix's square has the area fraction
    1 - lambda before clipping."""
    mix = drawn(AugmentSettings(**{field: alpha}), pairs=20_000, size=200)
    share = mix.weight
    if field == "cutmix_alpha":
        whole = (mix.top > 0) & (mix.left > 0) & (mix.bottom < 200) & (mix.right < 200)
        side = np.sqrt(1 - share[whole]) * 200
        assert whole.sum() > 3000 and np.allclose(side, np.round(side), atol=1e-6)
        assert 0.5 < share.mean() < 0.8  # clipping makes boxes smaller
    else:
        assert (
            abs(share.mean() - 0.5) < 0.01 and abs(share.var() - 1 / (4 * (2 * alpha + 1))) < 0.005
        )


@pytest.mark.parametrize(
    "alphas",
    [{"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}, {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}],
)
def test_the_weight_is_the_share_of_the_pictures_own_pixels(alphas: dict[str, float]) -> None:
    """Neighbors are all 0 and all 1: an image's mean is its mixing fraction, and must equal its
    label's weight."""
    augmentation = make(AugmentSettings(flip_probability=0.0, **alphas), size=SIZE)
    stored = torch.zeros(200, SIZE, SIZE, 3, dtype=torch.uint8)
    stored[1::2] = 1
    batch = batch_of(stored, np.arange(200))
    mixed = augmentation.prepare(batch)
    assert mixed.weight_B is not None and mixed.other_labels_B is not None
    own = torch.where(torch.arange(200) % 2 == 0, 1 - mixed.weight_B, mixed.weight_B)
    torch.testing.assert_close(mixed.images_BCHW.mean(dim=(1, 2, 3)), own, rtol=0, atol=1e-5)
    assert torch.equal(mixed.other_labels_B.view(-1, 2).flip(1), batch.labels_B.view(-1, 2))
    assert (
        (mixed.weight_B >= 0).all() and (mixed.weight_B <= 1).all() and mixed.weight_B.std() > 0.1
    )
