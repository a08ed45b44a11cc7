"""`data_prep build`: a listing is cut into shards, the shards are written in any order by any number of workers, and one
manifest, written last, makes them a dataset.

The plan (which input goes to which shard) is a function of the config and the listing, never of the workers. Steps:

1. list the source; the fingerprint hashes config and listing;
2. a directory of another fingerprint, finished or not: refuse; else put ours there;
3. write every shard whose record is missing (see shards.py);
4. write rejected.jsonl, then manifest.json;
5. remove the records.

A kill anywhere leaves finished shards with their records; the same command goes on from there to the same bytes.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep import __version__
from data_prep.config import BuildSettings
from data_prep.images import ImageSpec, Rejection, convert
from data_prep.manifest import MANIFEST_NAME, REJECTED_NAME, Manifest, Split, load_manifest, save_manifest
from data_prep.progress import progress
from data_prep.publish import TEMPORARY_PREFIX, canonical_json, sole_writer, write_atomic, write_json
from data_prep.shards import PARTS, Rejected, Sample, ShardRecord, finished_record, write_shard
from data_prep.sources import Item, Listing, Source, open_source
from data_prep.workers import worker_pool

BEGUN_NAME = "begun.json"


class TooManyRejected(ValueError):  # noqa: N818
    """The dataset is written and whole, but lost more inputs than the config allows."""


@dataclass(frozen=True)
class ShardJob:
    """One shard's worth of inputs, picklable."""

    directory: Path
    file: str
    items: tuple[Item, ...]
    source: Source
    spec: ImageSpec
    fingerprint: str


def build(settings: BuildSettings) -> Manifest:
    """The finished dataset of `settings.out`; safe to call again after any interruption."""
    directory = Path(settings.out)
    with sole_writer(directory):
        source = open_source(settings.source, num_workers=settings.num_workers)
        listing = source.listing()
        fingerprint = fingerprint_of(settings, source, listing)
        claim(directory, fingerprint=fingerprint)
        if (directory / MANIFEST_NAME).exists():
            manifest = load_manifest(directory)
        else:
            jobs = plan(settings, source, listing, fingerprint=fingerprint)
            records = run(jobs, num_workers=settings.num_workers)
            manifest = summarise(settings, source, listing, records, fingerprint=fingerprint)
            publish(directory, manifest, records)
        shutil.rmtree(directory / PARTS, ignore_errors=True)
    share = manifest.num_rejected / manifest.num_read
    if share > settings.max_reject_share:
        raise TooManyRejected(
            f"{directory}: {manifest.num_rejected:,} of {manifest.num_read:,} inputs were rejected ({share:.1%}, allowed "
            f"{settings.max_reject_share:.1%}); read {directory / REJECTED_NAME}, then mend the source or raise max_reject_share"
        )
    return manifest


def claim(directory: Path, *, fingerprint: str) -> None:
    """Makes the directory this build's; refuses one that holds, or has begun to hold, another."""
    begun, finished = directory / PARTS / BEGUN_NAME, (directory / MANIFEST_NAME).exists()
    if finished:
        found = load_manifest(directory).fingerprint
    else:
        found = json.loads(begun.read_text())["fingerprint"] if begun.exists() else fingerprint
    if found != fingerprint:
        state = "a" if finished else "an unfinished"
        raise ValueError(
            f"out: {directory} holds {state} dataset of another config or source; remove it or name another directory"
        )
    if not finished:
        for leftover in directory.glob(TEMPORARY_PREFIX + "*"):
            leftover.unlink()
        begun.parent.mkdir(exist_ok=True)
        write_json(begun, {"fingerprint": fingerprint})


def fingerprint_of(settings: BuildSettings, source: Source, listing: Listing) -> str:
    """What decides the bytes of the dataset: not the number of workers, and no path of this machine."""
    config = settings.model_dump(mode="json", exclude={"out", "num_workers", "max_reject_share", "source"})
    digest = hashlib.sha256(canonical_json([config, settings.dataset_name, source.describe(), listing.classes]))
    for split, items in sorted(listing.splits.items()):
        digest.update(f"\n{split}\n".encode())
        for item in items:
            digest.update(f"{item.locator}\t{item.label}\t{item.num_bytes}\n".encode())
    return digest.hexdigest()


