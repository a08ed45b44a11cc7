"""The training data of a run: one split of a dataset, a mixture of several datasets, or a stream.

A mixture has all classes of its datasets, in the order of their first occurrence. Equal class names
are one class. Its channel statistics are averages over its datasets, with their sampling weights.

The file is long because datasets, mixtures, folds and streams share one interface.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from braceexpand import braceexpand

from data_prep import __version__
from data_prep.clients import KINDS, is_command, is_record, recorded, shown
from data_prep.errors import SettingsError
from data_prep.manifest import (
    MANIFEST_NAME,
    CropPolicy,
    DatasetError,
    Filter,
    Manifest,
    Shard,
    Split,
    baselines,
    load_annotation,
    load_manifest,
)
from data_prep.publish import hash_of_json
from pretrain.config import DataSettings, PretrainSettings, parse_length
from pretrain.data.order import (
    AsItComes,
    CanonicalStreams,
    FoldOrder,
    Ids,
    Line,
    Mixture,
    Order,
    epoch_length,
    hash64,
    hex_key,
    mixture_weights,
)
from pretrain.data.store import ShardStore

FOLDS = "folds"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of ImageNet's color channels."""
STORES = tuple(scheme for scheme in KINDS if scheme not in ("http", "https"))
"""URL schemes that a stream reads through fsspec with data.storage. webdataset opens other URLs."""
_OPENED = (
    "",
    "file",
    "pipe",
    "http",
    "https",
    "ftp",
    "sftp",
    "ftps",
    "scp",
    "ais",
    "htgs",
    *STORES,
)
Statistic = tuple[float, float, float]


@dataclass(frozen=True)
class Part:
    """One split of one dataset. Its classes are numbered as in the complete training data."""

    directory: Path
    manifest: Manifest
    split: str
    classes: tuple[int, ...] | None = None
    """Number of each class in the complete training data. None: the same numbers as in this
    dataset."""
    fold: int | None = None
    """Number of the fold to train on, if the split has the annotation `folds`."""
    staged: ShardStore | None = None
    """Store of copies on this node's disk: all indices, and the shards in `staged_files`."""
    staged_files: frozenset[str] = frozenset()

    @property
    def num_samples(self) -> int:
        return self.content.num_samples if self.chosen is None else len(self.chosen)

    @cached_property
    def chosen(self) -> Ids | None:
        """Sample numbers of the fold in the split. None: train on all samples."""
        if self.fold is None:
            return None
        bits = load_annotation(self.directory, self.content, FOLDS)
        return np.flatnonzero(bits[:, self.fold])

    @property
    def content(self) -> Split:
        return self.manifest.splits[self.split]

    def tar(self, shard: Shard) -> Path:
        """Return the path of a local shard, or of its staged copy."""
        name = f"{shard.sha256}.tar"
        if self.staged is None or name not in self.staged_files:
            return self.directory / shard.file
        return self.staged.path / name

    def index(self, shard: Shard) -> Path:
        if self.staged is None:
            return self.directory / shard.index_file
        return self.staged.path / f"{shard.index_sha256}.npy"

    def stored_size(self, image_size: int | None) -> int:
        """Return the size of images as they are read: the stored size, or `image_size` if the
        images keep their own sizes."""
        if self.manifest.encoding == "keep" and image_size is not None:
            return image_size
        return self.manifest.image_size


