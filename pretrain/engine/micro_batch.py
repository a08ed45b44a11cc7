"""`train.local_batch_size: auto`: the largest micro-batch that fits, found when a run begins and kept with it.

The size changes how gradients are rounded, so a run that goes on must have the same one: RUN/micro_batch.json has a line for each
kind of device and number of ranks that the run has seen.

1. What is written there for this kind of device and number of ranks counts, and nothing is tried.
2. Each rank tries its whole share: two training steps of a copy of the model, beside a placeholder for the engine and for the
   pictures that wait. Where memory runs out, it tries the next smaller part of the share: half of it, where that divides (and is
   even, if mixing pairs neighbours). A GPU reports that by itself. A CPU reports nothing until the kernel ends the process, so
   there `MemoryLimit` counts tensors and reports it. The steps are not compiled: a compiled one takes no more.
3. The lowest size over all ranks is taken, written down by the first rank, and printed.
"""

import copy
import gc
import json
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_prep.publish import write_json
from data_prep.settings import UserError
from pretrain.augment.augmentation import Prepared
from pretrain.augment.feed import NUM_AHEAD
from pretrain.config import PretrainSettings, check_against_ranks
from pretrain.engine.step import DTYPES, checkpoint_activations, loss_of
from pretrain.engine.zero_cost import NUM_STATES, Training, bucket_elements, held
from pretrain.models.cost import num_parameters
from pretrain.ranks.collectives import any_rank, lowest_over_ranks, of_first_rank
from pretrain.ranks.world import World

