"""Does a GPU compute what the CPU does? And where does our code wait for it? Run in the project:
`check_cuda.py [--device cuda]`.

A line per check, "ok" or "BAD" with figures; exit 1 where one is bad. On a CPU (dry run) everything
is compared with itself.
"""

import argparse
import collections
import math
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.manifest import load_manifest
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.feed import Feed, finish_for
from pretrain.config import AugmentSettings, EngineSettings, OptimizerSettings
from pretrain.data.loader import Batch, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split
from pretrain.engine.step import compile_blocks, loss_of
from pretrain.models.build import build_model
from pretrain.models.presets import preset, spec_of
from pretrain.models.spec import SparseMlpSpec
from pretrain.optim import Lion, build_optimizer
from pretrain.ranks.world import read_world

Check = Callable[[torch.device], tuple[bool, str]]
DATASET = Path("data/demo-pretrain")
PAPER_B = {"crop_scale": (0.4, 1.0), "mixup_alpha": 0.8}
TIMM = {
    "crop_scale": (0.08, 1.0), "crop_interpolation": "random", "auto_augment": "rand-m9-mstd0.5-inc1", "erase_probability": 0.25,
    "mixup_alpha": 0.8, "cutmix_alpha": 1.0,
}  # fmt: skip
RECIPES: dict[str, tuple[dict[str, Any], int, int, float]] = {
    # settings; stored and fed pixels; how far a normalised value may be off (None-auto-augment:
    # rounding of a product)
    "paper B 64": (PAPER_B, 64, 64, 0.02),
    "paper B 72 to 64": (PAPER_B, 72, 64, 0.02),
    "crop 256 to 224": ({"crop_scale": (0.08, 1.0)}, 256, 224, 0.02),
    "timm 72 to 64": (TIMM, 72, 64, 0.02),
    "erase rand, const": (
        {
            "crop_scale": (0.4, 1.0),
            "erase_probability": 0.5,
            "erase_mode": "rand",
            "erase_count": 3,
        },
        64,
        64,
        0.02,
    ),
    "cifar padding": (
        {"crop_padding": 4, "auto_augment": "original", "cutmix_alpha": 1.0},
        32,
        32,
        0.02,
    ),
    "reflect": ({"crop_padding": 4, "padding_mode": "reflect", "auto_augment": "v0"}, 32, 32, 0.02),
}


def stored(count: int, size: int, *, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.integers(0, 256, (count, 3, 8, 8)).astype(np.float32))
    fine = torch.nn.functional.interpolate(
        coarse, size=(size, size), mode="bilinear"
    ) + torch.from_numpy(rng.normal(0, 12, (count, 3, size, size)).astype(np.float32))
    images = fine.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    ids = np.arange(count, dtype=np.int64)
    return Batch(
        images,
        torch.from_numpy(rng.integers(0, 48, count)),
        np.zeros(count, np.int64),
        ids * 7,
        ids // 2,
    )


def augmentation(
    settings: dict[str, Any], device: torch.device, *, size: int, dtype: torch.dtype = torch.float32
) -> Augmentation:
    normal = Normalisation((0.48, 0.45, 0.41), (0.27, 0.26, 0.27))
    return Augmentation(
        AugmentSettings(**settings),
        seed=3,
        image_size=size,
        normalisation=normal,
        device=device,
        dtype=dtype,
    )


def same_pictures(
    settings: dict[str, Any], from_px: int, to_px: int, tolerance: float, device: torch.device
) -> tuple[bool, str]:
    batch = stored(32 if to_px > 100 else 128, from_px)
    there = augmentation(settings, device, size=to_px).prepare(batch)
    here = augmentation(settings, torch.device("cpu"), size=to_px).prepare(batch)
    away = (there.images_BCHW.cpu().float() - here.images_BCHW.float()).abs()
    labels = torch.equal(there.labels_B.cpu(), here.labels_B)
    if here.weight_B is not None and there.weight_B is not None:
        labels &= torch.allclose(there.weight_B.cpu(), here.weight_B.float(), atol=1e-6)
    worst, share = float(away.max()), float((away > 1e-5).double().mean())
    contiguous = there.images_BCHW.is_contiguous()
    layout = "contiguous" if contiguous else "NOT CONTIGUOUS (the model copies it)"
    return (
        worst <= tolerance and labels,
        f"off by {worst:.2g} at most, {share:.2%} of the values at all; {layout}",
    )


