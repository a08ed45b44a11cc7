"""`data_prep index`: make a dataset of existing shards, and leave the shards unchanged.

Steps, under the lock of OUT, after `claim` has marked OUT as a dataset of data_prep:

1. expand the patterns to a list of shards; fail if OUT has an index of another list or config;
2. request the version of every shard (size and time of change, or the server's version), so that
   missing shards are found at once;
3. if the manifest exists, check that shards of another version still have the same content;
4. read every shard without a record of its version (samples.py). A remote shard is copied into an
   unnamed temporary file in OUT/PARTS. Each shard gets OUT/PARTS/NAME.npy, OUT/NAME.paths and
   then its record;
5. number the classes: class names get their rank in sorted order. Write OUT/NAME.npy of every
   shard, rejected.jsonl, versions.json and manifest.json, then remove OUT/PARTS.

Shards are named SPLIT-NUMBER in sorted order. The plan's hash depends on config and contents, not
on locations. Shards on disk, on a web server or in s3 therefore give the same dataset, except for
the paths in `file`.
"""

import json
import sys
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.build.merge import check_reject_fraction, manifest_of, with_limit
from data_prep.build.parts import (
    begin,
    forget_parts,
    of_another,
    own_place,
    read_record,
    write_record,
)
from data_prep.build.shards import ShardRecord, count_labels, write_index, write_paths
from data_prep.build.workplan import all_in_one
from data_prep.errors import UserError
from data_prep.images.decoding import decoder_version
from data_prep.index.config import IndexSettings
from data_prep.index.locate import StockShard, list_shards, opened, version_of, versions_of
from data_prep.index.samples import MAX_CLASSES, IndexPlan, read_shard
from data_prep.manifest import (
    INDEX_DTYPE,
    MANIFEST_NAME,
    PARTS,
    Manifest,
    Shard,
    load_manifest,
    save_manifest,
)
from data_prep.publish import hash_of_json, sha256_of, write_json
from data_prep.settings import Settings, printable
from data_prep.tar import TarError
from data_prep.workers import sweep

VERSIONS_NAME = "versions.json"


class StockRecord(Settings):
    """Facts of a shard before the class numbers are known. samples.py describes its labels."""

    plan_hash: str
    stamp: str | None
    rows_sha256: str
    names: tuple[str, ...]
    has_numbers: bool
    raw_size: int | None
    num_without_key: int
    goes_on_at: int | None
    record: ShardRecord


def index(settings: IndexSettings) -> Manifest:
    directory, shards = settings.directory, list_shards(settings)
    plan = _plan(settings, shards)
    with own_place(directory):
        if (directory / MANIFEST_NAME).exists():
            manifest = load_manifest(directory)
            _refuse_another(plan, shards, manifest)
            _refuse_changed(plan, shards, manifest)
            manifest = with_limit(directory, manifest, settings.max_reject_fraction)
        else:
            versions_of(shards, settings)
            begin(directory, plan.hash, plan.config)
            found = list(
                sweep(
                    partial(read, plan),
                    shards,
                    title="indexing",
                    unit="shards",
                    workers=settings.num_workers,
                )
            )
            if damaged := [each for each in found if isinstance(each, UserError)]:
                raise all_in_one(damaged)
            manifest = publish(
                plan, shards, [each for each in found if isinstance(each, StockRecord)]
            )
        forget_parts(directory)
    check_reject_fraction(directory, manifest)
    return manifest


def _plan(settings: IndexSettings, shards: list[StockShard]) -> IndexPlan:
    names = settings.class_names()
    made = settings.model_dump(
        mode="json", include={"image_size", "crop", "interpolation", "max_pixels", "seed"}
    )
    config = {
        "name": settings.dataset_name,
        **described(settings),
        **made,
        "classes_file": None if names is None else list(names),
    }
    plan_hash = hash_of_json([config, [[shard.name, shard.file] for shard in shards]])
    return IndexPlan(settings, names, plan_hash, config)


def described(settings: IndexSettings) -> dict[str, Any]:
    included = {"label", "image_member", "check"}
    return {"kind": "index", **settings.model_dump(mode="json", include=included)}


