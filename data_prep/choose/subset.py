"""`data_prep subset`: some samples of a dataset as a dataset of its own, without a copy of a single
picture.

The new directory holds a manifest and, for each shard with chosen samples, the index rows and the
paths of those; the tars stay where they are, named relative to the new directory (so move both or
neither). Size and sha256 of a tar are of the whole file. Channel mean and standard deviation are
those of the parent: runs on different fractions then see the same inputs.

Steps, under the lock of the new directory's parent:

1. choose the samples (selection.py); the same call again finds its own plan here, and is done;
2. write indices, paths and annotations into a temporary directory, the manifest last;
3. rename it (publish.py).
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from data_prep import __version__
from data_prep.build.destination import Destination, hand_over, occupied
from data_prep.build.exclusions import Exclusions, load_exclusions
from data_prep.build.merge import write_annotation, write_rejected
from data_prep.build.parts import forget_parts, own_place
from data_prep.build.shards import write_index, write_paths
from data_prep.check.stored import known_files
from data_prep.check.verify import stored_labels
from data_prep.choose.selection import Ids, per_class, ranking
from data_prep.errors import UserError
from data_prep.manifest import (
    MANIFEST_NAME,
    PARTS,
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
from data_prep.publish import LOCK, TEMPORARY_PREFIX, atomic_directory, hash_of_json, sole_maker
from data_prep.remote import shown
from data_prep.settings import Settings, nearest, read_lines


class Selection(Settings):
    """What is asked for; of `fraction`, `count` and `per_class` at most one, none takes all that is
    not left out."""

    fraction: float | None = Field(None, gt=0, le=1)
    count: int | None = Field(None, ge=1)
    per_class: int | None = Field(None, ge=1)
    split: str = "train"
    """The split that the size is of; others are taken whole."""
    seed: int = Field(0, ge=0)
    classes_file: str | None = None
    exclude: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_size(self) -> "Selection":
        sizes = [
            name for name in ("fraction", "count", "per_class") if getattr(self, name) is not None
        ]
        if len(sizes) > 1:
            raise ValueError(f"{sizes[1]}: {sizes[0]} is given, too; ask for one of them")
        if not sizes and self.classes_file is None and not self.exclude:
            raise ValueError(
                "fraction: nothing is asked for; give --fraction, --count, --per-class or what to"
                " leave out"
            )
        return self


@dataclass(frozen=True)
class Chosen:
    """The samples of one split."""

    positions: Ids
    """In the parent's split, ascending."""
    labels: NDArray[np.int64]
    """Of every sample of the parent's split, numbered as in the subset; -2 for classes that it does
    not have."""
    left_out: dict[str, int]
    excluded: frozenset[str]
    """The listed paths that the split has, of whatever class."""


def subset_to(source: Path, place: Destination, selection: Selection) -> Manifest:
    """The same in a directory, or in a store: there it is made in `work`, then uploaded, the
    manifest last."""
    if not place.is_remote:
        return subset(source, Path(place.out), selection)
    for shard in [
        shard
        for split in load_manifest(source).splits.values()
        for shard in split.shards
        if not shard.is_remote
    ][:1]:
        raise UserError(
            f"out: {shown(place.out)} is a store, and {source / shard.file} lies on this disk,"
            " where its readers may not find it; choose from a dataset whose shards are in a"
            " store, or name a directory"
        )
    with own_place(place.directory), occupied(place):
        made, in_store = place.directory / PARTS / place.last_name, place.directory / MANIFEST_NAME
        manifest = subset(source, made, selection)
        if in_store.exists():
            finished = load_manifest(place.directory)
            in_store.unlink()
            if finished.plan_hash != manifest.plan_hash:
                forget_parts(place.directory)
                raise UserError(
                    f"out: {shown(place.out)} holds another dataset ({finished.name}); name another"
                    " place"
                )
        hand_over(place, made)
        forget_parts(place.directory)
    return manifest


