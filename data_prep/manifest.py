"""The data contract: what a dataset directory holds, and how a reader may trust it.

    DATASET/
      manifest.json            written last and atomically; without it the dataset is unfinished
      train-000000.tar         a plain WebDataset shard: KEY.ppm or KEY.jpg, then KEY.cls
      train-000000.npy         its index: int64 rows (offset, num_bytes, label) of the image members
      rejected.jsonl           one line for every input that was not written: path, reason, sha256

Invariants: num_read = num_written + num_rejected; the manifest's hash stands for the whole content (it holds the sha256 of
every shard and index), so it may key an order, a cache or a result.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from data_prep.publish import canonical_json, write_json
from data_prep.settings import Settings, UserError, nearest

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
REJECTED_NAME = "rejected.jsonl"
INDEX_DTYPE = np.dtype("<i8")

Encoding = Literal["raw", "jpeg", "keep"]


class DatasetError(UserError):
    """A dataset that is missing, unfinished or damaged; the text names the file and the remedy."""


class Shard(Settings):
    file: str
    num_samples: int
    num_bytes: int
    sha256: str
    index_sha256: str

    @property
    def index_file(self) -> str:
        return self.file.removesuffix(".tar") + ".npy"


class Split(Settings):
    shards: tuple[Shard, ...]
    class_counts: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)


class Manifest(Settings):
    schema_version: Literal[1] = 1
    tool_version: str
    name: str
    source: dict[str, Any]
    seed: int
    encoding: Encoding
    image_size: int
    classes: tuple[str, ...]
    splits: dict[str, Split]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    num_read: int
    num_written: int
    num_rejected: int
    fingerprint: str
    """Hash of the build's config and of the listing of its inputs: the same fingerprint means the same bytes."""

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(canonical_json(self.model_dump(mode="json"))).hexdigest()

    def split(self, name: str, *, directory: Path | str = "dataset") -> Split:
        if name not in self.splits:
            raise DatasetError(f"{directory}: has no split {name!r}; {nearest(name, list(self.splits))}")
        return self.splits[name]


def load_manifest(directory: Path | str) -> Manifest:
    """The manifest of a finished dataset; every other state of `directory` is one clear error."""
    path = Path(directory) / MANIFEST_NAME
    if not path.parent.is_dir():
        raise DatasetError(
            f"{path.parent}: no such dataset directory; make it with data_prep build ... out={path.parent}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DatasetError(
            f"{path.parent}: has no {MANIFEST_NAME}, so it is unfinished; run its data_prep build again, it goes on from there"
        ) from None
    try:
        version = json.loads(text).get("schema_version")
        if version != SCHEMA_VERSION:
            raise DatasetError(
                f"{path}: schema version {version!r}, this tool reads {SCHEMA_VERSION}; rebuild it, or use the tool that wrote it"
            )
        return Manifest.model_validate_json(text)
    except (ValidationError, json.JSONDecodeError, AttributeError) as error:
        raise DatasetError(f"{path}: not a manifest ({str(error).splitlines()[0]}); rebuild the dataset") from None


def save_manifest(directory: Path, manifest: Manifest) -> None:
    write_json(directory / MANIFEST_NAME, manifest.model_dump(mode="json"))


def load_index(directory: Path | str, shard: Shard) -> NDArray[np.int64]:
    """The (num_samples, 3) index of one shard, memory-mapped."""
    path = Path(directory) / shard.index_file
    try:
        index = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: index cannot be read ({error}); run data_prep verify {directory}") from None
    if index.shape != (shard.num_samples, 3) or index.dtype != INDEX_DTYPE:
        raise DatasetError(
            f"{path}: index of shape {index.shape}, {(shard.num_samples, 3)} expected; run data_prep verify {directory}"
        )
    return index  # type: ignore[no-any-return]