def same_steps(name: str, device: torch.device) -> tuple[bool, str]:
    """Ten updates on the same gradients: the bits of the CPU's?"""
    found = []
    for where in (torch.device("cpu"), device):
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(300, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 10)
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))
        model.to(where)
        optimizer = build_optimizer(model, OptimizerSettings(name=name, lr=1e-3, weight_decay=0.1))  # type: ignore[arg-type]
        for _ in range(10):
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator).to(where)
            optimizer.step()
        found.append(torch.cat([weight.detach().cpu().flatten() for weight in model.parameters()]))
    away = (found[0] - found[1]).abs()
    return (
        float(away.max()) < 1e-4,
        (
            f"{int((away > 0).sum()):,} of {len(away):,} weights differ, by {float(away.max()):.2g}"
            " at most"
        ),
    )


def same_shards(device: torch.device) -> tuple[bool, str]:
    """LION's kernel: shards of pieces and padding, a share below 1, and steps that must change
    nothing."""
    found = []
    for where in (torch.device("cpu"), device):
        generator = torch.Generator().manual_seed(0)
        shard, copy = (
            torch.randn(100_003, generator=generator).to(where),
            torch.zeros(100_003, dtype=torch.bfloat16, device=where),
        )
        optimizer, kept = Lion([shard], lr=1e-3, weight_decay=0.1), True
        for share in (1.0, float("nan"), 0.25, float("inf"), 0.5):
            pieces = [
                torch.randn(size, generator=generator).to(where, torch.bfloat16)
                for size in (70_000, 30_000)
            ]
            before = shard.clone()
            optimizer.step_shards([pieces], [copy], torch.tensor(share, device=where))
            kept &= torch.equal(before, shard) == (not math.isfinite(share))
        written = torch.equal(copy[:100_000], shard[:100_000].bfloat16())
        found.append(torch.cat([shard, optimizer.state[shard]["exp_avg"]]).cpu())
        assert kept and written, (
            f"on {where}: steps are {'' if kept else 'not '}skipped, the copy is"
            f" {'' if written else 'not '}written"
        )
    away = (found[0] - found[1]).abs()
    return (
        float(away.max()) < 1e-6,
        (
            f"{int((away > 0).sum())} of 200,006 weights and momenta differ, by"
            f" {float(away.max()):.2g} at most"
        ),
    )


def same_gradients(
    spec: Any, image_size: int, device: torch.device, *, batch: int, compiled: bool = False
) -> tuple[bool, str]:
    grads, outs = [], []
    images = torch.randn(
        batch, 3, image_size, image_size, generator=torch.Generator().manual_seed(1)
    )
    for where, how in (
        (torch.device("cpu"), torch.float64),
        (device, torch.float32),
        (device, torch.bfloat16),
    ):
        model = (
            build_model(spec, num_classes=11, image_size=image_size, seed=0).to(where, how).train()
        )
        if compiled and how == torch.bfloat16:
            compile_blocks(model)  # as the engine does
        out = model(images.to(where, how))
        (out.float() ** 2).mean().backward()
        outs.append(out.detach().double().cpu())
        grads.append(
            torch.cat(
                [
                    weight.grad.double().cpu().flatten()
                    for weight in model.parameters()
                    if weight.grad is not None
                ]
            )
        )
    far = [float((each - grads[0]).norm() / grads[0].norm()) for each in grads[1:]]
    out_far = [float((each - outs[0]).norm() / outs[0].norm()) for each in outs[1:]]
    good = (
        far[0] < 1e-3 and out_far[0] < 1e-3 and far[1] < 0.2 and out_far[1] < 0.05
    )  # S-Mixers are 0.1 off on a CPU, too
    words = (
        f"fp32 off by {out_far[0]:.1e} (gradients {far[0]:.1e}),"
        f" bf16{' compiled' if compiled else ''} by"
    )
    return good, f"{words} {out_far[1]:.1e} ({far[1]:.1e})"


def reader_and_batches(device: torch.device, *, batch: int) -> Any:
    manifest = load_manifest(DATASET)
    reader, plan = open_split(DATASET, manifest, "train"), BatchPlan(batch, batch, 1)
    words = {
        "rank": 0,
        "consumed": 0,
        "num_threads": 4,
        "prefetch": 4,
        "pin": device.type == "cuda",
    }
    return lambda finish: training_batches(
        reader, Order(reader.num_samples, 1), plan, **words, finish=finish
    )