def subset(source: Path, out: Path, selection: Selection) -> Manifest:
    """Publishes the dataset `out`; safe to call again."""
    parent = load_manifest(source)
    if out.resolve() == source.resolve():
        raise UserError(
            f"out: {out} is the dataset that the samples are chosen from; name another directory"
        )
    parent.split(selection.split, directory=source)
    classes, exclusions = (
        _classes(parent, selection.classes_file),
        load_exclusions(selection.exclude),
    )
    description = _describe(parent, selection, classes, exclusions)
    plan_hash = hash_of_json([description, out.name])
    with sole_maker(out):
        existing = _existing(out, plan_hash, parent)
        if existing is not None:
            return existing
        chosen = {
            name: _choose(source, parent, name, selection, classes, exclusions)
            for name in parent.splits
        }
        for name, part in chosen.items():
            if not len(part.positions) and parent.splits[name].num_samples:
                raise UserError(
                    f"{source}: no sample of {name} is left; ask for more, or leave out less"
                )
        if exclusions.paths:
            found = frozenset[str]().union(*(part.excluded for part in chosen.values()))
            if not found:
                raise UserError(
                    f"exclude: {', '.join(selection.exclude)}: none of {len(exclusions.paths):,}"
                    f" paths is in {source}; name a list that data_prep dedup wrote of this dataset"
                )
            description["exclude_paths"] = {"listed": len(exclusions.paths), "found": len(found)}
        left_out = sum((Counter(part.left_out) for part in chosen.values()), Counter[str]())
        with atomic_directory(out) as fresh:
            splits = {
                name: _write_split(
                    _Place(source, out, fresh), name, split, chosen[name], num_classes=len(classes)
                )
                for name, split in parent.splits.items()
            }
            num_written = sum(split.num_samples for split in splits.values())
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
                "rejected_sha256": write_rejected(fresh, ()),
                "plan_hash": plan_hash,
                "config": {},
            }
            save_manifest(fresh, parent.model_copy(update=changes))
            return load_manifest(fresh)


def _classes(parent: Manifest, file: str | None) -> tuple[str, ...]:
    """The classes of the subset, in the parent's order."""
    if file is None:
        return parent.classes
    wanted = read_lines("classes-file", file, spelled=True)
    known = set(parent.classes)
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise UserError(
            f"classes-file: {file} names {unknown!r}, which the dataset lacks;"
            f" {nearest(unknown, list(parent.classes))}"
        )
    if not wanted:
        raise UserError(f"classes-file: {file} names no class; write one on each line")
    kept = set(wanted)
    return tuple(name for name in parent.classes if name in kept)


def _describe(
    parent: Manifest, selection: Selection, classes: tuple[str, ...], exclusions: Exclusions
) -> dict[str, object]:
    """The source of the subset's manifest: its bytes depend on nothing else."""
    asked = selection.model_dump(
        mode="json", include={"fraction", "count", "per_class", "split", "seed"}
    )
    numbers = {name: number for number, name in enumerate(parent.classes)}
    in_tar = stored_labels(parent)
    labels = None if in_tar is None else [in_tar[numbers[name]] for name in classes]
    of = {"name": parent.name, "source": parent.source}
    left = {
        "exclude": exclusions.digest if selection.exclude else None,
        "labels": labels,
        "classes": len(classes),
    }
    return {"kind": "subset", "parent": parent.pixels_hash, "of": of, **asked, **left}


def _existing(out: Path, plan_hash: str, parent: Manifest) -> Manifest | None:
    if not out.exists():
        return None
    if not (out / MANIFEST_NAME).exists():
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise UserError(f"{out}: exists and is no dataset; choose another directory")
    manifest = load_manifest(out)
    if manifest.plan_hash != plan_hash:
        raise UserError(f"{out}: holds another dataset ({manifest.name}); name another directory")
    places = {shard.file for split in parent.splits.values() for shard in split.shards}
    tars = [shard for split in manifest.splits.values() for shard in split.shards]
    if all(
        shard.file in places if shard.is_remote else (out / shard.file).exists() for shard in tars
    ):
        return manifest
    known = known_files(manifest) | {LOCK}
    strange = [
        path
        for path in sorted(out.iterdir())
        if path.name not in known and not path.name.startswith(TEMPORARY_PREFIX)
    ]
    if strange:
        raise UserError(
            f"{out}: its tars have moved, so it would be made anew, but {strange[0].name} is no"
            " part of it; move that elsewhere, then run the same command again"
        )
    return None


