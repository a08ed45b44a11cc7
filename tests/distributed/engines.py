"""Small engines on 2 ranks, and the plain PyTorch code for comparison."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pretrain.augment.augmentation import Prepared
from pretrain.config import EngineSettings, OptimizerSettings
from pretrain.data.order import BatchPlan
from pretrain.engine.step import EngineState, loss_of
from pretrain.models.build import build_model
from pretrain.models.spec import AnySpec, MlpSpec
from pretrain.optim import build_optimizer, set_lr
from pretrain.ranks.collectives import Exchange
from pretrain.ranks.world import World

SPEC = MlpSpec(kind="mlp", depth=2, width=17, expansion=2)  # 17 is divisible by no number of ranks
SIZE, CLASSES, GLOBAL, CLIP, LR, DECAY = 6, 5, 16, 0.5, 0.01, 0.8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(GLOBAL, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(0, CLASSES, (GLOBAL,), generator=generator)


def optimizer_settings(name: str) -> OptimizerSettings:
    return OptimizerSettings(name=name, lr=LR, weight_decay=0.1, head_lr_scale=2.0)


def make_model(spec: AnySpec = SPEC, *, seed: int = 1) -> Any:
    """Return a model with a nonzero head: a zero head would give the body zero gradients."""
    model = build_model(spec, num_classes=CLASSES, image_size=SIZE, seed=seed)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


def make_engine(
    world: World,
    stage: int,
    precision: str,
    optimizer: str,
    *,
    spec: AnySpec = SPEC,
    seed: int = 1,
    accumulation: int = 2,
    ema_decay: float | None = None,
    overlap: bool = False,
    on_device: bool | None = None,
    **settings: Any,
) -> Any:
    """Return an engine. `on_device`: True for our update, False for DeepSpeed's, where both exist."""
    import pretrain.engine.deepspeed

    plain_config = pretrain.engine.deepspeed.deepspeed_config

    def config(*arguments: Any, **options: Any) -> dict[str, Any]:
        """Return stage 3 settings as for large models: few weights stay gathered, and several
        sub-groups are stepped in turn."""
        made = plain_config(*arguments, **options)
        made["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 300,
        }
        made["zero_optimization"]["reduce_bucket_size"] = 2_000  # the largest weight has 1,836
        if overlap:
            made["zero_optimization"]["overlap_comm"] = True
        return made

    chosen = (
        pretrain.engine.deepspeed.updates_on_device if on_device is None else lambda _: on_device
    )
    with (
        patch.object(pretrain.engine.deepspeed, "deepspeed_config", config),
        patch.object(pretrain.engine.deepspeed, "updates_on_device", chosen),
    ):
        engine = pretrain.engine.deepspeed.DeepSpeedEngine(
            make_model(spec, seed=seed),
            make_optimizer=lambda module: build_optimizer(module, optimizer_settings(optimizer)),
            settings=EngineSettings(
                zero_stage=stage, precision=precision, **({"gradient_clip_norm": CLIP} | settings)
            ),
            plan=BatchPlan(GLOBAL, GLOBAL // world.num_ranks // accumulation, world.num_ranks),
            label_smoothing=0.1,
            device=torch.device("cpu"),
            world=world,
            ema_decay=ema_decay,
        )
    if precision == "fp16":
        engine._scaler.cur_scale = (
            1024.0  # a high scale could skip the first steps, which would shift all later ones
        )
    return engine


def train_step(
    engine: Any,
    world: World,
    step: int,
    *,
    poison: float | None = None,
    plan: BatchPlan | None = None,
) -> Any:
    """Run one step. `poison` replaces a pixel in the last rank's first micro-batch."""
    images, labels = global_batch(step)
    micro_batches, plan = [], plan or engine.plan
    for micro_step in range(plan.accumulation_steps):
        rows = torch.from_numpy(plan.positions(consumed=0, micro_step=micro_step, rank=world.rank))
        part = images[rows].to(engine.input_dtype)
        if poison is not None and micro_step == 0 and world.rank == world.num_ranks - 1:
            part[0, 0, 0, 0] = poison
        micro_batches.append(Prepared(part, labels[rows]))
    torch.manual_seed(step * 100 + world.rank)
    return engine.train_step(micro_batches, lr=LR)


def advance(engine: Any, world: World, steps: range) -> list[float]:
    """Train the steps. Return the mean loss of each."""
    return [
        Exchange(train_step(engine, world, step).loss, 0.0, flag=False, num_bad=0).read().loss
        for step in steps
    ]


def plain_start(*, low_precision: torch.dtype = torch.float32) -> Any:
    model = make_model()
    return model.to(low_precision).to(torch.float32)


def plain_gradients(
    *, low_precision: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], float]:
    """Return step 0's gradients by name, clipped, and their norm before clipping: the full batch at
    once, in fp32."""
    model = plain_start(low_precision=low_precision)
    images, labels = global_batch(0)
    loss_of(model(images), Prepared(images, labels), label_smoothing=0.1).backward()
    norm = float(sum(float(weight.grad.square().sum()) for weight in model.parameters()) ** 0.5)
    assert norm > 2 * CLIP
    return {name: weight.grad * (CLIP / norm) for name, weight in model.named_parameters()}, norm


def plain_training(
    optimizer_name: str, *, steps: range, low_precision: torch.dtype, clip: float = CLIP
) -> dict[str, Tensor]:
    """Return the weights after the steps: one process, the full batch at once, torch's clipping,
    fp32."""
    model = plain_start(low_precision=low_precision)
    optimizer = build_optimizer(model, optimizer_settings(optimizer_name))
    for step in steps:
        images, labels = global_batch(step)
        set_lr(optimizer, LR)
        optimizer.zero_grad()
        loss_of(model(images), Prepared(images, labels), label_smoothing=0.1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def shared(state: EngineState) -> EngineState:
    """Return the first rank's state on every rank, like a checkpoint."""
    box: list[Any] = [state]
    torch.distributed.broadcast_object_list(box)
    result: EngineState = box[0]
    return result


def from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between tensors of the same name."""
    assert one.keys() == other.keys() and one
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def apart(one: EngineState, other: EngineState) -> float:
    return max(distance(one.weights, other.weights), distance(one.optimizer, other.optimizer))


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest relative error of a tensor. The divisor is its norm, but at least a
    hundredth of the norm of all tensors."""
    assert one.keys() == other.keys() and one
    whole = sum(float(tensor.square().sum()) for tensor in other.values()) ** 0.5
    return max(
        float((one[name] - other[name]).norm() / max(float(other[name].norm()), whole / 100))
        for name in one
    )
