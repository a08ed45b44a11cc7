"""The feed returns the loader's batches augmented and in order, and ends its threads."""

import itertools
import threading

import numpy as np
import pytest
import torch

from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.augment.feed import Feed, finish_for
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batch
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader
from tests.pretrain.augment.pictures import make
from tests.pretrain.data.tiny import loaded


def augmentation(settings: AugmentSettings) -> Augmentation:
    return make(settings, seed=1, normalization=Normalization((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))


def feed(reader: ShardReader, augment: Augmentation, *, threads: int) -> Feed:
    order, plan = Order(reader.num_samples, 4), BatchPlan(48, 12, 2)
    finish = finish_for(augment)
    batches = loaded(reader, order, plan, rank=1, consumed=96, num_threads=threads, finish=finish)
    return Feed(batches, augment)


@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_the_augmented_batches_in_their_order(reader: ShardReader, threads: int) -> None:
    augment = augmentation(AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8))
    plan, order = BatchPlan(48, 12, 2), Order(reader.num_samples, 4)
    with feed(reader, augment, threads=threads) as found:
        for positions in itertools.islice(plan.sequence(consumed=96, rank=1), 40):
            epochs, samples = order.locate(positions)
            labels = torch.from_numpy(reader.locate(samples).labels)
            stored = Batch(reader.images(samples), labels, epochs, samples, positions // 2)
            expected, fed = augment.prepare(stored), next(found)
            assert fed.num_bad == 0
            for name in ("images_BCHW", "labels_B", "other_labels_B", "weight_B"):
                assert torch.equal(getattr(fed.prepared, name), getattr(expected, name)), name
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


@pytest.mark.parametrize(
    "plan", [BatchPlan(48, 12, 2), BatchPlan(48, 16, 3), BatchPlan(48, 3, 1)], ids=str
)
@pytest.mark.parametrize("way", ["mixup_alpha", "cutmix_alpha"])
def test_each_picture_is_mixed_with_the_one_before_it_in_the_global_batch_on_any_number_of_ranks(
    reader: ShardReader, plan: BatchPlan, way: str
) -> None:
    settings = AugmentSettings(crop_scale=(0.4, 1.0), mixup_pairing="ffcv", **{way: 0.8})
    alone, augment = augmentation(AugmentSettings(crop_scale=(0.4, 1.0))), augmentation(settings)
    order, weights = Order(reader.num_samples, 4), []
    ranks = [
        loaded(reader, order, plan, rank=rank, consumed=96, finish=augment.prepare, previous_in=48)
        for rank in range(plan.num_ranks)
    ]
    for number in range(2, 8):
        fed = [next(batches) for _ in range(plan.accumulation_steps) for batches in ranks]
        epochs, samples = order.locate(np.arange(48 * number, 48 * (number + 1)))
        labels = torch.from_numpy(reader.locate(samples).labels)
        own = alone.prepare(
            Batch(reader.images(samples), labels, epochs, samples, samples)
        ).images_BCHW
        images, found, others, weight = (
            torch.cat([getattr(each, name) for each in fed])
            for name in ("images_BCHW", "labels_B", "other_labels_B", "weight_B")
        )
        assert (
            torch.equal(found, labels)
            and torch.equal(others, labels.roll(1))
            and len(set(weight.tolist())) == 1
        )
        if way == "mixup_alpha":  # FFCV's pairing: images[i] and images[i - 1]
            torch.testing.assert_close(
                images, weight[0] * own + (1 - weight[0]) * own.roll(1, 0), rtol=0, atol=1e-5
            )
        else:
            is_own, is_other = (
                (images - each).abs().amax(1) < 1e-5 for each in (own, own.roll(1, 0))
            )
            assert (is_own | is_other).all()
        weights.append(weight[0].item())
    assert len(set(weights)) == len(weights)
    for batches in ranks:
        batches.close()


def test_an_error_of_the_augmentation_reaches_the_trainer(
    reader: ShardReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    augment = augmentation(AugmentSettings())

    def broken(batch: Batch) -> None:
        raise RuntimeError("no such picture")

    monkeypatch.setattr(augment, "prepare", broken)
    with (
        feed(reader, augment, threads=2) as found,
        pytest.raises(RuntimeError, match="no such picture"),
    ):
        next(found)
