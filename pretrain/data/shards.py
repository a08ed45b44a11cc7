"""Reads samples by number out of the shards of one split, or of several datasets one after the other.

All shards stand side by side in one range of addresses, and so do their indices. A batch of raw pictures is therefore one gather
over all shards, straight into the batch: tar members begin at multiples of 512 bytes, so the range is seen as overlapping rows
that begin at every block. Anything else is decoded picture by picture, by the code that the dataset was checked with. Pixels come
out as uint8 (B, H, W, 3).

Nothing is opened, read or held in memory before it is needed: a rank of a run over 1,400 shards starts in milliseconds.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.images import Rejection, decode_square, ppm_header
from data_prep.manifest import DatasetError, Manifest, Shard, load_index, load_paths
from pretrain.config import CacheSettings
from pretrain.data.buffers import BufferPool
from pretrain.data.counter import hash64
from pretrain.data.datasets import Part
from pretrain.data.mapped_shards import MappedShards
from pretrain.data.mapping import FileRange
from pretrain.data.order import Ids
from pretrain.data.shard_cache import ShardCache

BLOCK = 512
"""Of a tar: every member begins at a multiple of it."""
_OFFSET, _LENGTH, _LABEL = range(3)


@dataclass(frozen=True)
class Unreadable:
    """A sample that does not decode."""

    place: int
    """In the batch."""
    sample: int
    shard: str
    key: str
    reason: str


class Places(NamedTuple):
    """Where samples stand, and what they are."""

    ids: Ids
    shards: Ids
    offsets: Ids
    """In the range of all shards."""
    lengths: Ids
    labels: Ids

    def part(self, start: int, end: int) -> "Places":
        return Places(*(column[start:end] for column in self))


@dataclass(frozen=True)
class _Placed:
    part: Part
    shard: Shard


class ShardReader:
    """Random access to the samples of its parts, numbered one part after the other."""

    def __init__(self, parts: Sequence[Part], *, image_size: int | None = None, cache: ShardCache | None = None):
        self.parts, self.stored_size = tuple(parts), _stored_size(parts, image_size)
        self._placed = [_Placed(part, shard) for part in parts for shard in _shards_of(part)]
        self._cache = cache
        self._starts = np.cumsum([0, *(placed.shard.num_samples for placed in self._placed)])
        self.num_samples = int(self._starts[-1])
        self._shards = MappedShards([(placed.part, placed.shard) for placed in self._placed], cache=cache)
        self._indices = FileRange([_index_size(placed) for placed in self._placed])
        self._table = self._indices.content.view("<i8")
        self._table_starts = np.full(len(self._placed), -1, np.int64)
        """In `_table`; -1 until the index has been mapped and checked."""
        self._opening, self._buffers = threading.Lock(), BufferPool()
        self._classes, self._classes_start = _class_numbers(self._placed)
        self._is_raw = np.array([placed.part.manifest.encoding == "raw" for placed in self._placed], np.bool_)
        self._pictures = self._blockwise()

    @property
    def is_remote(self) -> bool:
        return self._shards.any_remote

    @property
    def decodes(self) -> bool:
        """Whether there are pictures that are not stored as pixels."""
        return not bool(self._is_raw.all())

    @cached_property
    def labels(self) -> Ids:
        """Of all samples; 8 bytes each, so not for training."""
        return self.locate(np.arange(self.num_samples)).labels

    def locate(self, ids: Ids) -> Places:
        """What the indices say of the samples."""
        shards = self.shards_of(ids)
        if (self._table_starts[shards] < 0).any():
            self._open_indices(shards)
        first = self._table_starts[shards] + 3 * (ids - self._starts[shards])
        offsets, lengths, labels = (self._table[first + column] for column in (_OFFSET, _LENGTH, _LABEL))
        if self._classes is not None:
            labels = self._classes[self._classes_start[shards] + labels]
        return Places(ids, shards, self._shards.files.starts[shards] + offsets, lengths, labels)

    def shards_of(self, ids: Ids) -> Ids:
        """The number of each sample's shard."""
        return np.searchsorted(self._starts, ids, side="right") - 1

    def images(self, ids: Ids) -> Tensor:
        """The pictures of `ids`, uint8 (B, H, W, 3); one that does not decode is an error."""
        places, batch = self.locate(ids), self.empty(len(ids))
        for bad in self.read(places, batch):
            directory = self._placed[places.shards[bad.place]].part.directory
            raise DatasetError(
                f"{bad.shard}: {bad.key} does not decode ({bad.reason}); run data_prep verify {directory}"
            )
        return batch

    def empty(self, count: int, *, pin: bool = False) -> Tensor:
        """Memory for a batch."""
        shape = (count, self.stored_size, self.stored_size, 3)
        if pin:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return self._buffers.empty(*shape, dtype=torch.uint8)

    def read(self, places: Places, batch_BHWC: Tensor) -> list[Unreadable]:
        """Puts the pictures into `batch_BHWC`; says which places could not be filled."""
        with self._shards.reading(places.shards):
            is_raw = self._is_raw[places.shards]
            if is_raw.all():
                blocks = torch.from_numpy(places.offsets // BLOCK)
                torch.index_select(self._pictures, 0, blocks, out=batch_BHWC.view(len(batch_BHWC), -1))
                return []
            raw, others = np.flatnonzero(is_raw), np.flatnonzero(~is_raw)
            if len(raw):
                gathered = torch.index_select(self._pictures, 0, torch.from_numpy(places.offsets[raw] // BLOCK))
                batch_BHWC[torch.from_numpy(raw)] = gathered.view(-1, *batch_BHWC.shape[1:])
            return self._decode(places, others, batch_BHWC.numpy())

    def fetch_ahead(self, ids: Ids) -> None:
        """The samples that are needed next, in their order; only shards behind a network need to know."""
        if self.is_remote:
            numbers = self.shards_of(ids)
            _, first = np.unique(numbers, return_index=True)
            self._shards.fetch_ahead(numbers[np.sort(first)].tolist())

    def stand_in(self, sample: int, attempt: int) -> int:
        """Who takes the place of a sample that cannot be read: another of the same shard, the same one in every run."""
        number = int(self.shards_of(np.array([sample]))[0])
        start, end = self._starts[number : number + 2].tolist()
        return int(start + int(hash64(sample, attempt)) % (end - start))

    def names(self, ids: Ids) -> list[tuple[str, str]]:
        """(shard, key) of the samples: for people."""
        numbers = self.shards_of(ids).tolist()
        shards = {number: self._placed[number] for number in numbers}
        paths = {number: load_paths(placed.part.directory, placed.shard) for number, placed in shards.items()}
        return [
            (shards[number].shard.name, paths[number][sample - int(self._starts[number])])
            for sample, number in zip(ids.tolist(), numbers, strict=True)
        ]

    def end_waits(self) -> None:
        """For downloads, in whatever thread and of whatever reader of the same cache: nothing is fetched from here on."""
        if self._cache is not None:
            self._cache.close()

    def close(self) -> None:
        self._shards.close()

    def _decode(self, places: Places, rows: Ids, batch: NDArray[np.uint8]) -> list[Unreadable]:
        content, bad = self._shards.files.content, []
        for row in rows.tolist():
            placed, start = self._placed[places.shards[row]], int(places.offsets[row])
            manifest = placed.part.manifest
            data = content[start : start + int(places.lengths[row])].tobytes()
            try:
                decode_square(data, batch[row], crop=manifest.crop, interpolation=manifest.interpolation)
            except Rejection as error:
                sample = int(places.ids[row])
                ((shard, key),) = self.names(places.ids[row : row + 1])
                bad.append(Unreadable(row, sample, shard, key, str(error)))
        return bad

    def _open_indices(self, shards: Ids) -> None:
        with self._opening:
            for number in np.unique(shards).tolist():
                if self._table_starts[number] < 0:
                    self._table_starts[number] = self._open_index(number)

    def _open_index(self, number: int) -> int:
        """Where its rows begin in the table."""
        placed = self._placed[number]
        path = placed.part.index(placed.shard)
        index = load_index(placed.part.directory, placed.shard, path=path)
        _check_index(index, path, placed, raw_size=self.stored_size if self._is_raw[number] else None)
        self._indices.map(number, path, num_bytes=_index_size(placed))
        return int(self._indices.starts[number] + index.offset) // 8  # type: ignore[attr-defined]

    def _blockwise(self) -> Tensor:
        """(blocks, 3 H W): the pixels that would follow a PPM header at the beginning of each block."""
        header, num_pixels = len(ppm_header(self.stored_size, self.stored_size)), 3 * self.stored_size**2
        content = torch.frombuffer(self._shards.files.buffer, dtype=torch.uint8)
        num_rows = max(0, (len(content) - header - num_pixels) // BLOCK + 1)
        return content.as_strided((num_rows, num_pixels), (BLOCK, 1), header)


def open_split(
    directory: Path | str,
    manifest: Manifest,
    split: str,
    *,
    image_size: int | None = None,
    cache: ShardCache | None = None,
) -> ShardReader:
    manifest.split(split, directory=directory)
    return ShardReader([Part(Path(directory), manifest, split)], image_size=image_size, cache=cache)


@contextmanager
def reading(parts: Sequence[Part], data: CacheSettings, *, image_size: int | None = None) -> Iterator[ShardReader]:
    """A reader of its own cache, for the length of the block."""
    reader = ShardReader(parts, image_size=image_size, cache=open_cache(data, parts))
    try:
        yield reader
    finally:
        reader.end_waits()
        reader.close()


def open_cache(settings: CacheSettings, parts: Sequence[Part]) -> ShardCache | None:
    """Where there are remote shards; its directory is what ranks and runs share."""
    if not any(shard.is_remote for part in parts for shard in part.content.shards):
        return None
    default = Path(tempfile.gettempdir()) / f"wide-mlps-shards-{os.getuid()}"
    directory = Path(settings.cache_dir) if settings.cache_dir else default
    return ShardCache(directory, max_bytes=int(settings.cache_gb * 1e9), storage=settings.storage)


def _shards_of(part: Part) -> list[Shard]:
    return [shard for shard in part.content.shards if shard.num_samples]


def _class_numbers(placed: Sequence[_Placed]) -> tuple[Ids | None, Ids]:
    """The classes of all parts one after the other, and where those of each shard begin; None where all keep their numbers."""
    if all(each.part.classes is None for each in placed):
        return None, np.zeros(len(placed), np.int64)
    numbers: dict[int, Ids] = {}
    for each in placed:
        classes = each.part.classes or range(len(each.part.manifest.classes))
        numbers.setdefault(id(each.part), np.array(classes, np.int64))
    starts = dict(zip(numbers, np.cumsum([0, *(len(part) for part in numbers.values())])[:-1].tolist(), strict=True))
    return np.concatenate(list(numbers.values())), np.array([starts[id(each.part)] for each in placed], np.int64)


def _stored_size(parts: Sequence[Part], image_size: int | None) -> int:
    sizes = {part.stored_size(image_size) for part in parts}
    assert len(sizes) == 1, sizes  # the config is checked against the datasets before
    return sizes.pop()


def _index_size(placed: _Placed) -> int:
    path = placed.part.index(placed.shard)
    try:
        return path.stat().st_size
    except OSError as error:
        raise DatasetError(
            f"{path}: index cannot be read ({error.strerror}); run data_prep verify {placed.part.directory}"
        ) from None


def _check_index(index: Ids, path: Path, placed: _Placed, *, raw_size: int | None) -> None:
    directory, num_bytes = placed.part.directory, placed.shard.num_bytes
    offsets, lengths, labels = index[:, _OFFSET], index[:, _LENGTH], index[:, _LABEL]
    if offsets.min() < 0 or lengths.min() < 0 or (offsets + lengths).max() > num_bytes:
        raise DatasetError(f"{path}: its index leads out of the shard; run data_prep verify {directory}")
    manifest = placed.part.manifest
    lowest = -1 if placed.part.content.num_unlabelled else 0
    if labels.min() < lowest or labels.max() >= max(1, len(manifest.classes)):
        raise DatasetError(
            f"{path}: has labels beyond the {len(manifest.classes):,} classes of the manifest; run data_prep verify {directory}"
        )
    if raw_size is not None:
        length = len(ppm_header(raw_size, raw_size)) + 3 * raw_size**2
        if (lengths != length).any() or (offsets % BLOCK).any():
            raise DatasetError(f"{path}: is not of a raw shard of {raw_size} px; run data_prep verify {directory}")
