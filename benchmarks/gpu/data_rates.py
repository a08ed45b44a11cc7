"""Does the data path deliver? `data_rates.py DATASET [--batch 16384] [--seconds 4]`, in the
project.

gather   stored batches into (pinned) memory, for numbers of threads and of batches ahead: images/s, and the first batch's delay
feed     the same through pretrain's Feed: copied to the device and augmented there, nothing trained: the most a step could be fed
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_prep.manifest import load_manifest
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.feed import Feed, finish_for
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batch, Batches, as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split

ON_GPU = torch.cuda.is_available()


def measured(take: Callable[[], object], *, batch: int, seconds: float) -> tuple[float, float]:
    """(images/s, seconds until the first); those that lay ready when the clock started are not
    counted."""
    began_s = time.perf_counter()
    take()
    first_s = time.perf_counter() - began_s
    for _ in range(8):  # pinned memory is made, and pages are read, for the first time
        take()
    if ON_GPU:
        torch.cuda.synchronize()
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        take()
        count += 1
    if ON_GPU:
        torch.cuda.synchronize()
    return count * batch / (time.perf_counter() - began_s), first_s


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=os.environ.get("BENCHMARK_FIGURES"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    manifest = load_manifest(options.dataset)
    reader = open_split(options.dataset, manifest, "train")
    plan, cores = BatchPlan(options.batch, options.batch, 1), len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cores": cores, "batch": options.batch, "pinned": ON_GPU}

    def batches(
        finish: Callable[[Batch], Any], *, threads: int, prefetch: int, shuffle: Any = "full"
    ) -> Batches[Any]:
        order = Order(reader.num_samples, 1, shuffle=shuffle)
        return training_batches(
            reader,
            order,
            plan,
            rank=0,
            consumed=0,
            num_threads=threads,
            prefetch=prefetch,
            pin=ON_GPU,
            finish=finish,
        )

    pairs = [(1, 2), (2, 4), (4, 4), (cores, 4), (8, 8), (cores, cores)]
    for threads, prefetch in dict.fromkeys(pair for pair in pairs if pair[0] <= cores):
        with batches(as_stored, threads=threads, prefetch=prefetch) as stored:
            rate, first_s = measured(
                lambda s=stored: next(s), batch=options.batch, seconds=options.seconds
            )
        found[f"gather, {threads} threads, {prefetch} ahead"] = rate
        print(
            f"gather, {threads:2} threads, {prefetch:2} ahead: {rate:12,.0f} images/s, first batch"
            f" after {first_s:.2f} s",
            flush=True,
        )
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    augmentation = Augmentation(
        AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8), seed=0, image_size=manifest.image_size,
        normalisation=Normalisation(manifest.channel_mean, manifest.channel_std), device=device, dtype=torch.bfloat16,
    )  # fmt: skip
    for threads, prefetch in dict.fromkeys([(cores, 4), (cores, max(4, cores // 2))]):
        source = batches(finish_for(augmentation), threads=threads, prefetch=prefetch)
        with Feed(source, augmentation) as feed:
            rate, first_s = measured(
                lambda f=feed: next(f), batch=options.batch, seconds=options.seconds
            )
        found[f"feed, {threads} threads, {prefetch} ahead"] = rate
        print(
            f"feed,   {threads:2} threads, {prefetch:2} ahead: {rate:12,.0f} images/s, first batch"
            f" after {first_s:.2f} s",
            flush=True,
        )
    best = max(rate for name, rate in found.items() if name.startswith("feed"))
    print(f"an epoch of 12.5M pictures takes this data path {12.5e6 / best:.1f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