def plan(settings: BuildSettings, source: Source, listing: Listing, *, fingerprint: str) -> list[ShardJob]:
    jobs = []
    for number, (split, items) in enumerate(sorted(listing.splits.items())):
        rows = np.arange(len(items))
        if settings.order == "shuffled":
            rows = np.random.Generator(np.random.Philox(np.random.SeedSequence([settings.seed, number]))).permutation(
                rows
            )
        for shard, start in enumerate(range(0, len(rows), settings.samples_per_shard)):
            chosen = tuple(items[row] for row in rows[start : start + settings.samples_per_shard])
            file = f"{split}-{shard:06d}.tar"
            jobs.append(ShardJob(Path(settings.out), file, chosen, source, settings.image_spec, fingerprint))
    return jobs


def run(jobs: list[ShardJob], *, num_workers: int) -> list[ShardRecord]:
    """The record of every job, in the order of the plan."""
    records: dict[str, ShardRecord] = {}
    with (
        worker_pool(min(num_workers, len(jobs))) as pool,
        progress("packing shards", total=sum(len(job.items) for job in jobs), unit="images") as line,
    ):
        futures = {pool.submit(write_job, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                job = futures[future]
                records[job.file] = future.result()
                line.advance(len(job.items), note=job.file)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [records[job.file] for job in jobs]


def write_job(job: ShardJob) -> ShardRecord:
    done = finished_record(job.directory, job.file, fingerprint=job.fingerprint)
    if done is not None:
        return done
    rejected: list[Rejected] = []
    return write_shard(job.directory, job.file, _samples(job, rejected), fingerprint=job.fingerprint, rejected=rejected)


def _samples(job: ShardJob, rejected: list[Rejected]) -> Iterator[Sample]:
    stem = job.file.removesuffix(".tar")
    for number, item in enumerate(job.items):
        data = job.source.read(item.locator)
        try:
            image = convert(data, job.spec)
        except Rejection as rejection:
            digest = hashlib.sha256(data).hexdigest()
            rejected.append(
                Rejected(path=item.locator, reason=rejection.reason, detail=rejection.detail, sha256=digest)
            )
            continue
        # Raw samples carry no provenance: their members must all have one size, so that the shard is an array.
        provenance = None if job.spec.encoding == "raw" else {"path": item.locator}
        yield Sample(key=f"{stem}-{number:06d}", label=item.label, image=image, provenance=provenance)


def summarise(
    settings: BuildSettings, source: Source, listing: Listing, records: list[ShardRecord], *, fingerprint: str
) -> Manifest:
    splits = {}
    for split in sorted(listing.splits):
        mine = [record for record in records if record.shard.file.startswith(f"{split}-")]
        counts = [
            sum(record.class_counts.get(str(label), 0) for record in mine) for label in range(len(listing.classes))
        ]
        splits[split] = Split(shards=tuple(record.shard for record in mine), class_counts=tuple(counts))
    mean, std = channel_statistics([record for record in records if record.shard.file.startswith("train-")] or records)
    num_read = sum(len(items) for items in listing.splits.values())
    num_rejected = sum(len(record.rejected) for record in records)
    num_written = sum(split.num_samples for split in splits.values())
    assert num_read == num_written + num_rejected, (num_read, num_written, num_rejected)
    return Manifest(
        tool_version=__version__,
        name=settings.dataset_name,
        source=source.describe(),
        seed=settings.seed,
        encoding=settings.encoding,
        image_size=settings.image_size,
        classes=listing.classes,
        splits=splits,
        channel_mean=mean,
        channel_std=std,
        num_read=num_read,
        num_written=num_written,
        num_rejected=num_rejected,
        fingerprint=fingerprint,
    )


def channel_statistics(records: list[ShardRecord]) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation per channel on the scale 0..1, of the pictures as the model gets them."""
    pixels = max(1, sum(record.num_pixels for record in records))
    mean = np.sum([record.channel_sums for record in records], axis=0) / pixels
    variance = np.sum([record.channel_square_sums for record in records], axis=0) / pixels - mean**2
    m, s = (mean / 255).tolist(), (np.sqrt(variance.clip(min=0)) / 255).tolist()
    return (m[0], m[1], m[2]), (s[0], s[1], s[2])


def publish(directory: Path, manifest: Manifest, records: list[ShardRecord]) -> None:
    lines = [json.dumps(reject.model_dump(), sort_keys=True) for record in records for reject in record.rejected]
    write_atomic(directory / REJECTED_NAME, "".join(line + "\n" for line in sorted(lines)).encode())
    save_manifest(directory, manifest)
