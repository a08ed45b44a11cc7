"""`data_prep merge`: finish a dataset whose shards array tasks have written.

First, `merge` checks that every planned shard has a record of this build and intact files. If the
source can be reached, it must match its listing. Then `merge` writes rejected.jsonl, annotations,
the indices for `wids` and manifest.json, and removes the folder PARTS. If the manifest already
exists, `merge` only removes PARTS.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import __version__
from data_prep.archives.inventory import open_inventory
from data_prep.build.config import BuildSettings
from data_prep.build.parts import forget_parts, sole_builder
from data_prep.build.shards import ShardRecord, finished_record
from data_prep.build.workplan import (
    Workplan,
    load_begun,
    open_source_of,
    outline_of,
    refuse_damaged,
)
from data_prep.errors import UserError
from data_prep.images.channels import channel_statistics
from data_prep.manifest import (
    MANIFEST_NAME,
    PARTS,
    REJECTED_NAME,
    WIDS_NAME,
    Annotation,
    Manifest,
    Split,
    load_manifest,
    load_paths,
    save_manifest,
    wids_index,
    write_array,
)
from data_prep.publish import remove_leftovers, write_atomic
from data_prep.sources import Source, SourceError
from data_prep.workers import Pool, sweep

NUM_COMPARISONS = 512
"""Approximate number of worker jobs that compare a source with its listing."""
NUM_NAMED = 3
_Changes = tuple[int, tuple[str, ...]]
"""Number of changed files in one container, and the first NUM_NAMED of their names."""


class TooManyRejected(UserError):  # noqa: N818
    """The dataset is complete, but more inputs were rejected than the config allows."""

    manifest: Manifest


def merge(directory: Path, *, num_workers: int) -> Manifest:
    """Finish the dataset that array tasks have written."""
    if not (directory / PARTS).is_dir() and not (directory / MANIFEST_NAME).exists():
        raise UserError(
            str(directory),
            "this directory contains no unfinished build",
            "run data_prep build CONFIG --task i/n first",
            code="unfinished" if directory.is_dir() else "missing-path",
        )
    with sole_builder(directory):
        remove_leftovers(directory, directory / PARTS)
        work = None if (directory / MANIFEST_NAME).exists() else load_begun(directory)
        if work is None:
            manifest = load_manifest(directory)
        else:
            refuse_damaged(work)
            records = _verified_records(work, num_workers=num_workers)
            source = open_source_of(work.settings)
            if _is_reachable(work.settings):
                with Pool(num_workers) as pool:
                    refuse_changed(work, source, pool)
            manifest = publish(work, source, records)
        forget_parts(directory)
    check_reject_fraction(directory, manifest)
    return manifest


def _is_reachable(settings: BuildSettings) -> bool:
    """Return True if this machine can read the source. An empty folder counts as unreachable,
    because it may be a mount point."""
    path = getattr(settings.source, "path", None) or getattr(settings.source, "images_dir", None)
    if path is None:
        return False
    if Path(path).is_file() or (Path(path).is_dir() and any(Path(path).iterdir())):
        return True
    print(
        f"data_prep: {path} cannot be reached, so changes of its files are not detected",
        file=sys.stderr,
    )
    return False


def refuse_changed(work: Workplan, source: Source, pool: Pool) -> None:
    """Raise SourceError if files were replaced, added or removed since the listing. The shards may
    then mix old and new files."""
    inventory = open_inventory(work.inventory_directory, work.stamp)
    count = len(inventory.containers)
    step = max(1, count // NUM_COMPARISONS)
    parts = [range(start, min(start + step, count)) for start in range(0, count, step)]
    compared = sweep(
        partial(_changed_source, source, work.inventory_directory, work.stamp),
        parts,
        title="comparing the source with its listing",
        unit="folders or archives",
        sizes=[len(part) for part in parts],
        workers=pool,
    )
    found = set[_Changes]().union(*compared)  # containers of one archive report the same change
    number, what = sum(each[0] for each in found), "files"
    names = sorted(name for _, some in found for name in some)
    if not found:  # new classes are not in the listed containers
        names = sorted(inventory.outline.differs_from(outline_of(work.settings, source)))
        number, what = len(names), "folders, archives or lists of labels"
    if number:
        raise SourceError(
            "source",
            f"{number:,} {what} have changed since they were listed "
            f"({', '.join(names[:NUM_NAMED])}), so shards may mix old and new files",
            f"remove {work.directory} and build again. Copy sources with cp -p or rsync -a, which "
            "keep file times",
            code="changed",
        )


def _changed_source(source: Source, directory: Path, stamp: str, numbers: range) -> set[_Changes]:
    inventory = open_inventory(directory, stamp)
    listed = (
        (inventory.containers[number], inventory.rows_of_container(number)) for number in numbers
    )
    changed = [source.changed(container, map(inventory.entry, rows)) for container, rows in listed]
    return {(len(names), tuple(names[:NUM_NAMED])) for names in changed if names}


def _verified_records(work: Workplan, *, num_workers: int) -> list[ShardRecord]:
    directory, names = work.directory, [plan.name for plan in work.shards]
    if strangers := sorted({path.stem for path in directory.glob("*.tar")} - set(names)):
        problem, fix = (
            f"{strangers[0]}.tar is not part of this build",
            "move it elsewhere, then merge",
        )
        raise UserError(str(directory), problem, fix, code="conflict")
    check = partial(finished_record, directory, plan_hash=work.parts_id)
    found = sweep(check, names, title="verifying parts", unit="shards", workers=num_workers)
    records = [
        record
        for plan, record in zip(work.shards, found, strict=True)
        if record is not None and record.num_inputs == plan.stop - plan.start
    ]
    if missing := sorted({*names} - {record.shard.name for record in records}):
        counts = f"{len(missing)} of {len(names)} shards"
        problem = f"{counts} are missing, damaged or from another build ({missing[0]})"
        fix = "run all tasks again: they write only these shards"
        raise UserError(str(directory), problem, fix, code="unfinished")
    return records


def publish(work: Workplan, source: Source, records: list[ShardRecord]) -> Manifest:
    """Write the remaining files of a dataset whose shards are finished, the manifest last."""
    directory = work.directory
    manifest = manifest_of(
        work.settings,
        records,
        {plan.name: plan.split for plan in work.shards},
        directory=directory,
        source=source.describe(),
        decoder=work.decoder,
        encoding=work.settings.encoding,
        classes=work.classes,
        num_left_out=work.num_left_out,
        config=work.config,
        num_held_out=work.num_held_out,
        plan_hash=work.plan_hash,
    )
    splits = dict(manifest.splits)
    if (name := source.annotated_split) in splits:
        paths = [path for shard in splits[name].shards for path in load_paths(directory, shard)]
        found = sorted(source.annotations(paths, work.labels).items())
        annotations = {
            key: write_annotation(directory, f"{name}-{key}", bits) for key, bits in found
        }
        splits[name] = splits[name].model_copy(update={"annotations": annotations})
    manifest = manifest.model_copy(update={"splits": splits})
    for split, content in splits.items():
        write_atomic(directory / f"{split}-{WIDS_NAME}", wids_index(manifest.name, content))
    save_manifest(directory, manifest)
    _name_repeats(work, records)
    extensions = sorted({f".{extension}" for record in records for extension in record.extensions})
    if len(extensions) > 1:  # `datasets` takes its columns from the first samples
        print(
            f"data_prep: the shards mix {', '.join(extensions)} images. Hugging Face's package "
            "datasets fails on such shards, or drops the images of one format. For this package, "
            "build with encoding=jpeg or raw",
            file=sys.stderr,
        )
    return manifest


def _name_repeats(work: Workplan, records: list[ShardRecord]) -> None:
    """Print a warning about images of other splits that are also in `train`."""
    of_split: dict[str, list[NDArray[Any]]] = {}
    for plan, record in zip(work.shards, records, strict=True):
        of_split.setdefault(plan.split, []).append(
            np.frombuffer(bytes.fromhex(record.fingerprints), "<u8")
        )
    stored = {split: np.concatenate(arrays) for split, arrays in of_split.items()}
    train = stored.pop("train", np.zeros(0, "<u8"))
    for split, fingerprints in stored.items():
        if count := int(np.isin(fingerprints, train).sum()):
            print(
                f"data_prep: {count:,} of {len(fingerprints):,} images of {split} are also in "
                "train, so accuracies are too high. List the copies with data_prep dedup "
                f"{work.settings.out} --exact --out duplicates.jsonl, then build another dataset "
                "with exclude=[duplicates.jsonl]",
                file=sys.stderr,
            )


def write_rejected(directory: Path, records: Iterable[ShardRecord]) -> str:
    """Write rejected.jsonl: a line for every rejected input, sorted. Return the file's sha256."""
    lines = [
        json.dumps(reject.model_dump(), sort_keys=True)
        for record in records
        for reject in record.rejected
    ]
    data = "".join(line + "\n" for line in sorted(lines)).encode()
    write_atomic(directory / REJECTED_NAME, data)
    return hashlib.sha256(data).hexdigest()


