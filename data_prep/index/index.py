"""`data_prep index`: a dataset out of shards that others have written. They are read where they are, and stay as they are.

Steps, under the sole lock of OUT and after it was marked as ours (`claim`):

1. the patterns become a list of shards; another list or config has begun or finished here: refuse;
2. ask for the version of every shard (size and time of change, or what the server says), so that a missing one is found at once;
3. the manifest stands: a shard of another version must still have the content it had, or it is refused; nothing else to do;
4. every shard without a record of this version is read (stock.py; a remote one is copied into OUT/PARTS meanwhile), and leaves
   OUT/PARTS/NAME.npy, OUT/NAME.paths, then its record OUT/PARTS/NAME.json;
5. the classes are known now: OUT/NAME.npy of every shard, rejected.jsonl, versions.json, then manifest.json; the parts go.

Shards are named SPLIT-NUMBER in their sorted order. The plan's hash in the manifest is of config and contents, not of places: the
same shards on disk, behind http or in s3 make the same dataset, but for `file`.
"""

import json
from collections.abc import Callable
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, TypeVar

from data_prep.build.merge import check_reject_share, with_limit
from data_prep.build.parts import BEGUN, PARTS, forget_parts, own_place, read_record, write_record
from data_prep.build.workplan import all_in_one
from data_prep.index.config import IndexSettings
from data_prep.index.places import StockShard, list_shards, versions_of
from data_prep.index.publishing import VERSIONS_NAME, described, finished_plan_hash, publish
from data_prep.index.reading import DamagedShard, Plan, hash_of, read_or_known
from data_prep.index.stock import Rule
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest
from data_prep.progress import progress
from data_prep.publish import hash_of_json, remove_leftovers, write_json
from data_prep.settings import Settings, UserError
from data_prep.workers import Tally, worker_pool

T = TypeVar("T")


class Begun(Settings):
    """Whose unfinished index this is."""

    kind: str = "index"
    plan_hash: str


def index(settings: IndexSettings) -> Manifest:
    """The finished dataset of `settings.out`; safe to call again after any interruption."""
    directory, names = Path(settings.out), settings.class_names()
    shards = list_shards(settings)
    plan = _plan(settings, shards, names)
    with own_place(directory):
        _claim(plan)
        remove_leftovers(directory, directory / PARTS)
        if (directory / MANIFEST_NAME).exists():
            manifest = load_manifest(directory)
            _refuse_another(plan, shards, manifest)
            _refuse_changed(plan, shards, manifest)
            manifest = with_limit(directory, manifest, settings.max_reject_share)
        else:
            versions_of(shards, settings)
            write_record(directory, BEGUN, Begun(plan_hash=plan.hash))
            records = _in_workers("indexing", read_or_known, [(shard, plan) for shard in shards], settings)
            manifest = publish(plan, shards, records, names)
        forget_parts(directory)
    check_reject_share(directory, manifest)
    return manifest


def _plan(settings: IndexSettings, shards: list[StockShard], names: tuple[str, ...] | None) -> Plan:
    rule = Rule(
        image_size=settings.image_size,
        crop=settings.crop,
        interpolation=settings.interpolation,
        label=settings.label,
        image_member=settings.image_member,
        ignore_zeros=settings.ignore_zeros,
        check=settings.check,
        max_pixels=settings.max_pixels,
        classes=None if names is None else {name: number for number, name in enumerate(names)},
        seed=settings.seed,
    )
    made = settings.model_dump(mode="json", include={"image_size", "crop", "interpolation", "max_pixels", "seed"})
    config_hash = hash_of_json([settings.dataset_name, described(settings), made, names])
    plan_hash = hash_of_json([config_hash, [[shard.name, shard.file] for shard in shards]])
    return Plan(Path(settings.out), settings, rule, config_hash, plan_hash)


# ---- whose directory --------------------------------------------------------------------------------------------


def _claim(plan: Plan) -> None:
    try:
        begun = read_record(plan.directory, BEGUN, Begun)
    except FileNotFoundError:
        return
    except ValueError:
        begun = None
    if begun is None or begun.plan_hash != plan.hash:
        raise _foreign(plan.directory, "an unfinished")


def _refuse_another(plan: Plan, shards: list[StockShard], manifest: Manifest) -> None:
    stored = [shard for _, split in sorted(manifest.splits.items()) for shard in split.shards]
    same = [(shard.name, shard.file) for shard in stored] == [(shard.name, shard.file) for shard in shards]
    if not same or finished_plan_hash(plan, shards, stored) != manifest.plan_hash:
        raise _foreign(plan.directory, "a")


def _foreign(directory: Path, state: str) -> UserError:
    return UserError(
        f"out: {directory} holds {state} dataset of another config or of other shards; remove it or name another directory"
    )


def _refuse_changed(plan: Plan, shards: list[StockShard], manifest: Manifest) -> None:
    """A shard of another version than it was may still be the same (a copy, a touch): then its content says so."""
    path = plan.directory / VERSIONS_NAME
    try:
        known = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    stamps = {name: version.stamp for name, version in versions_of(shards, plan.settings).items()}
    doubtful = [shard for shard in shards if stamps[shard.name] is None or known.get(shard.name) != stamps[shard.name]]
    if not doubtful:
        return
    stored = {shard.name: shard for split in manifest.splits.values() for shard in split.shards}
    try:
        hashes = _in_workers("reading again", hash_of, [(shard, plan) for shard in doubtful], plan.settings)
    finally:
        forget_parts(plan.directory)
    for shard, sha256 in zip(doubtful, hashes, strict=True):
        if sha256 != stored[shard.name].sha256:
            raise UserError(
                f"{shard.place}: has changed since it was indexed; remove {plan.directory} and index again, or put it back"
            )
    write_json(path, stamps)


def _in_workers(title: str, action: Callable[..., T], jobs: list[tuple[Any, ...]], settings: IndexSettings) -> list[T]:
    """The results in the order of the jobs; the first failure ends all, but for damaged shards, which are named together."""
    tally = Tally()
    with (
        worker_pool(min(settings.num_workers, len(jobs)), tally=tally) as pool,
        progress(title, total=len(jobs), unit="shards") as line,
    ):
        futures = [pool.submit(action, *job) for job in jobs]
        num_images, damaged = 0, []
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except DamagedShard as error:
                    damaged.append(str(error))
                num_images += tally.taken()
                line.advance(note=f"{num_images:,} images" if num_images else "")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if damaged:
        raise DamagedShard(all_in_one(sorted(damaged)))
    return [future.result() for future in futures]
