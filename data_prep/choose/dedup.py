"""`data_prep dedup`: which samples show a picture that is there already, as an exclusion list for
`build` and `subset`.

Samples have one order: those of the other datasets, then the splits that stay whole (test, val,
others), then the splits that may lose samples, each in the order of its shards.

1. Of equal pixels, the first stays.
2. Of equal perceptual hashes and colours, the first stays.
3. Of those that are left, one is dropped if it is near an earlier one that stays.

So test sets, of this dataset and of others, stay whole; every dropped sample has a like among those
that stay; and of those that stay no two in the splits concerned are alike: run again on what was
built without the list's samples, `dedup` finds none.
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
from data_prep.choose.hashes import DTYPE, Hashes, same_colours, shard_hashes
from data_prep.choose.neighbours import MAX_NEAR, near_pairs
from data_prep.errors import UserError
from data_prep.manifest import REJECTED_NAME, Manifest, Shard, load_index, load_manifest, load_paths
from data_prep.publish import make_directory
from data_prep.remote import Storage

Ids = NDArray[np.int64]
PRIORITY = {"test": 0, "val": 1}


@dataclass(frozen=True)
class Part:
    """One split of one dataset, and where its samples stand in the order."""

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
    """The dropped samples."""

    parts: list[Part]
    positions: Ids
    """In the order of all samples, ascending."""
    likes: Ids
    """Of each, the earlier sample that it is like."""
    distances: NDArray[np.int64]
    """Bits of the perceptual hash that differ; -1 for equal pixels."""
    num_plain: int
    """Pictures of the dataset that are nearly of one colour, or line art: compared by pixels
    only."""

    def pairs(self) -> Iterator[tuple[int, int, int, Part, Part]]:
        """Of each dropped sample: position, like, distance, and the parts that the two are of."""
        for row in zip(
            self.positions.tolist(), self.likes.tolist(), self.distances.tolist(), strict=True
        ):
            part, other = (
                next(part for part in self.parts if part.start <= place < part.stop)
                for place in row[:2]
            )
            yield *row, part, other


def find_duplicates(
    directory: Path,
    *,
    against: tuple[Path, ...] = (),
    splits: tuple[str, ...] = ("train",),
    near: int | None,
    cache: Path | None = None,
    num_workers: int = 1,
    storage: Storage | None = None,
) -> Duplicates:
    """What `splits` of the dataset have to lose; `near` is None where only equal pixels count."""
    if near is not None and not 0 <= near <= MAX_NEAR:
        raise UserError(
            f"near: {near} of the hash's 64 bits; choose 0 to {MAX_NEAR} (beyond, different"
            " pictures are alike)"
        )
    parts = _parts(directory, against, splits)
    if cache is not None:
        make_directory(cache)
    found = [np.zeros(0, DTYPE)]
    for part in parts:
        work, title = (
            partial(shard_hashes, part.directory, cache, storage or {}),
            f"hashing {part.manifest.name}/{part.split}",
        )
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
            raise UserError(
                f"against: {other} is the dataset itself; it is compared with itself anyway"
            )
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
    """For each sample the earlier one that it is like, or -1, and in how many bits they differ (-1:
    equal pixels)."""
    like, distance = np.full(len(hashes), -1, np.int64), np.full(len(hashes), -1, np.int64)
    pixels = hashes["pixels"]
    order = np.lexsort((pixels[:, 1], pixels[:, 0]))  # stable: equal ones stay in their order
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
    same = same_colours(hashes["colours"], left[a], left[b])
    for low, high, bits_apart in zip(
        left[a[same]].tolist(), left[b[same]].tolist(), apart[same].tolist(), strict=True
    ):
        if like[low] < 0 and like[high] < 0:
            like[high], distance[high] = low, bits_apart
    return like, distance


def _join_equal_bits(hashes: Hashes, left: Ids, like: Ids, distance: NDArray[np.int64]) -> Ids:
    """Step 2, of `left`; returns the others. In rounds, so that a thousand copies of one picture
    are not compared in pairs."""
    remaining, firsts = left, []
    while len(remaining):
        _, heads, inverse = np.unique(
            hashes["bits"][remaining], return_index=True, return_inverse=True
        )
        head = remaining[heads[inverse]]
        is_head = head == remaining
        firsts.append(remaining[is_head])
        same = ~is_head
        same[same] = same_colours(hashes["colours"], head[same], remaining[same])
        like[remaining[same]], distance[remaining[same]] = head[same], 0
        remaining = remaining[~is_head & ~same]
    return np.sort(np.concatenate(firsts)) if firsts else left


# ---- the list
# --------------------------------------------------------------------------------------------------


def exclusion_lines(found: Duplicates, *, storage: Storage | None = None) -> list[dict[str, Any]]:
    """What an exclusion list says of each dropped sample, sorted by path."""
    everyone = np.unique(np.concatenate([found.positions, found.likes]))
    keys, paths = _names(found, everyone, storage=storage or {})
    lines = []
    for position, like, distance, part, other in found.pairs():
        of = {
            "dataset": other.manifest.name,
            "split": other.split,
            "key": keys[like],
            "path": paths[like],
        }
        reason = {
            "reason": "exact" if distance < 0 else "near",
            "distance": max(distance, 0),
            "of": of,
        }
        lines.append(
            {"path": paths[position], "key": keys[position], "split": part.split, **reason}
        )
    return sorted(lines, key=lambda line: (line["path"], line["split"], line["key"]))


def _names(
    found: Duplicates, positions: Ids, *, storage: Storage
) -> tuple[dict[int, str], dict[int, str]]:
    """Key and path of each position, reading every shard concerned once."""
    keys: dict[int, str] = {}
    paths: dict[int, str] = {}
    for part in found.parts:
        start = part.start
        for shard in part.shards:
            low, high = np.searchsorted(positions, (start, start + shard.num_samples))
            if low < high:
                offsets, all_paths = (
                    load_index(part.directory, shard)[:, 0],
                    load_paths(part.directory, shard),
                )
                with tar_content(part.directory, shard, storage=storage) as content:
                    for position in positions[low:high].tolist():
                        keys[position] = stored_key(content, int(offsets[position - start]))
                        paths[position] = all_paths[position - start]
            start += shard.num_samples
    return keys, paths


def check_out(path: Path) -> None:
    """Refuses what is no place for a list, before hours of hashing."""
    if path.suffix != ".jsonl" or path.name == REJECTED_NAME:
        raise UserError(
            f"out: {path} is no name for the list; name it ....jsonl, such as duplicates.jsonl"
        )
    if path.is_dir():
        raise UserError(f"out: {path} is a directory; name the file that is to be written")
    if not path.parent.is_dir():
        raise UserError(f"out: {path.parent} is no directory; make it, or name another place")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"out: {path.parent} cannot be written to; name another place")
    if path.exists() and not _is_list(path):
        raise UserError(
            f"out: {path} exists and is no list of dedup; name another file, it is left as it is"
        )


def _is_list(path: Path) -> bool:
    try:
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError):
        return False
    return all(isinstance(line, dict) and {"path", "of"} <= line.keys() for line in lines)


def summary(found: Duplicates) -> Counter[tuple[str, str, str, str]]:
    """How many are dropped, by (split, the other's dataset, the other's split, reason)."""
    reasons = ((distance, part, other) for _, _, distance, part, other in found.pairs())
    return Counter(
        (part.split, other.manifest.name, other.split, "exact" if distance < 0 else "near")
        for distance, part, other in reasons
    )
