"""Arguments of cluster/submit: sbatch options, a job script and its arguments. Also computes which
part of a node a run gets. Imports only the standard library, for `cluster/submit --check`."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cluster.slurm import SlurmError, count_gpus, nodes_of

WARNING = "warning: "
"""Prefix of a printed warning. A warning does not stop a submission."""
GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "gpus-per-socket")
SHAPES = (
    *("nodes", "ntasks", "ntasks-per-node", "exclusive", "oversubscribe"),
    *("gpus", "gpus-per-task", "gpus-per-socket"),
)
"""Options of sbatch that request nodes or GPUs. If one is given, cluster/submit books no part of a
node."""
SIZES = ("cpus-per-gpu", "cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu")
FLAGS = ("exclusive", "hold", "oversubscribe", "test-only")
OTHERS = ("array", "begin", "dependency", "partition", "time", "time-min")
SHORT = {"nodes": "N", "ntasks": "n", "oversubscribe": "s", "gpus": "G", "cpus-per-task": "c"}
SHORT |= {"hold": "H", "array": "a", "begin": "b", "dependency": "d", "partition": "p", "time": "t"}
NUM_CPUS = 4
"""Number of CPUs of a run without a GPU, on nodes with at least this many CPUs."""
ON_PARTS = ("grid.slurm", "probe.slurm", "finetune.slurm", "knn.slurm", "evaluate.slurm")
"""Job scripts whose runs usually need one GPU."""


def _parser() -> argparse.ArgumentParser:
    """Return a parser of the sbatch options that this package reads. Like sbatch, it accepts
    abbreviations."""
    parser = argparse.ArgumentParser("cluster/submit", add_help=False)
    for name in sorted({*GPU_OPTIONS, *SHAPES, *SIZES, *FLAGS, *OTHERS}):
        short = [f"-{SHORT[name]}"] if name in SHORT else []
        count, const = ("?", "") if name in FLAGS else (None, None)
        parser.add_argument(f"--{name}", *short, nargs=count, const=const, dest=name)
    return parser


@dataclass(frozen=True)
class Submission:
    options: tuple[str, ...] = ()
    script: str | None = None
    arguments: tuple[str, ...] = ()
    kept: Path | None = None
    """Snapshot of code and configs from an earlier wave of a plan; None: make a new snapshot."""

    @property
    def name(self) -> str:
        return Path(self.script or "").name

    @cached_property
    def _values(self) -> dict[str, str | None]:
        return vars(_parser().parse_known_args(self.options)[0])

    def option(self, name: str) -> str | None:
        """Return the last value of an sbatch option; "" if the option has no value, None if it is
        absent."""
        return self._values[name]

    def has(self, *names: str) -> bool:
        return any(self._values[name] is not None for name in names)

    def with_options(self, *first: str, last: Sequence[str] = ()) -> "Submission":
        return replace(self, options=(*first, *self.options, *last))

    def ranks(self, environment: Mapping[str, str]) -> tuple[int | None, int | None]:
        """Return the number of nodes and the number of ranks per node (RANKS_PER_NODE, or the
        GPUs). Return None for a number that only the allocation determines."""
        nodes, ranks = self.option("nodes") or "1", environment.get("RANKS_PER_NODE", "")
        gpus = self.gpus_per_node(environment)
        per_node = None if gpus is None else gpus or 1
        if ranks:
            per_node = int(ranks) if ranks.isdigit() else None
        return int(nodes) if nodes.isdigit() else None, per_node

    def gpu_request(self, environment: Mapping[str, str]) -> tuple[str, str]:
        """Return name and value of the option, or of the site's variable, that requests GPUs."""
        given = [(name, self.option(name)) for name in GPU_OPTIONS]
        for name in GPU_OPTIONS:
            given.append((name, environment.get(f"SBATCH_{name.upper().replace('-', '_')}")))
        for name, value in given:
            if value and (name != "gres" or count_gpus(value)):
                return name, value
        return "", ""

    def gpus_per_node(self, environment: Mapping[str, str]) -> int | None:
        """Return the number of requested GPUs per node; None if only the allocation determines
        it."""
        name, value = self.gpu_request(environment)
        if name == "gpus-per-node":
            return count_gpus(f"gpu:{value}")
        return count_gpus(value) if name in ("", "gres") else None


