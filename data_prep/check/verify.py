"""`data_prep verify`: reads a dataset the slow way (plain tar, full decode) and holds it against its manifest and indices.

Nothing is mended, and nothing of the dataset is changed. What is wrong is a fault; what merely lies about is a note.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data_prep.check.shard_check import Expected, Faults, ShardFindings, check_shard, noting
from data_prep.check.stored import Storage, each_shard, known_files
from data_prep.manifest import PARTS, Manifest, Split, load_annotation, load_manifest, load_rejected
from data_prep.publish import TEMPORARY_PREFIX


@dataclass(frozen=True)
class Verification:
    manifest: Manifest
    faults: list[str]
    """One line each; of a shard with very many, the first."""
    num_faults: int
    notes: list[str]


def verify(directory: Path, *, num_workers: int = 1, storage: Storage | None = None) -> Verification:
    """Everything that is not as the manifest says; without faults the dataset is what it claims to be."""
    manifest = load_manifest(directory)
    faults = Faults()
    faults.add(*_manifest_faults(manifest))
    with noting(faults, directory):
        load_rejected(directory, manifest)
    for name, split in manifest.splits.items():
        expected = Expected.of(manifest, is_unlabelled=sum(split.class_counts) == 0)
        check = partial(check_shard, directory, expected, storage or {})
        found = each_shard(check, split.shards, title=f"verifying {name}", num_workers=num_workers)
        faults.extend(_split_faults(directory, name, split, found, num_classes=len(manifest.classes)))
    return Verification(manifest, faults.listed, faults.num_faults, list(_stray_files(directory, manifest)))


def _manifest_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.num_read != manifest.num_written + manifest.num_rejected:
        yield f"manifest: {manifest.num_read} read, but {manifest.num_written} written + {manifest.num_rejected} rejected"
    num_in_splits = sum(split.num_samples for split in manifest.splits.values())
    if manifest.num_written != num_in_splits:
        yield f"manifest: {manifest.num_written} written, but its splits have {num_in_splits} samples"
    names = Counter(shard.name for split in manifest.splits.values() for shard in split.shards)
    yield from (f"manifest: {count} shards are called {name}" for name, count in names.items() if count > 1)
    if len(set(manifest.classes)) != len(manifest.classes):
        yield "manifest: a class stands twice in the class list"


def _split_faults(directory: Path, name: str, split: Split, found: Iterator[ShardFindings], *, num_classes: int) -> Faults:
    faults = Faults()
    counts, num_unlabelled = np.zeros(num_classes, np.int64), 0
    for findings in found:
        faults.extend(findings.faults)
        counts += findings.class_counts
        num_unlabelled += findings.num_unlabelled
    if tuple(counts.tolist()) != split.class_counts:
        faults.add(f"split {name}: the class counts of the shards are not those of the manifest")
    if num_unlabelled and sum(split.class_counts):
        faults.add(f"split {name}: {num_unlabelled} samples have no label, others have; all or none may")
    for key in split.annotations:
        with noting(faults, directory):
            load_annotation(directory, split, key)
    return faults


def _stray_files(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What no manifest speaks of: left by a killed run, or put there by somebody."""
    known = known_files(manifest)
    for path in sorted(directory.iterdir()):
        if path.name.startswith(TEMPORARY_PREFIX) or path.name == PARTS:
            yield f"{path.name}: left by a run that did not end; once none is at work, it may be deleted"
        elif path.suffix in (".tar", ".npy", ".paths") and path.name not in known:
            yield f"{path.name}: not in the manifest"
