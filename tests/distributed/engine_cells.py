"""All results of one cell of the matrix stage x precision on 2 ranks, as numbers for the tests."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.step import EngineState
from pretrain.optim.segments import Layout
from pretrain.ranks.world import World
from tests.distributed.engines import (
    DECAY,
    DTYPES,
    advance,
    apart,
    distance,
    from_all_ranks,
    global_batch,
    make_engine,
    make_model,
    plain_gradients,
    plain_training,
    relative,
    shared,
    train_step,
)

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
OPTIMIZERS = ("lion", "adamw", "sgd")
CELLS = {
    f"stage{stage}-{precision}": (stage, precision, OPTIMIZERS[(stage + number) % 3])
    for stage in STAGES
    for number, precision in enumerate(PRECISIONS)
}
MOVED = ["stage0-fp16", "stage1-fp32", "stage2-bf16", "stage3-fp32", "stage3-fp16"]
"""Cells whose state one rank resumes."""
KINDS = {"lion": ["exp_avg"], "adamw": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}
SHARE = {"lion": 0.01, "adamw": 0.1, "sgd": 1.0}
"""Fraction of the first step's gradient in the first optimizer state."""


def raw(state: EngineState) -> dict[str, Tensor]:
    return of_kind(state, "weight")


def of_kind(state: EngineState, kind: str) -> dict[str, Tensor]:
    return {
        key.partition(".")[2]: value
        for key, value in state.optimizer.items()
        if key.startswith(f"{kind}.")
    }


def gradient_errors(engine: Any, world: World, optimizer: str) -> dict[str, float]:
    """Return the errors of step 0's gradients, derived from the optimizer state after the step."""
    low = DTYPES[engine.settings.precision] if engine.settings.zero_stage else torch.float32
    expected, norm = plain_gradients(low_precision=low)
    result = train_step(engine, world, 0)
    momentum = of_kind(shared(engine.export_state()), KINDS[optimizer][0])
    found = {name: value / SHARE[optimizer] for name, value in momentum.items()}
    return {
        "gradient": relative(found, expected),
        "norm": abs(float(result.gradient_norm) / norm - 1),
        "clipped": sum(float(value.square().sum()) for value in found.values()) ** 0.5,
    }


def tiling(
    world: World, layouts: dict[Tensor, Layout], weights: dict[str, Tensor]
) -> dict[str, Any]:
    """Return how often the segments of all ranks name each element of each parameter, and whether
    the shards have these elements."""
    named = [
        (segment, flat.detach().view(-1))
        for flat, layout in layouts.items()
        for segment in layout[world.rank]
    ]
    pieces = [
        (each.parameter_number, each.start, row[each.offset : each.offset + each.length])
        for each, row in named
    ]
    tensors = list(weights.values())
    counts = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
    right = True
    for number, begin, values in [piece for of_rank in from_all_ranks(pieces) for piece in of_rank]:
        counts[number][begin : begin + len(values)] += 1
        right = right and torch.equal(tensors[number].view(-1)[begin : begin + len(values)], values)
    every = torch.cat(counts)
    return {"least": int(every.min()), "most": int(every.max()), "right": right}


def averaged_logits(engine: Any, world: World, state: EngineState) -> dict[str, float]:
    """Return differences: logits inside `averaged` from a plain model of the published weights and
    from the logits before it, and what remains after it."""
    images = global_batch(7)[0].to(engine.input_dtype)
    before = engine.logits(images)
    with engine.averaged():
        inside = engine.logits(images)
    again, after = engine.logits(images), shared(engine.export_state())
    plain = make_model().eval()
    plain.load_state_dict(state.weights)
    with torch.no_grad():
        expected = plain.to(DTYPES[engine.settings.precision])(
            images.to(DTYPES[engine.settings.precision])
        ).float()
    return {
        "from_published": float((inside - expected).norm() / expected.norm()),
        "moved": float((inside - before).norm() / before.norm()),
        "left": max(float((again - before).abs().max()), apart(state, after)),
    }


def cell(world: World, identity: str, folder: str) -> dict[str, Any]:
    stage, precision, optimizer = CELLS[identity]
    engine = make_engine(world, stage, precision, optimizer, ema_decay=DECAY)
    first = shared(engine.export_state())
    found: dict[str, Any] = {"twice": gradient_errors(engine, world, optimizer)}
    middle = shared(engine.export_state())
    skipped = [
        train_step(engine, world, 1, poison=poison) for poison in (float("nan"), float("inf"))
    ]
    untouched = shared(engine.export_state())
    losses = advance(engine, world, range(1, 2))
    later = shared(engine.export_state())
    losses += advance(engine, world, range(2, 3))
    end = shared(engine.export_state())

    resumed = make_engine(world, stage, precision, optimizer, ema_decay=DECAY)
    resumed.import_state(untouched)
    advance(resumed, world, range(1, 3))
    again = shared(resumed.export_state())

    states = [first, middle, later, end]
    average = raw(first)
    for state in states[1:]:
        average = {
            name: DECAY * average[name] + (1 - DECAY) * value for name, value in raw(state).items()
        }
    low = DTYPES[precision] if stage else torch.float32
    plain = plain_training(optimizer, steps=range(3), low_precision=low)
    if world.is_first:
        kept = (untouched.weights, untouched.optimizer, untouched.num_updates, untouched.scale)
        torch.save(kept, Path(folder) / f"{identity}.pt")
    return found | {
        "applied": from_all_ranks([bool(each.applied) for each in skipped]),
        "untouched": apart(middle, untouched),
        "scales": [middle.scale, untouched.scale, end.scale, again.scale],
        "updates": [state.num_updates for state in (*states, untouched, again)],
        "resumed": apart(end, again),
        "from_plain": relative(
            {name: value - raw(first)[name] for name, value in raw(end).items()},
            {name: value - raw(first)[name] for name, value in plain.items()},
        ),
        "average": distance(average, end.weights),
        "kinds": sorted({key.partition(".")[0] for key in end.optimizer}),
        "averaged": averaged_logits(engine, world, end),
        "tiling": tiling(world, engine._state.layouts, raw(end)),
        "stepped": all(flat in engine._state.plain.state for flat in engine._state.layouts),
        "losses": losses,
    }


def elsewhere(world: World, identity: str, folder: str) -> dict[str, Any]:
    """Run this stage without accumulation. Then resume the previous stage's state in the same
    engine."""
    stage, precision, _ = CELLS[identity]
    before = f"stage{(stage - 1) % 4}-{precision}"
    other = make_engine(world, stage, precision, CELLS[before][2], accumulation=1, ema_decay=DECAY)
    found: dict[str, Any] = {"once": gradient_errors(other, world, CELLS[before][2])}
    state = EngineState(*torch.load(Path(folder) / f"{before}.pt", weights_only=True))
    other.import_state(state)
    kept = shared(other.export_state())
    return found | {
        "kept": apart(state, kept),
        "kept_scale": [state.scale, kept.scale],
        "losses_of_moved": advance(other, world, range(1, 3)),
    }


def going_on_alone(world: World, folder: str) -> dict[str, list[float]]:
    """Return the losses of one rank that resumes the state of two ranks."""
    from pretrain.engine.deepspeed import start_distributed

    start_distributed(world, timeout_s=60)
    losses = {}
    for identity in MOVED:
        stage, precision, optimizer = CELLS[identity]
        engine = make_engine(world, stage, precision, optimizer, accumulation=1, ema_decay=DECAY)
        engine.import_state(
            EngineState(*torch.load(Path(folder) / f"{identity}.pt", weights_only=True))
        )
        losses[identity] = advance(engine, world, range(1, 3))
    return losses