def feed_is_in_order(device: torch.device) -> tuple[bool, str]:
    """What the side stream hands over while the model's stream is busy, against the same on one
    stream: a race would show."""
    count, wrong = 60, 0
    make, open_batches = (
        augmentation(PAPER_B, device, size=32, dtype=torch.bfloat16),
        reader_and_batches(device, batch=512),
    )
    with open_batches(lambda batch: batch) as plain:
        expected = []
        for _ in range(count):
            batch = next(plain)
            expected.append(
                augmentation(PAPER_B, device, size=32, dtype=torch.bfloat16)
                .prepare(batch)
                .images_BCHW.clone()
            )
            pinned = batch.images_BHWC.is_pinned() if device.type == "cuda" else True
    load = torch.randn(
        4096 if device.type == "cuda" else 64, 4096 if device.type == "cuda" else 64, device=device
    )
    with Feed(open_batches(finish_for(make)), make) as feed:
        for number in range(count):
            images = next(feed).prepared.images_BCHW
            for _ in range(number % 5):
                load = torch.tanh(load @ load)
            wrong += not torch.equal(images, expected[number])
            scratch = [
                torch.empty_like(images).fill_(7) for _ in range(3)
            ]  # takes memory that was freed too early
            del scratch, images
    return (
        wrong == 0 and pinned,
        (
            f"{wrong} of {count} micro-batches differ; loader's memory"
            f" {'pinned' if pinned else 'NOT PINNED'}"
        ),
    )


def auto_size(name: str, share: int, share_on_cpu: int, device: torch.device) -> tuple[bool, str]:
    from pretrain.config import DataSettings, PretrainSettings, TrainSettings
    from pretrain.engine.micro_batch import micro_batch_size

    size, share = preset(name).image_size, share if device.type == "cuda" else share_on_cpu
    if (
        device.type == "cuda"
        # others run beside us: so memory runs out before the estimate says so, which `auto` has to
        # survive
    ):
        torch.cuda.set_per_process_memory_fraction(0.3)
    with tempfile.TemporaryDirectory() as run_dir:
        settings = PretrainSettings(
            run_dir=run_dir, data=DataSettings(dataset="unused"), model=spec_of(name), augment=AugmentSettings(**PAPER_B),
            train=TrainSettings(duration="1 steps", global_batch_size=share, local_batch_size="auto"),
            engine=EngineSettings(zero_stage=1, precision="bf16"),
        )  # fmt: skip
        model = build_model(spec_of(name), num_classes=1000, image_size=size, seed=0)
        began_s = time.perf_counter()
        found = micro_batch_size(
            model, settings=settings, image_size=size, device=device, world=read_world()
        )
    return found > 0, f"{found:,} of a share of {share:,} in {time.perf_counter() - began_s:.1f} s"


def same_neighbours(device: torch.device) -> tuple[bool, str]:
    from finetune.probe.knn import neighbours_of, unit_rows

    rng = torch.Generator().manual_seed(0)
    train, test = torch.randn(5000, 96, generator=rng), torch.randn(300, 96, generator=rng)
    found = []
    for where in (torch.device("cpu"), device):
        (queries,) = unit_rows([test], device=where)
        similar, rows = neighbours_of(queries, unit_rows(train.split(700), device=where), count=20)
        found.append((similar.cpu(), rows.cpu()))
    return (
        torch.equal(found[0][1], found[1][1]),
        f"{int((found[0][1] != found[1][1]).sum())} of 6,000 neighbours differ",
    )


def waits(device: torch.device) -> tuple[bool, str]:
    """Which lines wait for the device in a step, a feed and an evaluation, by torch's own record;
    DeepSpeed's are among them."""
    from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
    from pretrain.loop.evaluate import evaluate
    from pretrain.ranks.preemption import StopFlag

    world = read_world()
    start_distributed(world, timeout_s=60)
    manifest = load_manifest(DATASET)
    batch = 512 if device.type == "cuda" else 32
    found: dict[str, collections.Counter[str]] = {}
    make, open_batches = (
        augmentation(PAPER_B, device, size=32, dtype=torch.bfloat16),
        reader_and_batches(device, batch=batch),
    )
    steps = 3

    def noting(what: str, run: Callable[[], object]) -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            for _ in range(steps):
                run()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        places = [
            f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}"
            for each in noted
            if "synchroniz" in str(each.message)
        ]
        found[what] = collections.Counter(places)

    reader, plain = (
        open_split(DATASET, manifest, "val"),
        augmentation({}, device, size=32, dtype=torch.bfloat16),
    )
    with Feed(open_batches(finish_for(make)), make) as feed:
        prepared = [next(feed).prepared for _ in range(2)]
        noting("feed", lambda: next(feed))
        for stage in (0, 1, 2, 3):
            engine = DeepSpeedEngine(
                build_model(spec_of("mlp_b6_wi256"), num_classes=48, image_size=32, seed=0),
                make_optimizer=lambda module: build_optimizer(module, OptimizerSettings()),
                settings=EngineSettings(zero_stage=stage, precision="bf16"), plan=BatchPlan(batch, batch, 1), label_smoothing=0.1,
                device=device, world=world,
            )  # fmt: skip
            noting(
                f"step, ZeRO {stage}",
                lambda engine=engine: engine.train_step([prepared[0]], lr=1e-5),
            )
            if stage == 1:
                judged = partial(
                    evaluate,
                    engine.logits,
                    reader,
                    plain,
                    local_batch_size=256,
                    world=world,
                    stop=StopFlag(),
                )
                noting(f"evaluation of {-(-reader.num_samples // 256)} batches", judged)
    for what, places in found.items():
        print(
            f"    {what}: {sum(places.values()) / steps:.1f} waits each"
            + "".join(
                f"\n        {count / steps:.1f} x {place}"
                for place, count in places.most_common(12)
            )
        )
    return True, "; ".join(
        f"{what} {sum(places.values()) / steps:.1f}" for what, places in found.items()
    )


