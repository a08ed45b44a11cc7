"""Is training held up by its data? The rate from shards against the same step on one resident batch, in one process.

    .venv/bin/python benchmarks/train.py [--quick]

Contestants, each the same number of steps of the same engine (DeepSpeed, ZeRO 1, one rank):
  from shards          loader + augmentation + step: what `pretrain train` does
  resident, augmented  one stored batch again and again, augmented anew + step: no loader
  resident             one prepared batch again and again: the step alone
  matmul limit         the step's matrix products alone, at the same shapes
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from frame import DATA, arguments, rates, ratio, report

from data_prep.__main__ import main as data_prep
from data_prep.manifest import load_manifest
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.augment.settings import AugmentSettings
from pretrain.config import EngineSettings, OptimizerSettings
from pretrain.engine import DeepSpeedEngine, start_distributed
from pretrain.feed import Feed
from pretrain.loader import Batch, Batches, as_stored, training_batches
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.optim import build_optimizer
from pretrain.order import BatchPlan, Order
from pretrain.shards import open_split
from pretrain.world import read_world

IMAGE_SIZE = 64
T = TypeVar("T")


def dataset(per_class: int) -> Path:
    out = DATA / f"shapes-{IMAGE_SIZE}-{per_class}"
    source = [
        f"source.num_train_per_class={per_class}",
        "source.num_val_per_class=1",
        f"source.image_size={IMAGE_SIZE}",
    ]
    assert data_prep(["build", "--source", "synthetic", "--out", str(out), f"image_size={IMAGE_SIZE}", *source]) == 0
    return out


def matmuls(spec: MlpSpec, *, batch: int, classes: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Forward, and both products of backward, of every linear layer; nothing between them."""
    inner = [(spec.width, spec.expansion * spec.width), (spec.expansion * spec.width, spec.width)]
    shapes = [(3 * IMAGE_SIZE**2, spec.width), *inner * spec.depth, (spec.width, classes)]
    layers = [
        tuple(torch.randn(*shape, dtype=dtype, device=device) for shape in ((batch, i), (i, o), (batch, o)))
        for i, o in shapes
    ]

    def run() -> None:
        for number, (x, w, g) in enumerate(layers):
            torch.mm(x, w)
            torch.mm(x.T, g)
            if number:  # pictures need no gradient
                torch.mm(g, w.T)

    return run


def main() -> None:
    options = arguments(__doc__ or "")
    on_gpu = torch.cuda.is_available()
    spec = (
        MlpSpec(kind="mlp", depth=12, width=1024)
        if on_gpu
        else MlpSpec(kind="mlp", depth=6, width=256 if options.quick else 512)
    )
    batch, per_class, steps, rounds = (
        (16_384, 600, 40, 9) if on_gpu else (1024, 60 if options.quick else 400, 8, 4 if options.quick else 9)
    )
    directory = dataset(per_class)
    manifest, world = load_manifest(directory), read_world()
    device = start_distributed(world, timeout_s=600)
    plan = BatchPlan(batch, batch, 1)
    engine = DeepSpeedEngine(
        build_model(spec, num_classes=len(manifest.classes), image_size=IMAGE_SIZE, seed=0),
        make_optimizer=lambda module: build_optimizer(module, OptimizerSettings()),
        settings=EngineSettings(zero_stage=1, precision="bf16" if on_gpu else "fp32"),
        plan=plan,
        label_smoothing=0.3,
        device=device,
        world=world,
    )
    augmentation = Augmentation(
        AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8),
        seed=0,
        image_size=IMAGE_SIZE,
        normalisation=Normalisation(manifest.channel_mean, manifest.channel_std),
        device=device,
        dtype=engine.input_dtype,
    )
    reader = open_split(directory, manifest, "train")
    products = matmuls(spec, batch=batch, classes=len(manifest.classes), dtype=engine.input_dtype, device=device)

    def batches(finish: Callable[[Batch], T]) -> Batches[T]:
        order, kind = Order(reader.num_samples, 1), {"rank": 0, "consumed": 0, "num_threads": 2, "prefetch": 4}
        return training_batches(reader, order, plan, **kind, pin=on_gpu, finish=finish)

    with batches(as_stored) as source:
        stored = next(source)
    prepared = augmentation.prepare(stored)

    def from_shards() -> float:
        """Its loader starts and ends inside the clock: nothing is fetched at another's expense."""
        with Feed(batches, augmentation) as feed:
            return repeat(lambda: engine.train_step([next(feed).prepared], lr=1e-5))()

    def repeat(step: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            for _ in range(steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
            return float(steps * batch)

        return run

    found = rates(
        {
            "from shards": from_shards,
            "resident, augmented": repeat(lambda: engine.train_step([augmentation.prepare(stored)], lr=1e-5)),
            "resident": repeat(lambda: engine.train_step([prepared], lr=1e-5)),
            "matmul limit": repeat(products),
        },
        rounds=rounds,
    )
    name = f"B-{spec.depth}/Wi-{spec.width}, batch {batch:,}, {IMAGE_SIZE} px, {engine.input_dtype}"
    shares = {
        against: ratio(found, "from shards", against) for against in ("resident, augmented", "resident", "matmul limit")
    }
    words = ", ".join(f"{share:.1%} of {against}" for against, share in shares.items())
    report(name, found, unit="images/s", against="resident", headline=f"training from shards runs at {words}")


if __name__ == "__main__":
    sys.exit(main())
