"""`data_prep merge`: the records of all shards become one dataset.

Every part is verified before anything is written: a record of every planned shard, of this very
build, the files as they were written, and the source, where it can be reached, as it was listed.
Then, in this order: rejected.jsonl, annotations, the indices of `wids`, manifest.json; the parts
are removed last. Where the manifest stands, the removal is all that may be left to do.
"""

import hashlib
import io
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
from data_prep.build.destination import Destination, finished_manifest, hand_over, occupy
from data_prep.build.parts import forget_parts, sole_builder
from data_prep.build.shards import ShardRecord, damaged_files, load_record
from data_prep.build.workplan import Workplan, load_begun, outline_of, refuse_damaged
from data_prep.errors import UserError
from data_prep.images.channels import channel_statistics
from data_prep.manifest import (
    MANIFEST_NAME,
    PARTS,
    REJECTED_NAME,
    Annotation,
    Manifest,
    Split,
    load_manifest,
    load_paths,
    save_manifest,
)
from data_prep.publish import TEMPORARY_PREFIX, write_atomic
from data_prep.sources import Source, SourceError, open_source
from data_prep.workers import Pool, Tally, sweep, worker_pool

NUM_COMPARISONS = 512
"""About as many jobs compare a source with its listing, however many containers it has."""
NUM_NAMED = 3
WIDS_NAME = "wids.json"
_Changes = tuple[int, tuple[str, ...]]
"""Of one container: how many of its files have changed, and the first of them."""


class TooManyRejected(ValueError):  # noqa: N818
    """The dataset is written and whole, but lost more inputs than the config allows."""

    def __init__(self, manifest: Manifest, message: str):
        super().__init__(message)
        self.manifest = manifest


def merge(place: Destination, *, num_workers: int, trust: bool = False) -> Manifest:
    """Publishes the dataset that array tasks have written into `place`; with `trust`, without
    reading the shards again."""
    directory = place.directory
    if (
        place.is_remote
        and not (directory / PARTS).is_dir()
        and (finished := finished_manifest(place))
    ):
        check_reject_share(place.out, finished)
        return finished
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; name the one that the tasks wrote to")
    if not (directory / PARTS).is_dir() and not (directory / MANIFEST_NAME).exists():
        raise UserError(
            f"{directory}: holds no parts of a build; run data_prep build CONFIG --task i/n first"
        )
    with sole_builder(directory):
        occupy(place)
        work = None if (directory / MANIFEST_NAME).exists() else load_begun(directory)
        if work is None:
            manifest = load_manifest(directory)
        else:
            if work.settings.out != place.out and place.is_remote:
                raise UserError(
                    f"work: {directory} is of {work.settings.out}; name that, or the other's --work"
                )
            work = work.under(work.settings.model_copy(update=place.model_dump()))
            refuse_damaged(work)
            records = _verified_records(work, num_workers=num_workers, trust=trust)
            source = open_source(work.settings.source, num_workers=num_workers)
            if _is_here(work.settings):
                with worker_pool(num_workers) as pool:
                    refuse_changed(work, source, pool)
            manifest = publish(work, source, records)
        hand_over(place)
        forget_parts(directory)
    check_reject_share(place.out, manifest)
    return manifest


def _is_here(settings: BuildSettings) -> bool:
    """Whether this machine sees the source's files, if it has any; an empty folder is where a disk
    is not mounted."""
    path = getattr(settings.source, "path", None) or getattr(settings.source, "images_dir", None)
    if path is None:
        return False
    if Path(path).is_file() or (Path(path).is_dir() and any(Path(path).iterdir())):
        return True
    print(
        (
            f"data_prep: {path} is not here, so nothing can tell whether the source has changed "
            "since the tasks listed it"
        ),
        file=sys.stderr,
    )
    return False


