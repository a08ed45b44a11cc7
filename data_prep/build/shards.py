"""Writes one shard: a deterministic tar, its index, and the record of what went in.

The bytes of a shard are a function of its samples alone: fixed owner, mode and time. The files of a
shard are published in this order, each atomically:

1. `X.tar`, the samples;
2. `X.npy`, the index, and `X.paths`, where each sample came from;
3. `PARTS/X.json`, the record, which carries its own hash. A shard with a record of the same build
   is done; anything else is written anew;
4. of a dataset that goes to a store: the tar is uploaded, the record says so, the tar here is
   removed.
"""

import hashlib
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.build.destination import Destination, deliver_tar, is_as_delivered
from data_prep.build.parts import read_record, write_record
from data_prep.images import EncodedImage
from data_prep.images.channels import ChannelSums, ChannelTotals
from data_prep.manifest import INDEX_DTYPE, Shard
from data_prep.publish import atomic_file, sha256_of, write_atomic
from data_prep.settings import Settings
from data_prep.tar import TarWriter


@dataclass(frozen=True)
class Sample:
    key: str
    label: int
    image: EncodedImage
    path: str


class Rejected(Settings):
    key: str
    """The key that the sample would have had."""
    path: str
    reason: str
    detail: str
    sha256: str


class ShardRecord(Settings):
    """All that the manifest needs to know of a shard, kept beside it until the manifest stands."""

    plan_hash: str
    num_inputs: int
    shard: Shard
    class_counts: dict[str, int]
    channels: ChannelTotals
    rejected: tuple[Rejected, ...]
    extensions: tuple[str, ...] = ()
    """Of the pictures, where they were built here."""
    fingerprints: str = ""
    """8 bytes of BLAKE2 for each stored image, in hexadecimal, if the images were built here."""
    stored: str | None = None
    """What the store calls its tar, which is then no longer here."""

    @classmethod
    def of(
        cls, shard: Shard, channels: ChannelSums, rejected: list[Rejected], **more: Any
    ) -> "ShardRecord":
        num_inputs = shard.num_samples + len(rejected)
        return cls(
            num_inputs=num_inputs,
            shard=shard,
            channels=channels.totals,
            rejected=tuple(rejected),
            **more,
        )


def write_shard(
    directory: Path,
    name: str,
    samples: Iterable[Sample],
    *,
    plan_hash: str,
    rejected: list[Rejected],
) -> ShardRecord:
    """Consumes `samples` (which may append to `rejected` as it goes) into the shard `name` of
    `directory`."""
    channels = ChannelSums()
    rows: list[tuple[int, int, int]] = []
    paths: list[str] = []
    extensions: set[str] = set()
    fingerprints: list[str] = []
    with atomic_file(directory / f"{name}.tar") as raw:
        tar = TarWriter(raw)
        for sample in samples:
            offset = tar.add(f"{sample.key}.{sample.image.extension}", sample.image.data)
            tar.add(f"{sample.key}.cls", b"%d" % sample.label)
            if sample.image.extension != "ppm":
                # Raw samples carry none: their members must all have one size, so that the shard is
                # an array.
                tar.add(f"{sample.key}.json", json.dumps({"path": sample.path}).encode())
            rows.append((offset, len(sample.image.data), sample.label))
            extensions.add(sample.image.extension)
            fingerprints.append(hashlib.blake2b(sample.image.data, digest_size=8).hexdigest())
            paths.append(sample.path)
            channels.add(sample.image.pixels)
        tar.finish()
    index = np.array(rows, INDEX_DTYPE).reshape(-1, 3)
    shard = Shard(
        name=name,
        file=f"{name}.tar",
        num_samples=len(rows),
        num_bytes=tar.num_bytes,
        sha256=tar.sha256,
        index_sha256=write_index(directory, name, index),
        paths_sha256=write_paths(directory, name, paths),
    )
    more = {"class_counts": count_labels(index[:, 2]), "extensions": tuple(sorted(extensions))}
    record = ShardRecord.of(
        shard, channels, rejected, plan_hash=plan_hash, fingerprints="".join(fingerprints), **more
    )
    write_record(directory, name, record)
    return record


def write_index(directory: Path, name: str, rows: NDArray[np.int64]) -> str:
    """Publishes the index of a shard; returns its sha256."""
    buffer = io.BytesIO()
    np.save(buffer, rows.astype(INDEX_DTYPE))
    write_atomic(directory / f"{name}.npy", buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def write_paths(directory: Path, name: str, paths: list[str]) -> str:
    """Publishes where the samples of a shard came from; returns the file's sha256."""
    data = "".join(json.dumps(path) + "\n" for path in paths).encode()
    write_atomic(directory / f"{name}.paths", data)
    return hashlib.sha256(data).hexdigest()


def count_labels(labels: NDArray[np.int64]) -> dict[str, int]:
    """How many samples each class has; those without a label are not counted."""
    seen, counts = np.unique(labels[labels >= 0], return_counts=True)
    return {str(label): int(count) for label, count in zip(seen, counts, strict=True)}


def delivered(place: Destination, record: ShardRecord) -> ShardRecord:
    """The record of a shard that is in the store, if the dataset goes to one."""
    if not place.is_remote or record.stored is not None:
        return record
    record = record.model_copy(update={"stored": deliver_tar(place, record.shard)})
    write_record(place.directory, record.shard.name, record)
    (place.directory / record.shard.file).unlink()
    return record


def finished_record(place: Destination, name: str, *, plan_hash: str) -> ShardRecord | None:
    """The record of a shard that this very build has finished before, with its files still as they
    were."""
    try:
        record = load_record(place.directory, name)
    except (OSError, ValueError):
        return None
    if record.plan_hash != plan_hash or damaged_files(place, record, trust=False):
        return None
    return delivered(place, record)


def load_record(directory: Path, name: str) -> ShardRecord:
    """ValueError where it is not as it was written, or was written of another shard (copied, such
    as by a hand that mends)."""
    record = read_record(directory, name, ShardRecord)
    if record.shard.name != name:
        raise ValueError(f"is the record of {record.shard.name}")
    return record


def damaged_files(place: Destination, record: ShardRecord, *, trust: bool) -> list[str]:
    """The files of a shard that are missing or not as they were written; with `trust`, by their
    sizes. Of a tar in a store it is asked whether it is what was uploaded."""
    directory, shard = place.directory, record.shard
    hashes = {shard.index_file: shard.index_sha256, shard.paths_file: shard.paths_sha256}
    damaged = []
    if record.stored is None:
        hashes = {shard.file: shard.sha256, **hashes}
    elif not is_as_delivered(place, shard, record.stored):
        damaged.append(shard.file)
    for file, sha256 in hashes.items():
        path = directory / file
        try:
            is_same = file != shard.file or path.stat().st_size == shard.num_bytes
            if not (is_same and path.is_file() and (trust or sha256_of(path) == sha256)):
                damaged.append(file)
        except FileNotFoundError:
            damaged.append(file)
    return damaged
