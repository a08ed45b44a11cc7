"""`train.local_batch_size: auto`: find a micro-batch that fits into memory.

The size changes how gradients are rounded, so a resumed run must keep the size.
RUN/micro_batch.json maps each situation (device, number of ranks, engine) to its micro-batch size.

1. If the file has a size for this situation, use it.
2. Otherwise each rank runs one step of a copy of the model with the rank's complete part of the
   global batch. On a GPU, placeholders occupy the bytes that the engine, prepared images and the
   augmentation will need. If memory runs out, the rank tries at most half as many samples.
3. The first rank writes and prints the lowest size over all ranks.

On a CPU, Linux may kill the process instead of refusing memory. In this case set a number.
"""

import copy
import gc
import json
import platform
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn

from data_prep.errors import UserError
from data_prep.publish import write_json
from pretrain.augment.augmentation import Prepared
from pretrain.augment.feed import NUM_AHEAD
from pretrain.config import PretrainSettings, check_against_ranks
from pretrain.engine.step import DTYPES, checkpoint_activations, loss_of
from pretrain.engine.zero_cost import NUM_STATES, Training, bucket_elements, held
from pretrain.models.cost import num_parameters
from pretrain.ranks.collectives import highest, lowest_over_ranks, on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

FILE = "micro_batch.json"
SPARE_FRACTION = 0.08
"""Fraction of a GPU's memory that a trial step keeps free, for fragmentation and libraries."""
AUGMENTED_COPIES = 4
"""Largest number of fp32 images that augmentation on a GPU holds for each image of the batch."""
REMEDY = "set a higher engine.zero_stage, or use more ranks"
OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|can't allocate memory|bad_alloc")
"""Out-of-memory messages of torch, cuBLAS and the CPU's allocator. Some of these errors are not a
torch.OutOfMemoryError."""


def micro_batch_size(
    model: nn.Module,
    *,
    settings: PretrainSettings,
    image_size: int,
    device: torch.device,
    world: World,
    remedy: str = REMEDY,
) -> int:
    """Return the config's local batch size or, for auto, a size that fits on every rank."""
    share = check_against_ranks(settings.train, settings.augment, num_ranks=world.num_ranks)
    if settings.train.local_batch_size != "auto":
        return share
    path, engine = Path(settings.run_dir) / FILE, settings.engine
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}"
    situation = (
        f"{name}, {world.num_ranks} ranks, ZeRO {engine.zero_stage}, offload {engine.offload},"
        f" activation checkpointing {engine.activation_checkpointing}"
    )
    sizes = on_all_ranks(
        lambda: read_sizes(path) if world.is_first else {}, device=device, field=str(path)
    )
    known = highest(sizes.get(situation, 0), device=device)
    if known and share % known == 0:
        return known

    reserved_bytes = engine_bytes(model, settings=settings, num_ranks=world.num_ranks)
    step = partial(
        run_trial_step,
        model,
        settings=settings,
        reserved_bytes=reserved_bytes,
        image_size=image_size,
        device=device,
    )
    multiple = 2 if settings.augment.mixes_pairs else 1
    size = share
    while size and not fits(partial(step, size), device):
        size = next(
            (
                part
                for part in range(size // 2, 0, -1)
                if share % part == 0 and part % multiple == 0
            ),
            0,
        )
    size = lowest_over_ranks(size, device=device)  # before any rank raises
    if size == 0:
        error = UserError(
            "train.local_batch_size",
            f"auto finds no micro-batch that fits into memory; the engine needs"
            f" {reserved_bytes / 1e9:.1f} GB",
            remedy,
            code="no-space",
        )
        error.of_all_ranks = True
        raise error
    if world.is_first:
        write_json(path, sizes | {situation: size})
        print(
            f"{path.parent.name}: local_batch_size=auto chooses {size:,} samples, {share // size}"
            " times per rank and step",
            flush=True,
        )
    return size


def read_sizes(path: Path) -> dict[str, int]:
    try:
        sizes = json.loads(path.read_text()) if path.exists() else {}
        if isinstance(sizes, dict) and all(type(size) is int for size in sizes.values()):
            return sizes
    except ValueError:
        pass
    raise UserError(
        str(path), "the file is damaged", "remove it to measure the size again", code="damaged"
    )


def engine_bytes(model: nn.Module, *, settings: PretrainSettings, num_ranks: int) -> int:
    """Return the bytes that a step needs on a rank's device, without activations."""
    engine, num_weights = settings.engine, num_parameters(model)
    training = Training(
        num_weights,
        engine.zero_stage,
        engine.precision,
        num_ranks,
        num_states=NUM_STATES[settings.optimizer.name],
        accumulation_steps=2,  # the size may need accumulation, which takes more memory
        ema=settings.train.ema_decay is not None,
        offload=engine.offload,
    )
    total, itemsize = held(training), DTYPES[engine.precision].itemsize
    if engine.zero_stage == 0:  # gradients that ranks exchange; autocast's copies of the weights
        total += num_weights * (4 + (itemsize if itemsize < 4 else 0))
    if engine.zero_stage == 3:  # gathered weights
        total += itemsize * bucket_elements(num_weights)
    return int(total)


def fits(step: Callable[[], None], device: torch.device) -> bool:
    """Run the trial step and free its memory. Return False if memory runs out."""
    PROGRESS.touch()
    on_gpu = device.type == "cuda"
    try:
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            step()
        is_enough = True
    except RuntimeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        is_enough = False
    if on_gpu:  # after the `except`: the error's traceback keeps the step's tensors
        gc.collect()
        torch.cuda.empty_cache()
    return is_enough


def run_trial_step(
    model: nn.Module,
    size: int,
    *,
    settings: PretrainSettings,
    reserved_bytes: int,
    image_size: int,
    device: torch.device,
) -> None:
    """Run a step like the engine's, but do not compile it: a compiled step needs no more memory."""
    dtype = DTYPES[settings.engine.precision]
    input_dtype = dtype if settings.engine.zero_stage else torch.float32
    shape = (size, 3, image_size, image_size)
    trial = copy.deepcopy(model).to(device, input_dtype).train()
    if settings.engine.activation_checkpointing:
        checkpoint_activations(trial)
    for weight in trial.parameters():
        weight.grad = torch.zeros_like(weight)
    if device.type == "cuda":
        copied_bytes = 2 * num_parameters(model) * input_dtype.itemsize  # weights and gradients
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        per_pixel = NUM_AHEAD * input_dtype.itemsize + AUGMENTED_COPIES * 4 + 1
        placeholders = [  # noqa: F841 (they only occupy memory)
            torch.empty(max(0, num_bytes), dtype=torch.uint8, device=device)
            for num_bytes in (
                reserved_bytes - copied_bytes,
                int(total_bytes * SPARE_FRACTION),
                size * 3 * image_size**2 * per_pixel,
            )
        ]
    labels = torch.zeros(size, dtype=torch.long, device=device)
    mixing = (labels, torch.ones(size, device=device)) if settings.augment.mixing else (None, None)
    batch = Prepared(torch.zeros(shape, device=device, dtype=input_dtype), labels, *mixing)
    is_lowered = dtype != input_dtype
    with torch.autocast(device.type, dtype=dtype) if is_lowered else nullcontext():
        logits = trial(batch.images_BCHW)
    loss_of(logits, batch, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
