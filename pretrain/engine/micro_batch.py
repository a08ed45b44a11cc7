"""`train.local_batch_size: auto`: the largest micro-batch that fits, found when a run begins and kept with it.

The size changes how gradients are rounded, so a run that goes on must have the same one: RUN/micro_batch.json has a line for each
kind of device and number of ranks that the run has seen.

1. What is written there for this kind of device and number of ranks counts, and nothing is tried.
2. Each rank tries two small micro-batches; what they take says how many samples fit beside the engine (memory.py).
3. The largest part of the rank's share that fits (an even one where mixing pairs neighbours) is tried beside a placeholder for the
   engine; where memory runs out, the next smaller one. On a CPU nothing would be raised: there a margin has to do.
4. The lowest over all ranks is taken, written down by the first rank, and said.
"""

import gc
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.publish import write_json
from data_prep.settings import UserError
from pretrain.augment.feed import NUM_AHEAD
from pretrain.config import PretrainSettings, check_against_ranks
from pretrain.data.order import hash64
from pretrain.engine.memory import Trial, available_bytes, engine_bytes
from pretrain.models.cost import num_parameters
from pretrain.ranks.collectives import lowest_over_ranks, num_ranks_with, of_first_rank
from pretrain.ranks.world import World

FILE = "micro_batch.json"
USED_SHARE = {"cpu": 0.75, "cuda": 0.92}
"""Of the memory that is left: the rest is for fragments, libraries and, on a CPU, whatever else the node does."""
AUGMENTED_COPIES = 4
"""fp32 pictures that augmentation on a GPU may hold at once for each of the batch."""


REMEDY = "set a higher engine.zero_stage, or use more ranks"


class DoesNotFit(UserError):  # noqa: N818
    """Not even the smallest micro-batch does."""

    of_all_ranks = True


class Damaged(UserError):  # noqa: N818
    """What was written down cannot be read."""

    of_all_ranks = True


def micro_batch_size(
    model: nn.Module,
    *,
    settings: PretrainSettings,
    num_classes: int,
    image_size: int,
    device: torch.device,
    world: World,
    remedy: str = REMEDY,
) -> int:
    """The local batch size of the run: what the config says, or, where that is auto, what fits."""
    local_batch_size = check_against_ranks(settings.train, settings.augment, num_ranks=world.num_ranks)
    if settings.train.local_batch_size != "auto":
        return local_batch_size
    share = local_batch_size
    path, situation = Path(settings.run_dir) / FILE, situation_of(settings, device=device, world=world)
    found = of_first_rank(recall(path, situation) if world.is_first else 0, device=device)
    if found == BROKEN:
        raise Damaged(f"{path}: is damaged; remove it, and a size that fits is looked for again")
    if found and share % found == 0:
        return found
    found = fit_micro_batch(
        model,
        settings=settings,
        num_classes=num_classes,
        image_size=image_size,
        share=share,
        device=device,
        world=world,
        remedy=remedy,
    )
    if world.is_first:
        remember(path, situation, found)
        steps = f"{share // found} of them a step" if found < share else "all of its share"
        print(f"{path.parent.name}: local_batch_size auto is {found:,} samples per rank, {steps}", flush=True)
    return found


def with_local_batch_size(settings: PretrainSettings, found: int) -> PretrainSettings:
    """As the run's parameters are logged: what auto came to, where it stood for a number."""
    if settings.train.local_batch_size != "auto":
        return settings
    return settings.model_copy(update={"train": settings.train.model_copy(update={"local_batch_size": found})})


def fit_micro_batch(
    model: nn.Module,
    *,
    settings: PretrainSettings,
    num_classes: int,
    image_size: int,
    share: int,
    device: torch.device,
    world: World,
    available: int | None = None,
    remedy: str = REMEDY,
) -> int:
    """The largest part of the share that fits on every rank, into `available` bytes or what there is."""
    engine, on_gpu = settings.engine, device.type == "cuda"
    if available is None:
        available = available_bytes(device, num_local_ranks=num_ranks_with(this_node(), device=device))
    fixed = engine_bytes(
        num_parameters(model),
        engine=engine,
        optimizer=settings.optimizer.name,
        num_ranks=world.num_ranks,
        ema=settings.train.ema_decay is not None,
        on_gpu=on_gpu,
    )
    trial = Trial(model, num_classes, image_size, engine, is_mixed=bool(settings.augment.mixing), device=device)
    waiting = waiting_bytes(
        image_size, dtype=trial.input_dtype, prefetch=settings.train.prefetch_batches, on_gpu=on_gpu
    )
    budget = int(available * USED_SHARE[device.type]) - fixed
    candidates = candidates_of(share, must_be_even=bool(settings.augment.mixing))
    best = _tried_out(trial, candidates, budget=budget, fixed=fixed, waiting=waiting) if budget > 0 else 0
    if on_gpu:  # the copy and its activations are gone; so that the driver sees it, too
        gc.collect()
        torch.cuda.empty_cache()
    best = lowest_over_ranks(best, device=device)
    if best == 0:
        least = lowest_over_ranks(available, device=device)
        raise DoesNotFit(
            f"train.local_batch_size: auto finds no micro-batch that fits: of {least / 1e9:.1f} GB the engine takes "
            f"{fixed / 1e9:.1f} and {candidates[0]} samples do not fit beside it; {remedy}"
        )
    return best


