"""Write one shard: a deterministic tar, its index, and its record.

The bytes of a shard depend only on its samples: owner, mode and time are fixed. The files appear in
this order, each atomically:

1. `X.tar`, the samples;
2. `X.npy`, the index, and `X.paths`, the source path of each sample;
3. `PARTS/X.json`, the record with its own hash. A shard with a record of the same build is
   finished; any other shard is written again.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.build.parts import read_record, write_record
from data_prep.images import EncodedImage
from data_prep.images.channels import ChannelSums, ChannelTotals
from data_prep.manifest import INDEX_DTYPE, Shard, write_array
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
    """Key that the sample would have had in its shard."""
    path: str
    reason: str
    detail: str
    sha256: str


class ShardRecord(Settings):
    """Facts of a finished shard, kept on disk until the manifest is written."""

    plan_hash: str
    num_inputs: int
    shard: Shard
    class_counts: dict[str, int]
    channels: ChannelTotals
    rejected: tuple[Rejected, ...]
    extensions: tuple[str, ...] = ()
    """File extensions of the images; empty if another program encoded them."""
    fingerprints: str = ""
    """BLAKE2 hash (8 bytes, hexadecimal) of each stored image; empty if another program encoded
    them."""


def write_shard(
    directory: Path,
    name: str,
    samples: Iterable[Sample],
    *,
    plan_hash: str,
    rejected: list[Rejected],
) -> ShardRecord:
    """Write `samples` as the shard `name`, and return its record. Reading `samples` may append to
    `rejected`."""
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
                # Raw samples have no .json: the shard is an array of members of one size.
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
    record = ShardRecord(
        plan_hash=plan_hash,
        num_inputs=len(rows) + len(rejected),
        shard=shard,
        class_counts=count_labels(index[:, 2]),
        channels=channels.totals,
        rejected=tuple(rejected),
        extensions=tuple(sorted(extensions)),
        fingerprints="".join(fingerprints),
    )
    write_record(directory, name, record)
    return record


def write_index(directory: Path, name: str, rows: NDArray[np.int64]) -> str:
    """Write the index of a shard; return its sha256."""
    return write_array(directory / f"{name}.npy", rows.astype(INDEX_DTYPE))


def write_paths(directory: Path, name: str, paths: list[str]) -> str:
    """Write the source path of each sample of a shard; return the file's sha256."""
    data = "".join(json.dumps(path) + "\n" for path in paths).encode()
    write_atomic(directory / f"{name}.paths", data)
    return hashlib.sha256(data).hexdigest()


def count_labels(labels: NDArray[np.int64]) -> dict[str, int]:
    seen, counts = np.unique(labels[labels >= 0], return_counts=True)
    return {str(label): int(count) for label, count in zip(seen, counts, strict=True)}


def finished_record(directory: Path, name: str, *, plan_hash: str) -> ShardRecord | None:
    """Return the record of a finished shard of the build `plan_hash`, or None if the record or a
    file is missing or damaged."""
    try:
        record = read_record(directory, name, ShardRecord)
        shard = record.shard
        hashes = {
            shard.file: shard.sha256,
            shard.index_file: shard.index_sha256,
            shard.paths_file: shard.paths_sha256,
        }
        is_finished = (
            shard.name == name
            and record.plan_hash == plan_hash
            and all(sha256_of(directory / file) == sha256 for file, sha256 in hashes.items())
        )
    except (OSError, ValueError):
        return None
    return record if is_finished else None
