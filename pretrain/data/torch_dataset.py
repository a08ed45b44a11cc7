"""A split of a dataset for other training loops: `Shards` has samples by number, `ShardBatches`
iterates batches.

Images are uint8 (3, H, W) squares without augmentation. The label of an unlabelled image is -1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from data_prep.errors import UserError
from data_prep.manifest import load_manifest
from data_prep.settings import num_cores
from pretrain.config import ReadingSettings
from pretrain.data.bad_samples import BadSamples
from pretrain.data.datasets import Part
from pretrain.data.loader import Batches, Request, as_stored
from pretrain.data.order import Order, hash64, hex_key
from pretrain.data.reader import ShardReader, open_store, reading

Transform = Callable[[Tensor], Any]


class Shards(Dataset[tuple[Any, int]]):
    """`shards[7]` is (image, label). Each worker of a DataLoader reads a batch at once."""

    def __init__(
        self,
        dataset: Path | str,
        split: str,
        *,
        image_size: int | None = None,
        transform: Transform | None = None,
    ):
        """`image_size` is for datasets that keep the images' own sizes."""
        self.settings = ReadingSettings(dataset=str(dataset))
        manifest = load_manifest(self.settings.directory)
        self.classes, self.num_samples = (
            manifest.classes,
            manifest.split(split, directory=dataset).num_samples,
        )
        self.part, self.image_size, self.transform = (
            Part(self.settings.directory, manifest, split),
            image_size,
            transform,
        )
        self._reader: ShardReader | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Any, int]]:
        ids = np.array([range(self.num_samples)[number] for number in numbers])
        if self._reader is None:
            self._reader = ShardReader(
                [self.part],
                image_size=self.image_size,
                store=open_store(self.settings, [self.part]),
            )
        images, labels = (
            self._reader.images(ids).permute(0, 3, 1, 2),
            self._reader.locate(ids).labels.tolist(),
        )
        return list(
            zip(map(self.transform, images) if self.transform else images, labels, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the mapped shards."""
        return self.__dict__ | {"_reader": None}


class ShardBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of (images, labels), read and decoded by threads. Each pass is the next epoch, with
    every sample once."""

    def __init__(
        self,
        dataset: Path | str,
        split: str,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        image_size: int | None = None,
    ):
        self.shards = Shards(dataset, split, image_size=image_size)
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.epoch = 0
        """Epoch of the next pass. Equal (dataset, seed, epoch) give the same order everywhere."""

    def __len__(self) -> int:
        return math.ceil(len(self.shards) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if get_worker_info() is not None:
            raise UserError(
                "num_workers",
                "ShardBatches has its own threads, so a DataLoader must not have workers",
                "use DataLoader(batches, batch_size=None)",
                code="conflict",
            )
        part, count = self.shards.part, len(self.shards)
        key = int(hash64(hex_key(part.manifest.content_hash), self.seed) >> 1)
        order = Order(count, key, "full" if self.shuffle else "none")
        first, self.epoch = self.epoch * count, self.epoch + 1
        cuts = [*range(first, first + count, self.batch_size), first + count]
        requests = (Request(np.arange(*ends)) for ends in pairwise(cuts))
        with reading([part], self.shards.settings, image_size=self.shards.image_size) as reader:
            batches = Batches(
                reader,
                order,
                requests,
                finish=as_stored,
                on_bad=BadSamples(reader).replace,
                num_threads=num_cores(),
                prefetch=2,
                pin=False,
            )
            with batches:
                for batch in batches:
                    yield batch.images_BHWC.permute(0, 3, 1, 2), batch.labels_B
