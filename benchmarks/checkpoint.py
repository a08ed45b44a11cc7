"""Cost of a checkpoint during training: a pause (stall), and slower steps during the write.

    .venv/bin/python benchmarks/checkpoint.py [--quick]

One rank, ZeRO 1, AdamW. Each round first times steps without a checkpoint. Then training pauses
for a snapshot, and steps continue until the checkpoint is on disk, in a temporary directory.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from frame import arguments, print_table, ratio, sized

from pretrain.augment.augmentation import Prepared
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.files import Retention, Snapshot, TrainerState
from pretrain.checkpoints.writer import CheckpointWriter
from pretrain.config import EngineSettings, OptimizerSettings
from pretrain.data.order import BatchPlan
from pretrain.engine.deepspeed import DeepSpeedEngine, start_distributed
from pretrain.models.build import build_model
from pretrain.models.presets import spec_of
from pretrain.models.spec import MlpSpec
from pretrain.optim import build_optimizer
from pretrain.ranks.world import read_world

CLASSES, SIZE = 1000, 64
STEPS = 3


class Costs(dict[str, float]):
    """Event log in memory that keeps the costs of checkpoints."""

    def metrics(self, values: dict[str, float], *, step: int) -> None:  # noqa: ARG002
        self.update(values)

    def sync(self) -> None: ...


def main() -> None:
    options = arguments(__doc__ or "")
    world = read_world()
    device = start_distributed(world, timeout_s=600)
    on_gpu = device.type == "cuda"
    spec = (
        spec_of("mlp_b12_wi1024")
        if on_gpu
        else MlpSpec(kind="mlp", depth=6, width=sized(options, full=512, quick=256, dry=64))
    )
    batch = 16_384 if on_gpu else 64 if options.dry_run else 1024
    engine = DeepSpeedEngine(
        build_model(spec, num_classes=CLASSES, image_size=SIZE, seed=0),
        make_optimizer=lambda module: build_optimizer(module, OptimizerSettings(name="adamw")),
        settings=EngineSettings(zero_stage=1, precision="bf16" if on_gpu else "fp32"),
        plan=BatchPlan(batch, batch, 1),
        label_smoothing=0.1,
        device=device,
        world=world,
    )
    images = torch.randn(batch, 3, SIZE, SIZE, device=device, dtype=engine.input_dtype)
    prepared = Prepared(images, torch.arange(batch, device=device) % CLASSES)
    card = ModelCard(
        model=spec,
        image_size=SIZE,
        classes=tuple(map(str, range(CLASSES))),
        channel_mean=(0.5, 0.5, 0.5),
        channel_std=(0.5, 0.5, 0.5),
        dataset="none",
    )

    def step_s() -> float:
        began_s = time.perf_counter()
        engine.train_step([prepared], lr=1e-4)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    for _ in range(3):
        step_s()
    found: dict[str, list[float]] = {"step": [], "stall": [], "step while writing": []}
    with tempfile.TemporaryDirectory() as run_dir:
        for number in range(sized(options, full=9, quick=3, dry=1)):
            found["step"].append(statistics.median(step_s() for _ in range(STEPS)))
            log = Costs()
            writer = CheckpointWriter(Path(run_dir), Retention(1), log=log)
            began_s = time.perf_counter()
            snapshot = Snapshot(engine.export_state(), TrainerState(number + 1, 0), card)
            writer.make_room(timeout_s=600)
            writer.submit(snapshot)
            found["stall"].append(time.perf_counter() - began_s)
            during_s = [step_s()]
            while not log:
                during_s.append(step_s())
            writer.finish()
            found["step while writing"].append(statistics.median(during_s))
    size_gb = log["usage/checkpoint_gb"]
    print_table(
        f"{spec.label}, batch {batch:,}, a checkpoint of {size_gb:.2f} GB",
        ("", "median s", "x step"),
        [
            (name, f"{statistics.median(values):.3f}", f"{ratio(found, name, 'step'):.2f}")
            for name, values in found.items()
        ],
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