def manifest_of(
    settings: Any,
    records: list[ShardRecord],
    split_of: dict[str, str],
    *,
    directory: Path,
    classes: tuple[str, ...],
    **more: Any,
) -> Manifest:
    """Write rejected.jsonl and return the manifest. `split_of` maps shards to splits; `more` has
    further fields of the manifest."""
    gathered: dict[str, list[ShardRecord]] = {split: [] for split in sorted(set(split_of.values()))}
    for record in records:
        gathered[split_of[record.shard.name]].append(record)
    splits = {
        split: Split(
            shards=tuple(record.shard for record in mine),
            class_counts=tuple(
                sum(record.class_counts.get(str(label), 0) for record in mine)
                for label in range(len(classes))
            ),
        )
        for split, mine in gathered.items()
    }
    mean, std = channel_statistics([record.channels for record in gathered.get("train") or records])
    num_read = sum(record.num_inputs for record in records)
    num_rejected = sum(len(record.rejected) for record in records)
    num_written = sum(split.num_samples for split in splits.values())
    assert num_read == num_written + num_rejected, (num_read, num_written, num_rejected)
    same = settings.model_dump(
        include={"seed", "image_size", "crop", "interpolation", "max_reject_fraction"}
    )
    return Manifest(
        tool_version=__version__,
        name=settings.dataset_name,
        classes=classes,
        splits=splits,
        channel_mean=mean,
        channel_std=std,
        num_read=num_read,
        num_written=num_written,
        num_rejected=num_rejected,
        rejected_sha256=write_rejected(directory, records),
        **same,
        **more,
    )


