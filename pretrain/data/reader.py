"""Random access to the samples of one split, or of several datasets one after the other.

All shards are mapped into one range of addresses, and all indices into another (`FileRange`). A
batch of raw images is one gather over all shards. Tar members begin at multiples of 512 bytes, so
the range is viewed as overlapping rows that begin at every 512-byte block. Other images are decoded
one by one, by the code that also verifies datasets. Pixels are uint8 (B, H, W, 3).

Shards are opened at their first use. Local shards then stay mapped. A remote shard is unmapped when
no thread reads it and the current prefetch does not need it, or when the store needs its space.

Invariants: a shard stays mapped while a `reading` block with its number is open; a mapped file has
the size in the manifest.

The file is long because it covers the complete path from a sample's number to its pixels.
"""

import ctypes
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from data_prep.images import Rejection, decode_square, ppm_header
from data_prep.images.jpeg import aspects_of
from data_prep.limits import cause_of
from data_prep.local_copy import own_host
from data_prep.manifest import DatasetError, Manifest, Shard, load_index, load_paths
from pretrain.config import ReadingSettings
from pretrain.data.datasets import Part
from pretrain.data.order import Ids, hash64
from pretrain.data.store import File, ShardStore, tar_of

BLOCK = 512
"""Size of a tar block in bytes. Members begin at multiples of this size."""
_OFFSET, _LENGTH, _LABEL = range(3)

_MAP_FIXED = 0x10  # Linux; Python's mmap has no name for it
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Unreadable:
    """A sample that does not decode."""

    place: int
    """Row of the batch."""
    sample: int
    shard: str
    key: str
    reason: str


class Places(NamedTuple):
    """Locations and labels of samples in the shards."""

    ids: Ids
    shards: Ids
    offsets: Ids
    """Byte offsets in the address range of all shards."""
    lengths: Ids
    labels: Ids

    def part(self, rows: slice) -> "Places":
        return Places(*(column[rows] for column in self))


