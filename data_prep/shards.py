"""Writes one shard: a deterministic tar, its index, and the record of what went in.

The bytes of a shard are a function of its samples alone: fixed owner, mode and time. The three files of a shard are published
in this order, each atomically:

1. `X.tar`, the samples;
2. `X.npy`, the index;
3. `parts/X.json`, the record. A shard with a record of the same build is done; anything else is written anew.
"""

import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.channels import ChannelSums
from data_prep.images import EncodedImage
from data_prep.manifest import INDEX_DTYPE, Shard
from data_prep.publish import atomic_file, sha256_of, write_json
from data_prep.settings import Settings
from data_prep.tar_writer import TarWriter

PARTS = "parts"


@dataclass(frozen=True)
class Sample:
    key: str
    label: int
    image: EncodedImage
    provenance: dict[str, str] | None = None


class Rejected(Settings):
    path: str
    reason: str
    detail: str
    sha256: str


class ShardRecord(Settings):
    """All that the manifest needs to know of a shard, kept beside it until the manifest stands."""

    fingerprint: str
    shard: Shard
    class_counts: dict[str, int]
    channel_sums: tuple[int, int, int]
    channel_square_sums: tuple[int, int, int]
    num_pixels: int
    rejected: tuple[Rejected, ...]


def write_shard(
    directory: Path, file: str, samples: Iterable[Sample], *, fingerprint: str, rejected: list[Rejected]
) -> ShardRecord:
    """Consumes `samples` (which may append to `rejected` as it goes) into the shard `file` of `directory`."""
    channels = ChannelSums()
    labels: list[int] = []
    offsets: list[tuple[int, int, int]] = []
    with atomic_file(directory / file) as raw:
        tar = TarWriter(raw)
        for sample in samples:
            offset = tar.add(f"{sample.key}.{sample.image.extension}", sample.image.data)
            tar.add(f"{sample.key}.cls", b"%d" % sample.label)
            if sample.provenance is not None:
                tar.add(f"{sample.key}.json", json.dumps(sample.provenance, sort_keys=True).encode())
            offsets.append((offset, len(sample.image.data), sample.label))
            labels.append(sample.label)
            channels.add(sample.image.pixels)
        tar.finish()
    index_path = directory / (file.removesuffix(".tar") + ".npy")
    with atomic_file(index_path) as index_file:
        np.save(index_file, np.array(offsets, INDEX_DTYPE).reshape(-1, 3))
    labels_seen, counts = np.unique(np.array(labels, np.int64), return_counts=True)
    record = ShardRecord(
        fingerprint=fingerprint,
        shard=Shard(
            file=file,
            num_samples=len(labels),
            num_bytes=tar.num_bytes,
            sha256=tar.sha256,
            index_sha256=sha256_of(index_path),
        ),
        class_counts={str(label): int(count) for label, count in zip(labels_seen, counts, strict=True)},
        channel_sums=channels.sums,
        channel_square_sums=channels.square_sums,
        num_pixels=channels.num_pixels,
        rejected=tuple(rejected),
    )
    write_json(record_path(directory, file), record.model_dump(mode="json"))
    return record


def finished_record(directory: Path, file: str, *, fingerprint: str) -> ShardRecord | None:
    """The record of a shard that this very build has finished before, with its files still as they were."""
    try:
        record = ShardRecord.model_validate_json(record_path(directory, file).read_text(encoding="utf-8"))
        if record.fingerprint != fingerprint:
            return None
        whole = sha256_of(directory / file) == record.shard.sha256
        return record if whole and sha256_of(directory / record.shard.index_file) == record.shard.index_sha256 else None
    except (OSError, ValueError):
        return None


def record_path(directory: Path, file: str) -> Path:
    return directory / PARTS / (file.removesuffix(".tar") + ".json")


def read_samples(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """(key, image bytes, label) of a shard in file order, read as a plain tar (`verify` compares it with the index)."""
    with tarfile.open(path, mode="r:") as archive:
        key, image = "", b""
        for member in archive:
            name, _, extension = member.name.partition(".")
            body = archive.extractfile(member)
            assert body is not None, member.name
            if extension == "cls":
                if name != key:
                    raise ValueError(f"{path}: {member.name} follows the image of {key or 'no sample'}")
                yield key, image, int(body.read())
            elif extension != "json":
                key, image = name, body.read()
