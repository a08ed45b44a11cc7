"""What a build is going to write, decided once and kept on disk, so that every worker and array
task writes the same dataset.

    OUT/PARTS/begun.json       whose directory this is: the config, its hash and that of the plan, number of array tasks
    OUT/PARTS/inventory/       every input of the source (inventory.py)
    OUT/PARTS/order-SPLIT.npy  rows of the inventory in the order in which they are packed
    OUT/PARTS/NAME.json        the record of a finished shard (shards.py)

The plan is a function of the config and of what the source lists, never of workers or tasks. Steps
of `prepare`, under the sole lock of OUT:

1. ask the source for its containers;
2. an inventory of the same config and of unchanged containers stands: use it; else list everything;
3. the plan's hash is of config and listing; a directory of another plan, finished or not: refuse;
4. write the order of every split, then `begun.json`.
"""  # noqa: E501 (a table)

import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

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
from data_prep.manifest import MANIFEST_NAME, PARTS, Manifest, load_manifest
from data_prep.progress import progress
from data_prep.publish import (
    TEMPORARY_PREFIX,
    atomic_file,
    hash_of_json,
    remove_leftovers,
    sha256_of,
    withdraw,
)
from data_prep.settings import Settings, differences, printable
from data_prep.sources import Arrangement, Source, SourceError, open_source

INVENTORY_NAME = "inventory"
NUM_NAMED = 20
"""Of what is damaged."""
NUM_JOBS, LEAST_SHARD = 16, 512
"""Shards of a small split, and the fewest samples that make one worth its files."""
CANDIDATE_NAME = TEMPORARY_PREFIX + "candidate"


class ShardPlan(Settings):
    """One shard: the places `start` to `stop` of the order of `split`."""

    name: str
    split: str
    start: int
    stop: int


class Workplan(Settings):
    settings: BuildSettings
    config: dict[str, Any]
    """What decides the bytes, besides the source's files (`described`)."""
    plan_hash: str
    stamp: str
    """Of the source's files: shards that were made before they were touched are made anew."""
    decoder: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    """What each class of the inventory is called in the dataset: its label there, -1 where it is
    left out."""
    num_left_out: dict[str, int]
    num_held_out: int = 0
    shards: tuple[ShardPlan, ...]
    num_tasks: int
    orders: dict[str, str] = Field(default_factory=dict)
    """Split -> sha256 of its order's file."""

    @property
    def directory(self) -> Path:
        return self.settings.directory

    @property
    def parts_id(self) -> str:
        """What the record of a finished shard must say for the shard to be a part of this
        dataset."""
        return f"{self.plan_hash}-{self.stamp[:16]}"

    @property
    def inventory_directory(self) -> Path:
        return self.directory / PARTS / INVENTORY_NAME

    def order_path(self, split: str) -> Path:
        return self.directory / PARTS / f"order-{split}.npy"

    def under(self, settings: BuildSettings) -> "Workplan":
        """The same plan for a config that differs in what decides no byte, such as the name of the
        directory."""
        return self.model_copy(update={"settings": settings})


