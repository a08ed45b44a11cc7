"""A split of a dataset for other training loops: `Shards` returns samples by number, `ShardBatches`
iterates batches, `ShardLoader` adds worker processes.

Images are uint8 (3, H, W) squares without augmentation. The label of an unlabeled image is -1.

`ShardBatches` uses the sample order of training (order.py). Global batch i has positions [i B, (i +
1) B) for any number of ranks and workers. The state is the two numbers `epoch` and `samples`:

1. `epoch` counts passes. A shuffled pass over N samples has N // B full batches, and the next pass
   begins with the remaining samples. A pass without shuffling has every sample once.
2. `samples` counts the samples that all ranks have consumed. The next batch begins at this
   position.
3. Each batch has R nearly equal slices for R ranks.
4. Worker w of W takes batches w, w + W, ... after `samples`, because a DataLoader takes batches
   from its workers in turn. In a worker, `samples` is the start of its next W batches.
5. Each worker has a copy of the dataset and does not see when a pass ends. `ShardLoader` counts
   batches and passes for its workers. In torchdata's StatefulDataLoader, a worker that ends a pass
   writes the next epoch to shared memory. All workers read this epoch before the next pass.
   Workers of a plain DataLoader fail, because they would repeat the first pass.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

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
    """`shards[7]` is (image, label). A DataLoader's worker reads all samples of a batch at once."""

    def __init__(
        self,
        dataset: Path | str,
        split: str,
        *,
        image_size: int | None = None,
        transform: Transform | None = None,
    ):
        """`image_size`: side of the images, for datasets that keep the images' own sizes."""
        self.settings = ReadingSettings(dataset=str(dataset))
        manifest = load_manifest(self.settings.directory)
        self.classes = manifest.classes
        self.num_samples = manifest.split(split, directory=dataset).num_samples
        self.part = Part(self.settings.directory, manifest, split)
        self.image_size, self.transform = image_size, transform
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
        images: Iterable[Any] = self._reader.images(ids).permute(0, 3, 1, 2)
        if self.transform:
            images = map(self.transform, images)
        return list(zip(images, self._reader.locate(ids).labels.tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}


class ShardBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """This rank's slices (images, labels) of the global batches, read and decoded by threads. Each
    iteration is one epoch. torchdata can save and load the state."""

    def __init__(
        self,
        dataset: Path | str,
        split: str,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        image_size: int | None = None,
        ranks: tuple[int, int] | None = None,
    ):
        """`batch_size`: number of samples in a batch of all ranks. `ranks`: (rank, number of
        ranks); None: from torch.distributed, or from torchrun's environment variables."""
        self.shards = Shards(dataset, split, image_size=image_size)
        self.batch_size, self.shuffle, self._ranks = batch_size, shuffle, ranks
        manifest = self.shards.part.manifest
        self._identity = {
            "dataset": manifest.content_hash,
            "split": split,
            "seed": seed,
            "shuffle": shuffle,
            "batch_size": batch_size,
        }
        key = int(hash64(hex_key(manifest.content_hash), seed) >> 1)
        self._order = Order(len(self.shards), key, "full" if shuffle else "none")
        self.epoch = self.samples = 0
        self._shared_epoch = torch.zeros(1, dtype=torch.int64)
        self._shared_epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.is_followed = False
        """True in the workers of a loader that tells its workers which pass comes next."""

    def __len__(self) -> int:
        if self.shuffle:
            return max(1, len(self.shards) // self.batch_size)
        return math.ceil(len(self.shards) / self.batch_size)

    def ranks(self) -> tuple[int, int]:
        if self._ranks is not None:
            return self._ranks
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return 0, 1

    def state_dict(self) -> dict[str, Any]:
        self.is_followed = get_worker_info() is not None  # in a worker, torchdata calls this first
        return self._identity | {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the state's `samples`, on any number of ranks and workers."""
        if not state.keys() >= self.state_dict().keys():
            problem = "the value is not a state of ShardBatches"
            raise UserError("state", problem, "load the result of state_dict()", code="bad-value")
        for name, ours in self._identity.items():
            if state[name] != ours:
                theirs, this = (str(value)[:12] for value in (state[name], ours))
                problem = f"the state has {name} {theirs}, but these batches have {this}"
                fix = f"open the batches with the state's {name}, or begin without a state"
                raise UserError("state", problem, fix, code="mismatch")
        self.go_to(state["epoch"], state["samples"])

    def go_to(self, epoch: int, samples: int) -> None:
        self.epoch, self.samples = epoch, samples
        self._shared_epoch[0] = epoch

    def end_of(self, num_batches: int) -> int:
        """Return the position after the next `num_batches` batches of this pass."""
        return min(self.samples + num_batches * self.batch_size, self._begin_of(self.epoch + 1))

    def enter_pass(self) -> None:
        """Begin the next pass if the current pass has no batch left. Training loops that count
        batches do not read to the end of a pass."""
        if self.samples == self.end_of(1):
            self.begin_next_pass()

    def begin_next_pass(self) -> None:
        self.go_to(self.epoch + 1, self._begin_of(self.epoch + 1))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if get_worker_info() is None:
            self.enter_pass()
        elif self._shared_epoch > self.epoch and not self.is_followed:
            self.go_to(epoch := int(self._shared_epoch), self._begin_of(epoch))
        return self._rest_of_pass()

    def _rest_of_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None and not self.is_followed:
            raise UserError(
                "num_workers",
                "the workers of a plain DataLoader do not know which pass comes next",
                "use ShardLoader(batches, num_workers=...)",
                code="conflict",
            )
        shards = self.shards
        with reading([shards.part], shards.settings, image_size=shards.image_size) as reader:
            batches = Batches(
                reader,
                self._order,
                self._requests(worker, num_workers),
                finish=as_stored,
                on_bad=BadSamples(reader).replace,
                num_threads=max(1, num_cores() // num_workers),
                prefetch=2,
                pin=False,
            )
            with batches:
                for batch in batches:
                    self.samples = self.end_of(num_workers)
                    yield batch.images_BHWC.permute(0, 3, 1, 2), batch.labels_B
        self.begin_next_pass()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle with the rank, because a spawned worker cannot determine its
        rank."""
        return self.__dict__ | {"_ranks": self.ranks()}

    def _begin_of(self, epoch: int) -> int:
        return epoch * (len(self) * self.batch_size if self.shuffle else len(self.shards))

    def _requests(self, worker: int, num_workers: int) -> Iterator[Request]:
        rank, num_ranks = self.ranks()
        if self.batch_size < num_ranks:
            problem = f"{self.batch_size} samples are too few for {num_ranks} ranks"
            raise UserError("batch_size", problem, "use a larger batch_size", code="bad-value")
        begin, end = self.samples + worker * self.batch_size, self._begin_of(self.epoch + 1)
        for first in range(begin, end, num_workers * self.batch_size):
            size = min(self.batch_size, end - first)
            own = [first + size * number // num_ranks for number in (rank, rank + 1)]
            if own[0] < own[1]:  # the last batch without shuffling may have fewer samples
                yield Request(np.arange(*own))


class ShardLoader(DataLoader[Any]):
    """A DataLoader of `ShardBatches`. Its state includes only the batches that the training loop
    has received, so training can resume with another number of workers."""

    dataset: ShardBatches

    def __init__(
        self,
        batches: ShardBatches,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
    ):
        """`collate_fn`: function that the workers apply to each complete batch."""
        super().__init__(
            batches,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context,
        )

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self.dataset
        if not self.num_workers:
            yield from super().__iter__()
            return
        batches.enter_pass()
        batches.is_followed = True
        received = super().__iter__()
        batches.is_followed = False
        for batch in received:
            batches.samples = batches.end_of(1)
            yield batch
        batches.begin_next_pass()
