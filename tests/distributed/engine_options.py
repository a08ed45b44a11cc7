"""Engine options other than stage and precision, and models with buffers, on 2 ranks."""

import contextlib
import logging
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.augment.augmentation import Prepared
from pretrain.data.order import BatchPlan
from pretrain.engine.step import loss_of
from pretrain.models.layers.buffers import kept_buffers
from pretrain.models.spec import AnySpec, MixerSpec, SparseMlpSpec
from pretrain.ranks.preemption import Interrupted
from pretrain.ranks.world import World
from tests.distributed.engine_cells import gradient_errors, of_kind
from tests.distributed.engines import (
    CLIP,
    DECAY,
    DTYPES,
    GLOBAL,
    SPEC,
    advance,
    apart,
    distance,
    from_all_ranks,
    global_batch,
    make_engine,
    make_model,
    optimizer_settings,
    plain_training,
    relative,
    shared,
    train_step,
)

ACTIVATION = 48 << 20
"""Bytes. malloc would request such a block from the kernel, and return it when freed."""
OFFLOADED = {
    f"stage{stage}-{offload}-{precision}": (stage, offload, precision, optimizer)
    for stage, offload, precision, optimizer in (
        (1, "optimizer", "fp16", "adamw"),
        (1, "optimizer", "bf16", "adamw"),
        (2, "optimizer", "fp32", "lion"),
        (3, "optimizer", "bf16", "sgd"),
        (3, "all", "bf16", "sgd"),
    )
}


def offloaded(world: World, identity: str) -> dict[str, Any]:
    stage, offload, precision, optimizer = OFFLOADED[identity]
    there, here = (
        make_engine(world, stage, precision, optimizer, ema_decay=DECAY, offload=where)
        for where in (offload, "none")
    )
    found: dict[str, Any] = gradient_errors(there, world, optimizer)
    state = shared(there.export_state())
    applied = bool(train_step(there, world, 1, poison=float("nan")).applied)
    skipped = shared(there.export_state())
    here.import_state(skipped)
    back = shared(here.export_state())
    for engine in (there, here):
        advance(engine, world, range(1, 3))
    one, other = (shared(engine.export_state()) for engine in (there, here))
    return found | {
        "applied": applied,
        "untouched": apart(state, skipped),
        "moved": apart(skipped, back),
        "from_resident": relative(one.weights, other.weights),
    }


UPDATED = {
    f"stage{stage}-{precision}-{optimizer}-{clip}": (stage, precision, optimizer, clip)
    for stage, precision, optimizer, clip in (
        (1, "fp32", "lion", CLIP),
        (1, "bf16", "lion", 0.0),
        (1, "fp32", "adamw", 0.0),
        (2, "fp32", "lion", 0.0),
        (2, "bf16", "adamw", CLIP),
        (2, "fp32", "sgd", 0.0),
    )
}


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fail if a tensor's value is read on the host, which would wait for a GPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a wait for the device")
        return function(*args, **(kwargs or {}))


def updated(world: World, identity: str) -> dict[str, Any]:
    """Return the differences between the update on the device and DeepSpeed's from the first,
    skipped step on, and which update waits."""
    stage, precision, optimizer, clip = UPDATED[identity]
    kind: dict[str, Any] = {"gradient_clip_norm": clip, "ema_decay": DECAY}
    if world.num_ranks == 1 and (stage, precision) == (1, "bf16"):
        kind["accumulation"] = 1  # DeepSpeed rounds the fp32 sum to bf16 even without a reduction
    ours, theirs = (
        make_engine(world, stage, precision, optimizer, on_device=where, **kind)
        for where in (True, False)
    )
    overlapped = make_engine(
        world, stage, precision, optimizer, overlap=world.num_ranks > 1, **kind
    )
    start, steps = shared(ours.export_state()), [0.0, 0.0]
    for engine in (ours, theirs, overlapped):
        skipped = train_step(engine, world, 1, poison=float("nan"))
    found = {
        "applied": bool(skipped.applied),
        "skipped": distance(start.weights, shared(ours.export_state()).weights),
    }
    for step in range(2):
        with NoWaits():
            steps = [train_step(engine, world, step).gradient_norm for engine in (ours, overlapped)]
        steps.append(train_step(theirs, world, step).gradient_norm)
    waits = False
    try:
        with NoWaits():
            train_step(theirs, world, 2)
    except RuntimeError:
        waits = True
    one, other, last = (shared(engine.export_state()) for engine in (ours, overlapped, theirs))
    one_optimizer, last_optimizer = (
        {k: v for k, v in each.optimizer.items() if not k.startswith("weight")}
        for each in (one, last)
    )
    return found | {
        "norms": [float(each) for each in steps],
        "weights": relative(one.weights, last.weights),
        "state": relative(one_optimizer, last_optimizer),
        "overlapped": apart(one, other),
        "updates": [one.num_updates, last.num_updates],
        "theirs_waits": waits,
    }


