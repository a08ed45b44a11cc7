"""`data_prep verify`: reads a dataset the slow way (plain tar, full decode) and holds it against
its manifest and indices.

Nothing is mended, and nothing of the dataset is changed. What is wrong is a fault; what merely lies
about is a note. In worker processes each tar is read as a plain tar, from its first header to its
last, and walked beside the index:

1. hashes of the tar, the index and the paths;
2. every row of the index points exactly at the picture of a sample of its own, with the label that
   its `.cls` says;
3. a shard that was built has no other samples, and strictly ascending keys; one that is borrowed
   (`subset`, `index`) may have;
4. every picture of the index decodes, has the size of the manifest, and a label in range.
"""

import hashlib
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.build.merge import WIDS_NAME, wids_index
from data_prep.check.stored import each_shard, known_files, local_tar, tar_content
from data_prep.images import Rejection, decode
from data_prep.manifest import (
    PARTS,
    DatasetError,
    Manifest,
    Shard,
    Split,
    load_annotation,
    load_index,
    load_manifest,
    load_paths,
    load_rejected,
)
from data_prep.publish import TEMPORARY_PREFIX
from data_prep.remote import MissingError, RemoteError, Storage
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


@dataclass
class ShardFindings:
    faults: Faults
    class_counts: NDArray[np.int64]
    num_unlabelled: int = 0


@dataclass(frozen=True)
class Verification:
    manifest: Manifest
    faults: list[str]
    """One line each; of a shard with very many, the first."""
    num_faults: int
    notes: list[str]


def verify(
    directory: Path, *, num_workers: int = 1, storage: Storage | None = None
) -> Verification:
    """Everything that is not as the manifest says; without faults the dataset is what it claims to
    be."""
    manifest = load_manifest(directory)
    faults = Faults()
    faults.add(*_manifest_faults(manifest))
    with noting(faults, directory):
        load_rejected(directory, manifest)
    for name, split in manifest.splits.items():
        alone = manifest.model_copy(
            update={"splits": {name: split.model_copy(update={"shards": ()})}}
        )
        check = partial(check_shard, directory, alone, storage or {})
        found = each_shard(check, split.shards, title=f"verifying {name}", num_workers=num_workers)
        faults.extend(
            _split_faults(directory, name, split, found, num_classes=len(manifest.classes))
        )
        of_wids = directory / f"{name}-{WIDS_NAME}"
        if of_wids.exists() and of_wids.read_bytes() != wids_index(manifest.name, split):
            faults.add(
                f"{of_wids.name}: lists other shards than the manifest; remove it, only the package"
                " wids reads it"
            )
    return Verification(
        manifest, faults.listed, faults.num_faults, list(_stray_files(directory, manifest))
    )


def _manifest_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.num_read != manifest.num_written + manifest.num_rejected:
        yield (
            f"manifest: {manifest.num_read} read, but {manifest.num_written} written +"
            f" {manifest.num_rejected} rejected"
        )
    num_in_splits = sum(split.num_samples for split in manifest.splits.values())
    if manifest.num_written != num_in_splits:
        yield (
            f"manifest: {manifest.num_written} written, but its splits have {num_in_splits} samples"
        )
    names = Counter(shard.name for split in manifest.splits.values() for shard in split.shards)
    yield from (
        f"manifest: {count} shards are called {name}" for name, count in names.items() if count > 1
    )
    if len(set(manifest.classes)) != len(manifest.classes):
        yield "manifest: a class stands twice in the class list"


def _split_faults(
    directory: Path, name: str, split: Split, found: Iterator[ShardFindings], *, num_classes: int
) -> Faults:
    faults = Faults()
    counts, num_unlabelled = np.zeros(num_classes, np.int64), 0
    for findings in found:
        faults.extend(findings.faults)
        counts += findings.class_counts
        num_unlabelled += findings.num_unlabelled
    if tuple(counts.tolist()) != split.class_counts:
        faults.add(f"split {name}: the class counts of the shards are not those of the manifest")
    if num_unlabelled and sum(split.class_counts):
        faults.add(
            f"split {name}: {num_unlabelled} samples have no label, others have; all or none may"
        )
    for key in split.annotations:
        with noting(faults, directory):
            load_annotation(directory, split, key)
    return faults