def refuse_changed(work: Workplan, source: Source, pool: Pool) -> None:
    """A file that was replaced, added or removed between the listing and now may have been read in
    either state."""
    inventory = open_inventory(work.inventory_directory, work.stamp)
    count = len(inventory.containers)
    step = max(1, count // NUM_COMPARISONS)
    compared = sweep(
        partial(_changed_source, source, work.inventory_directory, work.stamp),
        [range(start, min(start + step, count)) for start in range(0, count, step)],
        title="comparing the source with its listing",
        unit="folders or archives",
        total=count,
        jobs_are="parts",
        pool=pool,
    )
    found = set[_Changes]().union(*compared)  # an archive of many containers is one of it
    number, what, names = (
        sum(each[0] for each in found),
        "files",
        sorted(name for _, some in found for name in some),
    )
    if not found:  # a class that has come meanwhile is in no container that was listed
        names = sorted(inventory.outline.differs_from(outline_of(work.settings, source)))
        number, what = len(names), "folders, archives or lists of labels"
    if number:
        raise SourceError(
            f"source: {number:,} {what} have changed since they were listed "
            f"({', '.join(names[:NUM_NAMED])}), so what was written "
            "may be a mixture; it must stay as it is while it is read (and copies keep its "
            "times: cp -p, rsync -a); remove "
            f"{work.directory} and build again"
        )


def _changed_source(source: Source, directory: Path, stamp: str, numbers: range) -> set[_Changes]:
    inventory = open_inventory(directory, stamp)
    listed = (
        (inventory.containers[number], inventory.rows_of_container(number)) for number in numbers
    )
    changed = [source.changed(container, map(inventory.entry, rows)) for container, rows in listed]
    Tally.add(len(numbers))
    return {(len(names), tuple(names[:NUM_NAMED])) for names in changed if names}


def _verified_records(work: Workplan, *, num_workers: int, trust: bool) -> list[ShardRecord]:
    directory, num_tasks = work.directory, work.num_tasks
    records: list[ShardRecord] = []
    faults: dict[int, str] = {}
    for number, plan in enumerate(work.shards):
        try:
            record = load_record(directory, plan.name)
        except FileNotFoundError:
            faults[number] = f"{plan.name} is not written"
        except ValueError:
            faults[number] = f"the record of {plan.name} is damaged, or of another"
        else:
            records.append(record)
            if record.plan_hash != work.parts_id or record.num_inputs != plan.stop - plan.start:
                faults[number] = f"{plan.name} is of another build"
            elif work.settings.is_remote and record.stored is None:
                faults[number] = f"{plan.name} is not in the store"
    tars = {
        path.stem for path in directory.glob("*.tar") if not path.name.startswith(TEMPORARY_PREFIX)
    }
    strangers = sorted(tars - {plan.name for plan in work.shards})
    if strangers:
        raise UserError(
            f"{directory}: {strangers[0]}.tar is no part of this build; move it elsewhere, "
            "then merge"
        )
    if not faults:
        check = partial(damaged_files, work.settings, trust=trust)
        damaged = sweep(
            check, records, title="verifying parts", unit="shards", num_workers=num_workers
        )
        faults = {
            number: f"{files[0]} is not as it was written"
            for number, files in enumerate(damaged)
            if files
        }
    if faults:
        tasks = ", ".join(
            f"{number}/{num_tasks}" for number in sorted({number % num_tasks for number in faults})
        )
        raise UserError(
            f"{directory}: {len(faults)} of {len(work.shards)} shards cannot be merged "
            f"({next(iter(faults.values()))}); "
            f"run the tasks {tasks} again, they write only what is missing"
        )
    return records


def publish(work: Workplan, source: Source, records: list[ShardRecord]) -> Manifest:
    """Writes what makes finished shards a dataset, the manifest last."""
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
    if (
        len(extensions) > 1
    ):  # Hugging Face's `datasets` takes its columns from the first samples of the first shard
        print(
            f"data_prep: the shards mix {', '.join(extensions)}: this project and webdataset "
            "read all of them, but Hugging Face's "
            "datasets fails, or drops the images of one format without a word. If you need "
            "it, build with encoding=jpeg (or raw).",
            file=sys.stderr,
        )
    return manifest


def _name_repeats(work: Workplan, records: list[ShardRecord]) -> None:
    """Print how many images of each other split are also in `train`. Stored images are compared, so
    resaved copies count."""
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
                f"data_prep: {count:,} of {len(fingerprints):,} images of {split} are also "
                "in train, so its accuracy is too high. "
                f"List the copies with data_prep dedup {work.settings.out} --exact --out "
                "duplicates.jsonl, then build elsewhere "
                "with exclude=[duplicates.jsonl]",
                file=sys.stderr,
            )


def wids_index(name: str, split: Split) -> bytes:
    """The file that the package `wids` asks for: its ShardListDataset has random access to these
    tars, too."""
    shards = [
        {"url": shard.file, "nsamples": shard.num_samples, "filesize": shard.num_bytes}
        for shard in split.shards
    ]
    return (
        json.dumps(
            {
                "__kind__": "wids-shard-index-v1",
                "wids_version": 1,
                "name": name,
                "shardlist": shards,
            }
        ).encode()
        + b"\n"
    )


def write_rejected(directory: Path, records: Iterable[ShardRecord]) -> str:
    """The line of every input that was not written, sorted; returns the file's sha256."""
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
    """The manifest of shards whose splits `split_of` says; writes rejected.jsonl. `more` are
    further fields of it."""
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
        include={"seed", "image_size", "crop", "interpolation", "max_reject_share"}
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
    """Publishes a (samples, columns) matrix of bits, packed."""
    buffer = io.BytesIO()
    np.save(buffer, np.packbits(bits, axis=1))
    data = buffer.getvalue()
    write_atomic(directory / f"{stem}.npy", data)
    return Annotation(
        file=f"{stem}.npy", sha256=hashlib.sha256(data).hexdigest(), num_columns=bits.shape[1]
    )


def with_limit(directory: Path, manifest: Manifest, max_reject_share: float) -> Manifest:
    """Of a finished dataset whose command is given again, perhaps with another limit, which a
    `merge` shall go by, too."""
    if manifest.max_reject_share != max_reject_share:
        manifest = manifest.model_copy(update={"max_reject_share": max_reject_share})
        save_manifest(directory, manifest)
    return manifest


def check_reject_share(out: Path | str, manifest: Manifest) -> None:
    """Every time, not only when the dataset is written."""
    share, allowed = manifest.num_rejected / max(1, manifest.num_read), manifest.max_reject_share
    if share > allowed:
        raise TooManyRejected(
            manifest,
            f"{out}: {manifest.num_rejected:,} of {manifest.num_read:,} inputs were rejected "
            f"({share:.1%}, allowed "
            f"{allowed:.1%}); read {out}/{REJECTED_NAME}, then mend the source or raise "
            "max_reject_share",
        )
