"""Communication between ranks, apart from the training engine's own. A single process sends
nothing."""

import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.errors import UserError

T = TypeVar("T")
LOOK_S = 1.0
"""Seconds between two checks in `on_all_ranks` of whether all ranks are done."""


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_sum(values: Tensor) -> Tensor:
    """Sum a tensor over ranks, in place."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Average a tensor over ranks, in place."""
    return all_sum(values).div_(dist.get_world_size()) if is_distributed() else values


class Moment:
    """Time at which a device has done all work submitted so far. A GPU records the time itself, so
    the host does not wait."""

    def __init__(self, device: torch.device):
        self._now_s = time.monotonic()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self.event is not None:
            self.event.record()

    def seconds_since(self, earlier: "Moment") -> float:
        """Return the seconds since `earlier`. Both moments must have passed."""
        if self.event is None or earlier.event is None:
            return self._now_s - earlier._now_s
        return float(earlier.event.elapsed_time(self.event)) / 1000


@dataclass(frozen=True)
class Agreed:
    """Facts about a step. All except `own_loss` are the same on all ranks."""

    loss: float
    """Mean loss over ranks. It is not finite if the loss of any rank is not finite."""
    gradient_norm: float
    votes: int
    """Number of ranks that voted to stop."""
    num_bad: int
    own_loss: float
    applied: bool = True
    """True if the step was applied on all ranks."""


class Exchange:
    """Sums over ranks for each step: the only communication besides the engine's. The exchange
    starts after the step, and is read at most one step later.

    The host does not wait until `read`.
    """

    def __init__(
        self,
        loss: Tensor,
        gradient_norm: Tensor | float,
        *,
        flag: bool,
        num_bad: int,
        applied: Tensor | bool = True,
    ):
        own = loss.detach().float()
        numbers = [
            value.detach().to(own) if torch.is_tensor(value) else own.new_full((), float(value))
            for value in (gradient_norm, flag, num_bad, applied)
        ]
        self._sums = torch.stack([own, *numbers])
        self._own = own.clone()
        self._work = dist.all_reduce(self._sums, async_op=True) if is_distributed() else None
        if own.is_cuda:
            if self._work is not None:
                self._work.wait()  # with NCCL the stream waits, not the host
            both = torch.cat([self._sums, self._own.unsqueeze(0)])
            self._host = torch.empty_like(both, device="cpu", pin_memory=True).copy_(
                both, non_blocking=True
            )
        self.ended = Moment(own.device)

    def read(self) -> Agreed:
        if self.ended.event is not None:
            self.ended.event.synchronize()
            loss, norm, votes, bad, applied, own = self._host.tolist()
        else:
            if self._work is not None:
                self._work.wait()
            loss, norm, votes, bad, applied = self._sums.tolist()
            own = float(self._own)
        ranks = dist.get_world_size() if is_distributed() else 1
        return Agreed(
            loss / ranks, norm / ranks, round(votes), round(bad), own, round(applied) == ranks
        )


def any_rank(flag: bool, *, device: torch.device) -> bool:
    """Return True, on all ranks, if `flag` is True on any rank."""
    return bool(all_sum(torch.tensor(float(flag), device=device)) > 0) if is_distributed() else flag


def highest(value: int, *, device: torch.device) -> int:
    if not is_distributed():
        return value
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values)


def lowest_over_ranks(value: int, *, device: torch.device) -> int:
    return -highest(-value, device=device)


def same_on_all_ranks(value: int, *, device: torch.device) -> bool:
    return highest(value, device=device) == lowest_over_ranks(value, device=device)


def barrier() -> None:
    if is_distributed():
        dist.barrier()


class FailedElsewhere(UserError):  # noqa: N818
    """Another rank failed and prints its own message."""

    of_all_ranks = True

    def __init__(self, field: str):
        super().__init__(field, "another rank failed", "see its message", code="another-rank")


def on_all_ranks(work: Callable[[], T], *, device: torch.device, field: str) -> T:
    """Run `work` on each rank in a thread, and return this rank's result when all ranks are done.
    Meanwhile ranks exchange a flag every second, so slow work does not exceed `timeout_s`. Long
    work must report its own progress (hangs.py). A rank on which `work` fails raises its own error;
    other ranks raise `FailedElsewhere` with the field."""
    thread = futures.ThreadPoolExecutor(1, thread_name_prefix="on-all-ranks")
    found = thread.submit(work)
    thread.shutdown(wait=False)
    while True:
        futures.wait([found], timeout=LOOK_S)
        if not any_rank(not found.done(), device=device):
            break
    if any_rank(found.exception() is not None, device=device):
        raise found.exception() or FailedElsewhere(field)
    return found.result()