def read_submission(words: Sequence[str]) -> Submission:
    at = next((number for number, word in enumerate(words) if word.endswith(".slurm")), len(words))
    script = words[at] if at < len(words) else None
    return Submission(tuple(words[:at]), script, tuple(words[at + 1 :]))


def book_part_of_node(submission: Submission, *, gpus: int | None = None) -> Submission:
    """Return the submission with options for a part of a node before its own options. The part has
    `gpus` GPUs (None: one, if the site has GPUs) and the same fraction of CPUs and memory.
    --oversubscribe cancels the script's --exclusive; SLURM never gives a GPU to two jobs. If
    site.env sets RANKS_PER_NODE, SLURM does not know the GPUs, and the submission is unchanged."""
    environment = os.environ
    of_site = {"SBATCH_EXCLUSIVE", "RANKS_PER_NODE"} & environment.keys()
    is_whole = submission.name not in ON_PARTS and gpus is None
    if submission.has(*SHAPES) or of_site or is_whole:
        return submission
    asks = submission.gpu_request({})[0]
    wanted = submission.gpus_per_node({}) or 0 if asks else 1 if gpus is None else gpus
    partition = submission.option("partition") or environment.get("SBATCH_PARTITION", "")
    try:
        nodes = nodes_of(partition)
    except SlurmError:
        return submission
    if not nodes:
        return submission
    num_gpus, cpus, memory_mb = part_of_node(nodes, gpus=wanted)
    options = ["--oversubscribe"]
    name, value = submission.gpu_request(environment)
    if not asks and name:  # in the form and kind of the site's own request
        item = next((each for each in value.split(",") if each.startswith("gpu:")), f"gpu:{value}")
        kind = [word for word in item.split(":")[1:] if word and not word.isdigit()]
        words = ":".join([*["gpu"] * (name == "gres"), *kind, str(wanted)])
        options.append(f"--{name}={words}")
    elif not asks and num_gpus:
        options.append(f"--gpus-per-node={wanted}")
    if not submission.has("cpus-per-task", "cpus-per-gpu"):
        options.append(f"--cpus-per-task={cpus}")
    # SLURM's RealMemory is 1 if the site does not set it
    if memory_mb > 1 and not submission.has("mem", "mem-per-cpu", "mem-per-gpu"):
        options.append(f"--mem={memory_mb}M")
    return submission.with_options(*options)


def part_of_node(nodes: Iterable[Mapping[str, str]], *, gpus: int) -> tuple[int, int, int]:
    """Return GPUs, CPUs and megabytes of memory for a run on the smallest node. The run gets `gpus`
    GPUs and their fraction of CPUs and memory. Without GPUs, it gets NUM_CPUS CPUs and their
    fraction of the memory. `nodes`: output of `scontrol show node`."""
    known = [node for node in nodes if {"CPUTot", "RealMemory"} <= node.keys()]
    gpus = min(gpus, max((count_gpus(node.get("Gres", "")) for node in known), default=0))
    parts = []
    for node in known:
        cpus, num_gpus = (
            int(node.get("CPUEfctv") or node["CPUTot"]),
            count_gpus(node.get("Gres", "")),
        )
        memory_mb = int(node["RealMemory"]) - int(node.get("MemSpecLimit", 0))
        part, whole = (gpus, num_gpus) if gpus else (min(NUM_CPUS, cpus), cpus)
        if part <= whole:
            parts.append((cpus * part // whole, memory_mb * part // whole))
    cpus = min((cpus for cpus, _ in parts), default=1)
    return gpus, max(1, cpus), min((memory_mb for _, memory_mb in parts), default=0)
