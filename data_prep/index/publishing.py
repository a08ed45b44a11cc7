"""The last step of an index: what was found out about every shard becomes one dataset, the manifest last.

Until here the labels of a shard are numbers of its own; words are numbered by the sorted set of all words. Only OUT/PARTS is read,
so this may be cut short and done again.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import __version__
from data_prep.build.merge import split_records, write_rejected
from data_prep.build.parts import PARTS
from data_prep.build.shards import ShardRecord, count_labels, write_index
from data_prep.images.channels import channel_statistics
from data_prep.images.decoding import decoder_version
from data_prep.index.config import IndexSettings
from data_prep.index.labels import MAX_CLASSES
from data_prep.index.places import StockShard
from data_prep.index.reading import Plan, StockRecord
from data_prep.manifest import Manifest, Shard, save_manifest
from data_prep.publish import hash_of_json, write_json
from data_prep.settings import UserError

VERSIONS_NAME = "versions.json"


def publish(plan: Plan, shards: list[StockShard], found: list[StockRecord], names: tuple[str, ...] | None) -> Manifest:
    _refuse_empty(shards, found)
    classes, records = _with_classes(plan, shards, found, names)
    manifest = _manifest(plan, shards, found, classes, records)
    write_json(plan.directory / VERSIONS_NAME, {part.record.shard.name: part.stamp for part in found})
    save_manifest(plan.directory, manifest)
    _say_what_was_not_read(shards, found)
    return manifest


def described(settings: IndexSettings) -> dict[str, Any]:
    """For the manifest: how the shards were read."""
    return {
        "kind": "index",
        **settings.model_dump(mode="json", include={"label", "image_member", "ignore_zeros", "check"}),
    }


def finished_plan_hash(plan: Plan, shards: list[StockShard], stored: list[Shard]) -> str:
    """Of the config and of what is in the shards, wherever they lie."""
    contents = [[mine.title, shard.name, shard.sha256] for mine, shard in zip(shards, stored, strict=True)]
    return hash_of_json([plan.config_hash, contents])


def _refuse_empty(shards: list[StockShard], found: list[StockRecord]) -> None:
    for split in sorted({shard.split for shard in shards}):
        if not sum(part.record.num_inputs for shard, part in zip(shards, found, strict=True) if shard.split == split):
            raise UserError(f"splits.{split}: its shards hold no samples; a sample is KEY.jpg with KEY.cls or KEY.json")


def _with_classes(
    plan: Plan, shards: list[StockShard], found: list[StockRecord], names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], list[ShardRecord]]:
    """The classes of the dataset, and the records with the index written in their numbers."""
    words = sorted({word for part in found for word in part.names})
    if len(words) > MAX_CLASSES:
        raise UserError(f"label: {plan.settings.label} has {len(words):,} different values; is that the class?")
    _refuse_mixed(plan, shards, found)
    number_of = {word: number for number, word in enumerate(words)}
    top, records = -1, []
    for part in found:
        record = part.record
        rows: NDArray[np.int64] = np.load(plan.directory / PARTS / f"{record.shard.name}.npy", allow_pickle=False)
        if part.names and len(rows):
            rows[:, 2] = np.array([number_of[word] for word in part.names], np.int64)[rows[:, 2]]
        top = max(top, int(rows[:, 2].max(initial=-1)))
        shard = record.shard.model_copy(update={"index_sha256": write_index(plan.directory, record.shard.name, rows)})
        records.append(record.model_copy(update={"shard": shard, "class_counts": count_labels(rows[:, 2])}))
    if names is not None:
        return names, records
    return tuple(words) or tuple(str(number) for number in range(top + 1)), records


def _refuse_mixed(plan: Plan, shards: list[StockShard], found: list[StockRecord]) -> None:
    pairs = list(zip(shards, found, strict=True))
    with_words = next((shard.place for shard, part in pairs if part.names), None)
    with_numbers = next((shard.place for shard, part in pairs if part.has_numbers), None)
    if with_words is not None and with_numbers is not None:
        raise UserError(
            f"label: {plan.settings.label} is a word in {with_words} and a number in {with_numbers}; "
            "give the words in classes_file, in the order of their numbers"
        )


def _say_what_was_not_read(shards: list[StockShard], found: list[StockRecord]) -> None:
    cut = [(shard.place, part.goes_on_at) for shard, part in zip(shards, found, strict=True) if part.goes_on_at]
    if cut:
        place, at = cut[0]
        print(
            f"data_prep: {len(cut):,} of {len(shards):,} shards go on behind their end mark ({place} at byte {at:,}), as tars put "
            "together with cat do; nothing behind it was read. ignore_zeros=true reads on",
            file=sys.stderr,
        )


def _manifest(
    plan: Plan, shards: list[StockShard], found: list[StockRecord], classes: tuple[str, ...], records: list[ShardRecord]
) -> Manifest:
    settings = plan.settings
    splits = split_records({shard.name: shard.split for shard in shards}, classes, records)
    trained_on = [record for shard, record in zip(shards, records, strict=True) if shard.split == "train"]
    mean, std = channel_statistics([record.channels for record in trained_on or records])
    raw_sizes = {part.raw_size for part in found if part.record.shard.num_samples}
    is_raw = raw_sizes == {settings.image_size}
    if not is_raw and len(raw_sizes) == 1 and None not in raw_sizes:
        size = raw_sizes.pop()
        print(
            f"data_prep: all pictures are raw ones of {size} px; with image_size={size} they would be read at memory speed",
            file=sys.stderr,
        )
    num_without_key = sum(part.num_without_key for part in found)
    return Manifest(
        tool_version=__version__,
        name=settings.dataset_name,
        source=described(settings),
        seed=settings.seed,
        decoder=decoder_version(),
        encoding="raw" if is_raw else "keep",
        image_size=settings.image_size,
        crop=settings.crop,
        interpolation=settings.interpolation,
        classes=classes,
        splits=splits,
        channel_mean=mean,
        channel_std=std,
        num_read=sum(record.num_inputs for record in records),
        num_written=sum(split.num_samples for split in splits.values()),
        num_rejected=sum(len(record.rejected) for record in records),
        max_reject_share=settings.max_reject_share,
        num_left_out={"without_key": num_without_key} if num_without_key else {},
        rejected_sha256=write_rejected(plan.directory, records),
        plan_hash=finished_plan_hash(plan, shards, [record.shard for record in records]),
    )
