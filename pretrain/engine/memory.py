"""What a rank's training step takes in memory, by formula and by trial, and what there is.

Bytes of weights, gradients and optimizer state follow from the ZeRO stage (`engine_bytes`). What a micro-batch takes on top is
tried out on a copy of the model with a few samples: `MemoryMeter` counts every tensor that comes and goes, on any device. A trial
does not change the model, and leaves no memory behind.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.augment.augmentation import Prepared
from pretrain.config import EngineSettings
from pretrain.engine.step import DTYPES, loss_of
from pretrain.engine.zero_cost import NUM_STATES, Training, bucket_elements, held

PROBES = (2, 4)
"""Samples of the two trial steps."""


def engine_bytes(
    num_weights: int, *, engine: EngineSettings, optimizer: str, num_ranks: int, ema: bool, on_gpu: bool
) -> int:
    """Of a rank: what stays from step to step, and what a step takes besides activations."""
    training = Training(
        num_weights,
        engine.zero_stage,
        engine.precision,
        num_ranks,
        num_states=NUM_STATES[optimizer],
        accumulation_steps=2,  # what is sought may come to it, and it takes more
        ema=ema,
        offload=engine.offload,
    )
    need, low = held(training), 4 if engine.precision == "fp32" else 2
    total = need.on_device if on_gpu else need.at_rest  # a CPU offloads into the same memory
    if engine.zero_stage == 0:
        # gradients on their way between ranks; autocast copies weights during a step
        total += num_weights * (4 + (low if low < 4 else 0))
    if engine.zero_stage == 3:
        total += low * bucket_elements(num_weights)  # gathered weights
    return int(total)


# ---- what there is ------------------------------------------------------------------------------------------------------


def available_bytes(device: torch.device, *, num_local_ranks: int) -> int:
    """On a GPU what nobody else holds; on a CPU this rank's part of what the node, or the job's cgroup, has left."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    room = int(lines["MemAvailable"].split()[0]) * 1024
    return min([room, *cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())]) // num_local_ranks


def cgroup_rooms(root: Path, membership: str) -> Iterator[int]:
    """What every cgroup above this process, of version 1 or 2, that has a limit leaves of it; caches of files count as free."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top, names = (
            (root, ("memory.max", "memory.current", "inactive_file"))
            if not controllers
            else (root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
        )
        own = top / path.lstrip("/")
        for directory in [own, *own.parents]:
            if directory.is_relative_to(top):
                yield from _room_in(directory, *names)


def _room_in(directory: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    try:
        allowed = (directory / limit).read_text().strip()
        used = int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:  # a container does not see the groups above it
        return
    if allowed != "max":
        yield max(0, int(allowed) - used + int(stat.get(cache, 0)))


# ---- trial steps --------------------------------------------------------------------------------------------------------


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made while it is active, whoever keeps them; `moments` are those that were alive
    each time that one was made."""

    def __init__(self, *, ignoring: Iterable[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.moments: list[int] = []
        self._seen = {tensor.untyped_storage()._cdata for tensor in ignoring}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.moments.append(self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def extrapolated(small: tuple[int, list[int]], large: tuple[int, list[int]]) -> Callable[[int], int]:
    """The peak at any batch size, from two (batch size, moments). The same tensors come and go in the same order, so each moment is
    a straight line of its own; the peak is not, for it moves from where gradients of weights are made to where activations pile up.
    """
    (few, first), (many, second) = small, large
    if len(first) != len(second):  # an operation that goes about it differently: as if everything grew with the batch
        return lambda size: -(-max(second) * size // many)
    slopes = [(b - a) / (many - few) for a, b in zip(first, second, strict=True)]
    return lambda size: int(max(a + slope * (size - few) for a, slope in zip(first, slopes, strict=True)))


@dataclass(frozen=True)
class Trial:
    """Forward and backward passes of a copy of the model, as the engine will do them."""

    model: nn.Module
    num_classes: int
    image_size: int
    engine: EngineSettings
    is_mixed: bool
    """Whether labels are mixtures of two."""
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.engine.precision]

    @property
    def input_dtype(self) -> torch.dtype:
        return self.dtype if self.engine.zero_stage else torch.float32

    @property
    def bytes_of_copy(self) -> int:
        """Of the copy and its gradients."""
        return 2 * sum(weight.numel() for weight in self.model.parameters()) * self.input_dtype.itemsize

    def copied(self) -> "Trial":
        """With a copy of the model on the device, as the engine will hold it."""
        there = copy.deepcopy(self.model).to(self.device, self.input_dtype).train()
        checkpoints: Any = getattr(there, "set_grad_checkpointing", None)
        if checkpoints is not None and self.engine.activation_checkpointing:
            checkpoints(True)
        return replace(self, model=there)

    def peak_bytes(self) -> Callable[[int], int]:
        """What a step of so many samples takes beyond the weights and their gradients, from two small ones."""
        self.step(PROBES[0])  # the first makes the gradients
        return extrapolated(*((size, self._moments(size)) for size in PROBES))

    def _moments(self, batch_size: int) -> list[int]:
        kept = [*self.model.parameters(), *self.model.buffers()]
        with MemoryMeter(ignoring=[*kept, *(each.grad for each in kept if each.grad is not None)]) as meter:
            self.step(batch_size)
        moments: list[int] = meter.moments
        return moments

    def step(self, batch_size: int) -> None:
        size, device = (batch_size, 3, self.image_size, self.image_size), self.device
        labels = torch.randint(self.num_classes, (batch_size,), device=device)
        others = (labels, torch.rand(batch_size, device=device)) if self.is_mixed else (None, None)
        batch = Prepared(torch.randn(size, device=device, dtype=self.input_dtype), labels, *others)
        autocast: Callable[[], Any] = nullcontext
        if self.dtype != self.input_dtype:
            autocast = lambda: torch.autocast(device.type, dtype=self.dtype)  # noqa: E731
        with autocast():
            logits = self.model(batch.images_BCHW)
        loss_of(logits, batch, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
