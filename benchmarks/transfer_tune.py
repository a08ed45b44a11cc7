"""Does fine-tuning run at the rate of pretraining? The step alone, on the same resident batch,
model and optimizer.

    .venv/bin/python benchmarks/transfer_tune.py [--quick]

The loop, the loader and the augmentation are the same code for both (benchmarks/train.py measures
them); what differs is the engine, accelerate's against DeepSpeed's. The peer is torch's plain
DistributedDataParallel.
"""

import torch
from frame import arguments, keep, rates, ratio, report
from train import LABEL_SMOOTHING, Case, cases, engine_of
from train_peers import ddp_step

from finetune.session import start_accelerator
from finetune.tune.config import TuneEngineSettings
from finetune.tune.tune import AccelerateEngine
from pretrain.augment.augmentation import Prepared
from pretrain.config import OptimizerSettings
from pretrain.engine.deepspeed import start_distributed
from pretrain.models.build import build_model
from pretrain.ranks.world import World, read_world

NUM_CLASSES = 100


def main() -> None:
    options = arguments(__doc__ or "")
    world = read_world()
    device = start_distributed(world, timeout_s=600)
    rounds = 1 if options.dry_run else 5 if options.quick else 9
    for name, case in cases(
        on_gpu=device.type == "cuda", quick=options.quick, is_dry=options.dry_run
    ).items():
        run(name, case, world, device, rounds=rounds)


def run(name: str, case: Case, world: World, device: torch.device, *, rounds: int) -> None:
    on_gpu = device.type == "cuda"
    tuning = tuning_engine(case, world, on_gpu=on_gpu)
    pretraining = {
        stage: engine_of(
            case, world, device, num_classes=NUM_CLASSES, is_compiled=on_gpu, stage=stage
        )
        for stage in (0, 1)
    }
    ddp = ddp_step(
        case.spec,
        num_classes=NUM_CLASSES,
        image_size=case.image_size,
        label_smoothing=LABEL_SMOOTHING,
        device=device,
        is_compiled=on_gpu,
    )
    batch = Prepared(
        torch.randn(
            case.batch, 3, case.image_size, case.image_size, device=device, dtype=tuning.input_dtype
        ),
        torch.randint(NUM_CLASSES, (case.batch,), device=device),
    )

    def repeated(step):  # type: ignore[no-untyped-def]
        def steps() -> float:
            for _ in range(case.steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
            return float(case.steps * case.batch)

        return steps

    found = rates(
        {
            "tuning": repeated(lambda: tuning.train_step([batch], lr=1e-5)),
            "pretraining, ZeRO 0": repeated(lambda: pretraining[0].train_step([batch], lr=1e-5)),
            "pretraining, ZeRO 1": repeated(lambda: pretraining[1].train_step([batch], lr=1e-5)),
            "plain DDP": repeated(lambda: ddp(batch)),
        },
        rounds=rounds,
    )
    keep({f"{name}: tuning of pretraining": ratio(found, "tuning", "pretraining, ZeRO 1")})
    report(
        f"{case.spec.label}, batch {case.batch:,}, {case.image_size} px, {tuning.input_dtype}",
        found,
        unit="images/s",
        against="pretraining, ZeRO 1",
        headline=(
            f"tuning runs at {ratio(found, 'tuning', 'pretraining, ZeRO 1'):.1%} of pretraining's"
            f" rate (ZeRO 0: {ratio(found, 'tuning', 'pretraining, ZeRO 0'):.1%}), at"
            f" {ratio(found, 'tuning', 'plain DDP'):.1%} of plain DDP's"
        ),
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
