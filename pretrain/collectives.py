"""The few things that ranks say to each other outside the engine; with one process they are no-ops."""

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_sum(values: Tensor) -> Tensor:
    """The sum over ranks, in place."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def any_rank(flag: bool, *, device: torch.device) -> bool:
    """True on every rank when it is true on one."""
    if not is_distributed():
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def barrier() -> None:
    if is_distributed():
        dist.barrier()