class ShardReader:
    """Random access to the samples of all parts. Sample numbers continue from part to part."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        image_size: int | None = None,
        store: ShardStore | None = None,
    ):
        self.parts = tuple(parts)
        (self.stored_size,) = {part.stored_size(image_size) for part in parts}
        self._placed = [
            (part, shard) for part in parts for shard in part.content.shards if shard.num_samples
        ]
        self._store = store
        self._starts = np.cumsum([0, *(shard.num_samples for _, shard in self._placed)])
        self.num_samples = int(self._starts[-1])
        self._shards = MappedShards(self._placed, store=store)
        self._indices = FileRange([_index_size(*placed) for placed in self._placed])
        self._table = self._indices.content.view("<i8")
        self._table_starts = np.full(len(self._placed), -1, np.int64)
        """Position of each shard's index in `_table`; -1 until the index is mapped and checked."""
        self._opening = threading.Lock()
        self._classes, self._classes_start = _class_numbers([part for part, _ in self._placed])
        self._is_raw = np.array(
            [part.manifest.encoding == "raw" for part, _ in self._placed], np.bool_
        )
        self._is_full = np.array(
            [part.manifest.crop == "full" for part, _ in self._placed], np.bool_
        )
        self.is_remote, self.decodes = self._shards.any_remote, not bool(self._is_raw.all())
        self._pictures = self._blockwise()

    @cached_property
    def labels(self) -> Ids:
        """Labels of all samples, 8 bytes each. Training does not read this property, to save
        memory."""
        return self.locate(np.arange(self.num_samples)).labels

    def locate(self, ids: Ids) -> Places:
        """Look up locations and labels of the samples in the indices."""
        shards = self.shards_of(ids)
        if (self._table_starts[shards] < 0).any():
            self._open_indices(shards)
        first = self._table_starts[shards] + 3 * (ids - self._starts[shards])
        offsets, lengths, labels = (
            self._table[first + column] for column in (_OFFSET, _LENGTH, _LABEL)
        )
        if self._classes is not None:
            labels = self._classes[self._classes_start[shards] + labels]
        return Places(ids, shards, self._shards.files.starts[shards] + offsets, lengths, labels)

    def shards_of(self, ids: Ids) -> Ids:
        return np.searchsorted(self._starts, ids, side="right") - 1

    def images(self, ids: Ids) -> Tensor:
        """Return the images, uint8 (B, H, W, 3). Raise an error if an image does not decode."""
        places, size = self.locate(ids), self.stored_size
        batch = torch.empty(len(ids), size, size, 3, dtype=torch.uint8)
        for bad in self.read(places, batch):
            part, _ = self._placed[places.shards[bad.place]]
            raise _damaged(bad.shard, f"sample {bad.key} does not decode ({bad.reason})", part)
        return batch

    def read(self, places: Places, batch_BHWC: Tensor) -> list[Unreadable]:
        """Read the images into `batch_BHWC`. Return the samples that do not decode."""
        with self._shards.reading(places.shards):
            is_raw = self._is_raw[places.shards]
            if is_raw.all():
                blocks = torch.from_numpy(places.offsets // BLOCK)
                torch.index_select(
                    self._pictures, 0, blocks, out=batch_BHWC.view(len(batch_BHWC), -1)
                )
                return []
            raw, others = np.flatnonzero(is_raw), np.flatnonzero(~is_raw)
            if len(raw):
                gathered = torch.index_select(
                    self._pictures, 0, torch.from_numpy(places.offsets[raw] // BLOCK)
                )
                batch_BHWC[torch.from_numpy(raw)] = gathered.view(-1, *batch_BHWC.shape[1:])
            return self._decode(places, others, batch_BHWC.numpy())

    def aspects(self, places: Places) -> NDArray[np.float64] | None:
        """Return width / height of the images before `data_prep build` squashed them; None if it
        squashed none."""
        if not self._is_full.any():
            return None
        found, rows = np.ones(len(places.ids)), np.flatnonzero(self._is_full[places.shards])
        with self._shards.reading(places.shards):
            found[rows] = aspects_of(self._shards.files.content, places.offsets[rows])
        return found

    def fetch_ahead(self, ids: Ids) -> None:
        numbers = self.shards_of(ids)
        _, first = np.unique(numbers, return_index=True)
        self._shards.fetch_ahead(numbers[np.sort(first)].tolist())

    def stand_in(self, sample: int, attempt: int) -> int:
        """Return a random sample of the same shard to replace a bad sample. The choice is the same
        in every run."""
        number = int(self.shards_of(np.array([sample]))[0])
        start, end = self._starts[number : number + 2].tolist()
        return int(start + int(hash64(sample, attempt)) % (end - start))

    def names(self, ids: Ids) -> list[tuple[str, str]]:
        numbers = self.shards_of(ids).tolist()
        placed = {number: self._placed[number] for number in numbers}
        paths = {
            number: load_paths(part.directory, shard) for number, (part, shard) in placed.items()
        }
        return [
            (placed[number][1].name, paths[number][sample - int(self._starts[number])])
            for sample, number in zip(ids.tolist(), numbers, strict=True)
        ]

    def end_waits(self) -> None:
        """End the downloads of all readers of the same store."""
        if self._store is not None:
            self._store.close()

    def close(self) -> None:
        self._shards.close()

    def _decode(self, places: Places, rows: Ids, batch: NDArray[np.uint8]) -> list[Unreadable]:
        content, bad = self._shards.files.content, []
        for row in rows.tolist():
            manifest, start = self._placed[places.shards[row]][0].manifest, int(places.offsets[row])
            data = content[start : start + int(places.lengths[row])].tobytes()
            try:
                decode_square(
                    data, batch[row], crop=manifest.crop, interpolation=manifest.interpolation
                )
            except Rejection as error:
                sample = int(places.ids[row])
                ((shard, key),) = self.names(places.ids[row : row + 1])
                bad.append(Unreadable(row, sample, shard, key, str(error)))
        return bad

    def _open_indices(self, shards: Ids) -> None:
        with self._opening:
            for number in np.unique(shards[self._table_starts[shards] < 0]).tolist():
                part, shard = self._placed[number]
                path = part.index(shard)
                index = load_index(part.directory, shard, path=path)
                _check_index(
                    index,
                    path,
                    part,
                    shard,
                    raw_size=self.stored_size if self._is_raw[number] else None,
                )
                self._indices.map(number, path, num_bytes=_index_size(part, shard))
                self._table_starts[number] = int(self._indices.starts[number] + index.offset) // 8  # type: ignore[attr-defined]

    def _blockwise(self) -> Tensor:
        """Return a view (blocks, 3 H W). If a PPM header begins at block i, row i has its
        pixels."""
        size = self.stored_size
        header, num_pixels = len(ppm_header(size, size)), 3 * size**2
        content = torch.frombuffer(self._shards.files.buffer, dtype=torch.uint8)
        num_rows = max(0, (len(content) - header - num_pixels) // BLOCK + 1)
        return content.as_strided((num_rows, num_pixels), (BLOCK, 1), header)


def open_split(
    directory: Path | str,
    manifest: Manifest,
    split: str,
    *,
    image_size: int | None = None,
    store: ShardStore | None = None,
) -> ShardReader:
    manifest.split(split, directory=directory)
    return ShardReader([Part(Path(directory), manifest, split)], image_size=image_size, store=store)


@contextmanager
def reading(
    parts: Sequence[Part], data: ReadingSettings, *, image_size: int | None = None
) -> Iterator[ShardReader]:
    reader = ShardReader(parts, image_size=image_size, store=open_store(data, parts))
    try:
        yield reader
    finally:
        reader.end_waits()
        reader.close()


def open_store(settings: ReadingSettings, parts: Sequence[Part]) -> ShardStore | None:
    """Open the store of remote shards. Return None if all shards are local. Ranks and runs share
    the store's directory."""
    if not any(shard.is_remote for part in parts for shard in part.content.shards):
        return None
    default = Path(tempfile.gettempdir()) / f"wide-mlps-shards-{os.getuid()}"
    directory = Path(settings.cache_dir) if settings.cache_dir else default
    hosts = {own_host(part.directory) for part in parts} if settings.storage else set()
    return ShardStore(
        directory,
        setting="data.cache_dir",
        max_bytes=int(settings.cache_gb * 1e9),
        storage=settings.storage,
        hosts=hosts,
    )


def _class_numbers(part_of_shards: Sequence[Part]) -> tuple[Ids | None, Ids]:
    """Return the class numbers of all parts, concatenated (None if all are unchanged), and the
    position of each shard's first class number."""
    parts = {id(part): part for part in part_of_shards}
    if all(part.classes is None for part in parts.values()):
        return None, np.zeros(len(part_of_shards), np.int64)
    classes = [part.classes or range(len(part.manifest.classes)) for part in parts.values()]
    starts = dict(zip(parts, itertools.accumulate(map(len, classes), initial=0), strict=False))
    return np.concatenate(classes), np.array([starts[id(part)] for part in part_of_shards])


def _index_size(part: Part, shard: Shard) -> int:
    path = part.index(shard)
    try:
        return path.stat().st_size
    except OSError as error:
        raise _damaged(path, f"the index cannot be read ({cause_of(error)})", part) from None


def _damaged(path: Path | str, problem: str, part: Part) -> DatasetError:
    return DatasetError(
        str(path), problem, f"run data_prep verify {part.directory}", code="damaged"
    )


def _check_index(index: Ids, path: Path, part: Part, shard: Shard, *, raw_size: int | None) -> None:
    offsets, lengths, labels = index[:, _OFFSET], index[:, _LENGTH], index[:, _LABEL]
    if offsets.min() < 0 or lengths.min() < 0 or (offsets + lengths).max() > shard.num_bytes:
        raise _damaged(path, "the index has samples outside the shard", part)
    lowest, num_classes = -1 if part.content.num_unlabeled else 0, len(part.manifest.classes)
    if labels.min() < lowest or labels.max() >= max(1, num_classes):
        raise _damaged(
            path, f"the index has labels beyond the manifest's {num_classes:,} classes", part
        )
    if raw_size is not None:
        length = len(ppm_header(raw_size, raw_size)) + 3 * raw_size**2
        if (lengths != length).any() or (offsets % BLOCK).any():
            raise _damaged(path, f"the index does not fit raw images of {raw_size} px", part)


class MappedShards:
    def __init__(self, shards: Sequence[tuple[Part, Shard]], *, store: ShardStore | None):
        self._shards, self._store = shards, store
        self.files = FileRange([shard.num_bytes for _, shard in shards])
        self.is_remote = np.array([shard.is_remote for _, shard in shards], np.bool_)
        self.any_remote = bool(self.is_remote.any())
        assert store is not None or not self.any_remote
        self._mapped = np.zeros(len(shards), np.bool_)
        self._users = np.zeros(len(shards), np.int64)
        self._held: dict[int, File] = {}
        self._lock = threading.Lock()
        self._mapping = [threading.Lock() for _ in shards]
        for number in np.flatnonzero(~self.is_remote).tolist():
            self._check_local(number)
        if store is not None and self.any_remote:
            store.readers.add(self)

    @contextmanager
    def reading(self, numbers: Ids) -> Iterator[None]:
        """Keep the shards mapped during the block. Wait for shards that are not yet fetched."""
        if not self.any_remote and self._mapped[numbers].all():
            yield  # local shards stay mapped
            return
        needed = np.unique(numbers)
        with self._lock:
            self._users[needed] += 1
        try:
            for number in needed[~self._mapped[needed]].tolist():
                self._map(number)
            yield
        finally:
            with self._lock:
                self._users[needed] -= 1

    def fetch_ahead(self, numbers: Sequence[int]) -> None:
        """Prefetch these shards in this order, and release other shards that no thread reads."""
        remote = [number for number in numbers if self.is_remote[number]]
        if self._store is None or not remote:
            return
        files, max_bytes = {each: self._file(each) for each in remote}, self._store.max_bytes
        num_bytes = sum({file.name: file.num_bytes for file in files.values()}.values())
        if max_bytes is not None and num_bytes > max_bytes:
            raise UserError(
                "data.cache_gb",
                f"the next samples need {len(remote):,} shards ({num_bytes / 1e9:.3g} GB), but the"
                f" cache has {max_bytes / 1e9:g} GB",
                "raise data.cache_gb, or use data.shuffle=block with a smaller data.block_size and"
                " data.window_blocks",
                code="no-space",
            )
        self.release_idle(kept=frozenset(remote))
        self._store.fetch_ahead(
            [file for number, file in files.items() if not self._mapped[number]]
        )

    def close(self) -> None:
        """Release all shards. No thread may read afterwards."""
        with self._lock:
            self._release(list(self._held))

    def release_idle(self, *, kept: frozenset[int] = frozenset()) -> None:
        """Unmap and release the remote shards that no thread is reading."""
        with self._lock:
            idle = [
                number for number in self._held if number not in kept and not self._users[number]
            ]
            for number in idle:
                self.files.unmap(number)
                self._mapped[number] = False
            self._release(idle)

    def _release(self, numbers: Sequence[int]) -> None:
        if self._store is not None and numbers:
            self._store.release([self._held.pop(number) for number in numbers])

    def _file(self, number: int) -> File:
        part, shard = self._shards[number]
        return tar_of(shard, part.directory)

    def _map(self, number: int) -> None:
        part, shard = self._shards[number]
        with self._mapping[number]:
            if self._mapped[number]:
                return
            if not shard.is_remote:
                self._check_local(number)
                self.files.map(number, part.tar(shard), num_bytes=shard.num_bytes)
            else:
                assert self._store is not None
                file = self._file(number)
                path = self._store.hold(file)
                try:
                    self.files.map(number, path, num_bytes=shard.num_bytes)
                except BaseException:
                    self._store.release([file])
                    raise
                with self._lock:
                    self._held[number] = file
            self._mapped[number] = True

    def _check_local(self, number: int) -> None:
        part, shard = self._shards[number]
        path = part.tar(shard)
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise _damaged(path, f"the shard cannot be read ({cause_of(error)})", part) from None
        if num_bytes != shard.num_bytes:
            problem = f"the shard has {num_bytes:,} bytes, not the manifest's {shard.num_bytes:,}"
            fix = "restore the shard, or build the dataset again"
            raise DatasetError(str(path), problem, fix, code="damaged")


class FileRange:
    """Reserved range of memory addresses, with one slot for each file. A file may be smaller than
    its slot."""

    def __init__(self, sizes: Sequence[int]):
        page = mmap.ALLOCATIONGRANULARITY
        slots = np.array([-(-max(size, 1) // page) * page for size in sizes], np.int64)
        ends = np.cumsum(slots)
        self.starts: NDArray[np.int64] = ends - slots
        """Start of each slot in `content`, a multiple of the page size."""
        self._slots = slots
        num_bytes = int(ends[-1]) if len(ends) else page
        self._address = _map(None, num_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        # at exit a thread may still read, so only the system unmaps the range
        weakref.finalize(self, _libc.munmap, self._address, num_bytes).atexit = False
        self.buffer: Any = (ctypes.c_ubyte * num_bytes).from_address(self._address)
        self.content: NDArray[np.uint8] = np.ctypeslib.as_array(self.buffer)
        self.content.flags.writeable = False

    def map(self, number: int, path: Path, *, num_bytes: int) -> None:
        """Map the file into its slot. The caller must not read beyond the end of the file."""
        assert num_bytes <= self._slots[number], (path, num_bytes)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _map(
                self._at(number),
                num_bytes,
                mmap.PROT_READ,
                mmap.MAP_SHARED | _MAP_FIXED,
                descriptor,
            )
        finally:
            os.close(descriptor)

    def unmap(self, number: int) -> None:
        """Unmap the slot. No thread may read it."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(self._at(number), int(self._slots[number]), _NO_ACCESS, kind, -1)

    def _at(self, number: int) -> int:
        return self._address + int(self.starts[number])


def _map(address: int | None, num_bytes: int, access: int, kind: int, descriptor: int) -> int:
    found: int | None = _libc.mmap(address, num_bytes, access, kind, descriptor, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(
            code,
            f"{os.strerror(code)} (cannot map {num_bytes:,} bytes; see ulimit -v and"
            " vm.max_map_count)",
        )
    return found