def prepare(
    settings: BuildSettings, source: Source, pool: Executor, *, num_tasks: int = 1
) -> Workplan:
    """The plan of this build in `settings.out`; the caller holds the directory alone."""
    directory = settings.directory
    exclusions = load_exclusions(settings.exclude)
    config = described(settings, source, exclusions)
    before, is_finished = load_begun(directory), (directory / MANIFEST_NAME).exists()
    if (
        before is not None
        and not is_finished
        and not any(record_path(directory, plan.name).exists() for plan in before.shards)
    ):
        record_path(
            directory, BEGUN
        ).unlink()  # it ended before its first shard: there is nothing to keep, or to be mixed with
        before = None
    standing = load_manifest(directory) if is_finished else before
    if standing is not None and standing.config != config:
        raise of_another(directory, standing.config, config)
    _check_decoder(directory, before)
    if before is not None and (damaged := damaged_file(before)):
        print(
            (
                f"data_prep: {damaged}: is damaged; the plan is made again, and finished shards "
                "are kept"
            ),
            file=sys.stderr,
        )
        open_inventory.cache_clear()
        before = None
    remove_leftovers(directory, directory / PARTS)
    inventory = _listed(settings, source, pool, before=before)
    plan_hash = hash_of_json([config, inventory.digest])
    try:
        if standing is not None and standing.plan_hash != plan_hash:
            raise of_another(directory, standing.config, config)
        if (
            inventory.directory.name == CANDIDATE_NAME
        ):  # is known only now not to be another dataset's
            place = inventory.directory.with_name(INVENTORY_NAME)
            if place.exists():
                withdraw(place)
            inventory.directory.rename(place)
            inventory = Inventory(place)
    finally:
        remove_leftovers(directory, directory / PARTS)
    if before is not None and (before.num_tasks, before.stamp) == (num_tasks, inventory.stamp):
        return before.under(settings)
    return _write_plan(
        settings,
        source,
        inventory,
        exclusions,
        config=config,
        plan_hash=plan_hash,
        num_tasks=num_tasks,
    )


def begun_by_others(settings: BuildSettings, source: Source, *, num_tasks: int) -> Workplan:
    """The plan that other tasks are working on, if it is ours and the source is still as they found
    it."""
    directory = settings.directory
    begun = load_begun(directory)
    assert begun is not None  # whoever is at work has one
    config = described(settings, source, load_exclusions(settings.exclude))
    if begun.config != config:
        raise UserError(
            f"out: tasks of another config are at work in {directory} "
            f"({differences(begun.config, config)}); name another out"
        )
    _check_decoder(directory, begun)
    if begun.num_tasks != num_tasks:
        raise UserError(
            f"--task: {begun.num_tasks} tasks are at work in {directory}, not {num_tasks}; "
            "wait until they end"
        )
    refuse_damaged(begun)
    if Inventory(directory / PARTS / INVENTORY_NAME).outline != outline_of(settings, source):
        raise SourceError(
            "source: has changed since the first task listed it (or is a copy without its "
            "times: cp -p, rsync -a keep them); "
            f"stop the tasks, remove {directory} and begin again"
        )
    return begun.under(settings)


def load_begun(directory: Path) -> Workplan | None:
    """The plan that stands in `directory`, wherever it was made."""
    try:
        begun = read_record(directory, BEGUN, Workplan)
        place = "work" if begun.settings.is_remote else "out"
        return begun.under(begun.settings.model_copy(update={place: str(directory)}))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(
            f"{record_path(directory, BEGUN)}: is damaged. Remove it, then run the build "
            "again: it keeps finished shards"
        ) from None


def damaged_file(work: Workplan) -> Path | None:
    """The first file of the plan, besides its record, that is not as it was written."""
    inventory = work.inventory_directory
    try:
        files = {inventory / name: digest for name, digest in Inventory(inventory).files.items()}
    except OSError as error:
        return Path(error.filename or inventory)
    except (ValueError, KeyError):
        return inventory / HEAD_NAME
    orders = {plan.split: work.orders.get(plan.split) for plan in work.shards}
    files |= {work.order_path(split): digest or "" for split, digest in orders.items()}
    return next(
        (path for path, digest in files.items() if not path.is_file() or sha256_of(path) != digest),
        None,
    )


def refuse_damaged(work: Workplan) -> None:
    if damaged := damaged_file(work):
        remedy = (
            f"End the tasks of {work.directory}, then run task 0/{work.num_tasks} again: it "
            "makes the plan again"
        )
        raise UserError(f"{damaged}: is damaged. {remedy}")


