"""The data contract: files of a dataset directory, and their checks.

    DATASET/
      manifest.json            written last and atomically; without it the dataset is unfinished
      train-000000.tar         a plain WebDataset shard: KEY.ppm or KEY.jpg, then KEY.cls
      train-000000.npy         its index: int64 rows (offset, num_bytes, label) of the image members
      train-000000.paths       origins of the samples, in order: one JSON string per line
      train-wids.json          index for the package `wids`; our programs do not read it
      train-real.npy           an annotation of a split: packed bits, one row per sample
      rejected.jsonl           one line per rejected input: key, path, reason, detail, sha256

Shards can be outside the directory, because `index` and `subset` copy nothing. Samples of an
unlabeled split have the label -1. All text is UTF-8; `printable` in settings.py converts other file
names.

Invariants: num_read = num_written + num_rejected. The manifest has its own hash, and the sha256 of
every other file except versions.json (only `index` reads it) and the `wids` indices. Readers check
each file except the tars when they open it. `content_hash` identifies the samples, independent of
file names; it is the key of orders, caches and results. `pixels_hash` is the key of results that
also depend on resizing by readers.
"""

import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, field_validator

from data_prep.clients import KINDS, SCHEMES
from data_prep.errors import Code, UserError
from data_prep.limits import cause_of
from data_prep.publish import hash_of_json, sealed, sha256_of, unsealed, write_atomic, write_json
from data_prep.settings import Settings, near_path, nearest

SCHEMA_VERSION = 3
MANIFEST_NAME = "manifest.json"
REJECTED_NAME = "rejected.jsonl"
WIDS_NAME = "wids.json"
INDEX_DTYPE = np.dtype("<i8")
PARTS = "wide-mlps-parts"
"""Folder for records of an unfinished dataset. Its name marks the directory as a dataset of
data_prep (parts.py)."""
PICTURES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif"),
    *(".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jxl"),
)
"""File extensions of stored images."""
NUM_LOOKED_AT = 2000
"""Number of files to search before a folder counts as having no images."""
CHANGED = "it does not match the manifest"

Encoding = Literal["raw", "jpeg", "keep"]
CropPolicy = Literal["center", "squash", "longer_side", "full"]
Filter = Literal["bicubic", "bilinear", "box", "area"]


