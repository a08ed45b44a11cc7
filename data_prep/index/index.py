"""`data_prep index`: a dataset out of shards that others have written. They are read where they
are, and stay as they are.

Steps, under the sole lock of OUT and after it was marked as ours (`claim`):

1. the patterns become a list of shards; another list or config has begun or finished here: refuse;
2. ask for the version of every shard (size and time of change, or what the server says), so that a
   missing one is found at once;
3. the manifest stands: a shard of another version must still have the content it had, or it is
   refused; nothing else to do;
4. every shard without a record of this version is read (samples.py; a remote one is copied into
   OUT/PARTS meanwhile), and leaves OUT/PARTS/NAME.npy, OUT/NAME.paths, then its record
   OUT/PARTS/NAME.json;
5. the classes are known now (until then the labels of a shard are numbers of its own; words are
   numbered by the sorted set of all words): OUT/NAME.npy of every shard, rejected.jsonl,
   versions.json, then manifest.json; the parts go.

Shards are named SPLIT-NUMBER in their sorted order. The plan's hash in the manifest is of config
and contents, not of places: the same shards on disk, behind http or in s3 make the same dataset,
but for `file`.
"""

import json
import sys
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.build.destination import OWN_MARK, hand_over, occupied
from data_prep.build.merge import check_reject_share, manifest_of, with_limit
from data_prep.build.parts import (
    BEGUN,
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
from data_prep.publish import hash_of_json, remove_leftovers, sha256_of, write_json
from data_prep.settings import Settings, printable
from data_prep.tar import TarError
from data_prep.workers import sweep

VERSIONS_NAME = "versions.json"


class UnfinishedIndex(Settings):
    """Whose unfinished index this is."""

    kind: str = "index"
    plan_hash: str
    config: dict[str, Any]


class StockRecord(Settings):
    """What is known of a shard before the classes are: its labels are still numbered as in
    samples.py."""

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
    """The finished dataset of `settings.out`; safe to call again after any interruption."""
    directory, shards = settings.directory, list_shards(settings)
    plan = _plan(settings, shards)
    with own_place(directory), occupied(settings):
        _refuse_unfinished_of_another(plan)
        remove_leftovers(directory, directory / PARTS)
        if (directory / MANIFEST_NAME).exists():
            manifest = load_manifest(directory)
            _refuse_another(plan, shards, manifest)
            _refuse_changed(plan, shards, manifest)
            manifest = with_limit(directory, manifest, settings.max_reject_share)
        else:
            versions_of(shards, settings)
            write_record(
                directory, BEGUN, UnfinishedIndex(plan_hash=plan.hash, config=dict(plan.config))
            )
            found = list(
                sweep(
                    partial(read, plan),
                    shards,
                    title="indexing",
                    unit="shards",
                    num_workers=settings.num_workers,
                )
            )
            if damaged := sorted(each for each in found if isinstance(each, str)):
                raise UserError(all_in_one(damaged))
            manifest = publish(
                plan, shards, [each for each in found if isinstance(each, StockRecord)]
            )
        hand_over(settings)
        forget_parts(directory)
    check_reject_share(settings.out, manifest)
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
    """For the manifest: how the shards were read."""
    return {
        "kind": "index",
        **settings.model_dump(
            mode="json", include={"label", "image_member", "ignore_zeros", "check"}
        ),
    }


def finished_plan_hash(plan: IndexPlan, shards: list[StockShard], stored: list[Shard]) -> str:
    """Of the config and of what is in the shards, wherever they lie."""
    contents = [
        [mine.title, shard.name, shard.sha256] for mine, shard in zip(shards, stored, strict=True)
    ]
    return hash_of_json([dict(plan.config), contents])


# ---- whose directory
# --------------------------------------------------------------------------------------------


def _refuse_unfinished_of_another(plan: IndexPlan) -> None:
    try:
        begun = read_record(plan.directory, BEGUN, UnfinishedIndex)
    except FileNotFoundError:
        return
    except ValueError:
        begun = None
    if {path.stem for path in (plan.directory / PARTS).glob("*.json")} <= {BEGUN, OWN_MARK}:
        return  # it ended before its first shard
    if begun is None or begun.plan_hash != plan.hash:
        raise of_another(plan.directory, begun.config if begun else {}, plan.config)


def _refuse_another(plan: IndexPlan, shards: list[StockShard], manifest: Manifest) -> None:
    stored = [shard for _, split in sorted(manifest.splits.items()) for shard in split.shards]
    same = [(shard.name, shard.file) for shard in stored] == [
        (shard.name, shard.file) for shard in shards
    ]
    if not same or finished_plan_hash(plan, shards, stored) != manifest.plan_hash:
        raise of_another(plan.directory, manifest.config, plan.config)


def _refuse_changed(plan: IndexPlan, shards: list[StockShard], manifest: Manifest) -> None:
    """A shard of another version than it was may still be the same (a copy, a touch): then its
    content says so."""
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
    num_workers = plan.settings.num_workers
    try:
        hashes = sweep(
            partial(hash_of, plan),
            doubtful,
            title="reading again",
            unit="shards",
            num_workers=num_workers,
        )
        changed = [
            shard.place
            for shard, sha256 in zip(doubtful, hashes, strict=True)
            if sha256 != stored[shard.name]
        ]
    finally:
        forget_parts(plan.directory)
    if changed:
        raise UserError(
            f"{changed[0]}: has changed since it was indexed; remove {plan.directory} and index"
            " again, or put it back"
        )
    write_json(path, stamps)


# ---- one shard, in a worker process
# -------------------------------------------------------------------------------


def hash_of(plan: IndexPlan, shard: StockShard) -> str:
    with opened(shard, plan.directory, plan.settings) as (path, _):
        return sha256_of(path)


def _known(shard: StockShard, plan: IndexPlan) -> StockRecord | None:
    """What an interrupted index has found out about a shard that is still the same."""
    parts = plan.directory / PARTS
    try:
        found = read_record(plan.directory, shard.name, StockRecord)
        whole = (
            sha256_of(parts / f"{shard.name}.npy") == found.rows_sha256
            and sha256_of(plan.directory / found.record.shard.paths_file)
            == found.record.shard.paths_sha256
        )
    except (OSError, ValueError):
        return None
    if (
        not whole
        or found.record.shard.name != shard.name
        or found.plan_hash != plan.hash
        or found.stamp is None
    ):
        return None
    return found if version_of(shard, plan.settings).stamp == found.stamp else None


def read(plan: IndexPlan, shard: StockShard) -> StockRecord | str:
    """The record of the shard; of a tar that is cut or damaged the complaint, so that one run names
    all of them."""
    if known := _known(shard, plan):
        return known
    with opened(shard, plan.directory, plan.settings) as (path, version):
        try:
            contents = read_shard(path, plan, name=shard.title)
        except TarError as error:
            return f"{shard.place}: {error.or_fix('fetch or write it again')}"
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
        record=ShardRecord.of(
            stored, contents.channels, contents.rejected, plan_hash=plan.hash, class_counts={}
        ),
    )
    write_record(plan.directory, shard.name, found)
    return found