FILE = "micro_batch.json"
USED_SHARE = {"cpu": 0.75, "cuda": 0.92}
"""Of the memory that is left: the rest is for fragments, libraries and, on a CPU, whatever else the node does."""
AUGMENTED_COPIES = 4
"""fp32 pictures that augmentation on a GPU may hold at once for each of the batch."""
REMEDY = "set a higher engine.zero_stage, or use more ranks"


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
    path, situation = Path(settings.run_dir) / FILE, situation_of(settings, device=device, world=world)
    known, is_damaged = None, False
    try:
        known = recall(path, situation) if world.is_first else None
    except (ValueError, TypeError, AttributeError, KeyError):  # no JSON, or of another shape
        is_damaged = True
    if any_rank(is_damaged, device=device):
        raise NoMicroBatch(f"{path}: is damaged; remove it, and a size that fits is looked for again")
    found = of_first_rank(known or 0, device=device)
    if found and share % found == 0:
        return found
    available, is_even = available_bytes(device, world), bool(settings.augment.mixing)
    fixed = engine_bytes(model, settings=settings, num_ranks=world.num_ranks, on_gpu=device.type == "cuda")
    candidates = [size for size in range(share, 0, -1) if share % size == 0 and not (is_even and size % 2)]
    trial = Trial(settings, num_classes, image_size, device, available=available, fixed=fixed)
    found = lowest_over_ranks(trial.largest(model, candidates), device=device)
    if found == 0:
        least = lowest_over_ranks(available, device=device)
        raise NoMicroBatch(
            f"train.local_batch_size: auto finds no micro-batch that fits: of {least / 1e9:.1f} GB the engine takes "
            f"{fixed / 1e9:.1f} and {candidates[-1]} samples do not fit beside it; {remedy}"
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


# ---- memory of the run ------------------------------------------------------------------------------------------------


def situation_of(settings: PretrainSettings, *, device: torch.device, world: World) -> dict[str, Any]:
    """What the choice depends on and may change while a run goes on."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    engine = settings.engine.model_dump(include={"zero_stage", "offload", "activation_checkpointing"})
    return {"device": kind, "num_ranks": world.num_ranks} | engine


def recall(path: Path, situation: dict[str, Any]) -> int | None:
    """None: nothing is known. Raises one of several errors where the file is damaged."""
    known = json.loads(path.read_text()) if path.exists() else []
    found = next((each["local_batch_size"] for each in known if situation.items() <= each.items()), None)
    if found is not None and not (isinstance(found, int) and found > 0):
        raise ValueError(found)
    return found


def remember(path: Path, situation: dict[str, Any], size: int) -> None:
    known = json.loads(path.read_text()) if path.exists() else []
    write_json(path, [*known, situation | {"local_batch_size": size}])


# ---- what there is, and what the engine takes -------------------------------------------------------------------------


def available_bytes(device: torch.device, world: World) -> int:
    """On a GPU what nobody else holds; on a CPU this rank's part of what the node, or the job's cgroup, has left."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    rooms = cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())
    return int(min([psutil.virtual_memory().available, *rooms])) // world.num_local_ranks


def cgroup_rooms(root: Path, membership: str) -> Iterator[int]:
    """What every cgroup above this process, of version 1 or 2, that has a limit leaves of it; caches of files count as free."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        if controllers:
            top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        own = top / path.lstrip("/")
        for directory in [own, *own.parents]:
            try:
                allowed = (directory / limit).read_text().strip()
                used = int((directory / usage).read_text())
                stat = dict(each.split() for each in (directory / "memory.stat").read_text().splitlines())
            except OSError:  # the top, or a group that a container does not see
                continue
            if allowed != "max":
                yield max(0, int(allowed) - used + int(stat.get(cache, 0)))


def engine_bytes(model: nn.Module, *, settings: PretrainSettings, num_ranks: int, on_gpu: bool) -> int:
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
    total = held(training).on_device if on_gpu else held(training).at_rest  # a CPU offloads into the same memory
    low = DTYPES[engine.precision].itemsize
    if engine.zero_stage == 0:  # gradients on their way between ranks; autocast copies weights during a step
        total += num_weights * (4 + (low if low < 4 else 0))
    if engine.zero_stage == 3:  # gathered weights
        total += low * bucket_elements(num_weights)
    return int(total)


# ---- trial steps --------------------------------------------------------------------------------------------------------


class MemoryLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises torch.OutOfMemoryError when the tensors that were made while it is active, and are alive, hold more bytes than
    that."""

    def __init__(self, limit: int, *, ignoring: Iterable[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.live = limit, 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in ignoring}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage())
        if self.live > self.limit:
            raise torch.OutOfMemoryError(f"{self.live:,} bytes are more than {self.limit:,}")
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.live += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class Trial:
    """Steps of a copy of the model, as the engine will do them. It does not change the model, and leaves no memory behind."""

    def __init__(
        self, settings: PretrainSettings, num_classes: int, image_size: int, device: torch.device, *, available: int, fixed: int
    ):
        self.settings, self.num_classes, self.image_size, self.device = settings, num_classes, image_size, device
        self.on_gpu, self.dtype = device.type == "cuda", DTYPES[settings.engine.precision]
        self.input_dtype = self.dtype if settings.engine.zero_stage else torch.float32
        self.available, self.budget = available, int(available * USED_SHARE[device.type]) - fixed
        """The budget is what is left for activations, and for the pictures that wait."""
        pixels, ahead = 3 * image_size**2, settings.train.prefetch_batches + 1
        self.waiting = pixels * ahead * (self.input_dtype.itemsize + 1)
        """Per sample: the pictures that are ready in the same memory while the model works on others."""
        if self.on_gpu:
            self.waiting = pixels * (NUM_AHEAD * self.input_dtype.itemsize + AUGMENTED_COPIES * 4 + 1)

    def largest(self, model: nn.Module, candidates: list[int]) -> int:
        """Of descending sizes the first that fits; 0: none. The ranks agree afterwards, so nothing may be raised before."""
        tried, found = None, 0
        with torch.random.fork_rng(devices=[self.device] if self.on_gpu else []):
            for size in candidates:
                try:
                    tried = tried or self._copy_of(model)
                    self._try(tried, size)
                    found = size
                    break
                except torch.OutOfMemoryError:
                    self._clean_up()
        del tried
        self._clean_up()
        return found

    def _clean_up(self) -> None:
        """So that neither the next size nor the driver meets what is left of this one on a GPU."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def _copy_of(self, model: nn.Module) -> nn.Module:
        """With its gradients, on the device."""
        found = copy.deepcopy(model).to(self.device, self.input_dtype).train()
        if self.settings.engine.activation_checkpointing:
            checkpoint_activations(found)
        for weight in found.parameters():
            weight.grad = torch.zeros_like(weight)
        return found

    def _try(self, model: nn.Module, size: int) -> None:
        room = self.budget - size * self.waiting
        if room <= 0:
            raise torch.OutOfMemoryError
        weights = list(model.parameters())
        kept = [*weights, *model.buffers(), *(each.grad for each in weights if each.grad is not None)]
        if not self.on_gpu:
            with MemoryLimit(room, ignoring=kept):
                self._step(model, size)
            return
        rest = self.available - room - sum(tensor.nbytes for tensor in kept)
        placeholder = torch.empty(max(0, rest), dtype=torch.uint8, device=self.device)
        for _ in range(2):
            self._step(model, size)
        torch.cuda.synchronize(self.device)
        del placeholder

    def _step(self, model: nn.Module, size: int) -> None:
        labels = torch.randint(self.num_classes, (size,), device=self.device)
        is_mixed = bool(self.settings.augment.mixing)
        others = (labels, torch.rand(size, device=self.device)) if is_mixed else (None, None)
        shape = (size, 3, self.image_size, self.image_size)
        batch = Prepared(torch.randn(shape, device=self.device, dtype=self.input_dtype), labels, *others)
        autocast: Callable[[], Any] = nullcontext
        if self.dtype != self.input_dtype:
            autocast = lambda: torch.autocast(self.device.type, dtype=self.dtype)  # noqa: E731
        with autocast():
            logits = model(batch.images_BCHW)
        loss_of(logits, batch, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
