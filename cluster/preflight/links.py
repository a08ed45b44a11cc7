"""The bandwidth between ranks: which groups are measured in which order, and how one group measures itself.

A group is a world of its own for a moment, on rank 0's store: a link that does not come about fails its two nodes, and nobody else.
"""

import datetime
import os
import statistics
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

MESSAGE_BYTES = {"nccl": 128 * 2**20, "gloo": 4 * 2**20}
"""Large enough for the full bandwidth of an H100's links, small enough for seconds on 1 Gbit/s."""
ROUNDS_S, MIN_ROUNDS, MAX_ROUNDS = 0.5, 3, 20
LINK_TIMEOUT_S = 40.0
"""For one group; NCCL takes up to ten seconds to connect, more among hundreds of ranks."""

WITHIN, BETWEEN, ALL = "within the nodes", "between nodes", "all together"


@dataclass(frozen=True)
class Stage:
    """Groups without a common rank; they measure at the same time."""

    name: str
    kind: str
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        return next((group for group in self.groups if rank in group), None)

    def without(self, gone: Set[int]) -> tuple[tuple[int, ...], ...]:
        """The groups that need none of these ranks."""
        return tuple(group for group in self.groups if not gone & set(group))


def stages(node_of: Mapping[int, str]) -> list[Stage]:
    """`node_of` every rank. Each node meets both its neighbours in a ring, one after the other; all its ranks meet theirs at once,
    for each may have a network card of its own."""
    members: dict[str, list[int]] = {}
    for rank in sorted(node_of):
        members.setdefault(node_of[rank], []).append(rank)
    found = []
    within = tuple(tuple(ranks) for ranks in members.values() if len(ranks) > 1)
    if within:
        found.append(Stage("within", WITHIN, within))
    nodes = list(members.values())
    pairs = list(zip(nodes, nodes[1:] + nodes[:1], strict=True)) if len(nodes) > 2 else []
    pairs = [(nodes[0], nodes[1])] if len(nodes) == 2 else pairs
    even = len(pairs) - len(pairs) % 2
    for number, chosen in enumerate((pairs[0:even:2], pairs[1:even:2], pairs[even:])):
        if chosen:
            # of the smaller node all ranks
            groups = tuple(ranks for pair in chosen for ranks in zip(*pair, strict=False))
            found.append(Stage(f"between-{number}", BETWEEN, groups))
    if len(members) > 1:
        found.append(Stage("all", ALL, (tuple(sorted(node_of)),)))
    return found


def measure_group(*, name: str, rank: int, group: list[int], on_gpu: bool, local_rank: int) -> dict[str, Any]:
    """{"gb_per_s": ...}: of all_reduce, bytes that each rank must send a second. Runs in the workers of all ranks of the group."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a timeout is then an error here, not the end of the process
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    backend, device = ("nccl", torch.device("cuda", local_rank)) if on_gpu else ("gloo", torch.device("cpu"))
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=LINK_TIMEOUT_S)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"group/{name}/{min(group)}", TCPStore(address, port, timeout=timeout))
    distributed.init_process_group(backend, store=store, rank=group.index(rank), world_size=len(group), timeout=timeout)
    message = torch.zeros(MESSAGE_BYTES[backend] // 4, device=device)

    def reduce_s() -> float:
        began_s = time.perf_counter()
        distributed.all_reduce(message)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    # Connects. Only a wait heeds the limit: torch passes over TORCH_NCCL_BLOCKING_WAIT for calls that return when they are done.
    distributed.all_reduce(message, async_op=True).wait(timeout)
    reduce_s()
    slowest_s = torch.tensor([reduce_s()], device=device)
    distributed.all_reduce(slowest_s, op=distributed.ReduceOp.MAX)
    count = int(min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_S / slowest_s.item())))
    took_s = statistics.median(reduce_s() for _ in range(count))
    distributed.destroy_process_group()
    sent = 2 * (len(group) - 1) / len(group) * MESSAGE_BYTES[backend]
    return {"gb_per_s": sent / took_s / 1e9}
