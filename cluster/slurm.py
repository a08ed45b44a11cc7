"""Requests to SLURM, and the output paths (places) of jobs. Imports only the standard library
(Python 3.9 or newer).

A second job for a run or dataset would only wait for the first job's lock. `cluster/submit`
therefore records the output paths of a job in jobs/JOB/writes. Each line has the array task that
writes the path (or "-": all tasks), a tab, and the complete path. Jobs that squeue no longer lists
do not count, so no cleanup is needed.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from data_prep.errors import UserError

ALL_TASKS = "-"
KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_WAIT")


class SlurmError(UserError):
    """Failure of a SLURM command, with SLURM's own message."""


def slurm(*words: str, tries: int = 1, environment: Mapping[str, str] = os.environ) -> str:
    """Return the output of a SLURM command. Repeat a failed command after ten seconds, `tries`
    times in total; then raise SlurmError. The command ignores TERM and USR2: after a requeue, SLURM
    sends these signals to all processes of the attempt, including scontrol."""
    # the user's format settings do not apply
    environment = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SQUEUE_", "SINFO_"))
    }
    environment["SLURM_TIME_FORMAT"] = "standard"
    for left in reversed(range(tries)):
        try:
            done = subprocess.run(
                words,
                env=environment,
                preexec_fn=_shield,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=120,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = f"{error}. Is this a node of a SLURM cluster?"
        else:
            if done.returncode == 0:
                return done.stdout
            reason = done.stderr.strip() or f"it ended with code {done.returncode}"
        if left:
            time.sleep(10)
    raise SlurmError(words[0], reason, code="scheduler")


def _shield() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def facts(line: str) -> dict[str, str]:
    """Return {name: value} of a line of `scontrol -o show`. A value ends at the next name, and may
    contain spaces. Values of (null) are omitted."""
    pairs = re.findall(r"([\w/:]+)=(.*?)(?=\s+[\w/:]+=|\s*$)", line)
    return {name: value for name, value in pairs if value != "(null)"}


def count_gpus(gres: str) -> int:
    """Return the number of GPUs in a gres list, for example 4 for gpu:h100:4(S:0-1),nvme:2. A name
    without a number counts as one GPU."""
    items = [
        re.split("[:=/]", item.removeprefix("gres/").removeprefix("gres:"))
        for item in re.sub(r"\([^)]*\)", "", gres).split(",")
    ]
    return sum(int(parts[-1]) if parts[-1].isdigit() else 1 for parts in items if parts[0] == "gpu")


def cpus_per_rank(environment: Mapping[str, str], node_lines: Iterable[str], *, ranks: int) -> int:
    """Return the number of CPUs for each rank on the node with the fewest CPUs. srun assigns
    complete cores, so the number is rounded down to complete cores. --hint=nomultithread makes a
    CPU a core, but older versions of SLURM count threads in SLURM_JOB_CPUS_PER_NODE."""
    nodes = [
        node
        for node in map(facts, node_lines)
        if {"CPUTot", "Sockets", "CoresPerSocket"} <= node.keys()
    ]
    cores = [int(node["Sockets"]) * int(node["CoresPerSocket"]) for node in nodes]
    every = re.sub(r"\([^)]*\)", "", environment["SLURM_JOB_CPUS_PER_NODE"])
    cpus = min(map(int, every.split(",")))
    threads = max((int(node["CPUTot"]) // count for node, count in zip(nodes, cores)), default=1)  # noqa: B905 (Python 3.9)
    if (
        environment.get("SLURM_HINT") == "nomultithread"
        or environment.get("SLURM_THREADS_PER_CORE") == "1"
    ):
        cpus, threads = min([cpus, *cores]), 1
    fraction = max(1, cpus // ranks)
    return fraction - fraction % threads if fraction > threads else fraction


def nodes_of(partitions: str) -> list[dict[str, str]]:
    """Return the properties of the nodes of these partitions. If `partitions` is empty, use the
    default partition."""
    chosen = set(partitions.split(",")) - {""}
    if not chosen:
        every = map(facts, slurm("scontrol", "-o", "show", "partition").splitlines())
        chosen = {each["PartitionName"] for each in every if each.get("Default") == "YES"}
    nodes = map(facts, slurm("scontrol", "-o", "show", "node").splitlines())
    return [node for node in nodes if chosen & set(node.get("Partitions", "").split(","))]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned columns as lines, without wrapping."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def about_job(job: str, *, tries: int = 1) -> dict[str, str]:
    return facts(slurm("scontrol", "-o", "show", "job", job, tries=tries))


def inherited(about: Mapping[str, str]) -> list[str]:
    """Return the sbatch options that copy partition, limits, memory and CPUs of a job, but not its
    size. `about`: output of `scontrol show job`."""
    names = {
        "partition": "Partition",
        "account": "Account",
        "qos": "QOS",
        "reservation": "Reservation",
        "time": "TimeLimit",
    }
    names |= {
        "constraint": "Features",
        "mem": "MinMemoryNode",
        "mem-per-cpu": "MinMemoryCPU",
        "cpus-per-task": "CPUs/Task",
    }
    return [
        f"--{option}={value}"
        for option, name in names.items()
        if (value := about.get(name)) not in (None, "", "N/A", "Partition_Limit")
    ]


def shape(about: Mapping[str, str]) -> list[str]:
    """Return the sbatch options for another job of the same size."""
    options = ["--no-requeue", f"--nodes={about['NumNodes']}", f"--ntasks={about['NumTasks']}"]
    sharing = {"NO": ["--exclusive"], "YES": ["--oversubscribe"]}
    options += sharing.get(about.get("OverSubscribe", ""), [])
    names = {"gres": "TresPerNode", "gpus": "TresPerJob", "gpus-per-task": "TresPerTask"}
    for option, name in names.items():
        value = re.sub("gres[:/]", "", about.get(name, ""))
        if option != "gres":  # SLURM 23.02 and newer also list CPUs: cpu=4,gpu:a100=2
            value = ",".join(re.findall("(?:^|,)gpu[:=]([^,]+)", value)).replace("=", ":")
        options += [f"--{option}={value}"] if value else []
    return options


def wait_for_successor(array: str, label: str, successor: str) -> None:
    """Make the pending jobs that wait for the job (or array task) `label` wait for its successor
    instead. Jobs that wait for the complete array then wait for array and successor."""
    words = ("squeue", "--noheader", "--me", "--states=PENDING", "--format=%F %E")
    with open(Path("jobs", ".dependencies"), "w") as lock:  # tasks of an array end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        _move_waits(slurm(*words, tries=3), array, label, successor)


def _move_waits(pending: str, array: str, label: str, successor: str) -> None:
    for line in sorted(set(pending.splitlines())):
        job, _, text = line.partition(" ")
        parts = re.split("([,?])", re.sub(r"\(\w+\)|_\*", "", text))
        for number, part in enumerate(parts):
            kind, *jobs = part.split(":")
            jobs = [successor if each == label else each for each in jobs]
            jobs += [successor] * (array in jobs)
            parts[number] = ":".join([kind, *jobs])
        if successor in re.split("[:,?]", "".join(parts)) and job != successor.partition("_")[0]:
            dependency = f"Dependency={''.join(parts)}"
            slurm("scontrol", "update", f"JobId={job}", dependency, tries=3)


def state_of(label: str, *, tries: int = 1) -> str:
    """Return the state of a job or an array task; "gone" if SLURM no longer knows it."""
    try:
        return (
            slurm("squeue", "--noheader", f"--jobs={label}", "--format=%T", tries=tries).strip()
            or "gone"
        )
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return "gone"
        raise


def expand_hosts(names: str) -> list[str]:
    """Return all node names of a list: n[1-3,5] -> n1 n2 n3 n5."""
    return slurm("scontrol", "show", "hostnames", names).split()


def new_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a new job, without variables of the job that submits it
    (SLURM_..., PYTHONPATH). The new job reads site.env again on its own node
    (cluster/environment.sh)."""
    ours = {
        *environment.get("JOB_SETTINGS", "").split(),
        "JOB_SETTINGS",
        "JOB_SETTINGS_GIVEN",
        "PLAN_KEPT",
        "PLAN_SINCE",
        "PYTHONPATH",
        "PYTHONSAFEPATH",
    }
    ours -= set(environment.get("JOB_SETTINGS_GIVEN", "").split())
    ours |= {name for name in environment if name.startswith("SLURM_")} - {*KEPT_OF_SLURM}
    return {name: value for name, value in environment.items() if name not in ours}


# ---- writers of places


class Writer(NamedTuple):
    """Job or array task in the queue that writes an output path."""

    job: str
    task: str
    """Number of the array task; "" without an array."""
    state: str

    @property
    def label(self) -> str:
        return f"{self.job}_{self.task}" if self.task else self.job

    def __str__(self) -> str:
        return f"job {self.label} ({self.state})"


def lines_of(places: Mapping[str, str]) -> str:
    """Return the content of jobs/JOB/writes. `places`: path -> task."""
    return "".join(f"{task}\t{Path(place).resolve()}\n" for place, task in places.items())


def writers_of(places: Sequence[str]) -> dict[str, list[Writer]]:
    """Return the jobs that write each path, running jobs first. Paths without such a job are
    omitted."""
    wanted = {str(Path(place).resolve()): place for place in places}
    # all jobs of the user: -j fails if SLURM no longer knows one of the jobs
    lines = slurm("squeue", "--noheader", "--me", "--array", "--format=%F %K %T").splitlines()
    found: dict[str, list[Writer]] = {}
    for job, task, state in (line.split() for line in lines if len(line.split()) == 3):
        writer, noted = Writer(job, "" if task == "N/A" else task, state), list[str]()
        # a job that is ending may take long after scancel, but writes only its last checkpoint
        if state != "COMPLETING":
            with suppress(OSError):
                noted = Path("jobs", job, "writes").read_text().splitlines()
        for of_task, _, path in (line.partition("\t") for line in noted):
            if of_task in (ALL_TASKS, writer.task) and path in wanted:
                found.setdefault(wanted[path], []).append(writer)
    for writers in found.values():
        writers.sort(key=lambda each: (each.state != "RUNNING", int(each.job)))
    return found


def entries_of(job: str) -> list[tuple[str, str]]:
    """Return (label, output path) for each task of a job, or for the job itself."""
    parts = (line.partition("\t") for line in Path("jobs", job, "writes").read_text().splitlines())
    return [(job if task == ALL_TASKS else f"{job}_{task}", path) for task, _, path in parts]


def places_since(first: int) -> set[str]:
    """Return the output paths of job `first` and of all later jobs."""
    jobs = [record.parent.name for record in Path("jobs").glob("*/writes")]
    late = (job for job in jobs if job.isdigit() and int(job) >= first)
    return {path for job in late for _, path in entries_of(job)}


def jobs_of(writers: Iterable[list[Writer]]) -> list[str]:
    return sorted({writer.job for each in writers for writer in each}, key=int)
