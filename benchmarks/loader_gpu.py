"""The loader and a GPU: `benchmarks/loader.py --device cuda [--quick]`; run by our own interpreter. Not yet run on a GPU.

  copy      a batch as it is stored, host to device: from the loader's pinned buffers against a plain pinned copy of the same bytes
  augment   the paper recipe on the device: images/s alone, and its share of a training step of B-12/Wi-1024 at the same batch
  wait      how long the steps of a training loop from shards wait for data, as a share of its time
Without a GPU everything runs on the CPU with a small model, to see that it does; those numbers mean nothing.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.frame import arguments, commit, machine, rates, ratio, report
from benchmarks.loader_data import CORES, dataset
from benchmarks.loader_ours import RECIPE
from data_prep.manifest import Manifest, load_manifest
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.feed import Feed
from pretrain.config import EngineSettings, OptimizerSettings
from pretrain.data.loader import Batch, Batches, as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split
from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.optim import build_optimizer
from pretrain.ranks.world import read_world

IMAGE_SIZE = 64
T = TypeVar("T")
ON_GPU = torch.cuda.is_available()


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def repeated(step: Callable[[], object], *, times: int, units: float) -> Callable[[], float]:
    """Units in all; the clock stops when the device is done."""

    def run() -> float:
        for _ in range(times):
            step()
        synchronize()
        return times * units

    return run


def engine_of(manifest: Manifest, plan: BatchPlan) -> DeepSpeedEngine:
    spec = MlpSpec(kind="mlp", depth=12, width=1024) if ON_GPU else MlpSpec(kind="mlp", depth=2, width=64)
    world = read_world()
    device = start_distributed(world, timeout_s=600)
    return DeepSpeedEngine(
        build_model(spec, num_classes=len(manifest.classes), image_size=IMAGE_SIZE, seed=0),
        make_optimizer=lambda module: build_optimizer(module, OptimizerSettings()),
        settings=EngineSettings(zero_stage=1, precision="bf16" if ON_GPU else "fp32"),
        plan=plan,
        label_smoothing=0.3,
        device=device,
        world=world,
    )


def copies(batches: Batches[Batch], device: torch.device, *, times: int) -> None:
    """GB/s to the device, of what the loader hands out and of a plain pinned tensor of that size."""
    handed = [next(batches).images_BHWC for _ in range(4)]
    plain = torch.empty_like(handed[0]).fill_(1)
    plain = plain.pin_memory() if ON_GPU else plain
    target = torch.empty_like(plain, device=device)
    gigabytes = plain.numel() / 1e9

    def from_loader() -> None:
        handed.append(handed.pop(0))
        target.copy_(handed[0], non_blocking=True)

    found = rates(
        {
            "from the loader's buffers": repeated(from_loader, times=times, units=gigabytes),
            "plain pinned copy": repeated(lambda: target.copy_(plain, non_blocking=True), times=times, units=gigabytes),
        },
        rounds=9,
    )
    share = ratio(found, "from the loader's buffers", "plain pinned copy")
    report("copy", found, unit="GB/s", against="plain pinned copy", headline=f"{share:.1%} of a plain pinned copy")


def augmenting(stored: Batch, augmentation: Augmentation, engine: DeepSpeedEngine, *, batch: int, times: int) -> None:
    prepared = augmentation.prepare(stored)
    found = rates(
        {
            "augmentation alone": repeated(lambda: augmentation.prepare(stored), times=times, units=batch),
            "step alone": repeated(lambda: engine.train_step([prepared], lr=1e-5), times=times, units=batch),
        },
        rounds=9,
    )
    share = ratio(found, "step alone", "augmentation alone")
    report("augment", found, unit="images/s", against="step alone", headline=f"it takes {share:.1%} of a step's time")


def waiting(feed: Feed, engine: DeepSpeedEngine, *, times: int) -> None:
    """As the trainer measures it; what a step costs is seen because the device is waited for once at the end."""
    shares = []
    for _ in range(5):
        synchronize()
        wait_s, began_s = 0.0, time.perf_counter()
        for _ in range(times):
            asked_s = time.perf_counter()
            prepared = next(feed).prepared
            wait_s += time.perf_counter() - asked_s
            engine.train_step([prepared], lr=1e-5)
        synchronize()
        shares.append(wait_s / (time.perf_counter() - began_s))
    print(f"data wait: {sorted(shares)[2]:.2%} of the time of a training loop (five of {times} steps)")


def main() -> None:
    options = arguments(__doc__ or "")
    if not ON_GPU:
        print("no GPU here: a small model on the CPU, to see that everything runs; the numbers mean nothing")
    batch, times = (16_384 if ON_GPU else 256), (10 if options.quick else 40) if ON_GPU else 4
    shards, _ = dataset("raw", num_samples=40_960, image_size=IMAGE_SIZE)
    manifest = load_manifest(shards)
    plan = BatchPlan(batch, batch, 1)
    engine = engine_of(manifest, plan)
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    augmentation = Augmentation(
        RECIPE,
        seed=0,
        image_size=IMAGE_SIZE,
        normalisation=Normalisation(manifest.channel_mean, manifest.channel_std),
        device=device,
        dtype=engine.input_dtype,
    )
    reader = open_split(shards, manifest, "train")

    def batches(finish: Callable[[Batch], T]) -> Batches[T]:
        words = {"rank": 0, "consumed": 0, "num_threads": min(CORES, 8), "prefetch": 4, "pin": ON_GPU}
        return training_batches(reader, Order(reader.num_samples, 1), plan, **words, finish=finish)

    with batches(as_stored) as stored:
        copies(stored, device, times=times)
        augmenting(next(stored), augmentation, engine, batch=batch, times=times)
    with Feed(batches, augmentation) as feed:
        waiting(feed, engine, times=times)
    print(f"{machine()}, commit {commit()}")


if __name__ == "__main__":
    main()