def _tried_out(trial: Trial, candidates: Sequence[int], *, budget: int, fixed: int, waiting: int) -> int:
    """0 also where memory runs out before anything is known: the ranks agree on that afterwards, and none may be missing then."""
    on_gpu = trial.device.type == "cuda"
    with torch.random.fork_rng(devices=[trial.device] if on_gpu else []):
        try:
            tried = trial.copied()
            peak_bytes = tried.peak_bytes()
        except torch.OutOfMemoryError:
            return 0
        return largest_that_fits(
            candidates,
            budget=budget,
            need=lambda size: peak_bytes(size) + size * waiting,
            holds=_holds(tried, reserved=fixed - trial.bytes_of_copy, waiting=waiting) if on_gpu else None,
        )


def candidates_of(share: int, *, must_be_even: bool) -> list[int]:
    """Micro-batches of which a whole number makes the rank's share, ascending."""
    found = [size for size in range(1, share + 1) if share % size == 0 and not (must_be_even and size % 2)]
    assert found, "an odd share with mixing is refused before"
    return found


def largest_that_fits(
    candidates: Sequence[int], *, budget: int, need: Callable[[int], int], holds: Callable[[int], bool] | None
) -> int:
    """Of ascending sizes the largest whose need is within the budget, and which holds when it is tried; 0: none."""
    for size in reversed(candidates):
        if need(size) <= budget and (holds is None or holds(size)):
            return size
    return 0


def waiting_bytes(image_size: int, *, dtype: torch.dtype, prefetch: int, on_gpu: bool) -> int:
    """Per sample: the pictures that lie ready in the same memory while the model works on others."""
    pixels = 3 * image_size**2
    if on_gpu:
        return pixels * (NUM_AHEAD * dtype.itemsize + AUGMENTED_COPIES * 4 + 1)
    return pixels * (prefetch + 1) * (dtype.itemsize + 1)


def _holds(trial: Trial, *, reserved: int, waiting: int) -> Callable[[int], bool]:
    """Whether two steps run beside a placeholder for the engine and the pictures that wait."""

    def holds(size: int) -> bool:
        try:
            placeholder = torch.empty(max(0, reserved) + size * waiting, dtype=torch.uint8, device=trial.device)
            for _ in range(2):
                trial.step(size)
            torch.cuda.synchronize(trial.device)
            del placeholder
        except torch.OutOfMemoryError:
            return False
        return True

    return holds


# ---- memory of the run ------------------------------------------------------------------------------------------------


def situation_of(settings: PretrainSettings, *, device: torch.device, world: World) -> dict[str, Any]:
    """What the choice depends on and may change while a run goes on."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    engine = settings.engine
    return {
        "device": kind,
        "num_ranks": world.num_ranks,
        "zero_stage": engine.zero_stage,
        "offload": engine.offload,
        "activation_checkpointing": engine.activation_checkpointing,
    }


BROKEN = -1


def recall(path: Path, situation: dict[str, Any]) -> int:
    """0: nothing is known. BROKEN: the file says nothing; it is the first rank's, so all complain of it together."""
    try:
        known = json.loads(path.read_text())
        found = next((each["local_batch_size"] for each in known if situation.items() <= each.items()), 0)
    except FileNotFoundError:
        return 0
    except (ValueError, TypeError, AttributeError, KeyError):  # no JSON, or of another shape
        return BROKEN
    return found if isinstance(found, int) and found >= 0 else BROKEN


def remember(path: Path, situation: dict[str, Any], size: int) -> None:
    known = json.loads(path.read_text()) if path.exists() else []
    write_json(path, [*known, situation | {"local_batch_size": size}])


def this_node() -> int:
    """Alike for all ranks that share a kernel, and so its memory."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return int(hash64(*name.encode()) >> 1)
