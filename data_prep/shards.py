"""Writes one shard: a deterministic tar, its index, and the record of what went in.

The bytes of a shard are a function of its samples alone: fixed owner, mode and time. The three files of a shard are published
in this order, each atomically:

1. `X.tar`, the samples;
2. `X.npy`, the index;
3. `parts/X.json`, the record. A shard with a record of the same build is done; anything else is written anew.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from data_prep.images import EncodedImage
from data_prep.manifest import INDEX_DTYPE, Shard
from data_prep.publish import atomic_file, sha256_of, write_json
from data_prep.settings import Settings

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
    sums, square_sums, num_pixels = np.zeros(3, np.int64), np.zeros(3, np.int64), 0
    labels: list[int] = []
    offsets: list[tuple[int, int, int]] = []
    with atomic_file(directory / file) as raw:
        tar = HashedFile(raw)
        with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for sample in samples:
                offset = _add(archive, f"{sample.key}.{sample.image.extension}", sample.image.data)
                _add(archive, f"{sample.key}.cls", b"%d" % sample.label)
                if sample.provenance is not None:
                    _add(archive, f"{sample.key}.json", json.dumps(sample.provenance, sort_keys=True).encode())
                offsets.append((offset, len(sample.image.data), sample.label))
                labels.append(sample.label)
                sums += sample.image.channel_sums
                square_sums += sample.image.channel_square_sums
                num_pixels += sample.image.num_pixels
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
            sha256=tar.digest.hexdigest(),
            index_sha256=sha256_of(index_path),
        ),
        class_counts={str(label): int(count) for label, count in zip(labels_seen, counts, strict=True)},
        channel_sums=(int(sums[0]), int(sums[1]), int(sums[2])),
        channel_square_sums=(int(square_sums[0]), int(square_sums[1]), int(square_sums[2])),
        num_pixels=num_pixels,
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


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> int:
    """Appends one member and returns where its data starts."""
    info = tarfile.TarInfo(name)  # mtime 0, mode 0644, owner 0: the defaults of TarInfo, and the same on every machine
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
    padded = -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return archive.offset - padded


class HashedFile(io.RawIOBase):
    """A write-only file that hashes what passes through, so that a shard need not be read again for its sha256."""

    def __init__(self, file: IO[bytes]):
        self._file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.digest.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.num_bytes
