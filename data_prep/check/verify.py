"""`data_prep verify`: read every tar and decode every image, then compare the dataset with its
manifest and indices.

Nothing is changed. Damage is a fault; an unknown file is a note. Worker processes read each tar
from its first header to its last, together with the rows of its index, and check:

1. the hashes of the tar, the index and the paths match the manifest;
2. every row of the index points at the image of its own sample and has the label of its `.cls`;
3. every sample of a shard from `build` has a row in the index, and the keys ascend;
4. every image of the index decodes, and has the manifest's size and a label in range.
"""

import hashlib
import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.check.stored import each_shard, local_tar, tar_content
from data_prep.clients import MissingError
from data_prep.images import Rejection, decode
from data_prep.manifest import (
    PARTS,
    WIDS_NAME,
    DatasetError,
    Manifest,
    Shard,
    Split,
    load_annotation,
    load_index,
    load_manifest,
    load_paths,
    load_rejected,
    wids_index,
)
from data_prep.publish import TEMPORARY_PREFIX
from data_prep.remote import RemoteError, Storage
from data_prep.tar import Run, TarError, members, runs

BORROWED = ("subset", "index")
"""Source kinds that index existing tars instead of writing their own."""
MAX_LISTED = 100
"""Number of faults of one shard that are listed. Further faults are only counted."""


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


@dataclass
class ShardFindings:
    faults: Faults
    class_counts: NDArray[np.int64]
    num_unlabeled: int = 0


@dataclass(frozen=True)
class Verification:
    manifest: Manifest
    faults: list[str]
    """At most MAX_LISTED descriptions for each shard."""
    num_faults: int
    notes: list[str]


@dataclass(frozen=True)
class _Expected:
    directory: Path
    num_classes: int
    is_labeled: bool
    in_tar: tuple[int, ...] | None
    size: tuple[int, int] | None
    is_borrowed: bool
    storage: Storage


def verify(
    directory: Path, *, num_workers: int = 1, storage: Storage | None = None
) -> Verification:
    """Return every difference between the dataset's files and its manifest."""
    manifest, faults = load_manifest(directory), Faults()
    faults.add(*_manifest_faults(manifest))
    with _noting(faults, directory):
        load_rejected(directory, manifest)
    for name, split in manifest.splits.items():
        expected = _Expected(
            directory=directory,
            num_classes=len(manifest.classes),
            is_labeled=any(split.class_counts),
            in_tar=stored_labels(manifest),
            size=None if manifest.encoding == "keep" else (manifest.image_size,) * 2,
            is_borrowed=manifest.source.get("kind") in BORROWED,
            storage=storage or {},
        )
        check, title = partial(check_shard, expected), f"verifying {name}"
        found = each_shard(check, split.shards, title=title, num_workers=num_workers)
        faults.extend(_split_faults(expected, name, split, found))
        of_wids = directory / f"{name}-{WIDS_NAME}"
        if of_wids.exists() and of_wids.read_bytes() != wids_index(manifest.name, split):
            faults.add(f"{of_wids.name}: does not list the shards of the manifest; remove it")
    notes = list(_stray_files(directory, manifest))
    return Verification(manifest, faults.listed, faults.num_faults, notes)


def _manifest_faults(manifest: Manifest) -> Iterator[str]:
    read, written, rejected = manifest.num_read, manifest.num_written, manifest.num_rejected
    if read != written + rejected:
        yield f"manifest: {read} inputs read, but {written} written + {rejected} rejected"
    num_in_splits = sum(split.num_samples for split in manifest.splits.values())
    if written != num_in_splits:
        yield f"manifest: {written} samples written, but {num_in_splits} in its splits"
    names = Counter(shard.name for split in manifest.splits.values() for shard in split.shards)
    for name, count in names.items():
        if count > 1:
            yield f"manifest: {count} shards have the name {name}"
    if len(set(manifest.classes)) != len(manifest.classes):
        yield "manifest: the class list repeats a class"


def _split_faults(
    expected: _Expected, name: str, split: Split, found: Iterator[ShardFindings]
) -> Faults:
    faults = Faults()
    counts, num_unlabeled = np.zeros(expected.num_classes, np.int64), 0
    for findings in found:
        faults.extend(findings.faults)
        counts += findings.class_counts
        num_unlabeled += findings.num_unlabeled
    if tuple(counts.tolist()) != split.class_counts:
        faults.add(f"split {name}: the class counts of its shards differ from the manifest")
    if num_unlabeled and sum(split.class_counts):
        faults.add(f"split {name}: {num_unlabeled} samples have no label, but others have one")
    for key in split.annotations:
        with _noting(faults, expected.directory):
            load_annotation(expected.directory, split, key)
    return faults


def _stray_files(directory: Path, manifest: Manifest) -> Iterator[str]:
    known = manifest.file_hashes()
    for path in sorted(directory.iterdir()):
        if path.name.startswith(TEMPORARY_PREFIX) or path.name == PARTS:
            yield f"{path.name}: left by an unfinished command; delete it if no command is running"
        elif path.suffix in (".tar", ".npy", ".paths") and path.name not in known:
            yield f"{path.name}: it is not in the manifest"


# ---- one shard, in a worker process


