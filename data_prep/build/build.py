"""`data_prep build`: write a dataset on a local disk from a source.

Steps, under the lock of OUT:

1. mark OUT as a dataset, then make the plan (workplan.py), unless the manifest exists;
2. write every shard without a record (shards.py), then compare the source with its listing;
3. write rejected.jsonl, annotations and manifest.json, then remove the records (merge.py).

Array tasks share step 2 (tasks.py). After a kill at any point the same command resumes and writes
the same bytes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from data_prep.archives.inventory import open_inventory
from data_prep.build.config import BuildSettings
from data_prep.build.merge import check_reject_fraction, publish, refuse_changed, with_limit
from data_prep.build.parts import forget_parts, own_place
from data_prep.build.shards import Rejected, Sample, ShardRecord, finished_record, write_shard
from data_prep.build.workplan import ShardPlan, Workplan, open_source_of, prepare
from data_prep.images import Rejection, convert, naming
from data_prep.images.rejection import check_file_size
from data_prep.manifest import MANIFEST_NAME, Manifest, load_manifest
from data_prep.sources import Source
from data_prep.workers import Pool, sweep


def build(settings: BuildSettings) -> Manifest:
    directory = settings.directory
    source = open_source_of(settings)
    with own_place(directory), Pool(settings.num_workers) as pool:
        work = prepare(settings, source, pool)
        if (directory / MANIFEST_NAME).exists():
            manifest = with_limit(directory, load_manifest(directory), settings.max_reject_fraction)
        else:
            records = write_shards(work, work.shards, source, pool)
            refuse_changed(work, source, pool)
            manifest = publish(work, source, records)
        forget_parts(directory)
    check_reject_fraction(directory, manifest)
    return manifest


def write_shards(
    work: Workplan, plans: Sequence[ShardPlan], source: Source, pool: Pool
) -> list[ShardRecord]:
    """Write the planned shards that do not exist yet. Return the records of all planned
    shards, in order."""
    function, sizes = (
        partial(write_planned, work, source),
        [each.stop - each.start for each in plans],
    )
    return list(sweep(function, plans, title="packing", unit="images", sizes=sizes, workers=pool))


def write_planned(work: Workplan, source: Source, plan: ShardPlan) -> ShardRecord:
    done = finished_record(work.directory, plan.name, plan_hash=work.parts_id)
    if done is not None and done.num_inputs == plan.stop - plan.start:
        return done
    rejected: list[Rejected] = []
    samples = _samples(work, source, plan, rejected)
    return write_shard(
        work.directory, plan.name, samples, plan_hash=work.parts_id, rejected=rejected
    )


def _samples(
    work: Workplan, source: Source, plan: ShardPlan, rejected: list[Rejected]
) -> Iterator[Sample]:
    inventory = open_inventory(work.inventory_directory, work.stamp)
    order = np.load(work.order_path(plan.split), mmap_mode="r")
    for number, row in enumerate(order[plan.start : plan.stop].tolist()):
        entry = inventory.entry(row)
        key, path, data = f"{plan.name}-{number:06d}", entry.path, b""
        try:
            check_file_size(entry.num_bytes)
            data = source.read(entry)
            with naming(path):
                image = convert(data, work.settings)
        except Rejection as rejection:
            digest = hashlib.sha256(data).hexdigest()
            reason, detail = rejection.reason, rejection.detail
            rejected.append(
                Rejected(key=key, path=path, reason=reason, detail=detail, sha256=digest)
            )
            continue
        label = work.labels[entry.label] if entry.label >= 0 else entry.label
        yield Sample(key=key, label=label, image=image, path=path)