def loss_is_the_same(device: torch.device) -> tuple[bool, str]:
    from pretrain.augment.augmentation import Prepared

    logits = torch.randn(64, 501, generator=torch.Generator().manual_seed(0))
    labels, others, weight = torch.arange(64) * 3, torch.arange(64) * 5, torch.linspace(0, 1, 64)
    found = []
    for where in (torch.device("cpu"), device):
        mine = logits.to(where).requires_grad_()
        loss_of(
            mine,
            Prepared(mine, labels.to(where), others.to(where), weight.to(where)),
            label_smoothing=0.3,
        ).backward()
        assert mine.grad is not None
        found.append(mine.grad.cpu())
    away = float((found[0] - found[1]).abs().max())
    return away < 1e-7, f"gradients off by {away:.1e}"


def models() -> dict[str, tuple[Any, int]]:
    found = {
        name: (spec_of(name), preset(name).image_size)
        for name in ("mlp_b6_wi256", "smixer_c32", "rp_mixer_ss_w", "mixer_ss_8")
    }
    found |= {
        "sw_mlp_540": (spec_of("sw_mlp_540"), 32),
        "monarch": (spec_of("monarch_mnist", greyscale=False), 28),
    }
    found["sw_mlp sparse"] = (SparseMlpSpec(kind="sw_mlp", width=1619, density=0.02), 32)
    found["kronecker"] = (spec_of("kronecker_mnist", greyscale=False), 28)
    return found


def checks() -> dict[str, Check]:
    """By name; those of tests/test_cuda.py, too. None needs a dataset."""
    found: dict[str, Check] = {}
    for name, (settings, from_px, to_px, tolerance) in RECIPES.items():
        found[f"pictures, {name}"] = partial(same_pictures, settings, from_px, to_px, tolerance)
    found["loss"] = loss_is_the_same
    found["LION of a shard"] = same_shards
    for name in ("lion", "adamw", "sgd"):
        found[f"optimizer {name}"] = partial(same_steps, name)
    for name, (spec, size) in models().items():
        found[f"model {name}"] = partial(same_gradients, spec, size, batch=8)
    for name in ("mlp_b6_wi256", "rp_mixer_ss_w", "sw_mlp sparse"):
        found[f"compiled {name}"] = partial(same_gradients, *models()[name], batch=8, compiled=True)
    found["nearest neighbours"] = same_neighbours
    return found


def on_the_dataset() -> dict[str, Check]:
    """Of the demo's, which must be there; and what others who use the device would disturb."""
    return {
        "feed": feed_is_in_order,
        "auto, B-12/Wi-1024": partial(auto_size, "mlp_b12_wi1024", 65_536, 8),
        "auto, Mixer-B-W": partial(auto_size, "mixer_b_w", 4096, 2),
        "where we wait": waits,
    }


def passes(name: str, run: Check, device: torch.device) -> bool:
    began_s = time.perf_counter()
    try:
        good, words = run(device)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        good, words = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    print(
        f"{'ok ' if good else 'BAD'} {name}: {words} ({time.perf_counter() - began_s:.1f} s)",
        flush=True,
    )
    return good


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="without the compiled models")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device(options.device)
    print(torch.cuda.get_device_name() if on_gpu else "CPU: everything is compared with itself")
    found = [
        passes(name, run, device)
        for name, run in checks().items()
        if not (options.quick and name.startswith("compiled"))
    ]
    found += [passes(name, run, device) for name, run in on_the_dataset().items()]
    print(f"check-cuda: {found.count(False)} bad", flush=True)
    os._exit(int(not all(found)))  # past what the process group would wait for


if __name__ == "__main__":
    main()
