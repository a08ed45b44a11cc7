"""Writes a dataset of rows of another's shards: indices, paths and annotations of the chosen samples, and a manifest, written last,
that names the tars where they are, relative to the new directory.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep import __version__
from data_prep.build.merge import write_annotation, write_rejected
from data_prep.build.shards import write_index, write_paths
from data_prep.choose.selection import Ids
from data_prep.manifest import (
    Annotation,
    Manifest,
    Shard,
    Split,
    load_annotation,
    load_index,
    load_manifest,
    load_paths,
    save_manifest,
)
from data_prep.progress import progress


@dataclass(frozen=True)
class Chosen:
    """The samples of one split."""

    positions: Ids
    """In the parent's split, ascending."""
    labels: NDArray[np.int64]
    """Of every sample of the parent's split, numbered as in the subset; -2 for classes that it does not have."""
    left_out: dict[str, int]
    excluded: frozenset[str]
    """The listed paths that the split has, of whatever class."""


def write_dataset(
    source: Path,
    out: Path,
    fresh: Path,
    parent: Manifest,
    chosen: dict[str, Chosen],
    classes: tuple[str, ...],
    description: dict[str, object],
    plan_hash: str,
) -> Manifest:
    splits = {
        name: _write_split(source, out, fresh, split, chosen[name], num_classes=len(classes), name=name)
        for name, split in parent.splits.items()
    }
    num_written = sum(split.num_samples for split in splits.values())
    left_out: dict[str, int] = {}
    for part in chosen.values():
        for reason, count in part.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    manifest = parent.model_copy(
        update={
            "tool_version": __version__,
            "name": out.name,
            "source": description,
            "classes": classes,
            "splits": splits,
            "num_read": num_written,
            "num_written": num_written,
            "num_rejected": 0,
            "num_left_out": {reason: count for reason, count in left_out.items() if count},
            "rejected_sha256": write_rejected(fresh, ()),
            "plan_hash": plan_hash,
        }
    )
    save_manifest(fresh, manifest)
    return load_manifest(fresh)


def _write_split(
    source: Path, out: Path, fresh: Path, split: Split, chosen: Chosen, *, num_classes: int, name: str
) -> Split:
    shards, start = [], 0
    with progress(f"writing {name}", total=split.num_samples, unit="rows") as line:
        for shard in split.shards:
            first, last = np.searchsorted(chosen.positions, (start, start + shard.num_samples))
            rows = chosen.positions[first:last] - start
            if len(rows):
                shards.append(_write_shard(source, out, fresh, shard, rows, chosen.labels[start + rows]))
            start += shard.num_samples
            line.advance(shard.num_samples)
    labels = chosen.labels[chosen.positions]
    return Split(
        shards=tuple(shards),
        class_counts=tuple(np.bincount(labels[labels >= 0], minlength=num_classes).tolist()),
        annotations=_write_annotations(source, fresh, split, chosen, num_classes=num_classes, name=name),
    )


def _write_shard(source: Path, out: Path, fresh: Path, shard: Shard, rows: Ids, labels: Ids) -> Shard:
    index = np.array(load_index(source, shard)[rows])
    index[:, 2] = labels
    paths = load_paths(source, shard)
    file = shard.file
    if not shard.is_remote:
        file = os.path.relpath((source / file).resolve(), out.resolve())
    return shard.model_copy(
        update={
            "file": file,
            "num_samples": len(rows),
            "index_sha256": write_index(fresh, shard.name, index),
            "paths_sha256": write_paths(fresh, shard.name, [paths[row] for row in rows.tolist()]),
        }
    )


def _write_annotations(
    source: Path, fresh: Path, split: Split, chosen: Chosen, *, num_classes: int, name: str
) -> dict[str, Annotation]:
    """The chosen rows. With fewer classes, annotations as wide as the parent's class list go: their columns are its classes."""
    num_before = len(split.class_counts)
    kept = {
        key: load_annotation(source, split, key)[chosen.positions]
        for key, annotation in split.annotations.items()
        if num_classes == num_before or annotation.num_columns != num_before
    }
    return {key: write_annotation(fresh, f"{name}-{key}", bits) for key, bits in kept.items()}
