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


def mean_and_vote(loss: Tensor, flag: bool) -> tuple[float, bool]:
    """(mean of the ranks' losses, whether any rank raised its flag): the one exchange, and the one wait, of a step."""
    both = torch.stack([loss.float(), loss.new_full((), float(flag), dtype=torch.float32)])
    total, votes = all_sum(both).tolist()
    return total / (dist.get_world_size() if is_distributed() else 1), votes > 0


def same_on_all_ranks(value: int, *, device: torch.device) -> bool:
    if not is_distributed():
        return True
    bounds = torch.tensor([value, -value], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    highest, negated_lowest = bounds.tolist()
    return bool(highest == -negated_lowest)


def barrier() -> None:
    if is_distributed():
        dist.barrier()
