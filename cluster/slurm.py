"""Requests to SLURM, and the places that its jobs write. Imports only the standard library (Python
3.9 or newer).

Two jobs for one run or dataset would only wait for each other's lock. `cluster/submit` therefore
records the places of a job in jobs/JOB/writes. Each line has the array's task that writes the place
(or "-": all of the job), a tab, and the complete path. Jobs that squeue no longer lists do not
count, so no cleanup is needed.
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
    """A command of SLURM failed; the problem is SLURM's own message."""


def slurm(*words: str, tries: int = 1, environment: Mapping[str, str] = os.environ) -> str:
    """Return the output of a SLURM command. A failed command is repeated after ten seconds. The
    command ignores TERM and USR2, because after a requeue SLURM sends these to all processes of the
    start, also to the running scontrol."""
    # whatever format the user prefers
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
            reason = done.stderr.strip() or f"ended with {done.returncode}"
        if left:
            time.sleep(10)
    raise SlurmError(words[0], reason, code="scheduler")


def _shield() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def facts(line: str) -> dict[str, str]:
    """Return {name: value} of a line of `scontrol -o show`, without (null) values."""
    return {name: value for name, value in re.findall(r"([\w/]+)=(\S*)", line) if value != "(null)"}


def count_gpus(gres: str) -> int:
    """Return the number of GPUs in a gres list, for example 4 for gpu:h100:4(S:0-1),nvme:2. A name
    without a number counts as one."""
    items = [
        re.split("[:=/]", item.removeprefix("gres/").removeprefix("gres:"))
        for item in re.sub(r"\([^)]*\)", "", gres).split(",")
    ]
    return sum(int(parts[-1]) if parts[-1].isdigit() else 1 for parts in items if parts[0] == "gpu")


def cpus_per_rank(environment: Mapping[str, str], node_lines: Iterable[str], *, ranks: int) -> int:
    """Return the number of CPUs for each rank, on the node with the fewest CPUs in the job. A step
    gets complete cores, so an uneven fraction of a node with several threads per core is rounded
    down. Under --hint=nomultithread a CPU is a core, but older versions of SLURM count threads in
    SLURM_JOB_CPUS_PER_NODE."""
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
    """Return the properties of the nodes of these partitions, or of the default partition if the
    text is empty."""
    chosen = set(partitions.split(",")) - {""}
    if not chosen:
        every = map(facts, slurm("scontrol", "-o", "show", "partition").splitlines())
        chosen = {each["PartitionName"] for each in every if each.get("Default") == "YES"}
    nodes = map(facts, slurm("scontrol", "-o", "show", "node").splitlines())
    return [node for node in nodes if chosen & set(node.get("Partitions", "").split(","))]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned columns as lines, without wrapping (for terminals, logs and grep)."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def about_job(job: str, *, tries: int = 1) -> dict[str, str]:
    return facts(slurm("scontrol", "-o", "show", "job", job, tries=tries))


def inherited(about: Mapping[str, str]) -> list[str]:
    """Return the sbatch options that make another job equal to this one in everything but size,
    from `scontrol show job`."""
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
    """Return the sbatch options that make another job as large as this running one."""
    options = ["--no-requeue", f"--nodes={about['NumNodes']}", f"--ntasks={about['NumTasks']}"]
    sharing = {"NO": ["--exclusive"], "YES": ["--oversubscribe"]}
    options += sharing.get(about.get("OverSubscribe", ""), [])
    names = {"gres": "TresPerNode", "gpus": "TresPerJob", "gpus-per-task": "TresPerTask"}
    for option, name in names.items():
        value = re.sub("gres[:/]", "", about.get(name, ""))
        if option != "gres":
            value = value.removeprefix("gpu:")
        options += [f"--{option}={value}"] if value else []
    return options


def wait_for_successor(array: str, task: str | None, successor: str) -> None:
    """Make pending jobs that wait for a job (or array task) wait for its successor. Jobs that wait
    for a complete array wait for both."""
    label = array if task is None else f"{array}_{task}"
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
    """Return the state of one job, or of one task of an array; "gone" if SLURM has forgotten it."""
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
    """Return the environment for a new job. It does not contain number, array, restarts or code of
    the job that submits it. site.env is read again on the new job's node
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
    """A job in the queue, or a task of an array."""

    job: str
    task: str
    """Number of the array task; "" if the job is no array."""
    state: str

    def __str__(self) -> str:
        label = f"{self.job}_{self.task}" if self.task else self.job
        return f"job {label} ({self.state})"


def lines_of(places: Mapping[str, str]) -> str:
    """Return the content of a file jobs/JOB/writes. `places`: path -> task."""
    return "".join(f"{task}\t{Path(place).resolve()}\n" for place, task in places.items())


def writers_of(places: Sequence[str]) -> dict[str, list[Writer]]:
    """Return the jobs that write each place, running ones first. Places without such a job are
    omitted."""
    wanted = {str(Path(place).resolve()): place for place in places}
    # all jobs of the user, not -j, which fails as soon as SLURM has forgotten one of them
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
    """Return the label and the place of each task of a job, or of the job itself."""
    parts = (line.partition("\t") for line in Path("jobs", job, "writes").read_text().splitlines())
    return [(job if task == ALL_TASKS else f"{job}_{task}", path) for task, _, path in parts]


def places_since(first: int) -> set[str]:
    """Return the complete paths of places that this job and later jobs write or have written."""
    jobs = [record.parent.name for record in Path("jobs").glob("*/writes")]
    late = (job for job in jobs if job.isdigit() and int(job) >= first)
    return {path for job in late for _, path in entries_of(job)}


def jobs_of(writers: Iterable[list[Writer]]) -> list[str]:
    """Return the job numbers of the writers, each once."""
    return sorted({writer.job for each in writers for writer in each}, key=int)
