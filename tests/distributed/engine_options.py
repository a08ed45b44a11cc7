"""What an engine may be asked for beside its stage and precision, and models that keep more than weights: computed on 2 ranks."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from pretrain.models.kept_buffers import kept_buffers
from pretrain.models.spec import MixerSpec, SparseMlpSpec
from pretrain.optim import build_optimizer
from pretrain.order import BatchPlan
from pretrain.world import World
from tests.distributed.engine_cells import gradient_errors
from tests.distributed.engines import (
    CLIP,
    DECAY,
    GLOBAL,
    SPEC,
    advance,
    distance,
    from_all_ranks,
    global_batch,
    make_engine,
    make_model,
    optimizer_settings,
    relative,
    shared,
    train_step,
)

OFFLOADED = {
    f"stage{stage}-{offload}-{precision}": (stage, offload, precision, optimizer)
    for stage, offload, precision, optimizer in (
        (1, "optimizer", "fp16", "adamw"),
        (2, "optimizer", "fp32", "lion"),
        (2, "optimizer", "bf16", "sgd"),
        (3, "optimizer", "bf16", "sgd"),
        (3, "all", "fp16", "adamw"),
    )
}


def offloaded(world: World, identity: str) -> dict[str, Any]:
    stage, offload, precision, optimizer = OFFLOADED[identity]
    there, here = (
        make_engine(world, stage, precision, optimizer, ema_decay=DECAY, offload=where) for where in (offload, "none")
    )
    found: dict[str, Any] = gradient_errors(there, world, optimizer)
    state = shared(there.export_state())
    applied = train_step(there, world, 1, poison=float("nan")).applied
    skipped = shared(there.export_state())
    here.import_state(skipped)
    back = shared(here.export_state())
    for engine in (there, here):
        advance(engine, world, range(1, 3))
    one, other = (shared(engine.export_state()) for engine in (there, here))
    return found | {
        "applied": applied,
        "untouched": max(distance(state.weights, skipped.weights), distance(state.optimizer, skipped.optimizer)),
        "moved": max(distance(skipped.weights, back.weights), distance(skipped.optimizer, back.optimizer)),
        "from_resident": relative(one.weights, other.weights),
    }


def checkpointed(world: World, stage: int) -> float:
    """How far training with dropout is from the same with recomputed activations."""
    spec = SPEC.model_copy(update={"dropout": 0.3})
    states = []
    for setting in (False, True):
        engine = make_engine(world, stage, "fp32", "adamw", spec=spec, activation_checkpointing=setting)
        assert engine._engine.module.grad_checkpointing is setting
        advance(engine, world, range(2))
        states.append(shared(engine.export_state()))
    return distance(states[0].weights, states[1].weights)


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
    return all(from_all_ranks(differed and same and torch.equal(mine.logits(images), other.logits(images))))


def averages_agree(world: World, stage: int) -> dict[str, Any]:
    """A model with batch norm: how far ranks' logits differ, and the saved averages from the ranks' mean."""
    engine = make_engine(world, stage, "fp32", "lion", spec=SPEC.model_copy(update={"norm": "batch"}))
    advance(engine, world, range(2))
    gathered = from_all_ranks(kept_buffers(engine._engine.module))
    logits = from_all_ranks(engine.logits(global_batch(0)[0]))
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
    advance(engine, world, range(1))
    again.import_state(shared(engine.export_state()))
    for each in (engine, again):
        advance(each, world, range(1, 2))
    one, other = (shared(each.export_state()) for each in (engine, again))
    return distance(one.weights, other.weights) == 0 and distance(one.optimizer, other.optimizer) == 0


def tuned(world: World) -> dict[str, Any]:
    """accelerate's engine: a step that one rank spoils, and the next against an engine that never saw it."""
    from finetune.config import TuneEngineSettings
    from finetune.engine import AccelerateEngine, start_accelerator

    accelerator = start_accelerator(world, precision="fp32", timeout_s=60)
    spoiled, clean = (
        AccelerateEngine(
            make_model(),
            make_optimizer=lambda module: build_optimizer(module, optimizer_settings("adamw")),
            settings=TuneEngineSettings(gradient_clip_norm=CLIP),
            accelerator=accelerator,
            label_smoothing=0.1,
            world=world,
        )
        for _ in range(2)
    )
    plan = BatchPlan(GLOBAL, GLOBAL // world.num_ranks // 2, world.num_ranks)
    for engine in (spoiled, clean):
        train_step(engine, world, 0, plan=plan)
    skipped = train_step(spoiled, world, 1, plan=plan, poison=float("nan"))
    for engine in (spoiled, clean):
        train_step(engine, world, 1, plan=plan)
    one, other = (shared(engine.export_state()) for engine in (spoiled, clean))
    return {
        "applied": from_all_ranks(skipped.applied),
        "apart": max(distance(one.weights, other.weights), distance(one.optimizer, other.optimizer)),
        "updates": [one.num_updates, other.num_updates],
    }


def noise(world: World, folder: str) -> dict[str, str]:
    """What an engine says while it is made and trained: on the console, and in the file that it was told to use."""
    from pretrain.engine import log_to

    log, console = (Path(folder) / f"{name}-{world.rank}" / "said" for name in ("log", "console"))
    log_to(log)
    console.parent.mkdir()
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with console.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        advance(make_engine(world, 3, "bf16", "lion", offload="all"), world, range(1))
        warnings.warn("a warning of Python's", stacklevel=1)
        sys.stdout.flush()
        sys.stderr.flush()
    for number, original in zip((1, 2), kept, strict=True):
        os.dup2(original, number)
    return {"console": console.read_text(), "log": log.read_text()}


def options(world: World, folder: str) -> dict[str, Any]:
    return {
        "tuned": tuned(world),
        "noise": noise(world, folder),
        "offloaded": {identity: offloaded(world, identity) for identity in OFFLOADED},
        "checkpointed": [checkpointed(world, stage) for stage in (0, 3)],
        "averages": averages_agree(world, 1),
        "permutations": permutations_are_restored(world, 3),
        "sparse": sparse_weights_go_on(world, 2),
    }
