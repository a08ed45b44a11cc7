"""Reads samples by number out of a split's memory-mapped shards.

Raw shards have one stride throughout, so a shard is a (samples, pixels) view of the file and a batch is one gather per shard at
memory speed. Anything else is decoded picture by picture, by the code that the dataset was checked with. Pixels come out as uint8
(B, H, W, 3).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.images import Rejection, decode, resize
from data_prep.manifest import DatasetError, Manifest, Shard, load_index

Ids = NDArray[np.int64]
BLOCK = 512
"""Of a tar. A raw sample is a header, the picture, a header and the label, each filled up to whole blocks."""


@dataclass(frozen=True)
class OpenShard:
    name: str
    content: NDArray[np.uint8]
    offsets: Ids
    lengths: Ids
    rows: Tensor | None
    """(samples of the tar, 3 H W) strided view, where the shard is raw."""
    places: Ids
    """Of each sample among the rows: a subset takes some of a tar's samples."""


class SplitReader:
    """Random access to one split."""

    def __init__(self, directory: Path | str, manifest: Manifest, split: str, *, image_size: int | None = None):
        self.directory, self.manifest = Path(directory), manifest
        shards = [shard for shard in manifest.split(split, directory=directory).shards if shard.num_samples]
        self.stored_size = manifest.image_size if manifest.encoding != "keep" else (image_size or manifest.image_size)
        self._shards = [self._open(shard) for shard in shards]
        self._starts = np.cumsum([0, *(shard.num_samples for shard in shards)])
        self.num_samples = int(self._starts[-1])
        indices = [load_index(directory, shard) for shard in shards]
        self.labels: Ids = np.concatenate([index[:, 2] for index in indices]) if indices else np.zeros(0, np.int64)

    def images(self, ids: Ids) -> Tensor:
        """The pictures of `ids`, uint8 (B, H, W, 3)."""
        size = self.stored_size
        batch = torch.empty(len(ids), size, size, 3, dtype=torch.uint8)
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            self._fill(batch, places, self._shards[number], ids[places] - self._starts[number])
        return batch

    def _fill(self, batch: Tensor, places: Ids, shard: OpenShard, rows: Ids) -> None:
        if shard.rows is not None:
            flat = batch.view(len(batch), -1)
            gathered = torch.index_select(shard.rows, 0, torch.from_numpy(shard.places[rows]))
            flat[torch.from_numpy(places)] = gathered
            return
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            batch[place] = self._decode(shard, row)

    def _decode(self, shard: OpenShard, row: int) -> Tensor:
        start, length = int(shard.offsets[row]), int(shard.lengths[row])
        try:
            picture, _ = decode(shard.content[start : start + length].tobytes())
        except Rejection as error:
            raise DatasetError(
                f"{shard.name}: sample {row} does not decode ({error}); run data_prep verify {self.directory}"
            ) from None
        square = resize(picture, size=self.stored_size, crop=self.manifest.crop)
        return torch.from_numpy(np.array(square))

    def _open(self, shard: Shard) -> OpenShard:
        if shard.is_remote:
            raise DatasetError(
                f"{shard.file}: is remote, and training reads local shards; copy the shards here and index them again"
            )
        path = self.directory / shard.file
        try:
            content = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path}: cannot be mapped ({error}); run data_prep verify {self.directory}") from None
        if len(content) != shard.num_bytes:
            raise DatasetError(
                f"{path}: {len(content):,} bytes, the manifest says {shard.num_bytes:,}; it was cut or changed, rebuild it"
            )
        index = load_index(self.directory, shard)
        offsets, lengths = np.ascontiguousarray(index[:, 0]), np.ascontiguousarray(index[:, 1])
        if len(index) and (offsets.min() < 0 or lengths.min() < 0 or (offsets + lengths).max() > len(content)):
            raise DatasetError(f"{path}: its index leads out of it; run data_prep verify {self.directory}")
        rows, places = None, np.zeros(0, np.int64)
        if self.manifest.encoding == "raw":
            rows, places = self._rows(path, content, offsets, lengths)
        return OpenShard(str(path), content, offsets, lengths, rows, places)

    def _rows(self, path: Path, content: NDArray[np.uint8], offsets: Ids, lengths: Ids) -> tuple[Tensor, Ids]:
        """All pictures of the tar as one strided view, and which of its rows each sample is."""
        num_pixels = 3 * self.stored_size**2
        header = int(lengths[0]) - num_pixels
        stride = BLOCK * (3 + -(-int(lengths[0]) // BLOCK))
        places = (offsets - BLOCK) // stride
        if header < 0 or (lengths != lengths[0]).any() or (offsets != BLOCK + places * stride).any():
            raise DatasetError(
                f"{path}: is not a raw shard of {self.stored_size} px; run data_prep verify {self.directory}"
            )
        start, num_rows = BLOCK + header, int(places.max()) + 1
        view = np.lib.stride_tricks.as_strided(content[start:], (num_rows, num_pixels), (stride, 1), writeable=False)
        return _tensor(view), places


def _tensor(view: NDArray[np.uint8]) -> Tensor:
    """The array as a tensor; torch's warning that a read-only array might be written to does not apply, as it never is."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(view)
