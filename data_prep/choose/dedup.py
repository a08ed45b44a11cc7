"""`data_prep dedup`: list samples that repeat an earlier image; `build` and `subset` read the list.

All samples are compared in one order: other datasets, then splits that stay complete (test, val,
others), then splits that may lose samples. Within a split, the order of the shards applies.

1. Among samples with equal pixels, the first stays.
2. Among samples with equal perceptual hashes and similar colors, the first stays.
3. A sample is dropped if an earlier sample, also a dropped one, has a near perceptual hash and
   similar colors.

Test sets stay complete. A dataset built without the listed samples has no duplicates in these
splits.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.check.stored import each_shard, stored_key, tar_content
from data_prep.choose.hashes import DTYPE, Hashes, same_colors, shard_hashes
from data_prep.choose.neighbors import MAX_NEAR, near_pairs
from data_prep.errors import Code, UserError
from data_prep.manifest import REJECTED_NAME, Manifest, Shard, load_index, load_manifest, load_paths
from data_prep.publish import make_directory
from data_prep.remote import Storage

Ids = NDArray[np.int64]
PRIORITY = {"test": 0, "val": 1}


@dataclass(frozen=True)
class Part:
    """One split of one dataset. `start` is the position of its first sample in the concatenation of
    all splits."""

    directory: Path
    manifest: Manifest
    split: str
    start: int
    may_lose: bool

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.manifest.splits[self.split].shards

    @property
    def stop(self) -> int:
        return self.start + self.manifest.splits[self.split].num_samples


@dataclass(frozen=True)
class Duplicates:
    parts: list[Part]
    positions: Ids
    """Positions of the repeated samples in the concatenation of all splits, ascending."""
    likes: Ids
    """For each entry of `positions`, the position of the earlier sample that it repeats."""
    distances: NDArray[np.int64]
    """Number of differing bits of the perceptual hashes; -1 for equal pixels."""
    num_plain: int
    """Number of the dataset's images that are compared by pixels only (see hashes.py)."""

    def pairs(self) -> Iterator[tuple[int, int, int, Part, Part]]:
        """Yield for each dropped sample: its position, the position of the earlier sample that it
        repeats, their distance, and the parts of both."""
        columns = (self.positions.tolist(), self.likes.tolist(), self.distances.tolist())
        for position, like, distance in zip(*columns, strict=True):
            part, other = (
                next(part for part in self.parts if part.start <= place < part.stop)
                for place in (position, like)
            )
            yield position, like, distance, part, other


def find_duplicates(
    directory: Path,
    *,
    against: tuple[Path, ...],
    splits: tuple[str, ...],
    near: int | None,
    cache: Path | None,
    num_workers: int,
    storage: Storage,
) -> Duplicates:
    """Return the samples of `splits` that repeat an earlier sample. `near` is the largest Hamming
    distance; None: only equal pixels count."""
    if near is not None and not 0 <= near <= MAX_NEAR:
        fix = f"choose 0 to {MAX_NEAR}; larger distances match different images"
        raise UserError("--max-hamming", f"{near} is not valid", fix, code="bad-value")
    parts = _parts(directory, against, splits)
    if cache is not None:
        make_directory(cache)
    found = [np.zeros(0, DTYPE)]
    for part in parts:
        work = partial(shard_hashes, part.directory, cache, storage)
        title = f"hashing {part.manifest.name}/{part.split}"
        found += each_shard(work, part.shards, title=title, num_workers=num_workers)
    hashes = np.concatenate(found)
    first = next(part.start for part in parts if part.may_lose)
    like, distance = compare(hashes, near=near, first=first)
    positions = np.flatnonzero((like >= 0) & (np.arange(len(like)) >= first))
    own = [part for part in parts if part.directory == directory]
    num_plain = int(sum(hashes["plain"][part.start : part.stop].sum() for part in own))
    return Duplicates(parts, positions, like[positions], distance[positions], num_plain)


def _parts(directory: Path, against: tuple[Path, ...], splits: tuple[str, ...]) -> list[Part]:
    manifest = load_manifest(directory)
    for split in splits:
        manifest.split(split, directory=directory)
    wanted: list[tuple[Path, Manifest, str, bool]] = []
    for other in against:
        if other.resolve() == directory.resolve():
            problem, fix = f"{other} is the dataset itself", "choose other datasets"
            raise UserError("against", problem, fix, code="conflict")
        found = load_manifest(other)
        wanted += [(other, found, split, False) for split in sorted(found.splits)]
    mine = sorted(
        manifest.splits,
        key=lambda split: (split in splits, PRIORITY.get(split, len(PRIORITY)), split),
    )
    wanted += [(directory, manifest, split, split in splits) for split in mine]
    parts: list[Part] = []
    for place, found, split, may_lose in wanted:
        parts.append(Part(place, found, split, parts[-1].stop if parts else 0, may_lose))
    return parts