class DatasetError(UserError):
    """A dataset that is missing, unfinished or damaged."""


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""A file name without folders: a foreign manifest must not name files outside its directory."""


class Shard(Settings):
    name: Word
    """Stem of the shard's index and paths files in the dataset directory. It is unique in the
    dataset."""
    file: str
    """Path of the tar relative to the dataset directory, or a URL."""
    num_samples: int
    num_bytes: int
    """Size of the tar in bytes."""
    sha256: str
    index_sha256: str
    paths_sha256: str

    @field_validator("file")
    @classmethod
    def _no_other_schemes(cls, value: str) -> str:
        """Allow paths and URLs of web servers and buckets, but no commands, because the manifest
        may come from others."""
        is_unknown = "://" in value and value.partition("://")[0] not in KINDS
        if "\0" in value or value.startswith("pipe:") or is_unknown:
            raise ValueError(f"{value!r} is neither a path nor a URL of {SCHEMES}")
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
    """Bits for every sample of a split: for example, which folds contain it, or all its true
    labels."""

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
    def num_unlabeled(self) -> int:
        return self.num_samples - sum(self.class_counts)

    @property
    def largest_class(self) -> float | None:
        """Fraction of the labeled samples in the largest class; None if all classes are equally
        large."""
        counts = self.class_counts
        return max(counts) / sum(counts) if len(set(counts)) > 1 else None


def baselines(num_classes: int, largest_class: float | None) -> str:
    """Return, as text, the accuracy of random guessing and, if classes are unequal, of always
    predicting the largest class."""
    largest = f", largest class {100 * largest_class:.3g} %" if largest_class else ""
    return f"chance {100 / num_classes:.3g} %{largest}"


def accuracy(top1: float, class_mean: float | None) -> str:
    """Return top-1 accuracy as text, with the mean over classes unless `class_mean` is None."""
    return f"top-1 {100 * top1:.1f} %" + (
        f", class mean {100 * class_mean:.1f} %" if class_mean is not None else ""
    )


class Manifest(Settings):
    schema_version: Literal[3] = 3
    tool_version: str
    decoder: str = ""
    """Versions of the libraries that decoded the images. Other versions give slightly different
    pixels."""
    name: str
    source: dict[str, Any]
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of `build` or `index` that determine the content; {} for a subset."""
    seed: int
    encoding: Encoding
    image_size: int
    crop: CropPolicy = "center"
    interpolation: Filter = "bicubic"
    """Filter for resizing to `image_size`. If encoding is keep, images are resized when they are
    read."""
    classes: tuple[str, ...]
    splits: dict[Word, Split]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    num_read: int
    num_written: int
    num_rejected: int
    num_left_out: dict[str, int] = Field(default_factory=dict)
    """Reason, such as excluded -> number of skipped inputs. `whole classes`: number of classes."""
    num_held_out: int = 0
    """Number of images of the archive's `train` that became `val`."""
    max_reject_fraction: float = 1.0
    """Largest accepted fraction of rejected inputs; `build`, `index` and `merge` fail above it."""
    rejected_sha256: str
    plan_hash: str
    """Hash of the config and of the list of inputs."""

    # not cached: model_copy would copy the hash to a manifest with other content

    @property
    def hash(self) -> str:
        """Hash of the complete manifest, including names and paths."""
        return hash_of_json(self.model_dump(mode="json"))

    @property
    def content_hash(self) -> str:
        """Hash of the samples, their order, classes and annotations, without file names."""
        splits = {
            name: {
                "shards": [[shard.sha256, shard.index_sha256] for shard in split.shards],
                "annotations": {
                    key: [each.sha256, each.num_columns] for key, each in split.annotations.items()
                },
            }
            for name, split in self.splits.items()
        }
        return hash_of_json([self.classes, splits])

    @property
    def pixels_hash(self) -> str:
        """Hash of the content and of the settings that resize and normalize it in readers."""
        reading = self.model_dump(
            mode="json",
            include={"image_size", "crop", "interpolation", "channel_mean", "channel_std"},
        )
        return hash_of_json([self.content_hash, reading])

    def file_hashes(self, *, with_tars: bool = True) -> dict[str, str]:
        """Return the sha256 of every file of the dataset except the manifest and `wids` indices."""
        hashes = {REJECTED_NAME: self.rejected_sha256}
        for split in self.splits.values():
            hashes |= {each.file: each.sha256 for each in split.annotations.values()}
            for shard in split.shards:
                hashes |= {shard.index_file: shard.index_sha256}
                hashes |= {shard.paths_file: shard.paths_sha256}
                hashes |= {shard.file: shard.sha256} if with_tars else {}
        return hashes

    def labeled_split(self, name: str, *, directory: Path | str) -> Split:
        split = self.split(name, directory=directory)
        if split.num_unlabeled:
            counts = f"{split.num_unlabeled:,} of {split.num_samples:,}"
            problem = f"{counts} samples of split {name!r} have no label"
            fix = "choose a split with labels"
            raise DatasetError(str(directory), problem, fix, code="mismatch")
        return split

    def split(self, name: str, *, directory: Path | str = "dataset") -> Split:
        if name not in self.splits:
            fix = nearest(name, list(self.splits))
            if name == "val" and "val_fraction" in self.source:
                names = ", ".join(self.splits)
                fix = f"choose {names}, or build another dataset with source.val_fraction=0.1"
            problem = f"it has no split {name!r}"
            raise DatasetError(str(directory), problem, fix, code="unknown-name")
        return self.splits[name]