def _check_decoder(directory: Path, begun: Workplan | None) -> None:
    """Shards of one dataset are made by the same libraries, or their pictures would differ a
    little."""
    if begun is not None and begun.decoder != decoder_version():
        raise UserError(
            f"{directory}: was begun with {begun.decoder}, and here is {decoder_version()}; "
            "go on in the environment that began it, or remove it and build anew"
        )


def refuse_other_config(settings: BuildSettings, manifest: Manifest) -> None:
    """Raise `UserError` if another config made this finished dataset. The tables of a source that
    is gone are not compared."""
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
    """What decides the bytes of the dataset: not the number of workers, and no path of this
    machine."""
    others = {"out", "work", "out_storage", "num_workers", "max_reject_share", "classes_file"}
    kept, config = settings.kept_classes, settings.model_dump(mode="json", exclude=others)
    classes = None if kept is None else sorted(kept)
    of_files = {
        "name": settings.dataset_name,
        "source": source.describe(),
        "classes": classes,
        "exclude": exclusions.digest[:12] or None,
    }
    return config | of_files


def _listed(
    settings: BuildSettings, source: Source, pool: Executor, *, before: Workplan | None
) -> Inventory:
    """The inventory of the source: the one that stands, if nothing says that it has changed, or
    else a new candidate."""
    outline = outline_of(settings, source)
    directory = settings.directory / PARTS / INVENTORY_NAME
    if before is not None and (directory / HEAD_NAME).exists():
        inventory = Inventory(directory)
        if inventory.outline == outline and all(
            container.stamp for container in outline.containers
        ):
            return inventory
    directory.parent.mkdir(parents=True, exist_ok=True)
    return write_inventory(
        directory.with_name(CANDIDATE_NAME),
        outline,
        _entries(source, outline, pool, ahead=8 * settings.num_workers),
    )


def outline_of(settings: BuildSettings, source: Source) -> Outline:
    """The containers that may hold what the config keeps, sorted."""
    outline = source.outline()
    outline = replace(outline, classes=tuple(map(printable, outline.classes)))
    kept, containers = settings.kept_classes, outline.containers
    if kept is not None:
        unknown = sorted(kept - set(outline.classes))
        if unknown:
            raise UserError(
                f"classes: {len(unknown)} are not in the source ({', '.join(unknown[:3])})"
            )
        labels = {label for label, name in enumerate(outline.classes) if name in kept}
        containers = tuple(
            part
            for part in containers
            if part.label is None or part.label < 0 or part.label in labels
        )
    return replace(outline, containers=tuple(sorted(containers)))


def _entries(source: Source, outline: Outline, pool: Executor, *, ahead: int) -> Iterator[Entries]:
    """What the containers list, in their order; no more than `ahead` of them wait in memory."""
    waiting: deque[Future[Entries]] = deque()
    damaged: list[str] = []
    with progress("listing", total=len(outline.containers), unit="folders or archives") as line:
        for number, container in enumerate(outline.containers):
            while number + len(waiting) < len(outline.containers) and len(waiting) < ahead:
                waiting.append(
                    pool.submit(source.entries, outline.containers[number + len(waiting)])
                )
            try:
                yield waiting.popleft().result()
            except SourceError as error:  # all of them are named in one run
                damaged.append(str(error))
            line.advance(note=container.path)
    if damaged:
        raise SourceError(all_in_one(damaged))


def all_in_one(complaints: list[str]) -> str:
    """The line about several damaged files."""
    first, *others = complaints
    return (
        f"{first} (and {len(others):,} more: {'; '.join(others[: NUM_NAMED - 1])})"
        if others
        else first
    )


