"""Training throughput, compared with its limits and with peers, in one process.

    .venv/bin/python benchmarks/train.py [--quick] [--only mlp]

Contestants run the same number of steps with equal batches:
  from shards           loader, augmentation and step, as in `pretrain train` (DeepSpeed, ZeRO 1, one rank)
  from shards, hashed   the same while data.verify_hashes hashes the shards (once in a real run)
  resident, augmented   augmentation and step of one stored batch, without a loader
  resident              the step of one prepared batch
  resident, ZeRO 0      the same without sharding, like plain DDP
  plain DDP             the same model and optimizer in torch's DistributedDataParallel, on the prepared batch
  tuning                the step of `finetune tune` (accelerate), on the prepared batch
  public step           the training step of Scaling MLPs: fp32 (TF32 on a GPU), eager, plain LION, `.item()` each step
  matmul limit          only the matrix products of the step, in the engine's precision
The clock starts when the loader has a steady speed.
GPUs train B-12/Wi-1024 at batch 16,384 with the classes of ImageNet-21k, and Mixer-B-W at 224 px,
in bf16. CPUs train smaller models in fp32, with the 48 classes of the images.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from frame import add_sizes, keep, rates, ratio, repeated, report, sized
from images import shapes_dataset
from models_peers import bare_products, plain, products_of, step_flops
from train_peers import ddp_step, public_step

from data_prep.manifest import load_manifest
from data_prep.publish import sha256_of
from finetune.session import start_accelerator
from finetune.tune.config import TuneEngineSettings
from finetune.tune.tune import AccelerateEngine
from pretrain.augment.augmentation import Augmentation, Normalization, Prepared
from pretrain.augment.feed import NUM_AHEAD, Feed, finish_for
from pretrain.config import AugmentSettings, EngineSettings, OptimizerSettings
from pretrain.data.first_read import lowest_priority
from pretrain.data.loader import Batch, Batches, as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader, open_split
from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
from pretrain.models.build import build_model
from pretrain.models.presets import spec_of
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec
from pretrain.optim import build_optimizer
from pretrain.ranks.world import World, read_world

LABEL_SMOOTHING = 0.3
AHEAD, NUM_THREADS = 4, min(8, len(os.sched_getaffinity(0)))
"""Numbers of prefetched batches and of loader threads, as by default in a training."""
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    spec: AnySpec
    image_size: int
    batch: int
    steps: int
    per_class: int
    """Number of images per class in the synthetic dataset."""
    num_classes: int | None = None
    """Number of classes of the head (default: from the dataset)."""

    def steps_of(self, step: Callable[[], object]) -> Callable[[], float]:
        """Return a contestant that takes `steps` steps and returns the number of images."""
        return repeated(step, times=self.steps, units=self.batch)


def cases(*, on_gpu: bool, quick: bool, is_dry: bool) -> dict[str, Case]:
    if is_dry:
        smallest = MixerSpec(kind="mixer", patch_size=8, num_channels=32, depth=1)
        return {
            "mlp": Case(MlpSpec(kind="mlp", depth=1, width=64), 64, 32, 1, 4),
            "mixer": Case(smallest, 32, 32, 1, 4),
        }
    if on_gpu:
        return {
            "mlp": Case(spec_of("mlp_b12_wi1024"), 64, 16_384, 100, 2000, 11_230),
            "mixer": Case(spec_of("mixer_b_w_c3"), 224, 512, 20, 100, 1000),
        }
    mlp, channels = MlpSpec(kind="mlp", depth=6, width=256 if quick else 512), 64 if quick else 128
    mixer = MixerSpec(kind="mixer", patch_size=4, num_channels=channels, depth=4)
    steps = 4 if quick else 10
    return {"mlp": Case(mlp, 64, 1024, steps, 60), "mixer": Case(mixer, 32, 256, steps, 60)}


@dataclass
class Bench:
    """Objects that the contestants of one case share."""

    case: Case
    engine: DeepSpeedEngine
    augmentation: Augmentation
    reader: ShardReader
    plan: BatchPlan
    stored: Batch
    prepared: Prepared
    num_classes: int
    hashed_bytes: int = 0

    def batches(self, finish: Callable[[Batch], T]) -> Batches[T]:
        return batches_of(self.reader, self.plan, finish, pin=self.engine.device.type == "cuda")

    def step(self, batch: Prepared) -> None:
        self.engine.train_step([batch], lr=1e-5)

    def from_shards(self) -> tuple[float, float]:
        """Train from shards with a new loader, because an open loader slows other contestants. The
        clock starts after some steps, with as many batches ready as when it stops."""
        with Feed(self.batches(finish_for(self.augmentation)), self.augmentation) as feed:

            def step() -> None:
                self.step(next(feed).prepared)

            run = self.case.steps_of(step)
            repeated(step, times=AHEAD + NUM_AHEAD)()
            began_s = time.perf_counter()
            return run(), time.perf_counter() - began_s

    def from_shards_hashed(self) -> tuple[float, float]:
        over = threading.Event()
        thread = threading.Thread(target=self._hash, args=(over,))
        thread.start()
        try:
            return self.from_shards()
        finally:
            over.set()
            thread.join()

    def _hash(self, over: threading.Event) -> None:
        """Hash all shards repeatedly, like first_read.py."""
        lowest_priority()
        (part,) = self.reader.parts
        while not over.is_set():
            for shard in part.content.shards:
                self.hashed_bytes += shard.num_bytes
                assert sha256_of(part.tar(shard)) == shard.sha256


def batches_of(
    reader: ShardReader, plan: BatchPlan, finish: Callable[[Batch], T], *, pin: bool
) -> Batches[T]:
    return training_batches(
        reader,
        Order(reader.num_samples, 1),
        plan,
        rank=0,
        consumed=0,
        num_threads=NUM_THREADS,
        prefetch=AHEAD,
        pin=pin,
        finish=finish,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--only", default="mlp,mixer")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    world = read_world()
    device = start_distributed(world, timeout_s=600)
    on_gpu = device.type == "cuda"
    rounds = sized(options, full=5, quick=3, dry=1)
    for name, case in cases(on_gpu=on_gpu, quick=options.quick, is_dry=options.dry_run).items():
        if name in options.only.split(","):
            run(name, case, world, device, rounds=rounds)


def run(name: str, case: Case, world: World, device: torch.device, *, rounds: int) -> None:
    bench = prepare(case, world, device)
    unsharded = engine_of(case, world, device, num_classes=bench.num_classes, stage=0)
    engine, prepared = bench.engine, bench.prepared
    shapes = {"num_classes": bench.num_classes, "image_size": case.image_size}
    with torch.device("cpu"):
        products = products_of(
            plain(case.spec, **shapes), torch.zeros(1, 3, case.image_size, case.image_size)
        )
    products = [replace(each, rows=each.rows * case.batch) for each in products]
    peer = shapes | {"label_smoothing": LABEL_SMOOTHING, "device": device}
    ddp, public = ddp_step(case.spec, **peer), public_step(case.spec, **peer)
    tuning = tuning_engine(case, world, device, num_classes=bench.num_classes)
    found = rates(
        {
            "from shards": bench.from_shards,
            "from shards, hashed": bench.from_shards_hashed,
            "resident, augmented": case.steps_of(
                lambda: bench.step(bench.augmentation.prepare(bench.stored))
            ),
            "resident": case.steps_of(lambda: bench.step(prepared)),
            "resident, ZeRO 0": case.steps_of(lambda: unsharded.train_step([prepared], lr=1e-5)),
            "plain DDP": case.steps_of(partial(ddp, prepared)),
            "tuning": case.steps_of(lambda: tuning.train_step([prepared], lr=1e-5)),
            "public step": case.steps_of(partial(public, prepared)),
            "matmul limit": case.steps_of(bare_products(products, like=prepared.images_BCHW)),
        },
        rounds=rounds,
    )
    keep(
        {
            f"{name}: {one} of {other}": ratio(found, one, other)
            for one in ("from shards", "resident", "tuning")
            for other in ("resident", "plain DDP")
        }
    )
    cost = 1 - ratio(found, "from shards, hashed", "from shards")
    tera = step_flops(products) / case.batch / 1e12
    kind = "compiled" if device.type == "cuda" else "eager"
    against = ("resident", "plain DDP", "public step", "matmul limit")
    shares = ", ".join(f"{ratio(found, 'from shards', each):.1%} of {each}" for each in against)
    report(
        f"{case.spec.label}, batch {case.batch:,}, {case.image_size} px, {engine.input_dtype},"
        f" {kind}",
        found,
        unit="images/s",
        against="resident",
        headline=(
            f"training from shards: {shares}; the resident step:"
            f" {ratio(found, 'resident', 'plain DDP'):.1%} of plain DDP (ZeRO 0:"
            f" {ratio(found, 'resident, ZeRO 0', 'plain DDP'):.1%}),"
            f" {ratio(found, 'resident', 'matmul limit'):.1%} of the matmul limit"
            f" ({tera * sorted(found['matmul limit'])[rounds // 2]:.2f} TFLOP/s);"
            f" data.verify_hashes slows steps by {cost:.1%} ({bench.hashed_bytes / 1e9:.2f} GB"
            " were hashed)"
        ),
    )


def engine_of(
    case: Case,
    world: World,
    device: torch.device,
    *,
    num_classes: int,
    stage: int,
    is_eager: bool = False,
) -> DeepSpeedEngine:
    """Return an engine: compiled in bf16 on a GPU, otherwise eager in fp32."""
    on_gpu = device.type == "cuda"
    return DeepSpeedEngine(
        build_model(case.spec, num_classes=num_classes, image_size=case.image_size, seed=0),
        make_optimizer=lambda module: build_optimizer(module, OptimizerSettings()),
        settings=EngineSettings(
            zero_stage=stage,
            precision="bf16" if on_gpu else "fp32",
            compile=on_gpu and not is_eager,
        ),
        plan=BatchPlan(case.batch, case.batch, 1),
        label_smoothing=LABEL_SMOOTHING,
        device=device,
        world=world,
    )


def tuning_engine(
    case: Case, world: World, device: torch.device, *, num_classes: int
) -> AccelerateEngine:
    on_gpu = device.type == "cuda"
    precision = "bf16" if on_gpu else "fp32"
    return AccelerateEngine(
        build_model(case.spec, num_classes=num_classes, image_size=case.image_size, seed=0),
        optimizer=OptimizerSettings(),
        settings=TuneEngineSettings(precision=precision, compile=on_gpu),
        accelerator=start_accelerator(world, precision=precision),
        label_smoothing=LABEL_SMOOTHING,
        world=world,
    )


def augmentation_for(
    engine: DeepSpeedEngine, image_size: int, normalization: Normalization
) -> Augmentation:
    return Augmentation(
        AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8),
        seed=0,
        image_size=image_size,
        normalization=normalization,
        device=engine.device,
        dtype=engine.input_dtype,
    )


def prepare(case: Case, world: World, device: torch.device) -> Bench:
    directory = shapes_dataset(case.image_size, case.per_class)
    manifest = load_manifest(directory)
    plan = BatchPlan(case.batch, case.batch, 1)
    num_classes = case.num_classes or len(manifest.classes)
    engine = engine_of(case, world, device, num_classes=num_classes, stage=1)
    normalization = Normalization(manifest.channel_mean, manifest.channel_std)
    augmentation = augmentation_for(engine, case.image_size, normalization)
    reader = open_split(directory, manifest, "train")
    with batches_of(reader, plan, as_stored, pin=device.type == "cuda") as source_batches:
        stored = next(source_batches)
    prepared = augmentation.prepare(stored)
    return Bench(case, engine, augmentation, reader, plan, stored, prepared, num_classes)


if __name__ == "__main__":
    main()
