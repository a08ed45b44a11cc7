"""What one rank has found out about its node; plain values that travel as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ABSENT, SILENT, DIED, UNCHECKED = "absent", "silent", "died", "unchecked"
GPUS, NO_GPU, GPU_ERROR, WRONG_PRODUCT = "gpus", "no gpu", "gpu error", "wrong product"
INTERFACE, SCRATCH, SCRATCH_PLACE, SHARED = "interface", "scratch", "scratch place", "shared directory"
MATMUL, CLOCK, NODE_LINK, NODE_RATE, LINK, LINK_RATE = "matmul", "clock", "node link", "node rate", "link", "link rate"
ONE_LINK = "one link"

CPU = "CPU"
"""What the device names of CPUs begin with."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong by itself, without a comparison of rates."""

    kind: str
    """One of the names above: nodes with the same kind of fault have the same trouble."""
    text: str


@dataclass(frozen=True)
class Disk:
    """A directory that was written to; no rate if that failed."""

    path: str
    write_mb_per_s: float | None = None
    free_gb: float | None = None


@dataclass(frozen=True)
class Figures:
    rank: int
    node: str
    local_rank: int
    num_local_ranks: int = 1
    device: str = ""
    """Its name; rates are compared among devices of one name."""
    matmul_tflops: float | None = None
    scratch: Disk | None = None
    """Of the node's first rank, like the next two."""
    shared: tuple[Disk, ...] = ()
    clock_s: float | None = None
    """How far this node's clock is ahead of rank 0's."""
    node_gb_per_s: float | None = None
    """all_reduce among the ranks of the node: bytes that each of them sends a second (what NCCL calls bus bandwidth)."""
    link_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    """The same between this rank and its like of a neighbouring node, while its node's other ranks do so, too; 0 where none came
    about."""
    world_gb_per_s: float | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def is_gpu(self) -> bool:
        return bool(self.device) and not self.device.startswith(CPU)

    @property
    def best_link(self) -> float | None:
        """A sound node beside a bad one still has its other neighbour."""
        return max(self.link_gb_per_s.values(), default=None)

    def as_json(self) -> dict[str, Any]:
        """Four digits of each figure are more than it is worth."""
        return {name: _short(value) for name, value in asdict(self).items()}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def figures_from(values: Mapping[str, Any]) -> Figures:
    """KeyError, TypeError or ValueError for what is no such thing. Keys of later versions are passed over."""
    known = {name: value for name, value in values.items() if name in Figures.__dataclass_fields__}
    known |= {name: int(known[name]) for name in ("rank", "local_rank", "num_local_ranks") if name in known}
    known["node"], known["device"] = str(known["node"]), str(known.get("device", ""))
    for name in ("matmul_tflops", "clock_s", "node_gb_per_s", "world_gb_per_s"):
        known[name] = None if known.get(name) is None else float(known[name])
    known["link_gb_per_s"] = {str(node): float(rate) for node, rate in dict(known.get("link_gb_per_s", {})).items()}
    known["scratch"] = Disk(**known["scratch"]) if known.get("scratch") else None
    known["shared"] = tuple(Disk(**disk) for disk in known.get("shared", ()))
    known["faults"] = tuple(Fault(**fault) for fault in known.get("faults", ()))
    return Figures(**known)