# ---- the dataset
# -------------------------------------------------------------------------------------------------


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
        config=dict(plan.config),
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
        _report(
            f"all pictures are raw ones of {size} px; with image_size={size} they would be read at"
            " memory speed"
        )
    cut = [
        (shard.place, part.goes_on_at)
        for shard, part in zip(shards, found, strict=True)
        if part.goes_on_at
    ]
    if cut:
        place, at = cut[0]
        _report(
            f"{len(cut):,} of {len(shards):,} shards go on behind their end mark ({place} at byte"
            f" {at:,}), as tars put together with cat do; nothing behind it was read."
            " ignore_zeros=true reads on"
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
                f"splits.{split}: its shards hold no samples; a sample is KEY.jpg with KEY.cls or"
                " KEY.json"
            )
    with_words = next((shard.place for shard, part in pairs if part.names), None)
    with_numbers = next((shard.place for shard, part in pairs if part.has_numbers), None)
    if with_words is not None and with_numbers is not None:
        raise UserError(
            f"label: {plan.settings.label} is a word in {with_words} and a number in"
            f" {with_numbers}; give the words in classes_file, in the order of their numbers"
        )


def _with_classes(
    plan: IndexPlan, found: list[StockRecord]
) -> tuple[tuple[str, ...], list[ShardRecord]]:
    """The classes of the dataset, and the records with the index written in their numbers."""
    words = sorted({word for part in found for word in part.names})
    if len(words) > MAX_CLASSES:
        raise UserError(
            f"label: {plan.settings.label} has {len(words):,} different values; is that the class?"
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
