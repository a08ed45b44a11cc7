"""The plan of a build: kept on disk, so that all workers and array tasks write one dataset.

    OUT/PARTS/begun.json       config, plan hash, shards
    OUT/PARTS/inventory/       every input of the source (inventory.py)
    OUT/PARTS/order-SPLIT.npy  rows of the inventory in the order in which they are packed
    OUT/PARTS/NAME.json        record of a finished shard (shards.py)

The plan depends only on the config and the source's listing, never on workers or tasks. This file
is long because these steps of `prepare`, under the lock of OUT, belong together:

1. ask the source for its containers;
2. reuse an inventory of the same config and unchanged containers; otherwise list everything;
3. fail if OUT has another plan, finished or not;
4. write the order of every split, then `begun.json`.
"""

import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.archives.inventory import (
    HEAD_NAME,
    Entries,
    Inventory,
    Outline,
    open_inventory,
    write_inventory,
)
from data_prep.build.config import DEFAULT_SHARD, BuildSettings
from data_prep.build.exclusions import Exclusions, load_exclusions
from data_prep.build.parts import BEGUN, of_another, read_record, record_path, write_record
from data_prep.errors import UserError
from data_prep.images.decoding import decoder_version
from data_prep.manifest import MANIFEST_NAME, PARTS, Manifest, load_manifest, write_array
from data_prep.progress import ProgressLine
from data_prep.publish import TEMPORARY_PREFIX, hash_of_json, remove_leftovers, sha256_of, withdraw
from data_prep.settings import Settings, printable
from data_prep.sources import Arrangement, Source, SourceError, open_source
from data_prep.sources.base import hold_out, move_to_val
from data_prep.workers import Pool

INVENTORY_NAME = "inventory"
NUM_NAMED = 20
"""Largest number of damaged containers that one error names."""
NUM_JOBS, LEAST_SHARD = 16, 512
"""Largest number of shards of a small split, and smallest default of `shard_size`."""
CANDIDATE_NAME = TEMPORARY_PREFIX + "candidate"


class ShardPlan(Settings):
    """One shard: the positions `start` to `stop` - 1 in the order of `split`."""

    name: str
    split: str
    start: int
    stop: int


class Workplan(Settings):
    settings: BuildSettings
    config: dict[str, Any]
    """Settings that determine the bytes of the dataset (see `described`)."""
    plan_hash: str
    stamp: str
    """Hash of the sizes and times of the source's files. If it changes, shards are written
    again."""
    decoder: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    """For each class of the inventory, its label in the dataset; -1 for a skipped class."""
    num_left_out: dict[str, int]
    num_held_out: int
    shards: tuple[ShardPlan, ...]
    orders: dict[str, str]
    """Split -> sha256 of the file with its order."""

    @property
    def directory(self) -> Path:
        return self.settings.directory

    @property
    def parts_id(self) -> str:
        """Hash of the plan and the stamp, stored in the records of finished shards."""
        return f"{self.plan_hash}-{self.stamp[:16]}"

    @property
    def inventory_directory(self) -> Path:
        return self.directory / PARTS / INVENTORY_NAME

    def order_path(self, split: str) -> Path:
        return self.directory / PARTS / f"order-{split}.npy"

    def under(self, settings: BuildSettings) -> "Workplan":
        """Return the same plan with another config that gives the same bytes."""
        return self.model_copy(update={"settings": settings})


def open_source_of(settings: BuildSettings) -> Source:
    """Open the source. This may unpack an archive into OUT/PARTS."""
    return open_source(
        settings.source, num_workers=settings.num_workers, work_directory=settings.directory / PARTS
    )


