"""`train.local_batch_size: auto`: the largest micro-batch that fits, found when a run begins and
kept with it.

The size changes how gradients are rounded, so a run that goes on must have the same one:
RUN/micro_batch.json has an entry for each kind of device and number of ranks that the run has seen.

1. What is written there for this kind of device and number of ranks counts, and nothing is tried.
2. Each rank measures what two training steps of a copy of the model take, first with the smallest
   part of its share (a GPU loads its kernels and libraries while there is room) and with twice as
   many samples. A line through the last two peaks then leads to the largest part that fits, at most
   eight times as far at once: no try passes the limit knowingly, since a CPU would not report that,
   the kernel would end the process. Where memory runs out nevertheless (somebody else took some),
   at most half as many samples are tried next. The steps are not compiled: a compiled one takes no
   more.
3. The lowest size over all ranks is taken, written down by the first rank, and printed.
"""

import copy
import gc
import json
import platform
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
USED_SHARE = {"cpu": 0.75, "cuda": 0.92}
"""Of the memory that is left: the rest is for fragments, libraries and, on a CPU, whatever else the
node does."""
AUGMENTED_COPIES = 4
"""fp32 pictures that augmentation on a GPU may hold at once for each of the batch."""
REMEDY = "set a higher engine.zero_stage, or use more ranks"
OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|can't allocate memory")
"""How torch, cuBLAS with its relatives, and the CPU's allocator report it; not all of them by
torch.OutOfMemoryError."""


class NoMicroBatch(UserError):  # noqa: N818
    """Not even the smallest one fits, or what was written down cannot be read."""

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
    share = check_against_ranks(settings.train, settings.augment, num_ranks=world.num_ranks)
    if settings.train.local_batch_size != "auto":
        return share
    path, on_gpu = Path(settings.run_dir) / FILE, device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}"
    situation = {"device": kind, "num_ranks": world.num_ranks}
    situation |= settings.engine.model_dump(
        include={"zero_stage", "offload", "activation_checkpointing"}
    )
    entries = on_all_ranks(
        lambda: recall(path) if world.is_first else [], device=device, failed=f"{path}: is damaged"
    )
    known = next(
        (each["local_batch_size"] for each in entries if situation.items() <= each.items()), 0
    )
    found = highest(known, device=device)  # which the first rank alone has looked up
    if found and share % found == 0:
        return found
    available = available_bytes(device, world)
    fixed = engine_bytes(model, settings=settings, num_ranks=world.num_ranks, on_gpu=on_gpu)
    step = 2 if settings.augment.mixes_pairs else 1
    parts = [size for size in range(step, share + 1, step) if share % size == 0]
    trial = Trial(model, settings, num_classes=num_classes, image_size=image_size, device=device)
    largest = largest_that_fits(
        parts, trial.peak_bytes, budget=int(available * USED_SHARE[device.type]) - fixed
    )
    found = lowest_over_ranks(
        largest, device=device
    )  # nothing may be raised before: the other ranks wait here
    if found == 0:
        least = lowest_over_ranks(available, device=device)
        raise NoMicroBatch(
            f"train.local_batch_size: auto finds no micro-batch that fits: of {least / 1e9:.1f} GB"
            f" the engine takes {fixed / 1e9:.1f} and {parts[0]} samples do not fit beside it;"
            f" {remedy}"
        )
    if world.is_first:
        write_json(path, [*entries, situation | {"local_batch_size": found}])
        steps = f"{share // found} of them a step" if found < share else "all of its share"
        print(
            f"{path.parent.name}: local_batch_size auto is {found:,} samples per rank, {steps}",
            flush=True,
        )
    return found


def recall(path: Path) -> list[dict[str, Any]]:
    """The entries that were written down, which have all that they are asked for."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        sizes = [each["local_batch_size"] for each in entries]
    except (ValueError, TypeError, KeyError):  # no JSON, or of another shape
        sizes = [None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise NoMicroBatch(
            f"{path}: is damaged; remove it, and a size that fits is looked for again"
        )
    return entries


def largest_that_fits(
    sizes: Sequence[int], peak_bytes: Callable[[int], int | None], *, budget: int
) -> int:
    """Of ascending sizes; 0: none. Upward, where a line through the last two peaks leads within the
    budget, and at most eight times as far as before: memory is not passed on the way. `peak_bytes`:
    None where it ran out."""
    points, most, size = [(0, 0)], sizes[-1], sizes[0]
    while points[-1][0] < size <= most:
        PROGRESS.touch()
        peak = peak_bytes(size)
        if peak is None or peak > budget:
            most = size // 2
        else:
            points.append((size, peak))
        if len(points) < 3:
            size *= 2  # whether or not it is one of the sizes: one measured point is no line
        else:
            (low, at_low), (high, at_high) = points[-2:]
            per_sample = max(1.0, (at_high - at_low) / (high - low))
            within = [
                each for each in sizes if each <= min(most, high + (budget - at_high) / per_sample)
            ]
            size = min(within[-1], 8 * high)
    return max((each for each in sizes if each <= points[-1][0]), default=0)


# ---- what there is, and what the engine takes
# -------------------------------------------------------------------------


def available_bytes(device: torch.device, world: World) -> int:
    """On a GPU what nobody else holds; on a CPU this rank's part of what the node, or the job's
    cgroup, has left."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    rooms = cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())
    return int(min([psutil.virtual_memory().available, *rooms])) // world.num_local_ranks