def write_annotation(directory: Path, stem: str, bits: NDArray[np.bool_]) -> Annotation:
    """Write a boolean (samples, columns) matrix as packed bits, and return its manifest entry."""
    file = f"{stem}.npy"
    sha256 = write_array(directory / file, np.packbits(bits, axis=1))
    return Annotation(file=file, sha256=sha256, num_columns=bits.shape[1])


def with_limit(directory: Path, manifest: Manifest, max_reject_fraction: float) -> Manifest:
    """Return the manifest with the given max_reject_fraction. Save the manifest if the fraction is
    new."""
    if manifest.max_reject_fraction != max_reject_fraction:
        manifest = manifest.model_copy(update={"max_reject_fraction": max_reject_fraction})
        save_manifest(directory, manifest)
    return manifest


def check_reject_fraction(out: Path, manifest: Manifest) -> None:
    share, allowed = manifest.num_rejected / max(1, manifest.num_read), manifest.max_reject_fraction
    if share > allowed:
        error = TooManyRejected(
            "max_reject_fraction",
            f"{manifest.num_rejected:,} of {manifest.num_read:,} inputs of {out} were rejected "
            f"({share:.1%}, allowed {allowed:.1%})",
            f"read {out}/{REJECTED_NAME}, then fix the source or raise max_reject_fraction",
            code="too-many-faults",
        )
        error.manifest = manifest
        raise error
