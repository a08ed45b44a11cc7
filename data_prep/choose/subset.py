"""`data_prep subset`: make a dataset of some samples of another dataset, without copying images.

The new directory has a manifest, and the index rows and paths of each shard with chosen samples.
The tars stay in place. The manifest has paths relative to the new directory, so move both datasets
or neither. Sizes and hashes in the manifest are of the complete tars. Channel mean and standard
deviation are copied from the parent, so runs on different fractions have the same inputs.

1. Choose the samples (selection.py). If the same call has finished, stop.
2. Under the lock of the new directory, write indices, paths and annotations, then the manifest.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from data_prep import __version__
from data_prep.build.exclusions import Exclusions, load_exclusions
from data_prep.build.merge import write_annotation, write_rejected
from data_prep.build.parts import begin, forget_parts, of_another, own_place
from data_prep.build.shards import write_index, write_paths
from data_prep.check.verify import stored_labels
from data_prep.choose.selection import Ids, per_class, ranking
from data_prep.errors import SettingsError, UserError
from data_prep.manifest import (
    MANIFEST_NAME,
    Manifest,
    Shard,
    Split,
    load_annotation,
    load_index,
    load_manifest,
    load_paths,
    save_manifest,
)
from data_prep.progress import ProgressLine
from data_prep.publish import hash_of_json
from data_prep.settings import Settings, nearest, read_lines


class Selection(Settings):
    """The requested samples. At most one of `fraction`, `count` and `per_class` is set. Without
    them, only `classes_file` and `exclude` select samples."""

    fraction: float | None = Field(None, gt=0, le=1)
    count: int | None = Field(None, ge=1)
    per_class: int | None = Field(None, ge=1)
    split: str = "train"
    """Split to which fraction, count or per_class applies; other splits stay complete."""
    seed: int = Field(0, ge=0)
    classes_file: str | None = None
    exclude: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_size(self) -> "Selection":
        names = ("fraction", "count", "per_class")
        sizes = [name for name in names if getattr(self, name) is not None]
        if len(sizes) > 1:
            problem, fix = f"it cannot be combined with {sizes[0]}", "choose one of them"
            raise SettingsError(sizes[1], problem, fix, code="conflict")
        if not sizes and self.classes_file is None and not self.exclude:
            fix = "give --fraction, --count, --per-class, --classes-file or --exclude"
            raise SettingsError("fraction", "no selection is given", fix, code="missing-value")
        return self


@dataclass(frozen=True)
class Chosen:
    positions: Ids
    """Positions in the parent's split, ascending."""
    labels: NDArray[np.int64]
    """For every sample of the parent's split, its label in the subset; -2 if the class is
    omitted."""
    left_out: dict[str, int]
    excluded: frozenset[str]
    """Excluded paths of samples in this split."""


@dataclass(frozen=True)
class _Parent:
    directory: Path
    manifest: Manifest
    classes: tuple[str, ...]
    """Classes of the subset, in the parent's order."""
    exclusions: Exclusions


