"""Throughput of a fine-tuning step, compared with a pretraining step on the same resident batch,
model and optimizer.

    .venv/bin/python benchmarks/transfer_tune.py [--quick]

Both use the same loop, loader and augmentation (see benchmarks/train.py). Tuning uses accelerate,
pretraining uses DeepSpeed.
"""

import torch
from frame import arguments, keep, rates, ratio, report, sized
from train import LABEL_SMOOTHING, Case, cases, engine_of, repeated

from finetune.session import start_accelerator
from finetune.tune.config import TuneEngineSettings
from finetune.tune.tune import AccelerateEngine
from pretrain.augment.augmentation import Prepared
from pretrain.config import OptimizerSettings
from pretrain.engine.deepspeed import start_distributed
from pretrain.models.build import build_model
from pretrain.ranks.world import World, read_world

NUM_CLASSES = 100
TUNING, PRETRAINING = "tuning", "pretraining, ZeRO 1"


def main() -> None:
    options = arguments(__doc__ or "")
    world = read_world()
    device = start_distributed(world, timeout_s=600)
    rounds = sized(options, full=9, quick=5, dry=1)
    for name, case in cases(
        on_gpu=device.type == "cuda", quick=options.quick, is_dry=options.dry_run
    ).items():
        run(name, case, world, device, rounds=rounds)


def run(name: str, case: Case, world: World, device: torch.device, *, rounds: int) -> None:
    tuning = tuning_engine(case, world, on_gpu=device.type == "cuda")
    pretraining = engine_of(case, world, device, num_classes=NUM_CLASSES, stage=1)
    shape = (case.batch, 3, case.image_size, case.image_size)
    batch = Prepared(
        torch.randn(shape, device=device, dtype=tuning.input_dtype),
        torch.randint(NUM_CLASSES, (case.batch,), device=device),
    )
    found = rates(
        {
            TUNING: repeated(case, lambda: tuning.train_step([batch], lr=1e-5)),
            PRETRAINING: repeated(case, lambda: pretraining.train_step([batch], lr=1e-5)),
        },
        rounds=rounds,
    )
    of_pretraining = ratio(found, TUNING, PRETRAINING)
    keep({f"{name}: tuning of pretraining": of_pretraining})
    report(
        f"{case.spec.label}, batch {case.batch:,}, {case.image_size} px, {tuning.input_dtype}",
        found,
        unit="images/s",
        against=PRETRAINING,
        headline=f"tuning has {of_pretraining:.1%} of the throughput of pretraining",
    )


def tuning_engine(case: Case, world: World, *, on_gpu: bool) -> AccelerateEngine:
    precision = "bf16" if on_gpu else "fp32"
    return AccelerateEngine(
        build_model(case.spec, num_classes=NUM_CLASSES, image_size=case.image_size, seed=0),
        optimizer=OptimizerSettings(),
        settings=TuneEngineSettings(precision=precision, compile=on_gpu),
        accelerator=start_accelerator(world, precision=precision),
        label_smoothing=LABEL_SMOOTHING,
        world=world,
    )


if __name__ == "__main__":
    main()