def _choose(
    source: Path,
    parent: Manifest,
    name: str,
    selection: Selection,
    classes: tuple[str, ...],
    exclusions: Exclusions,
) -> Chosen:
    split = parent.splits[name]
    new_label = np.full(len(parent.classes) + 1, -2, np.int64)
    new_label[-1] = -1  # no label stays no label
    numbers = {name: number for number, name in enumerate(parent.classes)}
    new_label[[numbers[name] for name in classes]] = np.arange(len(classes))
    labels = new_label[
        np.concatenate(
            [np.zeros(0, np.int64), *(load_index(source, shard)[:, 2] for shard in split.shards)]
        )
    ]
    in_class = labels != -2
    keep, excluded = in_class.copy(), set[str]()
    if exclusions.paths:
        keep &= ~np.fromiter(_excluded(source, split, exclusions, excluded), np.bool_, len(labels))
    left_out = {"classes": int((~in_class).sum()), "excluded": int((in_class & ~keep).sum())}
    positions = np.flatnonzero(keep)
    if name == selection.split:
        positions = _sized(labels, keep, selection, classes)
        left_out["not_chosen"] = int(keep.sum()) - len(positions)
    return Chosen(positions, labels, left_out, frozenset(excluded))


def _sized(
    labels: Ids, keep: NDArray[np.bool_], selection: Selection, classes: tuple[str, ...]
) -> Ids:
    if selection.per_class is not None:
        sizes = np.bincount(labels[keep & (labels >= 0)], minlength=len(classes))
        smallest = int(sizes.argmin())
        if sizes[smallest] < selection.per_class:
            raise UserError(
                f"per-class: {selection.per_class} asked for, {classes[smallest]} has"
                f" {sizes[smallest]} in {selection.split}; ask for at most as many, or name the"
                " larger classes in --classes-file"
            )
        return np.sort(per_class(labels, selection.per_class, seed=selection.seed, keep=keep))
    num_kept = int(keep.sum())
    count = num_kept if selection.count is None else selection.count
    if selection.fraction is not None:
        count = round(selection.fraction * num_kept)
    if count > num_kept:
        raise UserError(
            f"count: {count:,} asked for, {selection.split} has {num_kept:,}; ask for at most as"
            " many"
        )
    return np.sort(ranking(labels, seed=selection.seed, keep=keep)[:count])


def _excluded(
    source: Path, split: Split, exclusions: Exclusions, found: set[str]
) -> Iterator[bool]:
    """Of every sample; the paths that are listed are added to `found`."""
    with progress("reading paths", total=split.num_samples, unit="paths") as line:
        for shard in split.shards:
            for path in load_paths(source, shard):
                is_listed = path in exclusions.paths
                if is_listed:
                    found.add(path)
                yield is_listed
            line.advance(shard.num_samples)


# ---- writing
# --------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where the parent lies, where the subset is going to, and where it is made."""

    source: Path
    out: Path
    fresh: Path


def _write_split(
    place: _Place, name: str, split: Split, chosen: Chosen, *, num_classes: int
) -> Split:
    shards, start = [], 0
    with progress(f"writing {name}", total=split.num_samples, unit="rows") as line:
        for shard in split.shards:
            first, last = np.searchsorted(chosen.positions, (start, start + shard.num_samples))
            rows = chosen.positions[first:last] - start
            if len(rows):
                shards.append(_write_shard(place, shard, rows, chosen.labels[start + rows]))
            start += shard.num_samples
            line.advance(shard.num_samples)
    labels = chosen.labels[chosen.positions]
    num_before = len(split.class_counts)
    annotations = {
        key: write_annotation(
            place.fresh,
            f"{name}-{key}",
            load_annotation(place.source, split, key)[chosen.positions],
        )
        for key, annotation in split.annotations.items()
        # with fewer classes, one as wide as the parent's class list goes: its columns are its
        # classes
        if num_classes == num_before or annotation.num_columns != num_before
    }
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)
    return Split(shards=tuple(shards), class_counts=tuple(counts.tolist()), annotations=annotations)


def _write_shard(place: _Place, shard: Shard, rows: Ids, labels: Ids) -> Shard:
    index = np.array(load_index(place.source, shard)[rows])
    index[:, 2] = labels
    paths = load_paths(place.source, shard)
    changes = {
        "num_samples": len(rows),
        "index_sha256": write_index(place.fresh, shard.name, index),
        "paths_sha256": write_paths(place.fresh, shard.name, [paths[row] for row in rows.tolist()]),
    }
    if not shard.is_remote:
        changes["file"] = os.path.relpath(
            (place.source / shard.file).resolve(), place.out.resolve()
        )
    return shard.model_copy(update=changes)