def prepare(settings: BuildSettings, source: Source, pool: Pool) -> Workplan:
    """Return the plan of this build: the plan on disk, or a new plan. The caller holds the
    directory's lock."""
    directory = settings.directory
    exclusions = load_exclusions(settings.exclude)
    config = described(settings, source, exclusions)
    before, is_finished = load_begun(directory), (directory / MANIFEST_NAME).exists()
    if before and not is_finished and not _has_shards(before):
        record_path(directory, BEGUN).unlink()  # no shard of that plan is finished
        before = None
    existing = load_manifest(directory) if is_finished else before
    if existing is not None and existing.config != config:
        raise of_another(directory, existing.config, config)
    if before is not None:
        _check_decoder(before)
        if damaged := damaged_file(before):
            print(
                f"data_prep: {damaged} is damaged; the plan is made again, and finished shards "
                "are kept",
                file=sys.stderr,
            )
            open_inventory.cache_clear()
            before = None
    inventory = _listed(settings, source, pool, before=before)
    plan_hash = hash_of_json([config, inventory.digest])
    try:
        if existing is not None and existing.plan_hash != plan_hash:
            raise of_another(directory, existing.config, config)
        if inventory.directory.name == CANDIDATE_NAME:
            place = inventory.directory.with_name(INVENTORY_NAME)
            if place.exists():
                withdraw(place)
            inventory.directory.rename(place)
            inventory = Inventory(place)
    finally:
        remove_leftovers(directory, directory / PARTS)
    if before is not None and before.stamp == inventory.stamp:
        return before.under(settings)
    arrangement = source.arrange(inventory)
    _refuse_empty(source, inventory, arrangement)
    arrangement = _draw_images(settings, inventory, arrangement, exclusions)
    labels, classes, left_out = _renumber(settings, inventory, arrangement)
    splits, dropped = _drop_rows(inventory, arrangement, labels, exclusions)
    orders, shards = _write_orders(settings, splits)
    work = Workplan(
        settings=settings.resolved(),
        config=config,
        plan_hash=plan_hash,
        stamp=inventory.stamp,
        decoder=decoder_version(),
        classes=classes,
        labels=tuple(labels.tolist()),
        num_left_out=dict(left_out + dropped),
        num_held_out=arrangement.num_held_out,
        shards=tuple(shards),
        orders=orders,
    )
    write_record(directory, BEGUN, work)
    return work.under(settings)


def plan_that_fits(settings: BuildSettings, source: Source) -> Workplan | None:
    """Return the plan in the directory if it is intact and was made for this config and source."""
    begun = load_begun(settings.directory)
    if begun is None:
        return None
    if begun.config != described(settings, source, load_exclusions(settings.exclude)):
        return None
    _check_decoder(begun)
    if damaged_file(begun):
        return None
    outline = Inventory(begun.inventory_directory).outline
    return begun.under(settings) if outline == outline_of(settings, source) else None


def load_begun(directory: Path) -> Workplan | None:
    """Return the plan in `directory`, or None. Raise UserError if begun.json is damaged."""
    try:
        begun = read_record(directory, BEGUN, Workplan)
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(
            str(record_path(directory, BEGUN)),
            "the file is damaged",
            "remove it, then run the build again, which keeps finished shards",
            code="damaged",
        ) from None
    return begun.under(begun.settings.model_copy(update={"out": str(directory)}))


def damaged_file(work: Workplan) -> Path | None:
    """Return the first file of the plan (except begun.json) whose hash is wrong, or None."""
    inventory = work.inventory_directory
    try:
        found = Inventory(inventory)
        if found.stamp != work.stamp:  # a new plan was interrupted before its record was written
            return inventory / HEAD_NAME
        files = {inventory / name: digest for name, digest in found.files.items()}
    except OSError as error:
        return Path(error.filename or inventory)
    except (ValueError, KeyError):
        return inventory / HEAD_NAME
    files |= {work.order_path(split): digest for split, digest in work.orders.items()}
    return next(
        (path for path, digest in files.items() if not path.is_file() or sha256_of(path) != digest),
        None,
    )


def refuse_damaged(work: Workplan) -> None:
    if damaged := damaged_file(work):
        raise UserError(
            str(damaged),
            "the file is damaged",
            "run data_prep build CONFIG --plan, which keeps finished shards",
            code="damaged",
        )


def _has_shards(work: Workplan) -> bool:
    return any(record_path(work.directory, plan.name).exists() for plan in work.shards)


def _check_decoder(begun: Workplan) -> None:
    """Raise UserError if the dataset was begun with other decoder versions, whose pixels differ
    slightly."""
    if begun.decoder != decoder_version():
        raise UserError(
            "out",
            f"{begun.directory} was begun with {begun.decoder}, but this environment has "
            f"{decoder_version()}",
            "install the earlier versions, or remove the directory and build again",
            code="changed",
        )


def refuse_other_config(settings: BuildSettings, manifest: Manifest) -> None:
    """Raise UserError if this finished dataset was made with another config. Label tables are not
    compared if the source no longer exists."""
    gone = [
        name
        for name, file in settings.tables.items()
        if not all(map(os.path.exists, (file, getattr(settings.source, "path", "."))))
    ]
    source, before = (
        settings.source.model_copy(update=dict.fromkeys(gone)),
        manifest.config.get("source", {}),
    )
    settings = settings.model_copy(update={"source": source})
    config = described(
        settings, open_source(source, num_workers=1), load_exclusions(settings.exclude)
    )
    config["source"] |= {name: before.get(name) for name in gone}
    if manifest.config != config:
        raise of_another(settings.directory, manifest.config, config)


