"""Which node a rank belongs to, from SLURM's own lists: a rank that never comes cannot say it itself."""

import itertools
import os
import re
import socket
from collections.abc import Mapping

_PART = re.compile(r"([^,\[]|\[[^\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def this_node(environment: Mapping[str, str] = os.environ) -> str:
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def placed_by_slurm(num_ranks: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The node of each rank, if ranks fill one node after the other (SLURM's default); else, or without SLURM, nothing."""
    for step in ("STEP_", ""):
        names = expand(environment.get(f"SLURM_{step}NODELIST", ""))
        parts = [_TASKS.fullmatch(part) for part in environment.get(f"SLURM_{step}TASKS_PER_NODE", "").split(",")]
        counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
        if all(parts) and len(counts) == len(names) and sum(counts) == num_ranks:
            return [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    return []


def homes(num_ranks: int, *, seen: Mapping[int, str], by_slurm: list[str]) -> dict[int, str]:
    """The node of each rank as far as that is certain. `seen`: of the ranks that came."""
    known = dict(seen)
    if by_slurm and all(by_slurm[rank] == node for rank, node in seen.items()):
        known = dict(enumerate(by_slurm))
    elif len(left := set(by_slurm) - set(seen.values())) == 1:
        known |= dict.fromkeys(set(range(num_ranks)) - seen.keys(), left.pop())
    return known


def expand(host_list: str) -> list[str]:
    """n[1-3,5],m07 -> n1 n2 n3 n5 m07, as `scontrol show hostnames` does."""
    names = []
    for part in _PART.finditer(host_list):
        pieces = _BRACKETS.split(part[0])
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for span in ranges.split(","):
        first, _, last = span.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
