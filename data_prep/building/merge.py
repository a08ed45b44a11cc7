"""`data_prep merge`: the records of all shards become one dataset.

Every part is verified before anything is written: a record of every planned shard, of this very build, and the files as they were
written. Then, in this order: rejected.jsonl, annotations, manifest.json; the parts are removed last.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep import __version__
from data_prep.building.config import BuildSettings
from data_prep.building.shards import PARTS, ShardRecord, changed_files, load_record
from data_prep.building.workers import worker_pool
from data_prep.building.workplan import SETTINGS_NAME, Begun, load_begun
from data_prep.images.channels import channel_statistics
from data_prep.manifest import (
    MANIFEST_NAME,
    REJECTED_NAME,
    Annotation,
    Manifest,
    Split,
    load_manifest,
    load_paths,
    save_manifest,
)
from data_prep.progress import progress
from data_prep.publish import sole_writer, write_atomic
from data_prep.settings import UserError
from data_prep.sources import Source, open_source


class TooManyRejected(ValueError):  # noqa: N818
    """The dataset is written and whole, but lost more inputs than the config allows."""

    def __init__(self, manifest: Manifest, message: str):
        super().__init__(message)
        self.manifest = manifest


class IncompleteParts(UserError):  # noqa: N818
    """Array tasks that have not ended, or parts that are not theirs; nothing has been changed."""


def merge(directory: Path, *, num_workers: int) -> Manifest:
    """Publishes the dataset that array tasks have written into `directory`."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; name the one that the tasks wrote to")
    if not (directory / PARTS).is_dir() and not (directory / MANIFEST_NAME).exists():
        raise UserError(f"{directory}: holds no parts of a build; run data_prep build CONFIG --task i/n first")
    with sole_writer(directory):
        begun = load_begun(directory)
        if begun is None:
            return load_manifest(directory)
        settings = BuildSettings.model_validate_json((directory / PARTS / SETTINGS_NAME).read_text(encoding="utf-8"))
        if (directory / MANIFEST_NAME).exists():
            manifest = load_manifest(directory)
        else:
            records = _verified_records(directory, begun, num_workers=num_workers)
            source = open_source(settings.source, num_workers=num_workers)
            manifest = publish(settings.model_copy(update={"out": str(directory)}), source, begun, records)
        forget_parts(directory)
    check_reject_share(directory, manifest, settings.max_reject_share)
    return manifest


def _verified_records(directory: Path, begun: Begun, *, num_workers: int) -> list[ShardRecord]:
    records: list[ShardRecord] = []
    faults: list[str] = []
    unfinished: set[int] = set()
    for number, plan in enumerate(begun.shards):
        try:
            record = load_record(directory, plan.name)
        except FileNotFoundError:
            unfinished.add(number % begun.num_tasks)
            faults.append(f"{plan.name} is not written")
            continue
        except ValueError:
            unfinished.add(number % begun.num_tasks)
            faults.append(f"the record of {plan.name} is damaged")
            continue
        if record.fingerprint != begun.parts_id or record.num_inputs != plan.stop - plan.start:
            unfinished.add(number % begun.num_tasks)
            faults.append(f"{plan.name} is of another build")
        records.append(record)
    known = {plan.name for plan in begun.shards}
    strangers = sorted(path.stem for path in directory.glob("*.tar") if path.stem not in known)
    if strangers:
        raise IncompleteParts(
            f"{directory}: {strangers[0]}.tar is no part of this build; move it elsewhere, then merge"
        )
    if not faults:
        changed = _changed(directory, records, num_workers=num_workers)
        unfinished = {number % begun.num_tasks for number, files in enumerate(changed) if files}
        faults = [f"{files[0]} is not as it was written" for files in changed if files]
    if faults:
        tasks = ", ".join(f"{number}/{begun.num_tasks}" for number in sorted(unfinished))
        raise IncompleteParts(
            f"{directory}: {len(faults)} of {len(begun.shards)} shards cannot be merged ({faults[0]}); "
            f"run the tasks {tasks} again, they write only what is missing"
        )
    return records


def _changed(directory: Path, records: list[ShardRecord], *, num_workers: int) -> list[list[str]]:
    shards = [record.shard for record in records]
    with (
        worker_pool(max(1, min(num_workers, len(shards)))) as pool,
        progress("verifying parts", total=len(shards), unit="shards") as line,
    ):
        found = []
        for files in pool.map(changed_files, [directory] * len(shards), shards):
            found.append(files)
            line.advance()
    return found


