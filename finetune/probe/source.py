"""Feature rows for a probe, read from tables on disk or streamed.

Streamed features are computed for each request of rows, and are not kept. All ranks request the
same rows at the same time. Each rank decodes and augments its fraction of the images, computes
their features, and receives the features of the other ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from finetune.probe.cache import Wanted, Which, wanted_of
from finetune.probe.config import ProbeSettings
from finetune.probe.features import FeatureMaker, Table, undecodable
from finetune.probe.rows import CHUNK, OnDevice, Rows, Standard, TableRows
from finetune.split import view_of
from pretrain.augment.feed import on_device
from pretrain.data.datasets import Part
from pretrain.data.loader import Batches, Request, as_stored
from pretrain.data.order import Ids
from pretrain.data.reader import ShardReader, Unreadable, reading


class Listed(NamedTuple):
    samples: Ids

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        return np.zeros_like(positions), self.samples[positions]


class StreamedRows(Rows):
    def __init__(
        self,
        maker: FeatureMaker,
        reader: ShardReader,
        views: Sequence[int | None],
        *,
        standard: Standard,
        chosen_n: Tensor | None = None,
    ):
        labels_N = torch.from_numpy(reader.labels.astype(np.int64))
        super().__init__(labels_N, standard=standard, device=maker.device, chosen_n=chosen_n)
        self._maker, self._reader, self._views = maker, reader, views
        self._augmentation = maker.backbone.augmentation(
            maker.cache.augment, seed=maker.settings.seed, device=maker.device
        )

    def _gathered(self, view: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        blocks = self._blocks(view, torch.cat(list(batches)).numpy())
        left_BD = torch.empty(0, self.num_features, device=self.device)
        for size in map(len, batches):
            while len(left_BD) < size:
                left_BD = torch.cat([left_BD, next(blocks)])
            yield left_BD[:size]
            left_BD = left_BD[size:]

    @torch.no_grad()
    def _blocks(self, view: int, ids: Ids) -> Iterator[Tensor]:
        """Yield the samples' features in blocks. A block takes one forward pass on each rank."""
        maker, world = self._maker, self._maker.world
        cuts = [*range(0, len(ids), maker.batch_size * world.num_ranks), len(ids)]
        requests = (
            Request(_share_of(first, end, rank=world.rank, num_ranks=world.num_ranks))
            for first, end in pairwise(cuts)
        )
        with (
            Batches(
                self._reader,
                Listed(ids),
                requests,
                finish=as_stored,
                on_bad=self._refuse,
                num_threads=world.num_cores,
                prefetch=2,
                pin=self.device.type == "cuda",
            ) as stored,
            on_device(stored, self.device) as read,
        ):
            for (first, end), batch in zip(pairwise(cuts), read, strict=True):
                images_BCHW = view_of(batch, self._views[view], self._augmentation)
                own_BD = maker.backbone.extract(images_BCHW).float()
                all_BD = own_BD
                if world.num_ranks > 1:
                    all_BD = own_BD.new_empty(len(own_BD) * world.num_ranks, own_BD.shape[1])
                    dist.all_gather_into_tensor(all_BD, own_BD.contiguous())
                yield all_BD[: end - first]

    def _refuse(self, bad: Sequence[Unreadable], _ids: Ids, _images: Tensor) -> Ids:
        raise undecodable(bad[0].shard, bad[0].key, dataset=self._maker.settings.data.dataset)


def _share_of(first: int, end: int, *, rank: int, num_ranks: int) -> Ids:
    """Return this rank's part of the rows from `first` to `end` - 1. All parts have equal length,
    so the last ranks may repeat the last row."""
    size = -(-(end - first) // num_ranks)
    return np.minimum(np.arange(first + rank * size, first + (rank + 1) * size), end - 1)


class Cached:
    """Rows of tables on disk. Each rank reads independently."""

    are_shared = False
    """True if all ranks must request the same rows at the same time."""

    def __init__(self, tables: Mapping[Which, list[Table]], *, device: torch.device):
        self._tables, self._on_device = tables, OnDevice(device)
        self.num_train, self.num_features = len(tables["train"][0]), tables["test"][0].num_features

    def standard(self) -> Standard:
        return Standard.of(self._tables["train"][0].chunks(CHUNK), num_features=self.num_features)

    def rows(self, which: Which, *, standard: Standard, chosen_n: Tensor | None = None) -> Rows:
        return TableRows(
            self._tables[which],
            standard=standard,
            device=self._on_device.device,
            chosen_n=chosen_n,
            on_device=self._on_device,
        )


class Streamed:
    """Rows whose features are computed on demand."""

    def __init__(
        self,
        maker: FeatureMaker,
        wanted: Mapping[Which, Wanted],
        readers: Mapping[str, ShardReader],
    ):
        self._maker, self._wanted, self._readers = maker, wanted, readers
        self.are_shared, self.num_features = maker.world.num_ranks > 1, maker.num_features
        self.num_train = readers[wanted["train"].split].num_samples

    def standard(self) -> Standard:
        rows = self.rows("train", standard=Standard.none(self.num_features))
        return Standard.of(
            (x_BE[:, : self.num_features].cpu() for x_BE, _ in rows.chunks()),
            num_features=self.num_features,
        )

    def rows(self, which: Which, *, standard: Standard, chosen_n: Tensor | None = None) -> Rows:
        split, views = self._wanted[which]
        return StreamedRows(
            self._maker, self._readers[split], views, standard=standard, chosen_n=chosen_n
        )


@contextmanager
def source_of(settings: ProbeSettings, maker: FeatureMaker) -> Iterator[Cached | Streamed]:
    """Yield cached or streamed rows. All ranks make the same choice."""
    wanted, cache = wanted_of(settings), maker.cache
    is_streamed = maker.group.any_rank(
        settings.features == "stream" or (not settings.must_keep and cache.fault is not None)
    )
    if maker.world.is_first and (is_streamed or cache.missing_gb):
        place, size = settings.features_place, f"{1e3 * cache.missing_gb:,.1f} MB more"
        if is_streamed:
            print(f"features are computed again for each batch; to keep them, {place} needs {size}")
        else:
            print(f"features are kept in {place}, which needs {size}")
    if not is_streamed:
        tables = {
            which: maker.tables(*each)
            for which, each in wanted.items()
            if which != "train" or each != wanted["plain"]
        }
        yield Cached({"train": tables["plain"], **tables}, device=maker.device)
        return
    with ExitStack() as opened:
        readers = {}
        for split in dict.fromkeys(each.split for each in wanted.values()):
            part = Part(settings.data.directory, maker.manifest, split)
            readers[split] = opened.enter_context(
                reading([part], settings.data, image_size=maker.backbone.image_size)
            )
        yield Streamed(maker, wanted, readers)
