"""The features of a split, plain or in augmented views: found on disk, or computed once and kept there (cache.py).

Pictures go through the frozen model in the split's order, a range of rows on each rank; views that are missing are made together,
so that pictures are read and decoded once for several. Every rank maps the whole table; none holds it.
B batch, D features, N samples.
"""

import errno
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.manifest import DatasetError, Manifest
from data_prep.settings import UserError
from finetune.accelerator import Patience
from finetune.backbone import Backbone
from finetune.probe.cache import Entry, Writing, no_room
from finetune.probe.config import FeatureSettings
from finetune.views import images_of
from finetune.whole_split import batches_of
from pretrain.augment.augmentation import Augmentation
from pretrain.config import AugmentSettings
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch
from pretrain.data.reader import ShardReader, reading
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

VERSION = 1
"""Of what becomes of a picture: raise it when the same key would give other numbers."""
VIEWS_AT_ONCE = 10
"""Made in one pass over the pictures; a kill costs at most so many."""


class ElsewhereError(UserError):
    """Another rank says what is wrong."""

    of_all_ranks = True


@dataclass(frozen=True)
class Table:
    features_ND: Tensor
    """Memory-mapped."""
    labels_N: Tensor


@dataclass(frozen=True)
class Views:
    """How pictures are augmented, where they are."""

    augment: AugmentSettings
    seed: int


