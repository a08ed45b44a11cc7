"""The DeepSpeed engine against plain PyTorch, and its state against itself, for every ZeRO stage, precision and optimizer.

One start of 2 ranks computes the whole matrix (importing is what costs); each property is then a test of its own.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.augment.augmentation import Prepared
from pretrain.collectives import Exchange
from pretrain.config import EngineSettings, OptimizerSettings
from pretrain.models.build import build_model
from pretrain.models.kept_buffers import kept_buffers
from pretrain.models.spec import AnySpec, MixerSpec, MlpSpec, SparseMlpSpec
from pretrain.optim import build_optimizer, set_lr
from pretrain.order import BatchPlan
from pretrain.step import EngineState, loss_of
from pretrain.world import World
from tests.ranks import run_ranks

SPEC = MlpSpec(kind="mlp", depth=2, width=17, expansion=2)  # 17: nothing divides by the number of ranks
SIZE, CLASSES, GLOBAL, LOCAL, STEPS, CLIP, LR = 6, 5, 16, 4, 4, 0.5, 0.01
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16")
MATRIX = [
    *((stage, precision, "lion") for stage, precision in itertools.product(STAGES, PRECISIONS)),
    (0, "fp32", "adamw"),
    (1, "bf16", "adamw"),
    (2, "fp32", "adamw"),
    (3, "bf16", "adamw"),
    (2, "fp32", "sgd"),
    (3, "bf16", "sgd"),
]
IDS = [f"stage{stage}-{precision}-{optimizer}" for stage, precision, optimizer in MATRIX]


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(GLOBAL, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(0, CLASSES, (GLOBAL,), generator=generator)


def optimizer_settings(name: str) -> OptimizerSettings:
    return OptimizerSettings(name=name, lr=LR, weight_decay=0.1, head_lr_scale=2.0)


def plain_training(optimizer_name: str) -> dict[str, Tensor]:
    """The independent computation: one process, the whole batch at once, torch's own clipping."""
    model = build_model(SPEC, num_classes=CLASSES, image_size=SIZE, seed=1)
    optimizer = build_optimizer(model, optimizer_settings(optimizer_name))
    for step in range(STEPS):
        images, labels = global_batch(step)
        set_lr(optimizer, LR)
        optimizer.zero_grad()
        loss_of(model(images), Prepared(images, labels), label_smoothing=0.1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def make_engine(
    world: World, stage: int, precision: str, optimizer: str, *, spec: AnySpec = SPEC, seed: int = 1
) -> Any:
    from pretrain.engine import DeepSpeedEngine

    return DeepSpeedEngine(
        build_model(spec, num_classes=CLASSES, image_size=SIZE, seed=seed),
        make_optimizer=lambda module: build_optimizer(module, optimizer_settings(optimizer)),
        settings=EngineSettings(zero_stage=stage, precision=precision, gradient_clip_norm=CLIP),
        plan=BatchPlan(GLOBAL, LOCAL, world.num_ranks),
        label_smoothing=0.1,
        device=torch.device("cpu"),
        world=world,
    )


def micro_batches(engine: Any, world: World, step: int) -> Iterator[Prepared]:
    images, labels = global_batch(step)
    for micro_step in range(engine.plan.accumulation_steps):
        rows = torch.from_numpy(engine.plan.positions(consumed=0, micro_step=micro_step, rank=world.rank))
        yield Prepared(images[rows].to(engine.input_dtype), labels[rows])


def advance(engine: Any, world: World, steps: range) -> list[float]:
    results = [engine.train_step([*micro_batches(engine, world, step)], lr=LR) for step in steps]
    return [Exchange(result.loss, 0.0, flag=False, num_bad=0).read().loss for result in results]


def shared(state: EngineState) -> EngineState:
    """The first rank's state on every rank, as a checkpoint would bring it."""
    box: list[Any] = [state]
    torch.distributed.broadcast_object_list(box)
    result: EngineState = box[0]
    return result


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys() and one
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def permutations_are_restored(world: World, stage: int) -> bool:
    """Whether, on every rank, a model made from another seed takes the saved one's permutations and computes the same."""
    spec = MixerSpec(kind="mixer", patch_size=2, num_channels=5, depth=2, permuted_blocks="all", num_tokens=7)
    images = global_batch(0)[0]
    mine, other = (make_engine(world, stage, "fp32", "lion", spec=spec, seed=seed) for seed in (1, 2))
    differed = not torch.equal(mine.logits(images), other.logits(images))
    state = shared(mine.export_state())
    other.import_state(state)
    kept = kept_buffers(other._engine.module)
    same = len(kept) == 8 and all(torch.equal(kept[name], state.weights[name]) for name in kept)
    verdicts: list[Any] = [None] * world.num_ranks
    torch.distributed.all_gather_object(
        verdicts, differed and same and torch.equal(mine.logits(images), other.logits(images))
    )
    return all(verdicts)


def averages_agree(world: World, stage: int) -> dict[str, Any]:
    """A model with batch norm: how far ranks' logits differ, and the saved averages from the ranks' mean."""
    engine = make_engine(world, stage, "fp32", "lion", spec=SPEC.model_copy(update={"norm": "batch"}))
    advance(engine, world, range(2))
    gathered: list[Any] = [None] * world.num_ranks
    torch.distributed.all_gather_object(gathered, kept_buffers(engine._engine.module))
    logits: list[Any] = [None] * world.num_ranks
    torch.distributed.all_gather_object(logits, engine.logits(global_batch(0)[0]))
    saved, name = shared(engine.export_state()).weights, "blocks.1.norm.running_mean"
    first, second = (each[name] for each in gathered)
    return {
        "differed": distance({name: first}, {name: second}),
        "logits": distance({"": logits[0]}, {"": logits[1]}),
        "saved": distance({name: saved[name]}, {name: (first + second) / 2}),
    }


def sparse_weights_go_on(world: World, stage: int) -> bool:
    """Whether a resumed SW-MLP, whose weights are the values of a pattern, ends at the same bits."""
    spec = SparseMlpSpec(kind="sw_mlp", patch_size=2, num_channels=5, depth=2, density=0.3, storage="sparse")
    engine, again = (make_engine(world, stage, "fp32", "adamw", spec=spec) for _ in range(2))
    advance(engine, world, range(2))
    again.import_state(shared(engine.export_state()))
    for each in (engine, again):
        advance(each, world, range(2, 4))
    one, other = (shared(each.export_state()) for each in (engine, again))
    return distance(one.weights, other.weights) == 0 and distance(one.optimizer, other.optimizer) == 0


def matrix(world: World, folder: str) -> dict[str, Any]:
    from pretrain.engine import start_distributed

    start_distributed(world, timeout_s=60)
    results: dict[str, Any] = {}
    for identity, (stage, precision, optimizer) in zip(IDS, MATRIX, strict=True):
        engine = make_engine(world, stage, precision, optimizer)
        losses = advance(engine, world, range(STEPS))
        middle = shared(engine.export_state())
        later_losses = advance(engine, world, range(STEPS, 2 * STEPS))
        end = shared(engine.export_state())
        resumed = make_engine(world, stage, precision, optimizer)
        resumed.import_state(middle)
        advance(resumed, world, range(STEPS, 2 * STEPS))
        again = shared(resumed.export_state())
        elsewhere = make_engine(world, (stage + 1) % 4, precision, optimizer)
        elsewhere.import_state(middle)
        kept = shared(elsewhere.export_state())
        moved_losses = advance(elsewhere, world, range(STEPS, 2 * STEPS))
        results[identity] = {
            "from_plain": distance(middle.weights, plain_training(optimizer)),
            "resumed_weights": distance(end.weights, again.weights),
            "resumed_optimizer": distance(end.optimizer, again.optimizer),
            "kept": max(distance(middle.weights, kept.weights), distance(middle.optimizer, kept.optimizer)),
            "loss_elsewhere": max(abs(a - b) for a, b in zip(later_losses, moved_losses, strict=True)),
            "losses": losses,
            "updates": [middle.num_updates, again.num_updates],
            "kinds": sorted({name.partition(".")[0] for name in middle.optimizer}),
        }
        if world.is_first:
            torch.save((middle.weights, middle.optimizer, middle.num_updates), Path(folder) / f"{identity}.pt")
    results["averages"] = [averages_agree(world, stage) for stage in (0, 3)]
    results["permutations"] = [permutations_are_restored(world, stage) for stage in STAGES]
    results["sparse"] = [sparse_weights_go_on(world, stage) for stage in STAGES]
    return results


def one_rank(world: World, folder: str) -> dict[str, list[float]]:
    """Losses of going on alone from what two ranks had left."""
    from pretrain.engine import start_distributed

    start_distributed(world, timeout_s=60)
    losses = {}
    for identity, (stage, precision, optimizer) in zip(IDS, MATRIX, strict=True):
        engine = make_engine(world, stage, precision, optimizer)
        engine.import_state(EngineState(*torch.load(Path(folder) / f"{identity}.pt", weights_only=True)))
        losses[identity] = advance(engine, world, range(STEPS, STEPS + 2))
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def results(folder: str) -> dict[str, Any]:
    return dict(run_ranks(matrix, folder, num_ranks=2)[0])


@pytest.mark.parametrize("identity", IDS)
def test_two_ranks_with_accumulation_learn_what_plain_pytorch_learns(results: dict[str, Any], identity: str) -> None:
    assert results[identity]["from_plain"] < (1e-5 if "fp32" in identity else 6e-2)


@pytest.mark.parametrize("identity", IDS)
def test_a_resumed_engine_ends_at_the_same_bits(results: dict[str, Any], identity: str) -> None:
    assert results[identity]["resumed_weights"] == 0
    assert results[identity]["resumed_optimizer"] == 0
    assert results[identity]["updates"] == [STEPS, 2 * STEPS]


@pytest.mark.parametrize("identity", IDS)
def test_the_state_fits_another_stage(results: dict[str, Any], identity: str) -> None:
    assert results[identity]["kept"] == 0
    assert results[identity]["loss_elsewhere"] < (1e-5 if "fp32" in identity else 5e-2)


def test_permutations_are_restored_on_every_rank_at_every_stage(results: dict[str, Any]) -> None:
    assert results["permutations"] == [True] * len(STAGES)


def test_running_averages_are_those_of_all_ranks(results: dict[str, Any]) -> None:
    for found in results["averages"]:
        assert found["differed"] > 1e-3
        assert found["logits"] == 0
        assert found["saved"] < 1e-6


def test_sparse_weights_go_on_at_every_stage(results: dict[str, Any]) -> None:
    assert results["sparse"] == [True] * len(STAGES)


def test_the_state_fits_another_number_of_ranks(results: dict[str, Any], folder: str) -> None:
    alone = run_ranks(one_rank, folder, num_ranks=1)[0]
    two = run_ranks(two_ranks_losses, folder, num_ranks=2)[0]
    assert alone.keys() == two.keys() == set(IDS)
    for identity in IDS:
        assert alone[identity] == pytest.approx(two[identity], abs=1e-5 if "fp32" in identity else 5e-2)


def two_ranks_losses(world: World, folder: str) -> dict[str, list[float]]:
    return one_rank(world, folder)


def test_optimizer_state_has_the_kinds_that_the_optimizer_has(results: dict[str, Any]) -> None:
    kinds = {"lion": ["exp_avg"], "adamw": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}
    for identity, (_, _, optimizer) in zip(IDS, MATRIX, strict=True):
        assert results[identity]["kinds"] == kinds[optimizer]