def subset(source: Path, out: Path, selection: Selection) -> Manifest:
    manifest = load_manifest(source)
    if out.resolve() == source.resolve():
        problem, fix = f"{out} is the parent dataset", "choose another directory"
        raise UserError("out", problem, fix, code="conflict")
    manifest.split(selection.split, directory=source)
    classes = _classes(manifest, selection.classes_file)
    parent = _Parent(source, manifest, classes, load_exclusions(selection.exclude))
    description = _describe(parent, selection)
    plan_hash = hash_of_json([description, out.name])
    if existing := _existing(out, description, plan_hash, parent):
        return existing
    chosen = {name: _choose(parent, name, selection) for name in manifest.splits}
    for name, part in chosen.items():
        if not len(part.positions) and manifest.splits[name].num_samples:
            problem, fix = f"the selection leaves no sample in {name}", "choose more samples"
            raise UserError(str(source), problem, fix, code="empty")
    if listed := parent.exclusions.paths:
        found = frozenset[str]().union(*(part.excluded for part in chosen.values()))
        if not found:
            problem = f"none of the {len(listed):,} listed paths is in {source}"
            fix = "give a list that data_prep dedup wrote for this dataset"
            raise UserError("exclude", problem, fix, code="mismatch")
        description["exclude_paths"] = {"listed": len(listed), "found": len(found)}
    with own_place(out, wait=True):
        if existing := _existing(out, description, plan_hash, parent):
            return existing
        if not (out / MANIFEST_NAME).exists():
            begin(out, plan_hash, description)
        splits = {name: _write_split(parent, out, name, part) for name, part in chosen.items()}
        num_written = sum(split.num_samples for split in splits.values())
        left_out = sum((Counter(part.left_out) for part in chosen.values()), Counter[str]())
        changes = {
            "tool_version": __version__,
            "name": out.name,
            "source": description,
            "classes": classes,
            "splits": splits,
            "num_read": num_written,
            "num_written": num_written,
            "num_rejected": 0,
            "num_left_out": dict(left_out),
            "rejected_sha256": write_rejected(out, ()),
            "plan_hash": plan_hash,
            "config": {},
        }
        save_manifest(out, manifest.model_copy(update=changes))
        forget_parts(out)
    return load_manifest(out)


def _classes(parent: Manifest, file: str | None) -> tuple[str, ...]:
    if file is None:
        return parent.classes
    wanted = dict.fromkeys(read_lines("classes-file", file, spelled=True))
    known = set(parent.classes)
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        problem = f"the dataset has no class {unknown!r}, which {file} lists"
        fix = nearest(unknown, list(parent.classes))
        raise UserError("classes-file", problem, fix, code="unknown-name")
    if not wanted:
        fix = "write one class on each line"
        raise UserError("classes-file", f"{file} names no class", fix, code="empty")
    return tuple(name for name in parent.classes if name in wanted)


def _describe(parent: _Parent, selection: Selection) -> dict[str, object]:
    """Return the `source` section of the subset's manifest, which determines its bytes."""
    manifest, classes = parent.manifest, parent.classes
    names = {"fraction", "count", "per_class", "split", "seed"}
    numbers = {name: number for number, name in enumerate(manifest.classes)}
    in_tar = stored_labels(manifest)
    return {
        "kind": "subset",
        "parent": manifest.pixels_hash,
        "of": {"name": manifest.name, "source": manifest.source},
        **selection.model_dump(mode="json", include=names),
        "exclude": parent.exclusions.digest if selection.exclude else None,
        "labels": None if in_tar is None else [in_tar[numbers[name]] for name in classes],
        "classes": len(classes),
    }


