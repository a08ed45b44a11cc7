"""What the order of a large run costs, and how well the block shuffle mixes classes.

    .venv/bin/python benchmarks/order.py [--quick]

Cost: 14 million samples in 1,400 shards, 256 ranks, global batches of 16,384. A rank needs no table
of an epoch: shown are the time to its first batch's sample numbers, at the beginning and in the
middle of the run, the time for all its batches of one epoch, and the memory that all this leaves
behind. Then a reader of 1,400 shards (all of them links to one empty tar and one index): opened,
first batch of 64 pictures, a hundred more, private memory.

Mixing: 11 million samples of 10,450 classes. For each shuffle the number of different classes in a
global batch, and the deviation of a batch's class counts from what independent draws would give (1:
as random as can be; above 1: classes come in lumps). `shuffled` is how `data_prep build` stores a
split; `by class` is the worst that an indexed dataset of somebody else's can be.
"""

import itertools
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from frame import arguments, commit, machine, sized
from rich.console import Console
from rich.table import Table

from data_prep.images import ppm_header
from data_prep.manifest import Manifest
from data_prep.publish import sha256_of
from pretrain.data.loader import LOCATED_TOGETHER
from pretrain.data.order import BatchPlan, Ids, Order, permute
from pretrain.data.reader import open_split

NUM_SAMPLES, NUM_SHARDS, NUM_RANKS, GLOBAL_BATCH = 14_000_000, 1_400, 256, 16_384
MIXED_SAMPLES, NUM_CLASSES = 11_060_223, 10_450


def milliseconds(began_s: float) -> float:
    return 1000 * (time.perf_counter() - began_s)


def cost(shuffle: str, *, num_steps: int) -> list[str]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.perf_counter()
    order, plan = (
        Order(NUM_SAMPLES, 1, shuffle),
        BatchPlan(GLOBAL_BATCH, GLOBAL_BATCH // NUM_RANKS, NUM_RANKS),
    )  # type: ignore[arg-type]
    order.locate(plan.positions(consumed=0, micro_step=0, rank=17))
    first_ms = milliseconds(began_s)
    began_s = time.perf_counter()
    order.locate(plan.positions(consumed=400 * NUM_SAMPLES + 6_999_999, micro_step=0, rank=17))
    resume_ms = milliseconds(began_s)
    began_s = time.perf_counter()
    of_rank = plan.sequence(consumed=0, rank=17)
    together = LOCATED_TOGETHER // plan.local_batch_size  # as the loader does it
    for _ in range(0, num_steps, together):
        order.locate(np.concatenate(list(itertools.islice(of_rank, together))))
    epoch_ms = milliseconds(began_s) * (NUM_SAMPLES / GLOBAL_BATCH) / num_steps
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return [
        shuffle,
        f"{first_ms:.2f} ms",
        f"{resume_ms:.2f} ms",
        f"{epoch_ms:,.0f} ms",
        f"{grown_mb:.1f} MB",
    ]


def private_mb() -> float:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) / 1024


def many_shards(directory: Path) -> Manifest:
    """A dataset whose shards are one sparse file of raw pictures under many names."""
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


def reading() -> str:
    with tempfile.TemporaryDirectory() as folder:
        manifest = many_shards(Path(folder))
        order, before = Order(manifest.splits["train"].num_samples, 1), private_mb()
        began_s = time.perf_counter()
        reader = open_split(folder, manifest, "train")
        opened_ms = milliseconds(began_s)
        began_s = time.perf_counter()
        reader.images(order.locate(np.arange(64))[1])
        first_ms = milliseconds(began_s)
        began_s = time.perf_counter()
        for step in range(1, 101):
            reader.images(order.locate(np.arange(64 * step, 64 * step + 64))[1])
        more_ms = milliseconds(began_s)
        return (
            f"reader of {NUM_SHARDS:,} shards: opened in {opened_ms:.0f} ms, first 64 pictures in"
            f" {first_ms:.0f} ms, 100 such batches in {more_ms:.0f} ms (all shards opened on the"
            f" way), private memory grown by {private_mb() - before:.0f} MB"
        )


def classes_by_storage() -> dict[str, Ids]:
    """The class of every stored sample."""
    by_class = np.arange(MIXED_SAMPLES) * NUM_CLASSES // MIXED_SAMPLES
    return {
        "shuffled": by_class[permute(np.arange(MIXED_SAMPLES), size=MIXED_SAMPLES, key=7)],
        "by class": by_class,
    }


def mixing(order: Order, classes: Ids, *, batch: int, num_batches: int) -> tuple[float, float]:
    """(different classes, variance of class counts against the binomial one), medians over batches
    spread over two epochs."""
    distinct, lumps = [], []
    for start in np.linspace(0, 2 * MIXED_SAMPLES - batch, num_batches).astype(np.int64):
        _, samples = order.locate(np.arange(start, start + batch))
        counts = np.bincount(classes[samples], minlength=NUM_CLASSES)
        mean = batch / NUM_CLASSES
        distinct.append(float((counts > 0).sum()))
        lumps.append(float(((counts - mean) ** 2).mean() / (mean * (1 - 1 / NUM_CLASSES))))
    return statistics.median(distinct), statistics.median(lumps)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    console = Console(width=120)
    table = Table(title="cost for one of 256 ranks, 14 M samples", title_justify="left", box=None)
    for column in (
        "shuffle",
        "first batch",
        "resume in epoch 400",
        "all of an epoch",
        "memory grown",
    ):
        table.add_column(column, justify="left" if column == "shuffle" else "right")
    for shuffle in ("full", "block"):
        table.add_row(*cost(shuffle, num_steps=sized(options, full=854, quick=128, dry=2)))
    console.print(table)

    print(reading())
    table = Table(
        title="\nclasses in a batch, 11 M samples of 10,450 classes", title_justify="left", box=None
    )
    for column in (
        "stored",
        "shuffle",
        "block x blocks",
        "1,024: classes",
        "lumps",
        "16,384: classes",
        "lumps",
    ):
        table.add_column(column, justify="left" if column in ("stored", "shuffle") else "right")
    for stored, classes in classes_by_storage().items():
        shuffles = [
            ("full", 1024, 16),
            ("block", 1024, 16),
            ("block", 256, 64),
            ("block", 64, 256),
            ("block", 16, 1024),
        ]
        for shuffle, block_size, window_blocks in shuffles:
            order = Order(MIXED_SAMPLES, 3, shuffle, block_size, window_blocks)  # type: ignore[arg-type]
            row = [
                stored,
                shuffle,
                "" if shuffle == "full" else f"{block_size:,} x {window_blocks:,}",
            ]
            for batch in (1024, GLOBAL_BATCH):
                distinct, lumps = mixing(
                    order, classes, batch=batch, num_batches=sized(options, full=30, quick=4, dry=1)
                )
                row += [f"{distinct:,.0f}", f"{lumps:,.2f}"]
            table.add_row(*row)
    console.print(table)
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