def publish(settings: BuildSettings, source: Source, begun: Begun, records: list[ShardRecord]) -> Manifest:
    """Writes what makes finished shards a dataset, the manifest last."""
    directory = Path(settings.out)
    manifest = summarise(settings, source, begun, records)
    splits = {
        name: split.model_copy(update={"annotations": _annotations(directory, source, name, split, begun.labels)})
        if name in source.annotated_splits()
        else split
        for name, split in manifest.splits.items()
    }
    manifest = manifest.model_copy(update={"splits": splits})
    write_rejected(directory, records)
    save_manifest(directory, manifest)
    return manifest


def write_rejected(directory: Path, records: Iterable[ShardRecord]) -> None:
    """The line of every input that was not written, sorted."""
    lines = [json.dumps(reject.model_dump(), sort_keys=True) for record in records for reject in record.rejected]
    write_atomic(directory / REJECTED_NAME, "".join(line + "\n" for line in sorted(lines)).encode())


def summarise(settings: BuildSettings, source: Source, begun: Begun, records: list[ShardRecord]) -> Manifest:
    splits = split_records({plan.name: plan.split for plan in begun.shards}, begun.classes, records)
    trained_on = [record for record in records if record.shard.name.startswith("train-")] or records
    mean, std = channel_statistics([record.channels for record in trained_on])
    num_read = sum(record.num_inputs for record in records)
    num_rejected = sum(len(record.rejected) for record in records)
    num_written = sum(split.num_samples for split in splits.values())
    assert num_read == num_written + num_rejected, (num_read, num_written, num_rejected)
    return Manifest(
        tool_version=__version__,
        decoder=begun.decoder,
        name=settings.dataset_name,
        source=source.describe(),
        seed=settings.seed,
        encoding=settings.encoding,
        image_size=settings.image_size,
        crop=settings.crop,
        classes=begun.classes,
        splits=splits,
        channel_mean=mean,
        channel_std=std,
        num_read=num_read,
        num_written=num_written,
        num_rejected=num_rejected,
        num_left_out=begun.num_left_out,
        fingerprint=begun.fingerprint,
    )


def split_records(
    split_of: dict[str, str], classes: tuple[str, ...], records: Iterable[ShardRecord]
) -> dict[str, Split]:
    """The records gathered by split, with the class counts added up."""
    gathered: dict[str, list[ShardRecord]] = {split: [] for split in sorted(set(split_of.values()))}
    for record in records:
        gathered[split_of[record.shard.name]].append(record)
    return {
        split: Split(
            shards=tuple(record.shard for record in mine),
            class_counts=tuple(
                sum(record.class_counts.get(str(label), 0) for record in mine) for label in range(len(classes))
            ),
        )
        for split, mine in gathered.items()
    }


def _annotations(
    directory: Path, source: Source, name: str, split: Split, labels: tuple[int, ...]
) -> dict[str, Annotation]:
    paths = [path for shard in split.shards for path in load_paths(directory, shard)]
    found = source.annotations(name, paths, labels)
    return {key: write_annotation(directory, f"{name}-{key}", bits) for key, bits in sorted(found.items())}


def write_annotation(directory: Path, stem: str, bits: NDArray[np.bool_]) -> Annotation:
    """Publishes a (samples, columns) matrix of bits, packed."""
    buffer = io.BytesIO()
    np.save(buffer, np.packbits(bits, axis=1))
    data = buffer.getvalue()
    write_atomic(directory / f"{stem}.npy", data)
    return Annotation(file=f"{stem}.npy", sha256=hashlib.sha256(data).hexdigest(), num_columns=bits.shape[1])


def forget_parts(directory: Path) -> None:
    shutil.rmtree(directory / PARTS, ignore_errors=True)


def check_reject_share(directory: Path, manifest: Manifest, allowed: float) -> None:
    """Every time, not only when the dataset is written."""
    share = manifest.num_rejected / max(1, manifest.num_read)
    if share > allowed:
        raise TooManyRejected(
            manifest,
            f"{directory}: {manifest.num_rejected:,} of {manifest.num_read:,} inputs were rejected ({share:.1%}, allowed "
            f"{allowed:.1%}); read {directory / REJECTED_NAME}, then mend the source or raise max_reject_share",
        )
