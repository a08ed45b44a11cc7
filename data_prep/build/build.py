"""`data_prep build`: a work plan is cut into shards, the shards are written in any order by any
number of workers or array tasks, and one manifest, written last, makes them a dataset.

Steps of a build, under the sole lock of OUT:

1. the mark of ours, before the source is listed, then the plan (workplan.py), unless the manifest
   stands already;
2. write every shard whose record is missing (shards.py); then the source must be as it was when it
   was listed;
3. rejected.jsonl, annotations, then manifest.json; remove the records (merge.py).

Array tasks share step 2 (tasks.py). A kill anywhere leaves finished shards with their records; the
same command goes on from there to the same bytes.
"""

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from data_prep.archives.inventory import open_inventory
from data_prep.build.config import BuildSettings
from data_prep.build.destination import hand_over, occupied
from data_prep.build.merge import check_reject_share, publish, refuse_changed, with_limit
from data_prep.build.parts import forget_parts, own_place
from data_prep.build.shards import (
    Rejected,
    Sample,
    ShardRecord,
    delivered,
    finished_record,
    write_shard,
)
from data_prep.build.workplan import ShardPlan, Workplan, prepare
from data_prep.images import Rejection, convert, naming
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest
from data_prep.sources import Source, open_source
from data_prep.workers import Pool, Tally, sweep, worker_pool

MAX_INPUT_BYTES = 1 << 30
"""A larger file is no picture, and is not read."""


def build(settings: BuildSettings) -> Manifest:
    """The finished dataset of `settings.out`; safe to call again after any interruption."""
    directory = settings.directory
    source = open_source(settings.source, num_workers=settings.num_workers)
    with own_place(directory), occupied(settings), worker_pool(settings.num_workers) as pool:
        work = prepare(settings, source, pool)
        if (directory / MANIFEST_NAME).exists():
            manifest = with_limit(directory, load_manifest(directory), settings.max_reject_share)
        else:
            records = write_shards(work, work.shards, source, pool)
            refuse_changed(work, source, pool)
            manifest = publish(work, source, records)
        hand_over(settings)
        forget_parts(directory)
    check_reject_share(settings.out, manifest)
    return manifest


def write_shards(
    work: Workplan, plans: tuple[ShardPlan, ...], source: Source, pool: Pool
) -> list[ShardRecord]:
    """The record of every shard of `plans`, in their order."""
    total = sum(plan.stop - plan.start for plan in plans)
    return list(
        sweep(
            partial(write_planned, work, source),
            plans,
            title="packing",
            unit="images",
            total=total,
            pool=pool,
        )
    )


def write_planned(work: Workplan, source: Source, plan: ShardPlan) -> ShardRecord:
    place, parts_id = work.settings, work.parts_id
    done = finished_record(place, plan.name, plan_hash=parts_id)
    if done is not None and done.num_inputs == plan.stop - plan.start:
        Tally.add(plan.stop - plan.start)
        return done
    rejected: list[Rejected] = []
    samples = _samples(work, source, plan, rejected)
    return delivered(
        place,
        write_shard(work.directory, plan.name, samples, plan_hash=parts_id, rejected=rejected),
    )


def _samples(
    work: Workplan, source: Source, plan: ShardPlan, rejected: list[Rejected]
) -> Iterator[Sample]:
    inventory = open_inventory(work.inventory_directory, work.stamp)
    order = np.load(work.order_path(plan.split), mmap_mode="r")
    for number, row in enumerate(order[plan.start : plan.stop].tolist()):
        Tally.add(1)
        entry = inventory.entry(row)
        key, path = f"{plan.name}-{number:06d}", entry.path
        data = b""
        try:
            if entry.num_bytes > MAX_INPUT_BYTES:
                raise Rejection("too_large", f"{entry.num_bytes:,} bytes")
            data = source.read(entry)
            with naming(path):
                image = convert(data, work.settings)
        except Rejection as rejection:
            digest = hashlib.sha256(data).hexdigest()
            rejected.append(
                Rejected(
                    key=key,
                    path=path,
                    reason=rejection.reason,
                    detail=rejection.detail,
                    sha256=digest,
                )
            )
            continue
        label = work.labels[entry.label] if entry.label >= 0 else entry.label
        yield Sample(key=key, label=label, image=image, path=path)
