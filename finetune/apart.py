"""Whether the splits that one learns from, chooses with and is judged on are kept apart. No torch here.

A sample is a place in a tar: two splits share it when shards of both are the same tar (by hash) and their indices name the same
offset in it. That finds subsets of one dataset that were cut to overlap, and a split that holds another; copies of pictures in
other tars are `data_prep dedup`'s business.
"""

from pathlib import Path

import numpy as np

from data_prep.manifest import DatasetError, Manifest, Shard, load_index


def shared_samples(directory: Path | str, manifest: Manifest, one: str, other: str) -> tuple[int, str]:
    """How many samples of split `one` are in `other` as well, and the tar of the first of them."""
    num_shared, first = 0, ""
    others: dict[str, list[Shard]] = {}
    for shard in manifest.splits[other].shards:
        others.setdefault(shard.sha256, []).append(shard)
    for shard in manifest.splits[one].shards:
        same = others.get(shard.sha256, [])
        if not same:
            continue
        there = np.concatenate([load_index(directory, each)[:, 0] for each in same])
        found = int(np.isin(load_index(directory, shard)[:, 0], there).sum())
        num_shared, first = num_shared + found, first or (shard.file if found else "")
    return num_shared, first


def check_apart(
    directory: Path | str,
    manifest: Manifest,
    *,
    train: str,
    test: str,
    holdout: str | None = None,
    test_field: str = "test_split",
) -> None:
    """One clear message where a split holds samples of another."""
    pairs = [(test_field, test, train)]
    if holdout is not None:
        pairs += [("holdout_split", holdout, test), ("holdout_split", holdout, train)]
    for field, one, other in pairs:
        num_shared, tar = shared_samples(directory, manifest, one, other)
        if num_shared:
            raise DatasetError(
                f"{field}: {num_shared:,} of the {manifest.splits[one].num_samples:,} samples of {one!r} are in {other!r} as well "
                f"(in {tar}, for one), so its accuracy would mean nothing; choose splits that share none, or cut them with "
                "data_prep subset"
            )