def compare(hashes: Hashes, *, near: int | None, first: int) -> tuple[Ids, NDArray[np.int64]]:
    """Return for each sample the position of the earlier similar sample (-1: none), and the number
    of differing bits (-1: equal pixels). Near hashes are searched only for samples from `first`."""
    like, distance = np.full(len(hashes), -1, np.int64), np.full(len(hashes), -1, np.int64)
    pixels = hashes["pixels"]
    order = np.lexsort((pixels[:, 1], pixels[:, 0]))  # stable: equal hashes stay in their order
    starts = np.ones(len(order), np.bool_)
    starts[1:] = (pixels[order][1:] != pixels[order][:-1]).any(axis=1)
    heads = order[np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))]
    like[order[~starts]] = heads[~starts]
    if near is None:
        return like, distance
    left = np.flatnonzero((like < 0) & ~hashes["plain"])
    left = _join_equal_bits(hashes, left, like, distance)
    bits = np.ascontiguousarray(hashes["bits"][left])
    a, b, apart = near_pairs(bits, near=near, first=int(np.searchsorted(left, first)))
    same = same_colors(hashes["colors"], left[a], left[b])
    pairs = (left[a[same]].tolist(), left[b[same]].tolist(), apart[same].tolist())
    for low, high, bits_apart in zip(*pairs, strict=True):
        if like[low] < 0 and like[high] < 0:
            like[high], distance[high] = low, bits_apart
    return like, distance


def _join_equal_bits(hashes: Hashes, left: Ids, like: Ids, distance: NDArray[np.int64]) -> Ids:
    """Record the duplicates of step 2 (module docstring) in `like` and `distance`. Return the
    remaining samples. Rounds avoid comparing all pairs of a thousand copies of one image."""
    remaining, firsts = left, [np.zeros(0, np.int64)]
    while len(remaining):
        _, heads, inverse = np.unique(
            hashes["bits"][remaining], return_index=True, return_inverse=True
        )
        head = remaining[heads[inverse]]
        is_head = head == remaining
        firsts.append(remaining[is_head])
        same = ~is_head
        same[same] = same_colors(hashes["colors"], head[same], remaining[same])
        like[remaining[same]], distance[remaining[same]] = head[same], 0
        remaining = remaining[~is_head & ~same]
    return np.sort(np.concatenate(firsts))


# ---- the list


def exclusion_lines(found: Duplicates, *, storage: Storage) -> list[dict[str, Any]]:
    """Return the lines of an exclusion list, sorted by path."""
    names = _names(found, storage)
    lines = []
    for position, like, distance, part, other in found.pairs():
        (key, path), (like_key, like_path) = names[position], names[like]
        of = {"dataset": other.manifest.name, "split": other.split}
        lines.append(
            {
                "path": path,
                "key": key,
                "split": part.split,
                "reason": _reason(distance),
                "distance": max(distance, 0),
                "of": {**of, "key": like_key, "path": like_path},
            }
        )
    return sorted(lines, key=lambda line: (line["path"], line["split"], line["key"]))


def _reason(distance: int) -> str:
    return "exact" if distance < 0 else "near"


def _names(found: Duplicates, storage: Storage) -> dict[int, tuple[str, str]]:
    """Return {position: (key, path)} for both samples of each pair. Every shard is read once."""
    positions = np.unique(np.concatenate([found.positions, found.likes]))
    names: dict[int, tuple[str, str]] = {}
    for part in found.parts:
        start = part.start
        for shard in part.shards:
            low, high = np.searchsorted(positions, (start, start + shard.num_samples))
            rows = (positions[low:high] - start).tolist()
            if rows:
                offsets = load_index(part.directory, shard)[:, 0]
                paths = load_paths(part.directory, shard)
                with tar_content(part.directory, shard, storage=storage) as content:
                    for row in rows:
                        names[start + row] = stored_key(content, int(offsets[row])), paths[row]
            start += shard.num_samples
    return names


def check_out(path: Path) -> None:
    """Raise UserError, before hours of hashing, if this path cannot be written."""
    code: Code = "unreadable"
    if path.suffix != ".jsonl" or path.name == REJECTED_NAME:
        problem, code = "must end in .jsonl and not be rejected.jsonl", "bad-value"
    elif path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        problem = "cannot be written"
    elif path.exists() and not _is_list(path):
        problem, code = "exists, and dedup did not write it", "exists"
    else:
        return
    fix = "choose a file such as duplicates.jsonl in a folder that you can write to"
    raise UserError("out", f"{path} {problem}", fix, code=code)


def _is_list(path: Path) -> bool:
    try:
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError):
        return False
    return all(isinstance(line, dict) and {"path", "of"} <= line.keys() for line in lines)


def summary(found: Duplicates) -> Counter[tuple[str, str, str, str]]:
    """Count the dropped samples by (split, dataset and split of the earlier sample, reason)."""
    return Counter(
        (part.split, other.manifest.name, other.split, _reason(distance))
        for _, _, distance, part, other in found.pairs()
    )