def load_manifest(directory: Path | str) -> Manifest:
    """Return the manifest of a finished dataset. Raise DatasetError if it is missing or damaged."""
    path = Path(directory) / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _no_dataset(path.parent) from None
    except OSError as error:
        fix = "make it readable, or rebuild the dataset"
        raise DatasetError(str(path), cause_of(error), fix, code="unreadable") from None
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """Return the manifest in `data`. `path`: file to name in messages."""
    try:
        tree = json.loads(data)
        version = tree.get("schema_version")
        if version == SCHEMA_VERSION:
            return Manifest.model_validate_json(json.dumps(unsealed(tree)))
    except (ValueError, AttributeError, RecursionError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = (
                f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
            )
        problem = f"it is damaged or no manifest ({why})"
        fix = "copy it again, or rebuild the dataset"
        raise DatasetError(str(path), problem, fix, code="damaged") from None
    problem = f"it has schema version {version!r}, but this program reads {SCHEMA_VERSION}"
    fix = "rebuild the dataset, or install the version of wide-mlps that wrote it"
    raise DatasetError(str(path), problem, fix, code="unsupported")


def _no_dataset(place: Path) -> DatasetError:
    """Return the error for a path that is no dataset, with the command that makes a dataset of
    it."""
    code: Code = "unknown-format"
    if not place.exists():
        problem, code = "no such dataset directory exists", "missing-path"
        near = near_path(place, of="/" + MANIFEST_NAME)
        fix = near or f"make it with data_prep build ... out={place}"
    elif place.is_file():
        problem, fix = "it is a file, and a dataset is a directory", f"choose {place.parent}"
        if place.suffix == ".tar":
            fix = f"run data_prep index --train {place} --out DATASET"
    elif (place / PARTS).is_dir() or (place / REJECTED_NAME).exists():
        problem, code = f"it has no {MANIFEST_NAME}, so it is unfinished", "unfinished"
        fix = "run its data_prep build again, which resumes"
    elif (place / "config.yaml").is_file() or (place / "model.safetensors").is_file():
        problem, code = "it is a run or weights, not a dataset", "wrong-command"
        fix = "choose a dataset directory"
    elif datasets := sorted(place.glob(f"*/{MANIFEST_NAME}")):
        problem, fix = "it is no dataset, but it contains datasets", f"choose {datasets[0].parent}"
    else:
        files = itertools.islice(place.rglob("*"), NUM_LOOKED_AT)
        endings = {path.suffix.lower() for path in files}
        problem, code = f"it has no {MANIFEST_NAME}, no shards and no images", "empty"
        fix = "choose a directory that data_prep build or index wrote"
        if ".tar" in endings:
            problem, code = "it contains shards that are not indexed", "unknown-format"
            fix = f"run data_prep index --train '{place}/*.tar' --out DATASET"
        elif endings.intersection(PICTURES):
            problem, code = "it is a folder of images, and no dataset yet", "unknown-format"
            fix = f"run pretrain recommend {place}"
            fix += f", or data_prep build --source folder --out DATASET source.path={place}"
    return DatasetError(str(place), problem, fix, code=code)


def save_manifest(directory: Path, manifest: Manifest) -> None:
    write_json(directory / MANIFEST_NAME, sealed(manifest.model_dump(mode="json")))


def wids_index(name: str, split: Split) -> bytes:
    """Return the index that the package `wids` needs to read these tars in random order."""
    shards = [
        {"url": shard.file, "nsamples": shard.num_samples, "filesize": shard.num_bytes}
        for shard in split.shards
    ]
    head = {"__kind__": "wids-shard-index-v1", "wids_version": 1}
    return json.dumps({**head, "name": name, "shardlist": shards}).encode() + b"\n"


def load_paths(directory: Path | str, shard: Shard) -> list[str]:
    """Return the source path of each sample of a shard, in the order of its index."""
    return _lines(directory, shard.paths_file, sha256=shard.paths_sha256, count=shard.num_samples)


def load_rejected(directory: Path | str, manifest: Manifest) -> list[dict[str, str]]:
    """Return the lines of rejected.jsonl as dicts."""
    return _lines(
        directory, REJECTED_NAME, sha256=manifest.rejected_sha256, count=manifest.num_rejected
    )


def _lines(directory: Path | str, file: str, *, sha256: str, count: int) -> list[Any]:
    with _reading(directory, file) as path:
        data = path.read_bytes()
        lines = data.splitlines()
        if hashlib.sha256(data).hexdigest() != sha256 or len(lines) != count:
            raise ValueError(CHANGED)
        return [json.loads(line) for line in lines]


def load_annotation(directory: Path | str, split: Split, name: str) -> NDArray[np.bool_]:
    """Return the (num_samples, num_columns) bits of an annotation."""
    if name not in split.annotations:
        problem, fix = f"the split has no annotation {name!r}", "choose another split"
        raise DatasetError(str(directory), problem, fix, code="unknown-name")
    annotation = split.annotations[name]
    shape = (split.num_samples, -(-annotation.num_columns // 8))
    packed = _array(directory, annotation.file, annotation.sha256, shape, np.dtype(np.uint8))
    return np.unpackbits(packed, axis=1, count=annotation.num_columns).astype(np.bool_)


def load_index(
    directory: Path | str, shard: Shard, *, path: Path | None = None
) -> NDArray[np.int64]:
    """Return the (num_samples, 3) index of one shard, memory-mapped. `path`: file to read instead
    of the shard's own index."""
    shape = (shard.num_samples, 3)
    file = path.absolute() if path else shard.index_file  # `_reading` would repeat the directory
    return _array(directory, file, shard.index_sha256, shape, INDEX_DTYPE)


def write_array(path: Path, array: NDArray[Any]) -> str:
    """Write the array as .npy; return the sha256 of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomic(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _array(
    directory: Path | str,
    file: Path | str,
    sha256: str,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    with _reading(directory, file) as path:
        if sha256_of(path) != sha256:  # before numpy parses it
            raise ValueError(CHANGED)
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(
                f"it has shape {array.shape} and type {array.dtype}, not {shape} and {dtype}"
            )
    return array


@contextmanager
def _reading(directory: Path | str, file: Path | str) -> Iterator[Path]:
    path = Path(directory) / file
    try:
        yield path
    except (OSError, ValueError) as error:
        why = cause_of(error) if isinstance(error, OSError) else str(error)
        code: Code = "damaged" if isinstance(error, ValueError) else "unreadable"
        code = "missing-path" if isinstance(error, FileNotFoundError) else code
        fix = f"run data_prep verify {directory}"
        raise DatasetError(str(path), why, fix, code=code) from None
