"""The data contract: what a dataset directory holds, and how a reader may trust it.

    DATASET/
      manifest.json            written last and atomically; without it the dataset is unfinished
      train-000000.tar         a plain WebDataset shard: KEY.ppm or KEY.jpg, then KEY.cls
      train-000000.npy         its index: int64 rows (offset, num_bytes, label) of the image members
      train-000000.paths       where each sample came from: one JSON string a line, in the order of the index
      train-wids.json          what the package `wids` reads its shards by; nothing here does
      train-real.npy           an annotation of a split: a packed bit matrix, a row for each sample in the split's order
      rejected.jsonl           one line for every input that was not written: key, path, reason, sha256

A shard may also lie elsewhere (`index` and `subset` copy nothing): `file` is then a path relative
to the dataset directory, or a URL. The label of a sample of an unlabelled split is -1. All text is
UTF-8: `printable` of settings.py spells names that are not.

Invariants: num_read = num_written + num_rejected. The manifest holds the sha256 of every other file
of the dataset (but for the versions.json of an index, which only `index` reads, and for what `wids`
reads), and its own hash; readers check each small file (all but the tars) when they open it. What
is trained on is known by `content_hash`, wherever it lies and whatever it is called: it keys
orders, caches and results; `pixels_hash` those that depend on what readers make of it.
"""  # noqa: E501 (a table)

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from data_prep.clients import KINDS, SCHEMES
from data_prep.errors import UserError
from data_prep.limits import cause_of
from data_prep.publish import hash_of_json, sealed, sha256_of, unsealed, write_json
from data_prep.settings import Settings, near_path, nearest

SCHEMA_VERSION = 3
MANIFEST_NAME = "manifest.json"
REJECTED_NAME = "rejected.jsonl"
INDEX_DTYPE = np.dtype("<i8")
PARTS = "wide-mlps-parts"
"""What is kept of an unfinished dataset, beside its shards; the name is the mark of ours
(build/parts.py), and no user's."""
PICTURES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif"),
    *(".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"),
)
"""The endings of what is read as a picture."""
NUM_LOOKED_AT = 2000
"""Files, before a folder is taken to hold no pictures."""
CHANGED = "it is not what the manifest says"

Encoding = Literal["raw", "jpeg", "keep"]
CropPolicy = Literal["center", "squash", "longer_side"]
Filter = Literal["bicubic", "bilinear", "area"]


