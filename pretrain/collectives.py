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


def mean_over_ranks(values: Tensor) -> Tensor:
    """In place."""
    return all_sum(values).div_(dist.get_world_size()) if is_distributed() else values


def exchange(loss: Tensor, flag: bool, count: int) -> tuple[float, bool, int]:
    """(mean of the losses, whether any rank raised its flag, sum of the counts): the one exchange, and the one wait, of a step."""
    parts = [loss.float(), *(loss.new_full((), float(value), dtype=torch.float32) for value in (flag, count))]
    total, votes, counts = all_sum(torch.stack(parts)).tolist()
    return total / (dist.get_world_size() if is_distributed() else 1), votes > 0, round(counts)


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


def lowest_over_ranks(value: int, *, device: torch.device) -> int:
    if not is_distributed():
        return value
    bound = torch.tensor(value, device=device)
    dist.all_reduce(bound, op=dist.ReduceOp.MIN)
    return int(bound)


def of_first_rank(value: int, *, device: torch.device) -> int:
    if not is_distributed():
        return value
    sent = torch.tensor(value, device=device)
    dist.broadcast(sent, src=0)
    return int(sent)


def num_ranks_with(value: int, *, device: torch.device) -> int:
    """How many ranks, this one included, say the same."""
    if not is_distributed():
        return 1
    mine = torch.tensor([value], device=device)
    said = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(said, mine)
    return int((torch.cat(said) == mine).sum())
