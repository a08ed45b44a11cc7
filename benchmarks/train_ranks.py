"""Memory and traffic of two ranks at each ZeRO stage, compared with the formulas.

    .venv/bin/python benchmarks/train_ranks.py

"held" is the bytes of all tensors per parameter on the first rank, after the backward pass of the
second step (without activations). "sent" is the bytes on the loopback interface in three steps, per
rank, step and parameter. Other traffic on this interface is included. The ranks use
AdamW and one micro-batch for each step.
"""

import gc
import os
import sys
from pathlib import Path

import torch
from frame import arguments, print_table

from pretrain.augment.augmentation import Prepared
from pretrain.config import EngineSettings, OptimizerSettings
from pretrain.data.order import BatchPlan
from pretrain.engine.zero_cost import Training, bucket_bytes, bytes_sent, held
from pretrain.models.build import build_model
from pretrain.models.spec import MlpSpec
from pretrain.optim import build_optimizer
from pretrain.ranks.collectives import barrier
from pretrain.ranks.launch import launch
from pretrain.ranks.world import World, read_world

SPEC, SIZE, CLASSES, BATCH = MlpSpec(kind="mlp", depth=6, width=512), 32, 100, 8
WIRE = Path("/sys/class/net/lo/statistics/tx_bytes")
KEPT: list[object] = []
"""Engines that stay in memory, because new tensors at freed addresses would not count."""


def storages() -> dict[int, int]:
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def measure(world: World, stage: int, precision: str) -> tuple[str, ...]:
    from pretrain.engine.deepspeed import DeepSpeedEngine

    before = storages()
    model = build_model(SPEC, num_classes=CLASSES, image_size=SIZE, seed=0)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    engine = DeepSpeedEngine(
        model,
        make_optimizer=lambda module: build_optimizer(module, OptimizerSettings(name="adamw")),
        settings=EngineSettings(zero_stage=stage, precision=precision),
        plan=BatchPlan(BATCH * world.num_ranks, BATCH, world.num_ranks),
        label_smoothing=0.0,
        device=torch.device("cpu"),
        world=world,
    )
    KEPT.append(engine)
    batch = Prepared(torch.randn(BATCH, 3, SIZE, SIZE).to(engine.input_dtype), torch.arange(BATCH))
    most, updater = [0], engine._update or engine._engine
    update = updater.step

    def observed_update() -> None:
        most[0] = max(
            most[0], sum(size for place, size in storages().items() if place not in before)
        )
        update()

    engine.train_step([batch], lr=1e-3)
    updater.step = observed_update
    engine.train_step([batch], lr=1e-3)
    updater.step = update
    barrier()
    began = int(WIRE.read_text())
    for _ in range(3):
        engine.train_step([batch], lr=1e-3)
    barrier()
    on_wire = (int(WIRE.read_text()) - began) / 3 / world.num_ranks
    training = Training(num_parameters, stage, precision, world.num_ranks, num_states=2)
    wanted = held(training) - (bucket_bytes(training) if stage < 3 else 0)
    numbers = (most[0], wanted, on_wire, bytes_sent(training))
    return str(stage), precision, *(f"{number / num_parameters:.2f}" for number in numbers)


def rank_main(*, is_dry: bool) -> None:
    from pretrain.engine.deepspeed import start_distributed

    world = read_world()
    start_distributed(world, timeout_s=120)
    precisions, stages = (("bf16",), (2,)) if is_dry else (("fp32", "bf16"), range(4))
    rows = [measure(world, stage, precision) for precision in precisions for stage in stages]
    if world.is_first:
        columns = ("stage", "precision", "held", "formula", "sent", "formula")
        print_table(f"{SPEC.label}, {world.num_ranks} ranks, bytes per parameter", columns, rows)
    barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    options = arguments(__doc__ or "")
    if "RANK" in os.environ:
        rank_main(is_dry=options.dry_run)
    return launch([sys.executable, __file__, *sys.argv[1:]], num_ranks=2)


if __name__ == "__main__":
    sys.exit(main())