@dataclass(frozen=True)
class FeatureMaker:
    """Makes tables of splits, for all ranks together: its methods are collective."""

    settings: FeatureSettings
    manifest: Manifest
    backbone: Backbone
    world: World
    device: torch.device
    views: Views | None = None
    patience: Patience = field(default_factory=Patience)
    """Ranks are not done at the same time where they read and write."""

    def tables(self, split: str, views: Sequence[int | None]) -> list[Table]:
        """Of a split in each of `views`; None is the plain pictures."""
        part = Part(Path(self.settings.dataset), self.manifest, split)
        with reading([part], self.settings.data, image_size=self.backbone.image_size) as reader:
            return self._tables(reader, split, views)

    def _tables(self, reader: ShardReader, split: str, views: Sequence[int | None]) -> list[Table]:
        entries = [self.entry(split, view, num_features=self._num_features(reader)) for view in views]
        PROGRESS.mark(f"looking for features of {split}")
        missing = self._missing(entries)
        for first in range(0, len(missing), VIEWS_AT_ONCE):
            chosen = missing[first : first + VIEWS_AT_ONCE]
            PROGRESS.mark(f"computing features of {split}")
            self._compute(reader, [(entries[number], views[number]) for number in chosen], title=f"features of {split}")
        if self.world.is_first and len(missing) < len(entries):
            what = f"{len(entries) - len(missing)} of {len(entries)} views" if len(entries) > 1 else "features"
            print(f"{split}: {what} found in {entries[0].root}")
        return [Table(*(torch.from_numpy(values) for values in entry.read())) for entry in entries]

    @property
    def fed(self) -> AugmentSettings:
        """Of views, and with which filter plain pictures are resized."""
        return (self.views.augment if self.views else AugmentSettings()).fed_as(self.backbone.interpolation)

    def entry(self, split: str, view: int | None, *, num_features: int) -> Entry:
        backbone, augmented, fed = self.backbone, view is not None, self.fed
        assert self.views is not None or not augmented
        key: dict[str, Any] = {
            "version": VERSION,
            "weights_sha256": backbone.weights_sha256,
            "pixels_hash": self.manifest.pixels_hash,
            "split": split,
            "image_size": backbone.image_size,
            "mean": list(backbone.normalisation.mean),
            "std": list(backbone.normalisation.std),
            "interpolation": fed.plain_filter,
            "augment": fed.model_dump(mode="json") if augmented else None,
            "seed": self.views.seed if self.views and augmented else None,
            "view": view,
            "dtype": self.settings.feature_dtype,
        }
        return Entry(
            root=self.settings.features_place,
            name=f"{self.manifest.name}-{split}-" + (f"view{view:03d}" if augmented else "plain"),
            key=key,
            num_samples=self.manifest.splits[split].num_samples,
            num_features=num_features,
            dtype=self.settings.feature_dtype,
        )

    @torch.no_grad()
    def _num_features(self, reader: ShardReader) -> int:
        size = self.backbone.image_size
        assert reader.num_samples > 0
        return int(self.backbone.extract(torch.zeros(1, 3, size, size, device=self.device)).shape[1])

    def _missing(self, entries: list[Entry]) -> list[int]:
        """The numbers of those that are not there, or not whole; ranks share the reading; the first with a fault says it."""
        world = self.world
        faults = [entry.fault(part=world.rank, num_parts=world.num_ranks) for entry in entries]
        finders_RM = torch.zeros(world.num_ranks, len(entries))
        finders_RM[world.rank] = torch.tensor([float(fault is not None) for fault in faults])
        self.patience.all_sum(finders_RM)
        for number, fault in enumerate(faults):
            if fault and not finders_RM[: world.rank, number].any():
                print(f"{entries[number].path}: {fault}; its features are computed again", file=sys.stderr)
        return [int(number) for number in finders_RM.any(dim=0).nonzero().flatten().tolist()]

    def _compute(self, reader: ShardReader, wanted: list[tuple[Entry, int | None]], *, title: str) -> None:
        entries, size = [entry for entry, _ in wanted], self.settings.feature_batch_size
        works = [Writing(entry, run_dir=Path(self.settings.run_dir), rows_per_block=size) for entry in entries]
        self._on_first([work.lay_out for work in works], entries)
        fault: Exception | None = None
        num_rows = 0
        try:
            for work in works:
                work.open()
            num_rows = self._write_all(reader, works, [view for _, view in wanted], title=title)
        except Exception as error:  # noqa: BLE001 (whatever it is: the others wait for this rank below)
            fault = error
        for work in works:
            try:
                work.close(is_good=fault is None)
            except OSError as error:
                fault = fault or error
        is_good = not self.patience.any_rank(fault is not None)
        total = int(self.patience.all_sum(torch.tensor([num_rows])))
        if not is_good and self.world.is_first:
            for work in works:
                work.discard()
        self._raise_agreed(fault, is_good, entries)
        assert total == reader.num_samples * len(works), (total, reader.num_samples, len(works))
        digests = [self.patience.all_sum(torch.from_numpy(work.digests)).numpy() for work in works]
        publish = [partial(work.publish, reader.labels, each) for work, each in zip(works, digests, strict=True)]
        self._on_first(publish, entries)

    def _write_all(self, reader: ShardReader, works: list[Writing], views: list[int | None], *, title: str) -> int:
        """This rank's rows; returns how many it wrote. On a GPU a batch is written while the next ones are computed."""
        augmentation = self._augmentation()
        waiting: deque[Callable[[], int]] = deque()
        num_rows = 0
        for batch in batches_of(
            reader,
            title=title,
            local_batch_size=self.settings.feature_batch_size,
            world=self.world,
            pin=self.device.type == "cuda",
        ):
            if batch.num_bad:
                raise _undecodable(reader, batch, self.settings.dataset)
            assert batch.mask_B is not None
            count = int(batch.mask_B.sum())  # padding is at the end
            # once for all views
            there = replace(batch, images_BHWC=batch.images_BHWC.to(self.device, non_blocking=True))
            for work, view in zip(works, views, strict=True):
                PROGRESS.touch()
                waiting.append(self._start(there, view, augmentation, work, count=count))
                while len(waiting) > 2:
                    num_rows += waiting.popleft()()
        return num_rows + sum(finish() for finish in waiting)

    @torch.no_grad()
    def _start(
        self, batch: Batch, view: int | None, augmentation: Augmentation, work: Writing, *, count: int
    ) -> Callable[[], int]:
        """Computes a batch; what is returned waits for it and writes it."""
        if count == 0:
            return lambda: 0
        images = images_of(batch, view, augmentation)
        vectors = self.backbone.extract(images)[:count].to(getattr(torch, work.entry.dtype))
        if not vectors.is_cuda:
            return lambda: _write(work, vectors.numpy(), start=int(batch.samples[0]))
        host = torch.empty_like(vectors, device="cpu", pin_memory=True).copy_(vectors, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def finish() -> int:
            arrived.synchronize()
            return _write(work, host.numpy(), start=int(batch.samples[0]))

        return finish

    def _augmentation(self) -> Augmentation:
        return self.backbone.augmentation(self.fed, seed=self.views.seed if self.views else 0, device=self.device)

    def _on_first(self, steps: Sequence[Callable[[], None]], entries: list[Entry]) -> None:
        """On the first rank, with an end that all agree on and wait for."""
        fault: Exception | None = None
        if self.world.is_first:
            try:
                for step in steps:
                    step()
            except Exception as error:  # noqa: BLE001 (as above)
                fault = error
        self._raise_agreed(fault, not self.patience.any_rank(fault is not None), entries)

    def _raise_agreed(self, fault: Exception | None, is_good: bool, entries: list[Entry]) -> None:
        if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(entries[0].root, entries, fault) from None
        if fault is not None:
            raise fault
        if not is_good:
            raise ElsewhereError("features: another rank could not go on; see its message")


def _write(work: Writing, rows_BD: NDArray[Any], *, start: int) -> int:
    if not np.isfinite(rows_BD).all():
        words = (
            "beyond what float16 holds; set feature_dtype=float32" if work.entry.dtype == "float16" else "not finite"
        )
        raise UserError(f"features: those of samples {start:,} to {start + len(rows_BD) - 1:,} are {words}")
    work.write(rows_BD, start=start)
    return len(rows_BD)


def _undecodable(reader: ShardReader, batch: Batch, dataset: str) -> DatasetError:
    """Names the first bad picture: masked, but in its place (padding repeats the last sample of the split)."""
    assert batch.mask_B is not None
    in_place = batch.samples == batch.samples[0] + np.arange(len(batch.samples))
    bad = batch.samples[in_place & ~batch.mask_B.numpy()][:1]
    ((shard, key),) = reader.names(bad)
    return DatasetError(
        f"{shard}: {key} does not decode, and a feature cannot be made up; leave it out with data_prep subset {dataset} --exclude"
    )
