"""The feed hands out the augmented batches of the loader, in order, and ends its threads."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest
from pretrain.augment import augmentation as module
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.feed import Feed
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batch, as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader, open_split


@pytest.fixture(scope="module")
def reader(shapes: Path) -> ShardReader:
    return open_split(shapes, load_manifest(shapes), "train")


def augmentation(settings: AugmentSettings) -> Augmentation:
    normalisation = Normalisation((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    device = torch.device("cpu")
    return Augmentation(settings, seed=1, image_size=16, normalisation=normalisation, device=device, dtype=torch.float32)


def feed(reader: ShardReader, augment: Augmentation, *, threads: int) -> Feed:
    return Feed(
        lambda finish: training_batches(
            reader,
            Order(reader.num_samples, 4),
            BatchPlan(48, 12, 2),
            rank=1,
            consumed=96,
            num_threads=threads,
            prefetch=3,
            pin=False,
            finish=finish,
        ),
        augment,
    )


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
            assert torch.equal(fed.prepared.images_BCHW, expected.images_BCHW)
            assert torch.equal(fed.prepared.labels_B, expected.labels_B)
            assert expected.other_labels_B is not None and expected.weight_B is not None
            assert fed.prepared.other_labels_B is not None and fed.prepared.weight_B is not None
            assert torch.equal(fed.prepared.other_labels_B, expected.other_labels_B)
            assert torch.equal(fed.prepared.weight_B, expected.weight_B)
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


@pytest.mark.parametrize(
    "settings",
    [
        AugmentSettings(crop_scale=(0.3, 1.0), mixup_alpha=0.8),
        AugmentSettings(crop_scale=(0.3, 1.0)),
        AugmentSettings(flip_probability=0.5),
        AugmentSettings(mixup_alpha=0.4, mix_probability=0.5),
        AugmentSettings(crop_scale=(0.3, 1.0), cutmix_alpha=1.0, erase_probability=0.5, erase_mode="const"),
    ],
)
def test_compiled_loops_and_matrix_products_make_the_same_pictures(
    reader: ShardReader, monkeypatch: pytest.MonkeyPatch, settings: AugmentSettings
) -> None:
    samples = np.arange(60)
    stored = Batch(reader.images(samples), torch.from_numpy(reader.labels[:60]), samples // 7, samples, samples // 2)
    compiled = augmentation(settings)
    assert compiled._on_cpu
    ours = [compiled.prepare(stored), compiled.plain(stored)]
    monkeypatch.setattr(module, "on_cpu", None)
    products = augmentation(settings)
    assert not products._on_cpu
    for mine, theirs in zip(ours, [products.prepare(stored), products.plain(stored)], strict=True):
        torch.testing.assert_close(mine.images_BCHW, theirs.images_BCHW, rtol=0, atol=1e-3)
        assert torch.equal(mine.labels_B, theirs.labels_B)
        if theirs.weight_B is not None:
            torch.testing.assert_close(mine.weight_B, theirs.weight_B)


def test_an_error_of_the_augmentation_reaches_the_trainer(reader: ShardReader, monkeypatch: pytest.MonkeyPatch) -> None:
    augment = augmentation(AugmentSettings())

    def broken(batch: Batch) -> None:
        raise RuntimeError("no such picture")

    monkeypatch.setattr(augment, "prepare", broken)
    with feed(reader, augment, threads=2) as found, pytest.raises(RuntimeError, match="no such picture"):
        next(found)


def test_batches_as_stored_are_left_alone_while_somebody_holds_them(reader: ShardReader) -> None:
    with training_batches(
        reader,
        Order(reader.num_samples, 4),
        BatchPlan(24, 24, 1),
        rank=0,
        consumed=0,
        num_threads=2,
        prefetch=2,
        pin=False,
        finish=as_stored,
    ) as batches:
        held = [next(batches) for _ in range(30)]
    for batch in held:
        assert torch.equal(batch.images_BHWC, reader.images(batch.samples))