def described(settings: BuildSettings, source: Source, exclusions: Exclusions) -> dict[str, Any]:
    """Return the settings that determine the bytes of the dataset, without paths and worker
    count."""
    others = {"out", "num_workers", "max_reject_fraction", "classes_file"}
    kept, config = settings.kept_classes, settings.model_dump(mode="json", exclude=others)
    classes = None if kept is None else sorted(kept)
    of_files = {
        "name": settings.dataset_name,
        "source": source.describe(),
        "classes": classes,
        "exclude": exclusions.digest[:12] or None,
    }
    if config["per_class"] is None:
        del config["per_class"]  # older manifests do not have this key
    return config | of_files


def _listed(
    settings: BuildSettings, source: Source, pool: Pool, *, before: Workplan | None
) -> Inventory:
    """Return the existing inventory if all containers have a stamp and none has changed. Otherwise
    list the source again."""
    outline = outline_of(settings, source)
    directory = settings.directory / PARTS / INVENTORY_NAME
    if before is not None:
        inventory = Inventory(directory)
        if inventory.outline == outline and all(
            container.stamp for container in outline.containers
        ):
            return inventory
    return write_inventory(
        directory.with_name(CANDIDATE_NAME),
        outline,
        _entries(source, outline, pool, ahead=8 * settings.num_workers),
    )


def outline_of(settings: BuildSettings, source: Source) -> Outline:
    """Return the source's outline with sorted containers, without containers of classes to skip."""
    outline = source.outline()
    outline = replace(outline, classes=tuple(map(printable, outline.classes)))
    kept, containers = settings.kept_classes, outline.containers
    if kept is not None:
        unknown = sorted(kept - set(outline.classes))
        if unknown:
            raise UserError(
                "classes",
                f"{len(unknown)} classes are not in the source ({', '.join(unknown[:3])})",
                "use the names of the source",
                code="unknown-name",
            )
        labels = {label for label, name in enumerate(outline.classes) if name in kept}
        containers = tuple(
            part
            for part in containers
            if part.label is None or part.label < 0 or part.label in labels
        )
    return replace(outline, containers=tuple(sorted(containers)))


def _entries(source: Source, outline: Outline, pool: Pool, *, ahead: int) -> Iterator[Entries]:
    """Yield the entries of each container, in order. Workers list up to `ahead` containers in
    advance."""
    waiting: deque[Future[Entries]] = deque()
    damaged: list[UserError] = []

    def next_entries(number: int) -> Entries:
        while True:
            try:
                while number + len(waiting) < len(outline.containers) and len(waiting) < ahead:
                    container = outline.containers[number + len(waiting)]
                    waiting.append(pool.submit(source.entries, container))
                return waiting.popleft().result()
            except BrokenProcessPool:
                waiting.clear()
                pool.replace()

    with ProgressLine("listing", total=len(outline.containers), unit="folders or archives") as line:
        for number, container in enumerate(outline.containers):
            try:
                yield next_entries(number)
            except SourceError as error:  # one run reports all damaged containers
                damaged.append(error)
            line.advance(note=container.path)
    if damaged:
        raise all_in_one(damaged)


def all_in_one(errors: list[UserError]) -> UserError:
    """Return one error for several damaged files."""
    first, *others = errors
    if not others:
        return first
    more = "; ".join(f"{each.field}: {each.problem}" for each in others[: NUM_NAMED - 1])
    problem = f"{first.problem} (and {len(others):,} more: {more})"
    return type(first)(first.field, problem, first.fix, code=first.code)


def _drop_rows(
    inventory: Inventory,
    arrangement: Arrangement,
    labels: NDArray[np.int32],
    exclusions: Exclusions,
) -> tuple[dict[str, NDArray[np.int32]], Counter[str]]:
    """Return the rows of each split, without skipped classes (-1 in `labels`) and exclusions, and
    the number of dropped rows by reason."""
    splits, counts = dict[str, NDArray[np.int32]](), Counter[str]()
    excluded, paths = exclusions.rows(inventory), exclusions.paths
    if paths and not len(excluded):
        raise UserError(
            "exclude",
            f"none of the {len(paths):,} listed paths ({min(paths)}, ...) is in this source",
            "give a list that was made from this source",
            code="mismatch",
        )
    for split, chosen in arrangement.splits.items():
        stored = inventory.labels[chosen]
        rows = chosen[(stored < 0) | (labels[stored] >= 0)]
        splits[split] = rows[~np.isin(rows, excluded)]
        counts["classes"] += len(chosen) - len(rows)
        counts["excluded"] += len(rows) - len(splits[split])
    return splits, counts


