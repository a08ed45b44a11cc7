"""Cost of the sample order of a large run, and mixing of classes by the block shuffle.

    .venv/bin/python benchmarks/order.py [--quick]

Cost: 14 million samples in 1,400 shards, 256 ranks, global batches of 16,384. A rank needs no table
of an epoch. The first table shows time and memory for all sample numbers of a rank in one epoch. The
next line shows the time to open a reader of 1,400 shards (links to one empty tar and one index).
The last value is the time to resume a `ShardLoader` until its first batch of 64.

Mixing: 11 million samples of 10,450 classes. The second table shows the number of different classes
in a global batch for each shuffle. `data_prep build` stores samples `shuffled`. Samples stored
`by class` are the worst case of an indexed dataset.
"""

import itertools
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from frame import arguments, print_table, sized

from data_prep.images import ppm_header
from data_prep.manifest import Manifest, save_manifest
from data_prep.publish import sha256_of
from pretrain.data.datasets import stream_ends
from pretrain.data.loader import LOCATED_TOGETHER
from pretrain.data.order import BatchPlan, CanonicalStreams, Ids, Line, Order, permute
from pretrain.data.reader import open_split
from pretrain.data.torch_dataset import ShardBatches, ShardLoader

NUM_SAMPLES, NUM_SHARDS, NUM_RANKS, GLOBAL_BATCH = 14_000_000, 1_400, 256, 16_384
MIXED_SAMPLES, NUM_CLASSES = 11_060_223, 10_450
SHUFFLES = (
    ("full", 1024, 16, 1),
    ("block", 1024, 16, 1),
    ("block", 256, 64, 1),
    ("block", 64, 256, 1),
    ("block", 16, 1024, 1),
    ("full", 8192, 16, 32),
    ("block", 8192, 16, 32),
)
"""Tested shuffles: name, samples per block, blocks per window, canonical streams."""


def cost(shuffle: str, *, num_steps: int) -> tuple[str, ...]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    order = Order(NUM_SAMPLES, 1, shuffle)
    plan = BatchPlan(GLOBAL_BATCH, GLOBAL_BATCH // NUM_RANKS, NUM_RANKS)
    order.locate(plan.positions(consumed=0, micro_step=0, rank=17))  # warm-up
    began_s = time.perf_counter()
    of_rank = plan.sequence(consumed=0, rank=17)
    together = LOCATED_TOGETHER // plan.local_batch_size  # as the loader does it
    for _ in range(0, num_steps, together):
        order.locate(np.concatenate(list(itertools.islice(of_rank, together))))
    epoch_s = (time.perf_counter() - began_s) * (NUM_SAMPLES / GLOBAL_BATCH) / num_steps
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return shuffle, f"{epoch_s:.3f} s", f"{grown_mb:.1f} MB"


def many_shards(directory: Path) -> Manifest:
    """Make a dataset whose shards are links to one sparse file of raw images."""
    stride, per_shard = 512 * 27, NUM_SAMPLES // NUM_SHARDS
    tar, index = directory / "one.tar", directory / "one.npy"
    with open(tar, "wb") as file:
        file.truncate(per_shard * stride + 1024)
    offsets = 512 + stride * np.arange(per_shard)
    columns = (
        offsets,
        np.full(per_shard, len(ppm_header(64, 64)) + 3 * 64**2),
        np.arange(per_shard) % 1000,
    )
    np.save(index, np.stack(columns, axis=1).astype("<i8"))
    shards = []
    for number in range(NUM_SHARDS):
        name = f"train-{number:06d}"
        (directory / f"{name}.tar").hardlink_to(tar)
        (directory / f"{name}.npy").hardlink_to(index)
        facts = {"num_samples": per_shard, "num_bytes": tar.stat().st_size}
        hashes = {"sha256": "", "index_sha256": sha256_of(index), "paths_sha256": ""}
        shards.append({"name": name, "file": f"{name}.tar", **facts, **hashes})
    zeros = {"num_read": NUM_SAMPLES, "num_written": NUM_SAMPLES, "num_rejected": 0, "seed": 0}
    names = {"name": "many", "tool_version": "", "encoding": "raw", "image_size": 64, "source": {}}
    names |= {"plan_hash": "", "rejected_sha256": ""}
    split = {"shards": shards, "class_counts": [NUM_SAMPLES // 1000] * 1000}
    statistics_ = {"channel_mean": (0.5,) * 3, "channel_std": (0.2,) * 3}
    classes = [str(number) for number in range(1000)]
    return Manifest.model_validate_json(
        json.dumps(
            {**names, **zeros, **statistics_, "classes": classes, "splits": {"train": split}}
        )
    )


def opening() -> str:
    with tempfile.TemporaryDirectory() as folder:
        manifest = many_shards(Path(folder))
        save_manifest(Path(folder), manifest)
        began_s = time.perf_counter()
        open_split(folder, manifest, "train")
        opened_s = time.perf_counter()
        batches = ShardBatches(folder, "train", batch_size=64)
        loader = ShardLoader(batches)
        loader.load_state_dict(loader.state_dict() | {"epoch": 0, "samples": 64 * 100_000})
        next(iter(loader))
        resumed_s = time.perf_counter()
    return (
        f"a reader of {NUM_SHARDS:,} shards opens in {opened_s - began_s:.3f} s; "
        f"a ShardLoader resumes in {resumed_s - opened_s:.3f} s"
    )


def order_of(shuffle: str, block_size: int, window_blocks: int, streams: int) -> Line:
    if streams == 1:
        return Order(MIXED_SAMPLES, 3, shuffle, block_size, window_blocks)
    orders = [
        Order(end - first, 3 + first, shuffle, block_size, window_blocks)
        for first, end in itertools.pairwise(stream_ends(MIXED_SAMPLES, streams))
    ]
    return CanonicalStreams(tuple(orders), GLOBAL_BATCH)


def mixed_classes(order: Line, classes: Ids, *, num_batches: int) -> float:
    """Return the median number of different classes in a batch over two epochs."""
    starts = np.linspace(0, 2 * MIXED_SAMPLES - GLOBAL_BATCH, num_batches).astype(np.int64)
    return statistics.median(
        len(np.unique(classes[order.locate(np.arange(start, start + GLOBAL_BATCH))[1]]))
        for start in starts
    )


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    num_steps = sized(options, full=854, quick=128, dry=2)
    num_batches = sized(options, full=30, quick=4, dry=1)
    print_table(
        "cost for one of 256 ranks, 14 M samples",
        ("shuffle", "an epoch", "memory growth"),
        [cost(shuffle, num_steps=num_steps) for shuffle in ("full", "block")],
    )
    print(opening())
    by_class = np.arange(MIXED_SAMPLES) * NUM_CLASSES // MIXED_SAMPLES
    shuffled = by_class[permute(np.arange(MIXED_SAMPLES), size=MIXED_SAMPLES, key=7)]
    rows = []
    for stored, classes in (("shuffled", shuffled), ("by class", by_class)):
        for shuffle, block_size, window_blocks, streams in SHUFFLES:
            order = order_of(shuffle, block_size, window_blocks, streams)
            blocks = "" if shuffle == "full" else f"{block_size:,} x {window_blocks:,}"
            distinct = mixed_classes(order, classes, num_batches=num_batches)
            rows.append((stored, shuffle, blocks, f"{streams}", f"{distinct:,.0f}"))
    columns = ("stored", "shuffle", "block x blocks", "streams", "classes")
    print_table(f"classes in a batch of {GLOBAL_BATCH:,}", columns, rows)


if __name__ == "__main__":
    main()