def finished_plan_hash(plan: IndexPlan, shards: list[StockShard], stored: list[Shard]) -> str:
    contents = [
        [mine.title, shard.name, shard.sha256] for mine, shard in zip(shards, stored, strict=True)
    ]
    return hash_of_json([plan.config, contents])


# ---- owner of the directory


def _refuse_another(plan: IndexPlan, shards: list[StockShard], manifest: Manifest) -> None:
    stored = [shard for _, split in sorted(manifest.splits.items()) for shard in split.shards]
    same = [(shard.name, shard.file) for shard in stored] == [
        (shard.name, shard.file) for shard in shards
    ]
    if not same or finished_plan_hash(plan, shards, stored) != manifest.plan_hash:
        raise of_another(plan.directory, manifest.config, plan.config)


def _refuse_changed(plan: IndexPlan, shards: list[StockShard], manifest: Manifest) -> None:
    """Raise UserError if a shard's content has changed since it was indexed. Copying a shard
    changes its version, so the content is hashed."""
    path = plan.directory / VERSIONS_NAME
    try:
        known = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    stamps = {name: version.stamp for name, version in versions_of(shards, plan.settings).items()}
    doubtful = [
        shard
        for shard in shards
        if stamps[shard.name] is None or known.get(shard.name) != stamps[shard.name]
    ]
    if not doubtful:
        return
    stored = {
        shard.name: shard.sha256 for split in manifest.splits.values() for shard in split.shards
    }
    hashes = sweep(
        partial(hash_of, plan),
        doubtful,
        title="reading again",
        unit="shards",
        workers=plan.settings.num_workers,
    )
    for shard, sha256 in zip(doubtful, list(hashes), strict=True):
        if sha256 != stored[shard.name]:
            raise UserError(
                shard.place,
                "the shard has changed since it was indexed",
                f"restore it, or remove {plan.directory} and index again",
                code="changed",
            )
    write_json(path, stamps)


# ---- one shard, in a worker process


def hash_of(plan: IndexPlan, shard: StockShard) -> str:
    with opened(shard, plan.directory, plan.settings) as (path, _):
        return sha256_of(path)


def _known(shard: StockShard, plan: IndexPlan) -> StockRecord | None:
    """Return the record that an interrupted index has written for this shard, or None if the shard
    or the record has changed."""
    try:
        found = read_record(plan.directory, shard.name, StockRecord)
        rows_path = plan.directory / PARTS / f"{shard.name}.npy"
        stored = found.record.shard
        is_intact = (
            stored.name == shard.name
            and found.plan_hash == plan.hash
            and found.stamp is not None
            and sha256_of(rows_path) == found.rows_sha256
            and sha256_of(plan.directory / stored.paths_file) == stored.paths_sha256
        )
    except (OSError, ValueError):
        return None
    if is_intact and version_of(shard, plan.settings).stamp == found.stamp:
        return found
    return None


def read(plan: IndexPlan, shard: StockShard) -> StockRecord | UserError:
    """Return the record of the shard, or the error of a damaged tar, so that one run reports all
    damaged tars."""
    if known := _known(shard, plan):
        return known
    with opened(shard, plan.directory, plan.settings) as (path, version):
        try:
            contents = read_shard(path, plan, name=shard.title)
        except TarError as error:
            fix = error.fix or "fetch or write it again"
            return UserError(shard.place, f"the tar {error.problem}", fix, code="damaged")
        num_bytes, sha256 = path.stat().st_size, sha256_of(path)
    rows = np.array([row[1:] for row in contents.rows], INDEX_DTYPE).reshape(-1, 3)
    rows_sha256 = write_index(plan.directory / PARTS, shard.name, rows)
    paths = [f"{shard.title}/{printable(row.key)}" for row in contents.rows]
    stored = Shard(
        name=shard.name,
        file=shard.file,
        num_samples=len(rows),
        num_bytes=num_bytes,
        sha256=sha256,
        index_sha256="",
        paths_sha256=write_paths(plan.directory, shard.name, paths),
    )
    found = StockRecord(
        plan_hash=plan.hash,
        stamp=version.stamp,
        rows_sha256=rows_sha256,
        names=tuple(contents.names),
        has_numbers=contents.has_numbers,
        raw_size=contents.raw_size,
        num_without_key=contents.num_without_key,
        goes_on_at=contents.goes_on_at,
        record=ShardRecord(
            plan_hash=plan.hash,
            num_inputs=len(rows) + len(contents.rejected),
            shard=stored,
            class_counts={},
            channels=contents.channels.totals,
            rejected=tuple(contents.rejected),
        ),
    )
    write_record(plan.directory, shard.name, found)
    return found