def _write_orders(
    settings: BuildSettings, splits: dict[str, NDArray[np.int32]]
) -> tuple[dict[str, str], list[ShardPlan]]:
    """Write the order of each split. Return the sha256 of each order file, and the planned
    shards."""
    directory, shards, orders = settings.directory, list[ShardPlan](), dict[str, str]()
    for number, split in enumerate(sorted(splits)):
        rows = splits[split]
        if settings.order == "shuffled":
            seed = np.random.SeedSequence([settings.seed, number])
            rows = np.random.Generator(np.random.Philox(seed)).permutation(rows)
        if not len(rows):
            raise UserError(
                "classes",
                f"classes, per_class and exclude leave no image in the split {split}",
                "exclude fewer images or keep more classes",
                code="empty",
            )
        orders[split] = write_array(directory / PARTS / f"order-{split}.npy", rows)
        size = shard_size(len(rows), most=settings.samples_per_shard)
        for shard, start in enumerate(range(0, len(rows), size)):
            stop = min(start + size, len(rows))
            name = f"{split}-{shard:06d}"
            shards.append(ShardPlan(name=name, split=split, start=start, stop=stop))
    return orders, shards


def shard_size(num_samples: int, *, most: int) -> int:
    """Return the number of samples per shard: `most`, unless it is the default. Then a small split
    has up to `NUM_JOBS` smaller shards, so that several workers can write it."""
    if most != DEFAULT_SHARD:
        return most
    return min(most, max(LEAST_SHARD, -(-num_samples // NUM_JOBS)))


def _refuse_empty(source: Source, inventory: Inventory, arrangement: Arrangement) -> None:
    """Raise SourceError if a split, or a class within a split, has no readable image."""
    name, readable = source.describe()["kind"], inventory.sizes >= 0
    for split in sorted({container.split for container in inventory.containers}):
        rows = arrangement.splits.get(split)
        if rows is None or not readable[rows].any():
            problem = f"split {split} of this {name} source has no images"
            raise SourceError("source.path", problem, "add its images", code="empty")
    counts = np.bincount(
        inventory.container_numbers[readable], minlength=len(inventory.containers)
    ).tolist()
    empty = [
        part.path
        for part, count in zip(inventory.containers, counts, strict=True)
        if part.label is not None and part.label >= 0 and not count
    ]
    if empty:
        raise SourceError(
            "source.path",
            f"{len(empty)} class folders of this {name} source have no images"
            f" ({', '.join(empty[:3])})",
            "remove them, or add their images",
            code="empty",
        )


def _draw_images(
    settings: BuildSettings, inventory: Inventory, arrangement: Arrangement, exclusions: Exclusions
) -> Arrangement:
    """Draw `per_class` images of each class after exclusions. Omit classes with too few images."""
    numbers, seed, splits = settings.per_class, settings.seed, dict[str, NDArray[np.int32]]()
    if numbers is None:
        return arrangement
    excluded, left_out = exclusions.rows(inventory), Counter(arrangement.left_out)
    kept = {split: rows[~np.isin(rows, excluded)] for split, rows in arrangement.splits.items()}
    before, after = (sum(map(len, splits.values())) for splits in (arrangement.splits, kept))
    left_out["excluded"] += before - after
    arrangement = replace(arrangement, splits=kept)
    if number := numbers.get("val"):
        if not kept.keys() & {"train", "val"}:
            problem, fix = (
                "the source has no val and no train",
                f"use its splits: {', '.join(kept)}",
            )
            raise UserError("per_class", problem, fix, code="empty")
        root = Path(settings.source.path) if settings.source.kind == "folder" else None
        arrangement = hold_out(inventory, arrangement, per_class=number, seed=seed, root=root)
    labels = set(arrangement.labels or range(len(inventory.classes)))
    for split, number in numbers.items():
        complete = Arrangement({"train": arrangement.splits.get(split, np.empty(0, np.int32))})
        drawn = move_to_val(inventory, complete, seed=seed, per_class=number).splits
        splits[split] = drawn["val"]
        left_out["not_chosen"] += len(drawn["train"])
        counts = np.bincount(inventory.labels[drawn["val"]])
        labels &= {*np.flatnonzero(counts == number).tolist()}
    return replace(arrangement, splits=splits, labels=tuple(labels), left_out=left_out)


def _renumber(
    settings: BuildSettings, inventory: Inventory, arrangement: Arrangement
) -> tuple[NDArray[np.int32], tuple[str, ...], Counter[str]]:
    """Return the new label of each class (-1: skipped), the dataset's classes, and the number of
    skipped inputs by reason."""
    kept = settings.kept_classes
    staying = set(
        range(len(inventory.classes)) if arrangement.labels is None else arrangement.labels
    )
    labels = np.full(max(1, len(inventory.classes)), -1, np.int32)
    classes: list[str] = []
    for label, name in enumerate(inventory.classes):
        if label in staying and (kept is None or name in kept):
            labels[label] = len(classes)
            classes.append(name)
    left_out = Counter(arrangement.left_out)
    if kept is not None:
        left_out["whole classes"] = len(staying) - len(classes)
    return labels, tuple(classes), left_out
