"""Facts of a rank, read once from the environment of torchrun, our launcher or SLURM. This file
does not import torch."""

import errno
import os
import random
import re
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of torch's allocator, the newer name first."""


@dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    num_ranks: int
    num_cores: int = 1
    """Number of CPU cores of this rank."""
    num_local_ranks: int = 1
    num_slurm_gpus: int = 0
    """Number of GPUs of this node that SLURM gave to its ranks, or 0 if the ranks are not SLURM
    tasks."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gpu(self, num_visible: int) -> int | None:
        """Return the index of this rank's GPU, or None if there is no GPU for this rank. The index
        is 0 if the rank sees only its own GPU (--gpus-per-task=1)."""
        sees_its_own = num_visible == 1 and self.num_slurm_gpus >= self.num_local_ranks
        number = 0 if sees_its_own else self.local_rank
        return number if number < num_visible else None

    @property
    def node_ranks(self) -> range:
        """Ranks of this node. Launchers number the ranks node by node."""
        first = self.rank - self.local_rank
        return range(first, first + self.num_local_ranks)

    @property
    def is_one_node(self) -> bool:
        return self.num_local_ranks == self.num_ranks


@dataclass(frozen=True)
class Peer:
    rank: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"


def rank_of() -> int:
    """Return the rank of this process from RANK or SLURM_PROCID, otherwise 0."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def read_alone() -> World:
    """Return the world of a process that joins no other process, even if torchrun or SLURM started
    several of them."""
    _fill_in_torch(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    return World(rank=0, local_rank=0, num_ranks=1, num_cores=_cores_per_rank(os.environ))


def _fill_in_torch(environment: MutableMapping[str, str]) -> None:
    """Set defaults of torch's runtime, which reads them when it is loaded."""
    # waiting threads sleep: spinning threads take cores from busy ones
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch reads it before a GPU's first allocation; a CPU ignores it. Without it, evaluation, ZeRO
    # 3's gathers and new batch sizes fragment memory
    if not environment.keys() & ALLOCATOR:
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def read_world(environment: MutableMapping[str, str] = os.environ) -> World:
    """Return the world of this process, for programs whose ranks communicate. Set the environment
    variables that DeepSpeed and torch.distributed need."""
    if (
        "RANK" not in environment
        and int(environment.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_PROCID" in environment
    ):
        # one task per rank under srun; cluster/pretrain.slurm sets MASTER_ADDR and MASTER_PORT from
        # the job
        environment["RANK"] = environment["SLURM_PROCID"]
        if "SLURM_LOCALID" in environment:
            environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
        environment.setdefault("LOCAL_WORLD_SIZE", str(_tasks_of_this_node(environment)))
    if "RANK" not in environment:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
        environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    _fill_in_torch(environment)
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in environment
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not set, although RANK is set. Start with --ranks N, torchrun"
            " or srun, or unset RANK"
        )
    rank, local_rank, num_ranks = (
        int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    if "LOCAL_SIZE" in environment:  # the name in the `deepspeed` launcher
        environment.setdefault("LOCAL_WORLD_SIZE", environment["LOCAL_SIZE"])
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    are_tasks = environment.get("SLURM_NTASKS") == str(num_ranks)
    gpus = environment.get("SLURM_GPUS_ON_NODE", "") if are_tasks else ""
    return World(
        rank,
        local_rank,
        num_ranks,
        _cores_per_rank(environment),
        local,
        int(gpus) if gpus.isdigit() else 0,
    )


def _cores_per_rank(environment: MutableMapping[str, str]) -> int:
    """Return the cores of a rank. A SLURM task has the cores that it is bound to, at most its part
    of the job step's cores on this node. Other ranks share all available cores."""
    here, local = len(os.sched_getaffinity(0)), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    of_task, of_node = (
        int(environment.get(name, "0")) for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
    )
    if environment.get("SLURM_NTASKS", "1") == environment.get("WORLD_SIZE") and (
        of_task or of_node
    ):
        return max(1, min(here, of_task or here, of_node // local if of_node else here))
    return max(1, min(here, of_task or here) // local)


def _tasks_of_this_node(environment: MutableMapping[str, str]) -> int:
    """Return the number of SLURM tasks on this node, from the first complete list: the job step's,
    then the job's. "4(x3),2" means nodes with 4, 4, 4 and 2 tasks."""
    num_tasks, node = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NODEID", "0"))
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        parts = [_TASKS.fullmatch(part) for part in environment.get(name, "").split(",")]
        counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
        if all(parts) and sum(counts) == num_tasks and node < len(counts):
            return counts[node]
    return int(environment.get("SLURM_NTASKS_PER_NODE", num_tasks))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port below Linux's range for outgoing connections (from 32768), so that no
    connection takes it before the caller."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    raise OSError(f"{host}: 100 ports of 20000 to 32767 are taken. Set MASTER_PORT.")
