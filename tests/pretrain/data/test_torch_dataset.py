"""Our shards as torch datasets: samples by number, in workers, and in shuffled batches."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data_prep.manifest import load_manifest
from pretrain.data.reader import open_split
from pretrain.data.torch_dataset import ShardBatches, Shards

pytestmark = pytest.mark.processes


def test_samples_are_those_of_the_reader_and_workers_have_them_too(shapes: Path) -> None:
    reader, shards = open_split(shapes, load_manifest(shapes), "val"), Shards(shapes, "val")
    expected = reader.images(np.arange(72)).permute(0, 3, 1, 2)
    assert len(shards) == 72 and shards.classes == load_manifest(shapes).classes
    assert torch.equal(shards[-1][0], expected[-1]) and shards[-1][1] == reader.labels[-1]
    assert [label for _, label in shards] == reader.labels.tolist()  # type: ignore[attr-defined]
    for num_workers in (0, 2):
        doubled = Shards(shapes, "val", transform=lambda image: image.float() * 2)
        batches = list(
            DataLoader(
                doubled,
                batch_size=10,
                num_workers=num_workers,
                multiprocessing_context="fork" if num_workers else None,
            )
        )
        assert torch.equal(torch.cat([images for images, _ in batches]), expected.float() * 2)
        assert torch.cat([labels for _, labels in batches]).tolist() == reader.labels.tolist()


def test_each_pass_has_every_sample_once_in_an_order_of_its_own(shapes: Path) -> None:
    plain = list(ShardBatches(shapes, "val", batch_size=20, shuffle=False))
    assert [len(labels) for _, labels in plain] == [20, 20, 20, 12]
    stored = [image.numpy().tobytes() for image in torch.cat([images for images, _ in plain])]
    assert (
        torch.cat([images for images, _ in plain])
        .permute(0, 2, 3, 1)
        .equal(open_split(shapes, load_manifest(shapes), "val").images(np.arange(72)))
    )

    def numbers(batches: ShardBatches) -> list[int]:
        found = list(
            chain.from_iterable(images for images, _ in DataLoader(batches, batch_size=None))
        )
        return [stored.index(image.numpy().tobytes()) for image in found]

    batches = ShardBatches(shapes, "val", batch_size=24, seed=1)
    passes = [numbers(batches), numbers(batches)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(map(stored.index, stored))
    assert passes[0] != passes[1] and len(batches) == 3
    again = ShardBatches(shapes, "val", batch_size=24, seed=1)
    again.load_state_dict(batches.state_dict() | {"epoch": 1, "samples": 72})
    assert (
        numbers(again) == passes[1] != numbers(ShardBatches(shapes, "val", batch_size=24, seed=2))
    )