# ---- the dataset


def publish(plan: IndexPlan, shards: list[StockShard], found: list[StockRecord]) -> Manifest:
    _refuse_empty_or_mixed(plan, shards, found)
    settings = plan.settings
    classes, records = _with_classes(plan, found)
    raw_sizes = {part.raw_size for part in found if part.record.shard.num_samples}
    is_raw = raw_sizes == {settings.image_size}
    num_without_key = sum(part.num_without_key for part in found)
    manifest = manifest_of(
        settings,
        records,
        {shard.name: shard.split for shard in shards},
        directory=plan.directory,
        source=described(settings),
        config=plan.config,
        decoder=decoder_version(),
        encoding="raw" if is_raw else "keep",
        classes=classes,
        num_left_out={"without_key": num_without_key} if num_without_key else {},
        plan_hash=finished_plan_hash(plan, shards, [record.shard for record in records]),
    )
    write_json(
        plan.directory / VERSIONS_NAME, {part.record.shard.name: part.stamp for part in found}
    )
    save_manifest(plan.directory, manifest)
    if not is_raw and len(raw_sizes) == 1 and None not in raw_sizes:
        size = raw_sizes.pop()
        _report(f"all images are raw, {size} px; set image_size={size} to read them faster")
    pairs = zip(shards, found, strict=True)
    cut = [(shard.place, part.goes_on_at) for shard, part in pairs if part.goes_on_at]
    if cut:
        place, at = cut[0]
        _report(
            f"{len(cut):,} of {len(shards):,} shards have data after their end mark ({place} at "
            f"byte {at:,}), as if joined by cat. These data were skipped. Pack all files into one "
            "tar"
        )
    return manifest


def _report(text: str) -> None:
    print(f"data_prep: {text}", file=sys.stderr)


def _refuse_empty_or_mixed(
    plan: IndexPlan, shards: list[StockShard], found: list[StockRecord]
) -> None:
    pairs = list(zip(shards, found, strict=True))
    for split in sorted({shard.split for shard in shards}):
        if not any(part.record.num_inputs for shard, part in pairs if shard.split == split):
            raise UserError(
                f"splits.{split}",
                "the shards contain no samples",
                "name images KEY.jpg, and labels KEY.cls or KEY.json",
                code="empty",
            )
    with_words = next((shard.place for shard, part in pairs if part.names), None)
    with_numbers = next((shard.place for shard, part in pairs if part.has_numbers), None)
    if with_words is not None and with_numbers is not None:
        raise UserError(
            "label",
            f"{plan.settings.label} is a word in {with_words} and a number in {with_numbers}",
            "list the words in classes_file, in the order of their numbers",
            code="conflict",
        )


def _with_classes(
    plan: IndexPlan, found: list[StockRecord]
) -> tuple[tuple[str, ...], list[ShardRecord]]:
    """Write each shard's index with class numbers. Return the class names and the shards'
    records."""
    words = sorted({word for part in found for word in part.names})
    if len(words) > MAX_CLASSES:
        raise UserError(
            "label",
            f"{plan.settings.label} has {len(words):,} different values",
            "choose the field that contains the class",
            code="bad-value",
        )
    number_of = {word: number for number, word in enumerate(words)}
    top, records = -1, []
    for part in found:
        record = part.record
        rows: NDArray[np.int64] = np.load(
            plan.directory / PARTS / f"{record.shard.name}.npy", allow_pickle=False
        )
        if part.names and len(rows):
            rows[:, 2] = np.array([number_of[word] for word in part.names], np.int64)[rows[:, 2]]
        top = max(top, int(rows[:, 2].max(initial=-1)))
        shard = record.shard.model_copy(
            update={"index_sha256": write_index(plan.directory, record.shard.name, rows)}
        )
        records.append(
            record.model_copy(update={"shard": shard, "class_counts": count_labels(rows[:, 2])})
        )
    return plan.names or tuple(words) or tuple(str(number) for number in range(top + 1)), records