def cgroup_rooms(root: Path, membership: str) -> Iterator[int]:
    """What every cgroup above this process, of version 1 or 2, that has a limit leaves of it;
    caches of files count as free."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        top, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            top, limit, usage, cache = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        own = top / path.lstrip("/")
        for directory in [own, *own.parents]:
            try:
                allowed = (directory / limit).read_text().strip()
                used = int((directory / usage).read_text())
                stat = dict(
                    each.split() for each in (directory / "memory.stat").read_text().splitlines()
                )
            except OSError:  # the top, or a group that a container does not see
                continue
            if allowed != "max":
                yield max(0, int(allowed) - used + int(stat.get(cache, 0)))


def engine_bytes(
    model: nn.Module, *, settings: PretrainSettings, num_ranks: int, on_gpu: bool
) -> int:
    """Of a rank: what stays from step to step, and what a step takes besides activations."""
    engine, num_weights = settings.engine, num_parameters(model)
    training = Training(
        num_weights,
        engine.zero_stage,
        engine.precision,
        num_ranks,
        num_states=NUM_STATES[settings.optimizer.name],
        accumulation_steps=2,  # what is sought may come to it, and it takes more
        ema=settings.train.ema_decay is not None,
        offload=engine.offload,
    )
    of_rank, low = held(training), DTYPES[engine.precision].itemsize
    total = of_rank.on_device + (
        0 if on_gpu else of_rank.on_host
    )  # a CPU offloads into the same memory
    if (
        engine.zero_stage == 0
    ):  # gradients on their way between ranks; autocast copies weights during a step
        total += num_weights * (4 + (low if low < 4 else 0))
    if engine.zero_stage == 3:  # gathered weights
        total += low * bucket_elements(num_weights)
    return int(total)


# ---- trial steps
# --------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the tensors hold that were made while it is active and are alive; `most`: at any
    time."""

    def __init__(self, *, ignoring: Iterable[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in ignoring}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.live += size
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class Trial:
    """Steps of a copy of the model, as the engine will do them. It does not change the model, and
    leaves no memory behind."""

    def __init__(
        self,
        model: nn.Module,
        settings: PretrainSettings,
        *,
        num_classes: int,
        image_size: int,
        device: torch.device,
    ):
        self.model, self.settings, self.num_classes, self.device = (
            model,
            settings,
            num_classes,
            device,
        )
        self.on_gpu, self.dtype = device.type == "cuda", DTYPES[settings.engine.precision]
        self.input_dtype = self.dtype if settings.engine.zero_stage else torch.float32
        self.shape = (3, image_size, image_size)
        pixels, each = 3 * image_size**2, self.input_dtype.itemsize
        on_gpu_bytes, on_cpu_bytes = (
            NUM_AHEAD * each + AUGMENTED_COPIES * 4 + 1,
            (settings.train.prefetch_batches + 1) * (each + 1),
        )
        self.waiting = pixels * (on_gpu_bytes if self.on_gpu else on_cpu_bytes)
        """Bytes per sample: the pictures that are ready in the same memory while the model works on
        others."""

    def peak_bytes(self, size: int) -> int | None:
        """What steps of so many samples take beside weights and gradients, waiting pictures
        included; None: memory ran out."""
        peak = None
        try:
            with torch.random.fork_rng(devices=[self.device] if self.on_gpu else []):
                peak = self._measured(size) + size * self.waiting
        except RuntimeError as error:
            if not OUT_OF_MEMORY.search(str(error)):
                raise
        if self.on_gpu:  # not earlier: the error's traceback had kept the step's tensors
            gc.collect()
            torch.cuda.empty_cache()
        return peak

    def _measured(self, size: int) -> int:
        model = copy.deepcopy(self.model).to(self.device, self.input_dtype).train()
        if self.settings.engine.activation_checkpointing:
            checkpoint_activations(model)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        if self.on_gpu:
            before = torch.cuda.memory_reserved(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            for _ in range(2):
                self._step(model, size)
            return int(torch.cuda.max_memory_reserved(self.device)) - before  # fragments included
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        counted = LiveBytes(ignoring=[*model.parameters(), *model.buffers(), *gradients])
        with counted:
            self._step(model, size)
        return counted.most

    def _step(self, model: nn.Module, size: int) -> None:
        labels = torch.randint(self.num_classes, (size,), device=self.device)
        others = (
            (labels, torch.rand(size, device=self.device))
            if self.settings.augment.mixing
            else (None, None)
        )
        batch = Prepared(
            torch.randn((size, *self.shape), device=self.device, dtype=self.input_dtype),
            labels,
            *others,
        )
        lowered = self.dtype != self.input_dtype
        with torch.autocast(self.device.type, dtype=self.dtype) if lowered else nullcontext():
            logits = model(batch.images_BCHW)
        loss_of(logits, batch, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