def accumulated(world: World, stage: int) -> float:
    """Return the difference between the gradient of a step of single images and the fp32 sum of
    their bf16 gradients."""
    model, (images, labels) = make_model().to(torch.bfloat16), global_batch(0)
    expected = {name: torch.zeros(weight.shape) for name, weight in model.named_parameters()}
    for row in range(GLOBAL):
        model.zero_grad()
        one = Prepared(images[row : row + 1].to(torch.bfloat16), labels[row : row + 1])
        (
            loss_of(model(one.images_BCHW), one, label_smoothing=0.1) / (GLOBAL // world.num_ranks)
        ).backward()
        for name, weight in model.named_parameters():
            expected[name] += weight.grad.float() / world.num_ranks
    engine = make_engine(
        world, stage, "bf16", "sgd", accumulation=GLOBAL // world.num_ranks, gradient_clip_norm=0.0
    )
    train_step(engine, world, 0)
    return relative(of_kind(shared(engine.export_state()), "momentum_buffer"), expected)


def checkpointed(world: World, stage: int) -> float:
    """Return the difference that recomputed activations make with dropout."""
    spec = SPEC.model_copy(update={"dropout": 0.3})
    states = []
    for setting in (False, True):
        engine = make_engine(
            world, stage, "fp32", "adamw", spec=spec, activation_checkpointing=setting
        )
        assert engine._engine.module.grad_checkpointing is setting
        advance(engine, world, range(2))
        states.append(shared(engine.export_state()))
    return distance(states[0].weights, states[1].weights)


def permutations_are_restored(world: World, stage: int) -> bool:
    """True if a model of another seed takes the saved permutations and the same logits on every
    rank."""
    spec = MixerSpec(
        kind="mixer", patch_size=2, num_channels=5, depth=2, permuted_blocks="all", num_tokens=7
    )
    images = global_batch(0)[0]
    mine, other = (
        make_engine(world, stage, "fp32", "lion", spec=spec, seed=seed) for seed in (1, 2)
    )
    differed = not torch.equal(mine.logits(images), other.logits(images))
    state = shared(mine.export_state())
    other.import_state(state)
    kept = kept_buffers(other._engine.module)
    same = len(kept) == 8 and all(torch.equal(kept[name], state.weights[name]) for name in kept)
    return all(
        from_all_ranks(differed and same and torch.equal(mine.logits(images), other.logits(images)))
    )


def grown(world: World, stage: int) -> dict[str, Any]:
    """Train with fp16 and no clipping. The loss scale grows in the second and third steps."""
    engine = make_engine(world, stage, "fp16", "sgd", gradient_clip_norm=0.0)
    engine._scaler.scale_window = 1
    first = shared(engine.export_state()).weights
    norms = [float(train_step(engine, world, step).gradient_norm) for step in range(3)]
    state = shared(engine.export_state())
    low = DTYPES["fp16"] if stage else torch.float32
    plain = plain_training("sgd", steps=range(3), low_precision=low, clip=float("inf"))
    return {
        "scale": state.scale,
        "norms": norms,
        "from_plain": relative(
            {name: value - first[name] for name, value in state.weights.items()},
            {name: value - first[name] for name, value in plain.items()},
        ),
    }


def left_early(world: World, stage: int) -> dict[str, Any]:
    """Return the number of weight refreshes after an error, which other ranks may not know, and after
    an interruption of all ranks. Also return what has changed."""
    engine = make_engine(world, stage, "bf16", "adamw", ema_decay=DECAY)
    advance(engine, world, range(2))
    images = global_batch(7)[0].to(engine.input_dtype)
    before, weights = engine.logits(images), shared(engine.export_state())
    refresh, times = engine._state.refresh_working_weights, []
    found: dict[str, Any] = {}
    for error in (OSError, Interrupted):
        times.clear()
        with (
            patch.object(
                engine._state, "refresh_working_weights", lambda: (times.append(1), refresh())
            ),
            contextlib.suppress(error),
            engine.averaged(),
        ):
            raise error
        after = shared(engine.export_state())
        found[error.__name__] = len(times)
        found["left"] = max(found.get("left", 0.0), apart(weights, after))
    return found | {"logits": float((engine.logits(images) - before).abs().max())}


def averages_agree(world: World, stage: int) -> dict[str, Any]:
    """Return differences for a model with batch norm: logits between ranks, and saved averages from
    the ranks' mean."""
    engine = make_engine(
        world, stage, "fp32", "lion", spec=SPEC.model_copy(update={"norm": "batch"})
    )
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
    """True if a resumed SW-MLP with sparse storage ends at the same bits."""
    spec = SparseMlpSpec(
        kind="sw_mlp", patch_size=2, num_channels=5, depth=2, density=0.3, storage="sparse"
    )
    engine, again = (make_engine(world, stage, "fp32", "adamw", spec=spec) for _ in range(2))
    advance(engine, world, range(1))
    again.import_state(shared(engine.export_state()))
    for each in (engine, again):
        advance(each, world, range(1, 2))
    one, other = (shared(each.export_state()) for each in (engine, again))
    return apart(one, other) == 0


def tuning_engine(
    world: World, optimizer: str, *, spec: AnySpec = SPEC, recompute: bool = False
) -> Any:
    from finetune.session import start_accelerator
    from finetune.tune.config import TuneEngineSettings
    from finetune.tune.tune import AccelerateEngine

    return AccelerateEngine(
        make_model(spec),
        optimizer=optimizer_settings(optimizer),
        settings=TuneEngineSettings(gradient_clip_norm=CLIP, activation_checkpointing=recompute),
        accelerator=start_accelerator(world, precision="fp32", timeout_s=60),
        label_smoothing=0.1,
        world=world,
    )


def tuning_goes_on(world: World, optimizer: str) -> float:
    """Return the difference between resumed and uninterrupted tuning. The uninterrupted tuning
    recomputes activations."""
    plan = BatchPlan(GLOBAL, GLOBAL // world.num_ranks // 2, world.num_ranks)
    spec = SPEC.model_copy(update={"dropout": 0.3})
    straight, again = (
        tuning_engine(world, optimizer, spec=spec, recompute=recompute)
        for recompute in (True, False)
    )
    assert straight.module.grad_checkpointing and not again.module.grad_checkpointing
    for step in range(2):
        train_step(straight, world, step, plan=plan)
    again.import_state(shared(straight.export_state()))
    for engine in (straight, again):
        for step in range(2, 4):
            train_step(engine, world, step, plan=plan)
    one, other = (shared(engine.export_state()) for engine in (straight, again))
    return apart(one, other)


def tuned(world: World) -> dict[str, Any]:
    """Train accelerate's engine through a step with a NaN on one rank, and compare the next step
    with an engine without that step."""
    spoiled, clean = (tuning_engine(world, "adamw") for _ in range(2))
    plan = BatchPlan(GLOBAL, GLOBAL // world.num_ranks // 2, world.num_ranks)
    for engine in (spoiled, clean):
        train_step(engine, world, 0, plan=plan)
    skipped = train_step(spoiled, world, 1, plan=plan, poison=float("nan"))
    for engine in (spoiled, clean):
        train_step(engine, world, 1, plan=plan)
    one, other = (shared(engine.export_state()) for engine in (spoiled, clean))
    return {
        "applied": from_all_ranks(skipped.applied),
        "apart": apart(one, other),
        "updates": [one.num_updates, other.num_updates],
    }


def pages_taken_again() -> int:
    """Return the page faults of five repetitions of allocating and freeing activations."""
    faults = []
    for _ in range(6):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        activations = [torch.ones(ACTIVATION // 4) for _ in range(3)]
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults[1]


def noise(world: World, folder: str) -> dict[str, str]:
    """Return the output of an engine's construction and training: on the console, and in its log
    file."""
    from pretrain.loop.train import log_to

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
        logging.getLogger("torch.utils.cpp_extension").warning("a word of the compiler's")
        sys.stdout.flush()
        sys.stderr.flush()
    for number, original in zip((1, 2), kept, strict=True):
        os.dup2(original, number)
    return {"console": console.read_text(), "log": log.read_text()}


def options(world: World, folder: str) -> dict[str, Any]:
    return {
        "tuned": tuned(world),
        "tuning_goes_on": {name: tuning_goes_on(world, name) for name in ("lion", "adamw", "sgd")},
        "grown": [grown(world, stage) for stage in (0, 1, 3)],
        "left_early": [left_early(world, stage) for stage in (0, 3)],
        "noise": noise(world, folder),
        "pages": pages_taken_again(),
        "offloaded": {identity: offloaded(world, identity) for identity in OFFLOADED},
        "updated": {identity: updated(world, identity) for identity in UPDATED},
        "accumulated": {stage: accumulated(world, stage) for stage in (1, 2, 3)},
        "checkpointed": checkpointed(world, 3),
        "averages": averages_agree(world, 1),
        "permutations": permutations_are_restored(world, 3),
        "sparse": sparse_weights_go_on(world, 2),
    }
