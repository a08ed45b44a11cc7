"""What `verify` finds in one shard; runs in a worker process.

The tar is read as a plain tar, from its first header to its last, and walked beside the index:

1. hashes of the tar, the index and the paths;
2. every row of the index points exactly at the picture of a sample of its own, with the label that its `.cls` says;
3. a shard that was built has no other samples, and strictly ascending keys; one that is borrowed (`subset`, `index`) may have;
4. every picture of the index decodes, has the size of the manifest, and a label in range.
"""

import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.check.stored import Storage, local_tar, tar_content
from data_prep.images import Rejection, decode
from data_prep.manifest import DatasetError, Manifest, Shard, load_index, load_paths
from data_prep.remote import MissingError, RemoteError
from data_prep.tar import Run, TarError, members, runs
from data_prep.workers import Tally

BORROWED = ("subset", "index")
"""The kinds of source that copy nothing: their rows are of tars that were written elsewhere."""
MAX_LISTED = 100
"""Faults that are spelled out for one shard; the others are counted."""


@dataclass
class Faults:
    listed: list[str] = field(default_factory=list)
    num_faults: int = 0

    def add(self, *faults: str) -> None:
        self.listed += faults[: max(0, MAX_LISTED - len(self.listed))]
        self.num_faults += len(faults)

    def extend(self, other: "Faults") -> None:
        self.listed += other.listed
        self.num_faults += other.num_faults


@dataclass(frozen=True)
class Expected:
    """What the manifest says of every shard."""

    num_classes: int
    picture_size: int | None
    """Of both sides; None where pictures are kept as they came."""
    is_borrowed: bool
    stored_labels: tuple[int, ...] | None
    """What the `.cls` of each class holds; None where labels come from elsewhere."""
    is_unlabelled: bool
    """No sample of the split has a label."""

    @classmethod
    def of(cls, manifest: Manifest, *, is_unlabelled: bool) -> "Expected":
        return cls(
            num_classes=len(manifest.classes),
            picture_size=None if manifest.encoding == "keep" else manifest.image_size,
            is_borrowed=manifest.source.get("kind") in BORROWED,
            stored_labels=stored_labels(manifest),
            is_unlabelled=is_unlabelled,
        )


def stored_labels(manifest: Manifest) -> tuple[int, ...] | None:
    """What the `.cls` of each class holds: a subset of some classes numbers them anew, its tars do not; `index` keeps the numbers
    that it takes from there."""
    if manifest.source.get("kind") == "subset":
        labels = manifest.source.get("labels")
        return None if labels is None else tuple(labels)
    if manifest.source.get("kind") == "index" and manifest.source.get("label") != "cls":
        return None
    return tuple(range(len(manifest.classes)))


@dataclass
class ShardFindings:
    faults: Faults
    class_counts: NDArray[np.int64]
    num_unlabelled: int = 0


def check_shard(directory: Path, expected: Expected, storage: Storage, shard: Shard) -> ShardFindings:
    findings = ShardFindings(Faults(), np.zeros(expected.num_classes, np.int64))
    faults = findings.faults
    if not shard.is_remote and not (directory / shard.file).is_file():
        faults.add(f"{shard.file}: missing")
        return findings
    with noting(faults, directory):
        load_paths(directory, shard)
    index: NDArray[np.int64] | None = None
    with noting(faults, directory):
        index = _index(directory, shard)
        labels = index[:, 2]
        findings.num_unlabelled = int((labels == -1).sum())
        in_range = labels[(labels >= 0) & (labels < expected.num_classes)]
        findings.class_counts += np.bincount(in_range, minlength=expected.num_classes)
    with (
        noting(faults, directory),
        local_tar(directory, shard, storage=storage) as path,
        # as a local file, so that a remote one is fetched once
        tar_content(path.parent, shard.model_copy(update={"file": path.name}), storage={}) as content,
    ):
        is_same = hashlib.sha256(content).hexdigest() == shard.sha256
        if not is_same or len(content) != shard.num_bytes:
            what = f"{'size' if is_same else 'sha256'} differs from the manifest"
            faults.add(f"{shard.file}: {what} ({len(content):,} bytes, {shard.num_bytes:,} expected)")
        for fault in () if index is None else _walk(path, shard, expected, content, index):
            faults.add(fault)
    return findings