def _stray_files(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What no manifest speaks of: left by a killed run, or put there by somebody."""
    known = known_files(manifest)
    for path in sorted(directory.iterdir()):
        if path.name.startswith(TEMPORARY_PREFIX) or path.name == PARTS:
            yield (
                f"{path.name}: left by a run that did not end; once none is at work, it may be"
                " deleted"
            )
        elif path.suffix in (".tar", ".npy", ".paths") and path.name not in known:
            yield f"{path.name}: not in the manifest"


# ---- one shard, in a worker process
# -------------------------------------------------------------------------------


def check_shard(
    directory: Path, manifest: Manifest, storage: Storage, shard: Shard
) -> ShardFindings:
    """`manifest`: with the shard's split alone."""
    num_classes = len(manifest.classes)
    findings = ShardFindings(Faults(), np.zeros(num_classes, np.int64))
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
        findings.class_counts += np.bincount(
            labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes
        )
    with (
        noting(faults, directory),
        local_tar(directory, shard, storage=storage) as path,
        # as a local file, so that a remote one is fetched once
        tar_content(
            path.parent, shard.model_copy(update={"file": path.name}), storage={}
        ) as content,
    ):
        is_same = hashlib.sha256(content).hexdigest() == shard.sha256
        if not is_same or len(content) != shard.num_bytes:
            what = f"{'size' if is_same else 'sha256'} differs from the manifest"
            faults.add(
                f"{shard.file}: {what} ({len(content):,} bytes, {shard.num_bytes:,} expected)"
            )
        for fault in () if index is None else _walk(path, shard, manifest, content, index):
            faults.add(fault)
    return findings


@contextmanager
def noting(faults: Faults, directory: Path) -> Iterator[None]:
    """Adds what a reader of the dataset complains of, in words for those who follow its remedy
    already."""
    try:
        yield
    except (DatasetError, MissingError, RemoteError) as error:
        faults.add(
            str(error)
            .removeprefix(f"{directory}/")
            .removesuffix(f"; run data_prep verify {directory}")
        )


def stored_labels(manifest: Manifest) -> tuple[int, ...] | None:
    """What the `.cls` of each class holds: a subset of some classes numbers them anew, its tars do
    not; `index` keeps the numbers that it takes from there."""
    if manifest.source.get("kind") == "subset":
        labels = manifest.source.get("labels")
        return None if labels is None else tuple(labels)
    if manifest.source.get("kind") == "index" and manifest.source.get("label") != "cls":
        return None
    return tuple(range(len(manifest.classes)))


def _index(directory: Path, shard: Shard) -> NDArray[np.int64]:
    index = load_index(directory, shard)
    if (np.diff(index[:, 0]) <= 0).any():
        row = int(np.flatnonzero(np.diff(index[:, 0]) <= 0)[0])
        raise DatasetError(f"{shard.index_file}: row {row + 1} does not lie behind row {row}")
    return index


def _walk(
    path: Path,
    shard: Shard,
    manifest: Manifest,
    content: mmap.mmap | bytes,
    index: NDArray[np.int64],
) -> Iterator[str]:
    """One pass over the tar, beside the rows of its index."""
    num_classes, (split,) = len(manifest.classes), manifest.splits.values()
    is_borrowed, least = (
        manifest.source.get("kind") in BORROWED,
        0 if any(split.class_counts) else -1,
    )
    in_tar, size = (
        stored_labels(manifest),
        None if manifest.encoding == "keep" else (manifest.image_size, manifest.image_size),
    )
    rows = {
        offset: (number, length, label)
        for number, (offset, length, label) in enumerate(index.tolist())
    }
    num_samples, key = 0, ""
    try:
        for sample in runs(members(path, ignore_zeros=is_borrowed)):
            if is_borrowed and not sample.key:
                continue  # belongs to no sample
            num_samples += 1
            if not is_borrowed and sample.key <= key:
                yield f"{shard.file} {sample.key}: does not come after {key}; keys ascend strictly"
            key, name = sample.key, f"{shard.file} {sample.key}"
            picture = next((member for _, member in sample.members if member.offset in rows), None)
            if picture is not None:
                Tally.add(1)
                _, length, label = rows.pop(picture.offset)
                if picture.num_bytes != length or not _is_label(
                    label, sample, in_tar, content, is_borrowed=is_borrowed
                ):
                    yield f"{name}: the index points elsewhere"
                if not least <= label < num_classes:
                    yield f"{name}: label {label} of {num_classes} classes"
                yield from _picture_faults(
                    name, content[picture.offset : picture.offset + picture.num_bytes], size
                )
            elif not is_borrowed:  # of those, only the chosen ones have rows
                yield f"{name}: the index points elsewhere"
    except (TarError, OSError) as error:
        yield f"{shard.file}: not readable after {num_samples} samples ({error})"
    else:
        yield from (
            f"{shard.file}: row {number} of {shard.index_file} points at no picture"
            for number, _, _ in rows.values()
        )
    if not is_borrowed and num_samples != shard.num_samples:
        yield f"{shard.file}: {num_samples} samples, {shard.num_samples} expected"


def _is_label(
    label: int,
    sample: Run,
    in_tar: Sequence[int] | None,
    content: mmap.mmap | bytes,
    *,
    is_borrowed: bool,
) -> bool:
    """Whether the `.cls` of the sample holds what this label is stored as."""
    if in_tar is None:
        return True
    member = next((member for suffix, member in sample.members if suffix.lower() == "cls"), None)
    try:
        found = int(content[member.offset : member.offset + member.num_bytes]) if member else None
    except ValueError:
        found = None
    if found is None and is_borrowed:
        # in tars of others, members that belong to no sample may stand between a picture and its
        # `.cls`
        return True
    return found == (in_tar[label] if 0 <= label < len(in_tar) else label)


def _picture_faults(name: str, data: bytes, size: tuple[int, int] | None) -> Iterator[str]:
    try:
        image, _ = decode(data)
    except Rejection as rejection:
        yield f"{name}: {rejection}"
        return
    if size is not None and image.size != size:
        yield f"{name}: {image.size} pixels, {size} expected"