@dataclass(frozen=True)
class TrainingData:
    settings: DataSettings
    parts: tuple[Part, ...]
    weights: tuple[int, ...]
    classes: tuple[str, ...]

    @property
    def name(self) -> str:
        return "+".join(part.manifest.name for part in self.parts)

    @property
    def num_samples(self) -> int:
        return sum(part.num_samples for part in self.parts)

    @property
    def image_size(self) -> int:
        return self.settings.image_size or self.parts[0].manifest.image_size

    @property
    def read_parts(self) -> tuple[Part, ...]:
        evaluated = self.eval_part()
        return self.parts if evaluated is None else (*self.parts, evaluated)

    @cached_property
    def content_hash(self) -> str:
        """Hash of the dataset, or of all datasets of the mixture and their weights."""
        return self._hash([part.manifest.content_hash for part in self.parts])

    @cached_property
    def pixels_hash(self) -> str:
        return self._hash([part.manifest.pixels_hash for part in self.parts])

    def _hash(self, hashes: list[str]) -> str:
        if len(hashes) == 1:
            return hashes[0]
        splits = [part.split for part in self.parts]
        return hash_of_json([*map(list, zip(hashes, splits, strict=True)), list(self.weights)])

    @cached_property
    def channel_statistics(self) -> tuple[Statistic, Statistic]:
        """Mean and standard deviation of each color, averaged with the sampling weights of the
        datasets."""
        if len(self.parts) == 1:
            return self.parts[0].manifest.channel_mean, self.parts[0].manifest.channel_std
        shares = np.array(self.weights) / sum(self.weights)
        means = np.array([part.manifest.channel_mean for part in self.parts])
        squares = np.array([part.manifest.channel_std for part in self.parts]) ** 2 + means**2
        mean = shares @ means
        return _triple(mean), _triple(np.sqrt(np.maximum(shares @ squares - mean**2, 0)))

    @property
    def squares(self) -> tuple[CropPolicy, Filter] | tuple[None, None]:
        """Crop and interpolation that made the stored images square; (None, None) if the datasets
        differ."""
        ways = {(part.manifest.crop, part.manifest.interpolation) for part in self.parts}
        return ways.pop() if len(ways) == 1 else (None, None)

    def order(self, *, seed: int, global_batch_size: int) -> Line:
        """Return the sequence of samples. Ids are numbered as in a `ShardReader` over `parts`."""
        streams = self.settings.canonical_streams
        if streams > 1:
            ends = stream_ends(self.num_samples, streams)
            orders = [
                self._order(0, end - first, seed=seed, batch=global_batch_size, stream=number)
                for number, (first, end) in enumerate(pairwise(ends))
            ]
            # if block_size is the shard size, each block is a shard, so each shard is in one window
            shards = np.cumsum([0, *(shard.num_samples for shard in self.parts[0].content.shards)])
            after = shards[np.searchsorted(shards, ends[:-1])] - ends[:-1]
            return CanonicalStreams(
                tuple(
                    replace(order, first_block=first)
                    for order, first in zip(orders, after.tolist(), strict=True)
                ),
                global_batch_size,
            )
        orders = [
            self._order(number, part.num_samples, seed=seed, batch=global_batch_size)
            for number, part in enumerate(self.parts)
        ]
        if len(orders) > 1:
            return Mixture(tuple(orders), self.weights)
        chosen = self.parts[0].chosen
        return orders[0] if chosen is None else FoldOrder(orders[0], chosen)

    def shards_of(self, ranks: range, *, num_ranks: int) -> Iterator[tuple[Part, Shard]]:
        """Yield (part, shard) for each shard that the neighboring ranks `ranks` train on."""
        streams = self.settings.canonical_streams
        ends = stream_ends(self.num_samples, streams)
        first = ends[ranks.start * streams // num_ranks]
        end = ends[-(-ranks.stop * streams // num_ranks)]
        for part in self.parts:
            position = 0
            for shard in part.content.shards:
                after = position + shard.num_samples
                if shard.num_samples and (streams == 1 or (position < end and after > first)):
                    yield part, shard
                position = after

    @property
    def is_remote(self) -> bool:
        return any(shard.is_remote for part in self.parts for shard in part.content.shards)

    def node_bytes(self, num_nodes: int) -> int:
        """Return the largest number of shard bytes that a node reads in an epoch."""
        return max(
            sum(
                shard.num_bytes
                for _, shard in self.shards_of(range(node, node + 1), num_ranks=num_nodes)
            )
            for node in range(num_nodes)
        )

    def reading_in_words(self, num_nodes: int) -> str:
        own, total = self.node_bytes(num_nodes), self.node_bytes(1)
        nodes = f"{num_nodes} node{'s' * (num_nodes > 1)}"
        words = f"with {nodes}, a node reads at most {own / 1e9:,.3g} GB per epoch"
        words += f" ({own / total:.1%} of the shards)"
        if num_nodes > 1 and self.settings.canonical_streams % num_nodes:
            words += f"; set data.canonical_streams={num_nodes} to read only the node's own shards"
        return words

    def epoch_size(self, *, global_batch_size: int) -> int:
        return epoch_length(
            self.num_samples,
            global_batch_size=global_batch_size,
            last_batch=self.settings.last_batch,
        )

    def steps(self, length: str, *, global_batch_size: int) -> int:
        num_samples = self.epoch_size(global_batch_size=global_batch_size)
        return parse_length(length).steps(
            global_batch_size=global_batch_size, num_samples=num_samples
        )

    def eval_part(self) -> Part | None:
        """Return the evaluation split of the first dataset, with the class numbers of all training
        data, or None."""
        first, split = self.parts[0], self.settings.eval_split
        return None if split is None else replace(first, split=split, fold=None)

    @property
    def baselines(self) -> str:
        part = self.eval_part()
        return baselines(len(self.classes), part.content.largest_class if part else None)

    def _order(
        self, number: int, num_samples: int, *, seed: int, batch: int, stream: int | None = None
    ) -> Order:
        data, part = self.settings, self.parts[number]
        differs = [number] if number else []  # two uses of a dataset need two orders
        if stream is not None:
            differs = [data.canonical_streams, stream]
        key = int(hash64(hex_key(part.manifest.content_hash), seed, *differs) >> 1)
        length = num_samples
        if data.last_batch != "carry":
            length = self.epoch_size(global_batch_size=batch) // data.canonical_streams
        return Order(num_samples, key, data.shuffle, data.block_size, data.window_blocks, length)


@dataclass(frozen=True)
class StreamData(TrainingData):
    """Data of a stream. It has one part: the part's manifest describes the images, and the split
    has no shards."""

    urls: tuple[str, ...] = ()
    """Shard addresses and `pipe:` commands from the settings, never from a manifest."""
    evaluated: Part | None = None

    @property
    def num_samples(self) -> int:
        assert self.settings.samples_per_epoch is not None
        return self.settings.samples_per_epoch

    @cached_property
    def content_hash(self) -> str:
        return hash_of_json(["stream", self.urls, self.classes])

    @cached_property
    def pixels_hash(self) -> str:
        return hash_of_json([self.content_hash, self.image_size, *self.channel_statistics])

    def order(self, *, seed: int, global_batch_size: int) -> Line:  # noqa: ARG002
        return AsItComes(self.num_samples)

    def eval_part(self) -> Part | None:
        return self.evaluated

    def check_ranks(self, num_ranks: int) -> None:
        """Raise SettingsError if there are fewer shards than ranks."""
        if len(self.urls) < num_ranks:
            raise SettingsError(
                "data.dataset",
                f"{num_ranks} ranks need {num_ranks} shards, but the stream has {len(self.urls)}",
                "write more shards, or let ranks share shards: index them with data_prep index",
                code="mismatch",
            )

    @property
    def in_words(self) -> str:
        rows = [" ".join(f"{value:.3f}" for value in row) for row in self.channel_statistics]
        default = (
            ", ImageNet's by default"
            if None in (self.settings.channel_mean, self.settings.channel_std)
            else ""
        )
        return (
            f"a stream of {len(self.urls):,} shards: it has no shuffle over all shards and no exact"
            f" resume; an epoch has {self.num_samples:,} samples; mean / std of the colors is"
            f" {' / '.join(rows)}{default}"
        )


def load_training_data(data: DataSettings) -> TrainingData:
    if data.stream:
        return _load_stream(data)
    manifest = load_manifest(data.directory)
    _labeled(manifest, data.train_split, field="data.train_split", directory=data.dataset)
    if data.eval_split is not None:
        _labeled(manifest, data.eval_split, field="data.eval_split", directory=data.dataset)
    found = [Part(data.directory, manifest, data.train_split, fold=data.fold)]
    count = num_folds(found[0])
    if data.fold is not None and data.fold >= count:
        raise SettingsError(
            "data.fold",
            f"split {data.train_split!r} of {data.dataset} has {count} folds, so fold {data.fold}"
            " does not exist",
            f"choose a fold from 0 to {count - 1}" if count else "remove data.fold",
            code="unknown-name",
        )
    for number, other in enumerate(data.extra_datasets):
        directory = data.directory_of(other.dataset)
        also = load_manifest(directory)
        _labeled(
            also, other.split, field=f"data.extra_datasets.{number}.split", directory=other.dataset
        )
        found.append(Part(directory, also, other.split))
    _check_sizes(data, found)
    _check_names(found)
    _check_streams(data, found[0])
    weights = mixture_weights(
        [data.weight, *(other.weight for other in data.extra_datasets)],
        [part.content.num_samples for part in found],
    )
    if len(found) == 1:
        return TrainingData(data, tuple(found), weights, manifest.classes)
    classes = tuple(dict.fromkeys(name for part in found for name in part.manifest.classes))
    numbers = {name: number for number, name in enumerate(classes)}
    parts = [
        replace(part, classes=tuple(numbers[name] for name in part.manifest.classes))
        for part in found
    ]
    return TrainingData(data, tuple(parts), weights, classes)


def _load_stream(data: DataSettings) -> StreamData:
    evaluated, urls, size = None, expand_shards(data.dataset), data.image_size
    assert data.num_classes is not None and size is not None
    classes = tuple(map(str, range(data.num_classes)))
    if data.eval_dataset is not None and data.eval_split is not None:
        directory = data.directory_of(data.eval_dataset)
        of_evaluation = load_manifest(directory)
        _labeled(
            of_evaluation, data.eval_split, field="data.eval_split", directory=data.eval_dataset
        )
        evaluated, classes = Part(directory, of_evaluation, data.eval_split), of_evaluation.classes
        if len(classes) != data.num_classes:
            raise SettingsError(
                "data.num_classes",
                f"the value is {data.num_classes:,}, but {data.eval_dataset} has {len(classes):,}"
                " classes",
                f"set data.num_classes={len(classes)}",
                code="mismatch",
            )
    named = re.search(
        r"([\w.+-]+?)[-_]?\d*\.(tar|tgz)\b", next((url for url in urls if not is_command(url)), "")
    )
    manifest = Manifest(
        tool_version=__version__,
        name=f"stream of {named[1] if named else 'shards'}",
        source={"kind": "stream"},
        seed=0,
        encoding="keep",
        image_size=size,
        classes=classes,
        splits={data.train_split: Split(shards=(), class_counts=(0,) * len(classes))},
        channel_mean=data.channel_mean or IMAGENET[0],
        channel_std=data.channel_std or IMAGENET[1],
        num_read=0,
        num_written=0,
        num_rejected=0,
        rejected_sha256="",
        plan_hash="",
    )
    part = Part(Path(), manifest, data.train_split)
    return StreamData(data, (part,), (1,), classes, urls=urls, evaluated=evaluated)


def expand_shards(words: str) -> tuple[str, ...]:
    """Expand a list of shards as webdataset does: split at `::`, replace ${NAME} by the environment
    variable WDS_NAME, and expand braces."""

    def value(match: re.Match[str]) -> str:
        if (found := os.environ.get(name := f"WDS_{match[1]}")) is None:
            raise SettingsError(
                "data.dataset",
                f"${{{match[1]}}} means the variable {name}, which is not set",
                f"export {name}, or write its value",
                code="missing-value",
            )
        return found

    urls: list[str] = []
    for part in words.split("::"):
        if is_record(part):
            raise SettingsError(
                "data.dataset",
                f"{part} is only the record of a command, not the command",
                "give the command again as data.dataset='pipe:COMMAND'",
                code="missing-value",
            )
        for _ in range(10):
            part = re.sub(r"\$\{(\w+)\}", value, part)  # noqa: PLW2901
        try:
            urls += braceexpand(part)
        except ValueError:
            problem, fix = (
                f"the braces of {shown(part)} do not match",
                "write {000..146} for ranges",
            )
            raise SettingsError("data.dataset", problem, fix, code="bad-syntax") from None
    for url in urls:
        scheme = urlsplit(url).scheme
        path = Path(unquote(urlsplit(url).path) if scheme == "file" else url)
        if scheme not in _OPENED:
            raise SettingsError(
                "data.dataset",
                f"{scheme}: addresses are not supported",
                "write a path, a URL, or a command as 'pipe:COMMAND'",
                code="unsupported",
            )
        if scheme not in ("", "file") or path.is_file():
            continue
        if (path / MANIFEST_NAME).is_file():
            raise SettingsError(
                "data.dataset",
                f"{path} is an indexed dataset, not a list of shards",
                "remove data.stream; indexed datasets resume exactly",
                code="conflict",
            )
        fix = "correct the list (a range is {000..146}, not *), or create the file"
        if path.is_dir():
            fix = f"name the shards in the folder, for example {path}/{{000..146}}.tar"
        problem = f"{url or recorded(words)!r} is not a file"
        raise SettingsError("data.dataset", problem, fix, code="missing-path")
    return tuple(urls)


def check_against_data(data: TrainingData, settings: PretrainSettings) -> None:
    settings.model.check(image_size=data.image_size)
    train, schedule = settings.train, settings.schedule
    batch = train.global_batch_size
    if batch > data.num_samples:
        raise SettingsError(
            "train.global_batch_size",
            f"{batch:,} is more than the {data.num_samples:,} samples of an epoch",
            f"set at most {data.num_samples:,}, for example"
            f" {1 << (data.num_samples.bit_length() - 1)}",
            code="bad-value",
        )
    steps = data.steps(train.duration, global_batch_size=batch)
    if steps < 1:
        raise SettingsError(
            "train.duration",
            f"{train.duration!r} is shorter than one step",
            "set a longer duration",
            code="bad-value",
        )
    warmup = fit_warmup(data.steps(schedule.warmup, global_batch_size=batch), num_steps=steps)
    cooldown = data.steps(schedule.cooldown, global_batch_size=batch)
    check_cooldown(warmup, cooldown, num_steps=steps)


def check_cooldown(warmup: int, cooldown: int, *, num_steps: int, length: str = "the run") -> None:
    if warmup + cooldown > num_steps:
        asked = f"{warmup} steps of warm-up and {cooldown} of cooldown"
        problem = f"{asked} exceed the {num_steps} steps of {length}"
        fix = "set a shorter cooldown, or train longer"
        raise SettingsError("schedule.cooldown", problem, fix, code="conflict")


def fit_warmup(num_warmup_steps: int, *, num_steps: int) -> int:
    """Return the warm-up steps, or a tenth of the run if the run is not longer than the warm-up."""
    return num_warmup_steps if num_warmup_steps < num_steps else num_steps // 10


def _labeled(manifest: Manifest, split: str, *, field: str, directory: str) -> None:
    try:
        content = manifest.labeled_split(split, directory=directory)
    except DatasetError as error:
        fix = "choose another split"
        if field == "data.eval_split":
            fix = "choose another split, or set data.eval_split=null to train without evaluation"
        raise SettingsError(field, str(error).rstrip("."), fix, code=error.code) from None
    if content.num_samples == 0:
        problem = f"split {split!r} of {directory} is empty"
        raise SettingsError(field, problem, "choose another split", code="empty")


def num_folds(part: Part) -> int:
    annotation = part.content.annotations.get(FOLDS)
    return annotation.num_columns if annotation else 0


def stream_ends(num_samples: int, num_streams: int) -> list[int]:
    """Return the first sample of each canonical stream, followed by the number of samples."""
    return [num_samples * number // num_streams for number in range(num_streams + 1)]


def _check_streams(data: DataSettings, part: Part) -> None:
    num_shards = sum(shard.num_samples > 0 for shard in part.content.shards)
    if 1 < data.canonical_streams > num_shards:
        raise SettingsError(
            "data.canonical_streams",
            f"{part.directory} has {num_shards:,} shards, too few for {data.canonical_streams:,}"
            " streams",
            f"set at most {num_shards:,}, or build the dataset with a smaller samples_per_shard",
            code="bad-value",
        )


def _check_sizes(data: DataSettings, parts: Sequence[Part]) -> None:
    keeping = [part for part in parts if part.manifest.encoding == "keep"]
    if data.image_size is None and keeping:
        sized = [part.manifest.image_size for part in parts if part not in keeping]
        example = (*sized, keeping[0].manifest.image_size)[0]
        raise SettingsError(
            "data.image_size",
            f"a value is required because {keeping[0].directory} keeps the images' own sizes",
            f"set a size, for example data.image_size={example}",
            code="missing-value",
        )
    stored = {part.manifest.image_size for part in parts if part not in keeping}
    if keeping and stored - {data.image_size}:
        raise SettingsError(
            "data.image_size",
            f"other datasets have images of {min(stored)} px, so {keeping[0].directory} must be"
            f" read at {min(stored)} px, not at {data.image_size} px",
            f"set data.image_size={min(stored)}",
            code="mismatch",
        )
    first = parts[0].stored_size(data.image_size)
    for part in parts:
        if (size := part.stored_size(data.image_size)) != first:
            raise SettingsError(
                "data.extra_datasets",
                f"images have {size} px in {part.directory}, but {first} px in"
                f" {parts[0].directory}",
                "build one dataset again with the size of the other",
                code="mismatch",
            )


def _check_names(parts: Sequence[Part]) -> None:
    """Reject a mixture whose datasets have no class names and different numbers of classes."""
    sizes = {
        len(part.manifest.classes): part.directory
        for part in parts
        if part.manifest.classes == tuple(map(str, range(len(part.manifest.classes))))
    }
    if len(sizes) > 1:
        words = " and ".join(f"{path} ({size:,} classes)" for size, path in sizes.items())
        raise SettingsError(
            "data.extra_datasets",
            f"the classes of {words} have no names, so equal numbers may mean different classes",
            "index the datasets again with a classes_file",
            code="mismatch",
        )


def _triple(values: np.ndarray) -> Statistic:
    red, green, blue = values.tolist()
    return red, green, blue