@contextmanager
def noting(faults: Faults, directory: Path) -> Iterator[None]:
    """Adds what a reader of the dataset complains of, in words for those who follow its remedy already."""
    try:
        yield
    except (DatasetError, MissingError, RemoteError) as error:
        faults.add(str(error).removeprefix(f"{directory}/").removesuffix(f"; run data_prep verify {directory}"))


def _index(directory: Path, shard: Shard) -> NDArray[np.int64]:
    index = load_index(directory, shard)
    if (np.diff(index[:, 0]) <= 0).any():
        row = int(np.flatnonzero(np.diff(index[:, 0]) <= 0)[0])
        raise DatasetError(f"{shard.index_file}: row {row + 1} does not lie behind row {row}")
    return index


def _walk(path: Path, shard: Shard, expected: Expected, content: mmap.mmap | bytes, index: NDArray[np.int64]) -> Iterator[str]:
    """One pass over the tar, beside the rows of its index."""
    rows = {offset: (number, length, label) for number, (offset, length, label) in enumerate(index.tolist())}
    num_samples, key = 0, ""
    try:
        for sample in runs(members(path, ignore_zeros=expected.is_borrowed)):
            if expected.is_borrowed and not sample.key:
                continue  # belongs to no sample
            num_samples += 1
            if not expected.is_borrowed and sample.key <= key:
                yield f"{shard.file} {sample.key}: does not come after {key}; keys ascend strictly"
            key, name = sample.key, f"{shard.file} {sample.key}"
            picture = next((member for _, member in sample.members if member.offset in rows), None)
            if picture is not None:
                Tally.add(1)
                _, length, label = rows.pop(picture.offset)
                if picture.num_bytes != length or not _is_label(label, sample, expected, content):
                    yield f"{name}: the index points elsewhere"
                if not (0 <= label < expected.num_classes or (label == -1 and expected.is_unlabelled)):
                    yield f"{name}: label {label} of {expected.num_classes} classes"
                yield from _picture_faults(name, content[picture.offset : picture.offset + picture.num_bytes], expected)
            elif not expected.is_borrowed:  # of those, only the chosen ones have rows
                yield f"{name}: the index points elsewhere"
    except (TarError, OSError) as error:
        yield f"{shard.file}: not readable after {num_samples} samples ({error})"
    else:
        yield from (f"{shard.file}: row {number} of {shard.index_file} points at no picture" for number, _, _ in rows.values())
    if not expected.is_borrowed and num_samples != shard.num_samples:
        yield f"{shard.file}: {num_samples} samples, {shard.num_samples} expected"


def _is_label(label: int, sample: Run, expected: Expected, content: mmap.mmap | bytes) -> bool:
    """Whether the `.cls` of the sample holds what this label is stored as."""
    if expected.stored_labels is None:
        return True
    member = next((member for suffix, member in sample.members if suffix.lower() == "cls"), None)
    try:
        found = int(content[member.offset : member.offset + member.num_bytes]) if member else None
    except ValueError:
        found = None
    if found is None and expected.is_borrowed:
        return True  # in tars of others, members that belong to no sample may stand between a picture and its `.cls`
    return found == (expected.stored_labels[label] if 0 <= label < len(expected.stored_labels) else label)


def _picture_faults(name: str, data: bytes, expected: Expected) -> Iterator[str]:
    try:
        image, _ = decode(data)
    except Rejection as rejection:
        yield f"{name}: {rejection}"
        return
    size = expected.picture_size
    if size is not None and image.size != (size, size):
        yield f"{name}: {image.size} pixels, {(size, size)} expected"