def _existing(
    out: Path, description: dict[str, object], plan_hash: str, parent: _Parent
) -> Manifest | None:
    """Return the manifest of the finished subset `out`, or None if there is no manifest or the tars
    have moved. Raise UserError if `out` has another dataset."""
    if not (out / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(out)
    if manifest.plan_hash != plan_hash:
        raise of_another(out, manifest.source, description)
    splits = parent.manifest.splits.values()
    places = {shard.file for split in splits for shard in split.shards}
    tars = [shard for split in manifest.splits.values() for shard in split.shards]
    is_in_place = all(
        shard.file in places if shard.is_remote else (out / shard.file).exists() for shard in tars
    )
    return manifest if is_in_place else None


def _choose(parent: _Parent, name: str, selection: Selection) -> Chosen:
    split, known = parent.manifest.splits[name], parent.manifest.classes
    new_label = np.full(len(known) + 1, -2, np.int64)
    new_label[-1] = -1  # unlabeled stays unlabeled
    numbers = {name: number for number, name in enumerate(known)}
    new_label[[numbers[name] for name in parent.classes]] = np.arange(len(parent.classes))
    stored = [load_index(parent.directory, shard)[:, 2] for shard in split.shards]
    labels = new_label[np.concatenate([np.zeros(0, np.int64), *stored])]
    in_class = labels != -2
    keep, excluded = in_class.copy(), set[str]()
    if parent.exclusions.paths:
        is_listed = _listed(parent, split, excluded)
        keep &= ~np.array(is_listed, np.bool_)
    left_out = {"classes": int((~in_class).sum()), "excluded": int((in_class & ~keep).sum())}
    positions = np.flatnonzero(keep)
    if name == selection.split:
        positions = _sized(labels, keep, selection, parent.classes)
        left_out["not_chosen"] = int(keep.sum()) - len(positions)
    return Chosen(positions, labels, left_out, frozenset(excluded))


def _sized(
    labels: Ids, keep: NDArray[np.bool_], selection: Selection, classes: tuple[str, ...]
) -> Ids:
    if selection.per_class is not None:
        sizes = np.bincount(labels[keep & (labels >= 0)], minlength=len(classes))
        smallest = int(sizes.argmin())
        if sizes[smallest] < selection.per_class:
            num_most, split = sizes[smallest], selection.split
            problem = f"class {classes[smallest]} has only {num_most} samples in {split}"
            fix = f"choose {num_most} or fewer, or list only larger classes in --classes-file"
            raise UserError("per-class", problem, fix, code="bad-value")
        return np.sort(per_class(labels, selection.per_class, seed=selection.seed, keep=keep))
    num_kept = int(keep.sum())
    count = num_kept if selection.count is None else selection.count
    if selection.fraction is not None:
        count = round(selection.fraction * num_kept)
    if count > num_kept:
        problem = f"{selection.split} has only {num_kept:,} samples"
        raise UserError("count", problem, f"choose {num_kept} or fewer", code="bad-value")
    return np.sort(ranking(labels, seed=selection.seed, keep=keep)[:count])


def _listed(parent: _Parent, split: Split, found: set[str]) -> list[bool]:
    """Return, for every sample, True if an exclusion list has its path. Add these paths to
    `found`."""
    listed, is_listed = parent.exclusions.paths, list[bool]()
    with ProgressLine("reading paths", total=split.num_samples, unit="paths") as line:
        for shard in split.shards:
            paths = load_paths(parent.directory, shard)
            is_listed += [path in listed for path in paths]
            found |= listed.intersection(paths)
            line.advance(shard.num_samples)
    return is_listed


# ---- writing


def _write_split(parent: _Parent, out: Path, name: str, chosen: Chosen) -> Split:
    split, shards, start = parent.manifest.splits[name], list[Shard](), 0
    with ProgressLine(f"writing {name}", total=split.num_samples, unit="rows") as line:
        for shard in split.shards:
            first, last = np.searchsorted(chosen.positions, (start, start + shard.num_samples))
            rows = chosen.positions[first:last] - start
            if len(rows):
                shards.append(_write_shard(parent, out, shard, rows, chosen.labels[start + rows]))
            start += shard.num_samples
            line.advance(shard.num_samples)
    labels, num_classes = chosen.labels[chosen.positions], len(parent.classes)
    num_before, annotations = len(split.class_counts), {}
    for key, annotation in split.annotations.items():
        # with fewer classes, annotations with a column per class are dropped
        if num_classes == num_before or annotation.num_columns != num_before:
            bits = load_annotation(parent.directory, split, key)[chosen.positions]
            annotations[key] = write_annotation(out, f"{name}-{key}", bits)
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)
    return Split(shards=tuple(shards), class_counts=tuple(counts.tolist()), annotations=annotations)


def _write_shard(parent: _Parent, out: Path, shard: Shard, rows: Ids, labels: Ids) -> Shard:
    index = np.array(load_index(parent.directory, shard)[rows])
    index[:, 2] = labels
    paths = load_paths(parent.directory, shard)
    changes = {
        "num_samples": len(rows),
        "index_sha256": write_index(out, shard.name, index),
        "paths_sha256": write_paths(out, shard.name, [paths[row] for row in rows.tolist()]),
    }
    if not shard.is_remote:
        tar = (parent.directory / shard.file).resolve()
        changes["file"] = os.path.relpath(tar, out.resolve())
    return shard.model_copy(update=changes)
