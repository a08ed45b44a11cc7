"""`data_prep stats`: statistics of a dataset from its manifest and indices. Images are opened only
on request.

The manifest has the image sizes. For encoding=keep, the sizes are read from the images' headers,
before the EXIF orientation is applied. Recomputed channel statistics use the resized images of
`train`, as in `build`, or of all splits if there is no `train`.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.check.stored import each_picture, each_shard
from data_prep.images import decode, resize, size_of
from data_prep.images.channels import ChannelSums, ChannelTotals, channel_statistics
from data_prep.manifest import Manifest, Shard, Split, load_index, load_manifest, load_rejected
from data_prep.remote import Storage

SPREAD = {"min": 0, "5 %": 5, "median": 50, "95 %": 95, "max": 100}
NUM_EXTREMES = 3
"""Number of largest and of smallest classes to list."""


def stats(
    directory: Path,
    *,
    recompute: bool = False,
    num_workers: int = 1,
    storage: Storage | None = None,
) -> dict[str, Any]:
    """Return the statistics as plain values, ready for JSON."""
    manifest = load_manifest(directory)
    found: dict[str, Any] = {
        "dataset": str(directory),
        "name": manifest.name,
        "content_hash": manifest.content_hash,
        "encoding": manifest.encoding,
        "image_size": manifest.image_size,
        "num_classes": len(manifest.classes),
        "read": manifest.num_read,
        "written": manifest.num_written,
        "rejected": dict(
            sorted(Counter(each["reason"] for each in load_rejected(directory, manifest)).items())
        ),
        "left_out": manifest.num_left_out,
        "splits": {
            name: _of_split(directory, manifest, split) for name, split in manifest.splits.items()
        },
        "channel_mean": list(manifest.channel_mean),
        "channel_std": list(manifest.channel_std),
        "sizes": _sizes(directory, manifest, num_workers=num_workers, storage=storage or {}),
    }
    if recompute:
        shards = (
            list(manifest.splits["train"].shards)
            if "train" in manifest.splits
            else _shards(manifest)
        )
        work = partial(_shard_totals, directory, manifest, storage or {})
        mean, std = channel_statistics(
            list(each_shard(work, shards, title="summing pixels", num_workers=num_workers))
        )
        found |= {"recomputed_channel_mean": list(mean), "recomputed_channel_std": list(std)}
    return found


def _of_split(directory: Path, manifest: Manifest, split: Split) -> dict[str, Any]:
    counts = np.array(split.class_counts, np.int64)
    order = np.lexsort((np.arange(len(counts)), -counts))
    present = counts[counts > 0]
    ranked = [[manifest.classes[label], int(counts[label])] for label in order.tolist()]
    picture_bytes = sum(int(load_index(directory, shard)[:, 1].sum()) for shard in split.shards)
    return {
        "samples": split.num_samples,
        "unlabeled": split.num_unlabeled,
        "shards": len(split.shards),
        "picture_bytes": picture_bytes,
        "tar_bytes": sum(shard.num_bytes for shard in split.shards),
        "classes": len(present),
        "per_class": spread(counts) if len(present) else None,
        "imbalance": round(float(present.max() / present.min()), 3) if len(present) else None,
        "largest": ranked[:NUM_EXTREMES] if len(present) else [],
        "smallest": ranked[::-1][:NUM_EXTREMES] if len(present) else [],
        "annotations": {
            key: annotation.num_columns for key, annotation in sorted(split.annotations.items())
        },
    }


def spread(
    values: Sequence[int] | NDArray[np.int64], counts: Sequence[int] | None = None
) -> dict[str, int]:
    """Return the percentiles `SPREAD` of values. `counts`: frequency of each value."""
    found = np.percentile(
        values, list(SPREAD.values()), weights=counts or np.ones(len(values)), method="inverted_cdf"
    )
    return dict(zip(SPREAD, map(int, found), strict=True))


def _sizes(
    directory: Path, manifest: Manifest, *, num_workers: int, storage: Storage
) -> list[dict[str, int]]:
    """Return width, height and number of images of each size, the most frequent size first."""
    sizes: Counter[tuple[int, int]] = Counter()
    if manifest.encoding != "keep":
        sizes[manifest.image_size, manifest.image_size] = manifest.num_written
    else:
        work = partial(_shard_sizes, directory, storage)
        for found in each_shard(
            work, _shards(manifest), title="reading headers", num_workers=num_workers
        ):
            sizes += found
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return [{"width": width, "height": height, "count": count} for (width, height), count in ranked]


def _shard_sizes(directory: Path, storage: Storage, shard: Shard) -> Counter[tuple[int, int]]:
    return Counter(each_picture(size_of, directory, shard, storage=storage))


def _shard_totals(
    directory: Path, manifest: Manifest, storage: Storage, shard: Shard
) -> ChannelTotals:
    channels = ChannelSums()
    for picture, _ in each_picture(decode, directory, shard, storage=storage):
        channels.add(
            resize(
                picture,
                size=manifest.image_size,
                crop=manifest.crop,
                interpolation=manifest.interpolation,
            )
        )
    return channels.totals


def _shards(manifest: Manifest) -> list[Shard]:
    return [shard for split in manifest.splits.values() for shard in split.shards]
