"""The data contract: what a dataset directory holds, and how a reader may trust it.

    DATASET/
      manifest.json            written last and atomically; without it the dataset is unfinished
      train-000000.tar         a plain WebDataset shard: KEY.ppm or KEY.jpg, then KEY.cls
      train-000000.npy         its index: int64 rows (offset, num_bytes, label) of the image members
      train-000000.paths       where each sample came from: one JSON string a line, in the order of the index
      train-real.npy           an annotation of a split: a packed bit matrix, a row for each sample in the split's order
      rejected.jsonl           one line for every input that was not written: key, path, reason, sha256

A shard may also lie elsewhere (`index` and `subset` copy nothing): `file` is then a path relative to the dataset directory, or
a URL. The label of a sample of an unlabelled split is -1.

Invariants: num_read = num_written + num_rejected; the manifest's hash stands for the whole content (it holds the sha256 of
every shard, index and annotation), so it may key an order, a cache or a result.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, field_validator

from data_prep.publish import hash_of_json, write_json
from data_prep.settings import Settings, UserError, nearest

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
REJECTED_NAME = "rejected.jsonl"
INDEX_DTYPE = np.dtype("<i8")

Encoding = Literal["raw", "jpeg", "keep"]


class DatasetError(UserError):
    """A dataset that is missing, unfinished or damaged; the text names the file and the remedy."""


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""What names files: a manifest of others must not lead out of its directory."""


class Shard(Settings):
    name: Word
    """Of the index and the paths in the dataset directory, without their endings; unique in the dataset."""
    file: str
    """The tar: relative to the dataset directory, or a URL of http, https or s3."""
    num_samples: int
    num_bytes: int
    """Of the whole tar."""
    sha256: str
    index_sha256: str
    paths_sha256: str

    @field_validator("file")
    @classmethod
    def _no_other_schemes(cls, value: str) -> str:
        """What is fetched for a manifest of others comes from a web server or an object store, or lies on this disk."""
        if "://" in value and not value.startswith(("http://", "https://", "s3://")):
            raise ValueError(f"{value!r} is neither a path nor a URL of http, https or s3")
        return value

    @property
    def index_file(self) -> str:
        return f"{self.name}.npy"

    @property
    def paths_file(self) -> str:
        return f"{self.name}.paths"

    @property
    def is_remote(self) -> bool:
        return "://" in self.file


class Annotation(Settings):
    """A fact of every sample of a split as bits: membership of folds, several true labels."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.npy$")]
    sha256: str
    num_columns: int


class Split(Settings):
    shards: tuple[Shard, ...]
    class_counts: tuple[int, ...]
    annotations: dict[Word, Annotation] = Field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_unlabelled(self) -> int:
        return self.num_samples - sum(self.class_counts)


class Manifest(Settings):
    schema_version: Literal[2] = 2
    tool_version: str
    decoder: str = ""
    """The libraries that made the pixels: others make slightly different ones."""
    name: str
    source: dict[str, Any]
    seed: int
    encoding: Encoding
    image_size: int
    crop: Literal["center", "squash"] = "center"
    """What readers make of pictures that are not squares of `image_size` (those of encoding keep)."""
    classes: tuple[str, ...]
    splits: dict[Word, Split]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    num_read: int
    num_written: int
    num_rejected: int
    num_left_out: dict[str, int] = Field(default_factory=dict)
    """Inputs that the config leaves out before anything is read, by reason (classes, excluded)."""
    fingerprint: str
    """Hash of the build's config and of the listing of its inputs: the same fingerprint means the same bytes."""

    @cached_property
    def hash(self) -> str:
        return hash_of_json(self.model_dump(mode="json"))

    def labelled_split(self, name: str, *, directory: Path | str = "dataset") -> Split:
        split = self.split(name, directory=directory)
        if split.num_unlabelled:
            raise DatasetError(
                f"{directory}: {split.num_unlabelled:,} of {split.num_samples:,} samples of split {name!r} have no label; "
                "choose a split with labels"
            )
        return split

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


def load_paths(directory: Path | str, shard: Shard) -> list[str]:
    """Where each sample of a shard came from, in the order of its index."""
    path = Path(directory) / shard.paths_file
    try:
        paths = [json.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read ({error}); run data_prep verify {directory}") from None
    if len(paths) != shard.num_samples:
        raise DatasetError(
            f"{path}: {len(paths)} lines, {shard.num_samples} expected; run data_prep verify {directory}"
        )
    return paths


def load_annotation(directory: Path | str, split: Split, name: str) -> NDArray[np.bool_]:
    """The (num_samples, num_columns) bits of an annotation."""
    if name not in split.annotations:
        raise DatasetError(f"{directory}: no annotation {name!r}; {nearest(name, list(split.annotations))}")
    annotation = split.annotations[name]
    path = Path(directory) / annotation.file
    try:
        packed = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read ({error}); run data_prep verify {directory}") from None
    if packed.dtype != np.uint8 or packed.shape != (split.num_samples, -(-annotation.num_columns // 8)):
        raise DatasetError(f"{path}: is not the annotation of {split.num_samples} samples; rebuild the dataset")
    return np.unpackbits(packed, axis=1, count=annotation.num_columns).astype(np.bool_)


def load_index(directory: Path | str, shard: Shard) -> NDArray[np.int64]:
    """The (num_samples, 3) index of one shard, memory-mapped."""
    path = Path(directory) / shard.index_file
    try:
        index = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: index cannot be read ({error}); run data_prep verify {directory}") from None
    if index.shape != (shard.num_samples, 3) or index.dtype != INDEX_DTYPE or not index.flags.c_contiguous:
        raise DatasetError(
            f"{path}: index of shape {index.shape}, {(shard.num_samples, 3)} expected, row by row; run data_prep verify {directory}"
        )
    return index  # type: ignore[no-any-return]