def check_shard(expected: _Expected, shard: Shard) -> ShardFindings:
    directory, num_classes = expected.directory, expected.num_classes
    findings = ShardFindings(Faults(), np.zeros(num_classes, np.int64))
    faults = findings.faults
    if not shard.is_remote and not (directory / shard.file).is_file():
        faults.add(f"{shard.file}: it is missing")
        return findings
    with _noting(faults, directory):
        load_paths(directory, shard)
    index: NDArray[np.int64] | None = None
    with _noting(faults, directory):
        index = _index(directory, shard)
        labels = index[:, 2]
        findings.num_unlabeled = int((labels == -1).sum())
        valid = labels[(labels >= 0) & (labels < num_classes)]
        findings.class_counts += np.bincount(valid, minlength=num_classes)
    with (
        _noting(faults, directory),
        local_tar(directory, shard, storage=expected.storage) as path,
        # from `path`, so a remote tar is fetched once
        tar_content(
            path.parent, shard.model_copy(update={"file": path.name}), storage={}
        ) as content,
    ):
        is_same = hashlib.sha256(content).hexdigest() == shard.sha256
        if not is_same or len(content) != shard.num_bytes:
            what = f"{'size' if is_same else 'sha256'} differs from the manifest"
            sizes = f"{len(content):,} bytes, {shard.num_bytes:,} expected"
            faults.add(f"{shard.file}: {what} ({sizes})")
        if index is not None:
            for fault in _walk(expected, path, shard, content, index):
                faults.add(fault)
    return findings


@contextmanager
def _noting(faults: Faults, directory: Path) -> Iterator[None]:
    try:
        yield
    except (DatasetError, MissingError, RemoteError) as error:
        faults.add(f"{error.field.removeprefix(f'{directory}/')}: {error.problem}")


def stored_labels(manifest: Manifest) -> tuple[int, ...] | None:
    """Return, for each class, the number in the tars' `.cls` members. A subset renumbers classes,
    but its tars keep the old numbers. Return None if the tars have no numeric `.cls`."""
    kind = manifest.source.get("kind")
    if kind == "subset":
        labels = manifest.source.get("labels")
        return None if labels is None else tuple(labels)
    if kind == "index" and manifest.source.get("label") != "cls":
        return None
    return tuple(range(len(manifest.classes)))


def _index(directory: Path, shard: Shard) -> NDArray[np.int64]:
    index = load_index(directory, shard)
    wrong = np.flatnonzero(np.diff(index[:, 0]) <= 0)
    if len(wrong):
        problem = f"the offset does not increase from row {wrong[0]} to {wrong[0] + 1}"
        raise DatasetError(shard.index_file, problem, code="damaged")
    return index


def _walk(
    expected: _Expected,
    path: Path,
    shard: Shard,
    content: mmap.mmap | bytes,
    index: NDArray[np.int64],
) -> Iterator[str]:
    is_borrowed, least = expected.is_borrowed, 0 if expected.is_labeled else -1
    rows = {
        offset: (number, length, label)
        for number, (offset, length, label) in enumerate(index.tolist())
    }
    num_samples, key = 0, ""
    try:
        for sample in runs(members(path)):
            if is_borrowed and not sample.key:
                continue  # belongs to no sample
            num_samples += 1
            if not is_borrowed and sample.key <= key:
                yield f"{shard.file} {sample.key}: is not after {key}; keys must ascend"
            key, name = sample.key, f"{shard.file} {sample.key}"
            image = next((member for _, member in sample.members if member.offset in rows), None)
            if image is not None:
                _, length, label = rows.pop(image.offset)
                if image.num_bytes != length or not _is_label(expected, label, sample, content):
                    yield f"{name}: the index does not point at this image"
                if not least <= label < expected.num_classes:
                    yield f"{name}: label {label} is not one of {expected.num_classes} classes"
                data = content[image.offset : image.offset + image.num_bytes]
                yield from _image_faults(name, data, expected.size)
            elif not is_borrowed:  # only chosen samples of a borrowed tar have rows
                yield f"{name}: the index does not point at this image"
    except (TarError, OSError) as error:
        yield f"{shard.file}: not readable after {num_samples} samples ({error})"
    else:
        for number, _, _ in rows.values():
            yield f"{shard.file}: row {number} of {shard.index_file} points at no image"
    if not is_borrowed and num_samples != shard.num_samples:
        yield f"{shard.file}: {num_samples} samples, {shard.num_samples} expected"


def _is_label(expected: _Expected, label: int, sample: Run, content: mmap.mmap | bytes) -> bool:
    """Return True if the sample's `.cls` has this label, or if `.cls` cannot be compared."""
    in_tar = expected.in_tar
    if in_tar is None:
        return True
    member = next((member for suffix, member in sample.members if suffix.lower() == "cls"), None)
    try:
        found = int(content[member.offset : member.offset + member.num_bytes]) if member else None
    except ValueError:
        found = None
    if found is None and expected.is_borrowed:
        return True  # other members may be between an image and its `.cls`
    return found == (in_tar[label] if 0 <= label < len(in_tar) else label)


def _image_faults(name: str, data: bytes, size: tuple[int, int] | None) -> Iterator[str]:
    try:
        image, _ = decode(data)
    except Rejection as rejection:
        yield f"{name}: {rejection}"
        return
    if size is not None and image.size != size:
        yield f"{name}: {image.size} pixels, {size} expected"
