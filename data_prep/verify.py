"""`data_prep verify`: reads a dataset the slow way (plain tar, full decode) and holds it against its manifest and index."""

from pathlib import Path

import numpy as np

from data_prep.images import Rejection, decode
from data_prep.manifest import REJECTED_NAME, DatasetError, Manifest, Shard, load_index, load_manifest
from data_prep.progress import progress
from data_prep.publish import sha256_of
from data_prep.shards import read_samples


def verify(directory: Path) -> tuple[Manifest, list[str]]:
    """The manifest and every fault found, one line each; an empty list means that the dataset is what it claims to be."""
    manifest = load_manifest(directory)
    faults = []
    if manifest.num_read != manifest.num_written + manifest.num_rejected:
        faults.append(
            f"manifest: {manifest.num_read} read, but {manifest.num_written} written + {manifest.num_rejected} rejected"
        )
    num_in_splits = sum(split.num_samples for split in manifest.splits.values())
    if manifest.num_written != num_in_splits:
        faults.append(f"manifest: {manifest.num_written} written, but its splits have {num_in_splits} samples")
    faults += _rejected_faults(directory / REJECTED_NAME, manifest.num_rejected)
    with progress("verifying", total=manifest.num_written, unit="images") as line:
        for name, split in manifest.splits.items():
            counts = np.zeros(len(manifest.classes), np.int64)
            for shard in split.shards:
                faults += _shard_faults(directory, shard, manifest, counts)
                line.advance(shard.num_samples, note=shard.file)
            if tuple(counts.tolist()) != split.class_counts:
                faults.append(f"split {name}: the class counts of the shards are not those of the manifest")
    return manifest, faults


def _rejected_faults(path: Path, num_rejected: int) -> list[str]:
    if not path.is_file():
        return [f"{path.name}: missing"]
    num_lines = len(path.read_bytes().splitlines())
    return [f"{path.name}: {num_lines} lines, {num_rejected} expected"] if num_lines != num_rejected else []


def _shard_faults(
    directory: Path, shard: Shard, manifest: Manifest, counts: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[str]:
    path = directory / shard.file
    if not path.is_file():
        return [f"{shard.file}: missing"]
    faults = []
    if sha256_of(path) != shard.sha256:
        faults.append(
            f"{shard.file}: sha256 differs from the manifest ({path.stat().st_size:,} bytes, {shard.num_bytes:,} expected)"
        )
    index_path = directory / shard.index_file
    paths_path = directory / shard.paths_file
    if not paths_path.is_file() or sha256_of(paths_path) != shard.paths_sha256:
        faults.append(f"{shard.paths_file}: missing or changed")
    if not index_path.is_file() or sha256_of(index_path) != shard.index_sha256:
        return [*faults, f"{shard.index_file}: missing or changed"]
    try:
        index = load_index(directory, shard)
    except DatasetError as error:
        return [*faults, str(error)]
    content = path.read_bytes()
    seen = 0
    try:
        for seen, (key, image, label) in enumerate(read_samples(path), start=1):
            faults += _sample_faults(f"{shard.file} {key}", image, label, manifest)
            offset, length, indexed_label = index[seen - 1].tolist() if seen <= len(index) else (0, -1, -1)
            if content[offset : offset + length] != image or indexed_label != label:
                faults.append(f"{shard.file} {key}: the index points elsewhere")
            if 0 <= label < len(counts):
                counts[label] += 1
    except Exception as error:  # noqa: BLE001
        # whatever a damaged tar makes its reader raise is a finding about the file
        faults.append(f"{shard.file}: not readable after {seen} samples ({error})")
    if seen != shard.num_samples:
        faults.append(f"{shard.file}: {seen} samples, {shard.num_samples} expected")
    return faults


def _sample_faults(name: str, image: bytes, label: int, manifest: Manifest) -> list[str]:
    faults = [] if 0 <= label < len(manifest.classes) else [f"{name}: label {label} of {len(manifest.classes)} classes"]
    try:
        picture, _ = decode(image)
    except Rejection as rejection:
        return [*faults, f"{name}: {rejection}"]
    size = (manifest.image_size, manifest.image_size)
    if manifest.encoding != "keep" and picture.size != size:
        faults.append(f"{name}: {picture.size} pixels, {size} expected")
    return faults
