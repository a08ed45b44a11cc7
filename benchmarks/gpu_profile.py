"""Profile a training step of the real engine at full size, on a batch that stays on the device.

    gpu_profile.py [--model mlp_b12_wi1024] [--batch 16384] [--classes 11230] [--stage 1] [--compile]
                   [--augment]

The output has time, images/s, and FLOP/s as a fraction of the FLOP/s of a large matrix product. The
profile adds idle time of the device and the most expensive operations and kernels. `--augment`
augments a stored batch in each step. Without a GPU, times are from the CPU (choose small sizes).
"""

import argparse
import os
import statistics
import sys
from typing import Any

import numpy as np
import torch
from frame import keep, print_table, rates, ratio, repeated
from models_peers import plain, products_of, step_flops
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from train import Case, augmentation_for, engine_of

from pretrain.augment.augmentation import Normalization, Prepared
from pretrain.data.loader import Batch
from pretrain.engine.deepspeed import start_distributed
from pretrain.models.presets import preset, spec_of
from pretrain.ranks.world import read_world

STEP, PRODUCT = "step", "large product"
"""Names of the contestants: training step (images/s) and matrix product (FLOP/s)."""


def synthetic_batch(count: int, size: int, num_classes: int) -> Batch:
    rng = np.random.default_rng(0)
    ids = np.arange(count, dtype=np.int64)
    images = torch.from_numpy(rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, num_classes, count))
    if torch.cuda.is_available():
        images, labels = images.pin_memory(), labels.pin_memory()
    return Batch(images, labels, np.zeros(count, np.int64), ids, ids // 2)


def idle_fraction(intervals: list[tuple[float, float]]) -> float | None:
    """Return the fraction of time that no interval covers, from the first start to the last end."""
    if not intervals:
        return None
    intervals = sorted(intervals)
    first = end = intervals[0][0]
    busy = 0.0
    for low, high in intervals:
        busy += max(0.0, high - max(low, end))
        end = max(end, high)
    return 1 - busy / (end - first)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp_b12_wi1024")
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--classes", type=int, default=11_230)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--steps", type=int, default=4, help="steps under the profiler")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of 10 steps without profiler")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    world = read_world()
    device = start_distributed(world, timeout_s=120)
    on_gpu = device.type == "cuda"
    spec, size = spec_of(options.model), preset(options.model).image_size
    shapes: dict[str, Any] = {"num_classes": options.classes, "image_size": size}
    side, times = (8192, 10) if on_gpu else (512, 1)
    case = Case(spec, size, options.batch, times, 0)
    engine = engine_of(
        case,
        world,
        device,
        num_classes=options.classes,
        stage=options.stage,
        is_eager=not options.compile,
    )
    normalization = Normalization((0.48, 0.45, 0.41), (0.27, 0.26, 0.27))
    augmentation = augmentation_for(engine, size, normalization)
    batch = synthetic_batch(options.batch, size, options.classes)
    resident: Prepared = augmentation.prepare(batch)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def step() -> None:
        prepared = augmentation.prepare(batch) if options.augment else resident
        engine.train_step([prepared], lr=1e-5)

    products = repeated(lambda: torch.mm(left, right), times=times, units=2 * side**3)
    found = rates({STEP: case.steps_of(step), PRODUCT: products}, rounds=options.rounds)
    model_products = products_of(plain(spec, **shapes), torch.zeros(1, 3, size, size))
    flops = step_flops(model_products)
    images_per_s, product_rate = (statistics.median(found[name]) for name in (STEP, PRODUCT))
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as recorded:
        repeated(step, times=options.steps)()
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    idle = idle_fraction(kernels)
    figures = {
        "ms": 1000 * options.batch / images_per_s,
        "images_per_s": images_per_s,
        "product_rate_teraflops": product_rate / 1e12,
        "share_of_product_rate": flops * ratio(found, STEP, PRODUCT),
        "device_idle_fraction": idle,
    }
    keep(figures)
    kind = "compiled" if options.compile and on_gpu else "eager"
    print_table(
        f"{options.model}, batch {options.batch:,}, {options.classes:,} classes, ZeRO"
        f" {options.stage}, {engine.input_dtype}, {kind}{', augmented' if options.augment else ''}",
        ("ms a step", "images/s", "TFLOP/s", "of a large product's", "idle", "peak GB"),
        [
            (
                f"{figures['ms']:.2f}",
                f"{images_per_s:,.0f}",
                f"{flops * images_per_s / 1e12:.1f}",
                f"{figures['share_of_product_rate']:.1%}",
                f"{idle:.1%}" if idle is not None else "",
                f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if on_gpu else "",
            )
        ],
    )
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=90))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