def _write_plan(
    settings: BuildSettings,
    source: Source,
    inventory: Inventory,
    exclusions: Exclusions,
    *,
    config: dict[str, Any],
    plan_hash: str,
    num_tasks: int,
) -> Workplan:
    arrangement = source.arrange(inventory)
    _refuse_empty(source, inventory, arrangement)
    labels, classes, left_out = _renumber(settings, inventory, arrangement)
    directory, shards, orders = settings.directory, [], {}
    dropped = exclusions.rows(inventory)
    if exclusions.paths and not len(dropped):
        raise UserError(
            f"exclude: none of the {len(exclusions.paths):,} listed paths is in this source "
            f"(such as {min(exclusions.paths)}); "
            "was the list made from another dataset?"
        )
    for number, (split, chosen) in enumerate(sorted(arrangement.splits.items())):
        stored = inventory.labels[chosen]
        rows = chosen[(stored < 0) | (labels[stored] >= 0)]
        left_out["classes"] += len(chosen) - len(rows)
        if len(dropped):
            kept = rows[~np.isin(rows, dropped)]
            left_out["excluded"] += len(rows) - len(kept)
            rows = kept
        if settings.order == "shuffled":
            generator = np.random.Generator(
                np.random.Philox(np.random.SeedSequence([settings.seed, number]))
            )
            rows = generator.permutation(rows)
        if not len(rows):
            raise UserError(
                f"classes, exclude: they leave nothing of the split {split}; leave out less"
            )
        with atomic_file(directory / PARTS / f"order-{split}.npy") as file:
            np.save(file, rows)
        orders[split] = sha256_of(directory / PARTS / f"order-{split}.npy")
        size = shard_size(len(rows), most=settings.samples_per_shard)
        for shard, start in enumerate(range(0, len(rows), size)):
            stop = min(start + size, len(rows))
            shards.append(
                ShardPlan(name=f"{split}-{shard:06d}", split=split, start=start, stop=stop)
            )
    work = Workplan(
        settings=settings.settled(),
        config=config,
        plan_hash=plan_hash,
        stamp=inventory.stamp,
        decoder=decoder_version(),
        classes=classes,
        labels=tuple(labels.tolist()),
        num_left_out=dict(+left_out),
        num_held_out=arrangement.num_held_out,
        shards=tuple(shards),
        num_tasks=num_tasks,
        orders=orders,
    )
    write_record(directory, BEGUN, work)
    return work.under(settings)


def shard_size(num_samples: int, *, most: int) -> int:
    """Samples of each shard of a split. A shard is one worker's job, so a small split has smaller
    shards than the default ones: up to `NUM_JOBS` shards, however many workers there are, so that
    their number decides no byte."""
    return (
        most if most != DEFAULT_SHARD else min(most, max(LEAST_SHARD, -(-num_samples // NUM_JOBS)))
    )


def _refuse_empty(source: Source, inventory: Inventory, arrangement: Arrangement) -> None:
    """A split or a class that is there, and of which nothing can be read: no class of val vanishes
    behind its namesake of train."""
    name, readable = source.describe()["kind"], inventory.sizes >= 0
    for split in sorted({container.split for container in inventory.containers}):
        rows = arrangement.splits.get(split)
        if rows is None or not readable[rows].any():
            raise SourceError(
                f"source.path: split {split} of this {name} source holds no pictures; "
                "complete the archive"
            )
    counts = np.bincount(
        inventory.container_numbers[readable], minlength=len(inventory.containers)
    ).tolist()
    labelled = [part.label is not None and part.label >= 0 for part in inventory.containers]
    empty = [
        part.path
        for part, count, has in zip(inventory.containers, counts, labelled, strict=True)
        if has and not count
    ]
    if empty:
        raise SourceError(
            f"source.path: {len(empty)} classes of this {name} source hold no pictures "
            f"({', '.join(empty[:3])}); "
            "remove them, or complete the archive"
        )


def _renumber(
    settings: BuildSettings, inventory: Inventory, arrangement: Arrangement
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], tuple[str, ...], Counter[str]]:
    """The label in the dataset of each class of the inventory (-1: left out), the dataset's
    classes, what was left out so far."""
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
    left_out = Counter(arrangement.left_out or {})
    if kept is not None:
        left_out["whole classes"] = len(staying) - len(classes)
    return labels, tuple(classes), left_out