class DatasetError(UserError):
    """A dataset that is missing, unfinished or damaged; the text names the file and the remedy."""


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""What names files: a manifest of others must not lead out of its directory."""


class Shard(Settings):
    name: Word
    """Of the index and the paths in the dataset directory, without their endings; unique in the
    dataset."""
    file: str
    """The tar: relative to the dataset directory, or a URL of a web server or a store."""
    num_samples: int
    num_bytes: int
    """Of the whole tar."""
    sha256: str
    index_sha256: str
    paths_sha256: str

    @field_validator("file")
    @classmethod
    def _no_other_schemes(cls, value: str) -> str:
        """What is fetched for a manifest of others comes from a web server or an object store, or
        lies on this disk."""
        if "\0" in value:
            raise ValueError(f"{value!r} is no path")
        if value.startswith("pipe:"):
            raise ValueError(
                f"{value!r} is neither a path nor a URL: a command is run from a config or a"
                " command line alone"
            )
        if "://" in value and value.partition("://")[0] not in KINDS:
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

    @property
    def largest_class(self) -> float | None:
        """The fraction of the labeled samples in the largest class; None if all classes are equally
        large."""
        counts = self.class_counts
        return max(counts) / sum(counts) if len(set(counts)) > 1 else None


def baselines(num_classes: int, largest_class: float | None) -> str:
    """The accuracies without a model, in words: of a random class, and of the largest class if
    classes are unequal."""
    largest = f", largest class {100 * largest_class:.3g} %" if largest_class else ""
    return f"chance {100 / num_classes:.3g} %{largest}"


def accuracy(top1: float, class_mean: float | None) -> str:
    """Top-1 in words; with its mean over classes, if classes are unequal."""
    return f"top-1 {100 * top1:.1f} %" + (
        f", class mean {100 * class_mean:.1f} %" if class_mean is not None else ""
    )


class Manifest(Settings):
    schema_version: Literal[3] = 3
    tool_version: str
    decoder: str = ""
    """The libraries that made the pixels: others make slightly different ones."""
    name: str
    source: dict[str, Any]
    config: dict[str, Any] = Field(default_factory=dict)
    """What decides the bytes, besides the files of the source; {} of a subset."""
    seed: int
    encoding: Encoding
    image_size: int
    crop: CropPolicy = "center"
    interpolation: Filter = "bicubic"
    """How pictures that were not squares of `image_size` became such; with encoding keep it is
    readers who do it."""
    classes: tuple[str, ...]
    splits: dict[Word, Split]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    num_read: int
    num_written: int
    num_rejected: int
    num_left_out: dict[str, int] = Field(default_factory=dict)
    """Inputs that the config leaves out before anything is read, by reason (classes, excluded)."""
    num_held_out: int = 0
    """Inputs of the archive's `train` that became `val`: it has none of its own, or its own is left
    alone."""
    max_reject_share: float = 1.0
    """The share of inputs that may be rejected; past it `build`, `index` and `merge` end with 1,
    whenever they are called."""
    rejected_sha256: str
    """Of rejected.jsonl."""
    plan_hash: str
    """Of the build's config, the dataset's name in it, and the listing of its inputs: the same plan
    makes the same bytes."""

    # these are not cached: pydantic's model_copy would carry them over to what has another content

    @property
    def hash(self) -> str:
        """Of all that stands here: names and places, too."""
        return hash_of_json(self.model_dump(mode="json"))

    @property
    def content_hash(self) -> str:
        """Of the samples and their order alone: the same bytes at another place, under another
        name, made or indexed by another version of this tool, have the same."""
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
        """Of the content, and of what readers make of it."""
        reading = self.model_dump(
            mode="json",
            include={"image_size", "crop", "interpolation", "channel_mean", "channel_std"},
        )
        return hash_of_json([self.content_hash, reading])

    def labelled_split(self, name: str, *, directory: Path | str = "dataset") -> Split:
        split = self.split(name, directory=directory)
        if split.num_unlabelled:
            raise DatasetError(
                f"{directory}: {split.num_unlabelled:,} of {split.num_samples:,} samples of split"
                f" {name!r} have no label; choose a split with labels"
            )
        return split

    def split(self, name: str, *, directory: Path | str = "dataset") -> Split:
        if name not in self.splits:
            if name == "val" and "val_share" in self.source:
                known = ", ".join(self.splits)
                raise DatasetError(
                    f"{directory}: has no split 'val'; known: {known}; build it elsewhere with"
                    " source.val_share=0.1"
                )
            raise DatasetError(
                f"{directory}: has no split {name!r}; {nearest(name, list(self.splits))}"
            )
        return self.splits[name]


def load_manifest(directory: Path | str) -> Manifest:
    """The manifest of a finished dataset; every other state of `directory` is one clear error."""
    path = Path(directory) / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DatasetError(f"{path.parent}: {_no_dataset(path.parent)}") from None
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be read ({cause_of(error)}); mend that, or rebuild the dataset"
        ) from None
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """`path` stands for where it lies."""
    try:
        tree = json.loads(data)
        version = tree.get("schema_version")
        if version == SCHEMA_VERSION:
            return Manifest.model_validate_json(json.dumps(unsealed(tree)))
    except (ValueError, AttributeError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise DatasetError(
            f"{path}: is damaged, or no manifest ({why}); copy it again from where it is whole, or"
            " rebuild the dataset"
        ) from None
    raise DatasetError(
        f"{path}: schema version {version!r}, this tool reads {SCHEMA_VERSION}; rebuild it, or use"
        " the tool that wrote it"
    )


def _no_dataset(place: Path) -> str:
    """What stands in the place of a dataset, and what makes one of it."""
    if not place.exists():
        near = near_path(place, of="/" + MANIFEST_NAME)
        return (
            f"no such dataset directory; {near or f'make it with data_prep build ... out={place}'}"
        )
    if place.is_file():
        if place.name == MANIFEST_NAME:
            return f"is a file of a dataset; name its directory, {place.parent}"
        return "is a file, and a dataset is a directory; " + (
            f"make one of the shard with data_prep index --train {place} --out DATASET"
            if place.suffix == ".tar"
            else "name that"
        )
    if (place / PARTS).is_dir() or (place / REJECTED_NAME).exists():
        return (
            f"has no {MANIFEST_NAME}, so it is unfinished; run its data_prep build again, it goes"
            " on from there"
        )
    if (place / "config.yaml").is_file() or (place / "model.safetensors").is_file():
        return (
            "is a run, or its weights, and no dataset; name the directory that data_prep build or"
            " index has written"
        )
    if datasets := sorted(place.glob(f"*/{MANIFEST_NAME}")):
        return f"is no dataset itself; name one that is in it, such as {datasets[0].parent}"
    endings = {path.suffix.lower() for path in itertools.islice(place.rglob("*"), NUM_LOOKED_AT)}
    if ".tar" in endings:
        return (
            "holds shards without an index; make a dataset of them with data_prep index --train"
            f" '{place}/*.tar' --out DATASET"
        )
    if endings.intersection(PICTURES):
        build = f"data_prep build --source folder --out DATASET source.path={place}"
        return (
            f"is a folder of pictures, no dataset yet; pretrain start {place} makes one and a"
            f" config, {build} makes it alone"
        )
    return (
        f"holds no {MANIFEST_NAME}, no shards and no pictures; name the directory that data_prep"
        " build or index has written"
    )


def save_manifest(directory: Path, manifest: Manifest) -> None:
    write_json(directory / MANIFEST_NAME, sealed(manifest.model_dump(mode="json")))


def load_paths(directory: Path | str, shard: Shard) -> list[str]:
    """Where each sample of a shard came from, in the order of its index."""
    return _lines(directory, shard.paths_file, sha256=shard.paths_sha256, count=shard.num_samples)


def load_rejected(directory: Path | str, manifest: Manifest) -> list[dict[str, str]]:
    """What was not written, and why."""
    return _lines(
        directory, REJECTED_NAME, sha256=manifest.rejected_sha256, count=manifest.num_rejected
    )


def _lines(directory: Path | str, file: str, *, sha256: str, count: int) -> list[Any]:
    path = Path(directory) / file
    with _reading(directory, path):
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(CHANGED)
        lines = [json.loads(line) for line in data.splitlines()]
    if len(lines) != count:
        raise DatasetError(
            f"{path}: {len(lines)} lines, {count} expected; run data_prep verify {directory}"
        )
    return lines


def load_annotation(directory: Path | str, split: Split, name: str) -> NDArray[np.bool_]:
    """The (num_samples, num_columns) bits of an annotation."""
    if name not in split.annotations:
        raise DatasetError(
            f"{directory}: no annotation {name!r}; {nearest(name, list(split.annotations))}"
        )
    annotation = split.annotations[name]
    path = Path(directory) / annotation.file
    packed = _array(directory, path, sha256=annotation.sha256)
    if packed.dtype != np.uint8 or packed.shape != (
        split.num_samples,
        -(-annotation.num_columns // 8),
    ):
        raise DatasetError(
            f"{path}: is not the annotation of {split.num_samples} samples; rebuild the dataset"
        )
    return np.unpackbits(packed, axis=1, count=annotation.num_columns).astype(np.bool_)


def load_index(
    directory: Path | str, shard: Shard, *, path: Path | None = None
) -> NDArray[np.int64]:
    """The (num_samples, 3) index of one shard, memory-mapped; of a copy of it at `path`."""
    path = path or Path(directory) / shard.index_file
    index = _array(directory, path, sha256=shard.index_sha256)
    if (
        index.shape != (shard.num_samples, 3)
        or index.dtype != INDEX_DTYPE
        or not index.flags.c_contiguous
    ):
        raise DatasetError(
            f"{path}: index of shape {index.shape}, {(shard.num_samples, 3)} expected, row by row;"
            f" run data_prep verify {directory}"
        )
    return index


def _array(directory: Path | str, path: Path, *, sha256: str) -> NDArray[Any]:
    """Memory-mapped; numpy parses only what is as it was written."""
    with _reading(directory, path):
        if sha256_of(path) != sha256:
            raise ValueError(CHANGED)
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


@contextmanager
def _reading(directory: Path | str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = cause_of(error) if isinstance(error, OSError) else error
        raise DatasetError(
            f"{path}: cannot be read ({why}); run data_prep verify {directory}"
        ) from None
