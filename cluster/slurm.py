"""What is asked of SLURM, and which of its jobs write which place. Imports nothing that must be
installed (Python 3.9 or newer).

Two jobs for one run, or for one dataset, would only fight. jobs/JOB/writes has a line for each
place that a job writes: the array's task that writes it (or "-": all of the job), a tab, the whole
path. `cluster/submit` writes it once SLURM has taken the job. A job that plain sbatch took does at
its start; a task of an array then in jobs/JOB_TASK, for NFS does not let many nodes append to one
file. Jobs that squeue does not list any more do not count, so nobody cleans up after them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ALL_TASKS = "-"
WARNING = "warning: "
"""How cluster/submit begins what does not stop it; the doctor repeats it."""
COMPLETE_NAMES = (
    "--container",
    "--export",
    "--gpus",
    "--gres",
    "--mem",
    "--ntasks",
    "--time",
    "--wait",
)
"""Options of sbatch that are the beginning of other options, and yet no abbreviations."""
NUM_CPUS = 4
"""CPUs of a member without a GPU, if its node has that many."""
GPU_OPTIONS = {
    "--gpus-per-node": "SBATCH_GPUS_PER_NODE",
    "--gres": "SBATCH_GRES",
    "--gpus": "SBATCH_GPUS",
    "--gpus-per-task": "SBATCH_GPUS_PER_TASK",
    "--gpus-per-socket": "SBATCH_GPUS_PER_SOCKET",
}
"""sbatch's ways to ask for GPUs, each with its variable."""
KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_WAIT")


class SlurmError(ValueError):
    """A command of SLURM failed; the text has the command and its own last words."""


def slurm(*words: str, tries: int = 1, environment: Mapping[str, str] = os.environ) -> str:
    """The output of one of SLURM's commands, asked so many times, ten seconds apart: controllers
    have their bad moments.

    It ignores TERM and USR2: SLURM sends these to all processes of a start as soon as it has taken
    a requeue, also to the scontrol that waits for the answer.
    """
    # whatever the user likes to see
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
            reason = f"{error}; is this a node of a SLURM cluster?"
        else:
            if done.returncode == 0:
                return done.stdout
            reason = done.stderr.strip() or f"ended with {done.returncode}"
        if left:
            time.sleep(10)
    raise SlurmError(f"{words[0]}: {reason}")


def _shield() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def facts(line: str) -> dict[str, str]:
    """Of a line of `scontrol -o show`; what is (null) there is absent here."""
    return {name: value for name, value in re.findall(r"([\w/]+)=(\S*)", line) if value != "(null)"}


def count_gpus(gres: str) -> int:
    """Return the GPUs of a gres list, such as 4 of gpu:h100:4(S:0-1),nvme:2; a name without a
    number is one."""
    items = [
        re.split("[:=/]", item.removeprefix("gres/").removeprefix("gres:"))
        for item in re.sub(r"\([^)]*\)", "", gres).split(",")
    ]
    return sum(int(parts[-1]) if parts[-1].isdigit() else 1 for parts in items if parts[0] == "gpu")


def allocated_gpus(about: str) -> list[int]:
    """Return the GPUs that a job has on each group of its nodes, from `scontrol -d show job`."""
    return [count_gpus(gres) for gres in re.findall(r" CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", about)]


def cpus_per_rank(environment: Mapping[str, str], node_lines: Iterable[str], *, ranks: int) -> int:
    """Return the CPUs that each of a node's ranks may have, on the node of the job that has the
    fewest.

    SLURM gives complete cores to a step, so an uneven fraction of a node with several threads per
    core is rounded down. With
    --hint=nomultithread a CPU is a core; older versions of SLURM count its threads in
    SLURM_JOB_CPUS_PER_NODE nevertheless.
    """
    nodes = [
        node
        for node in map(facts, node_lines)
        if {"CPUTot", "Sockets", "CoresPerSocket"} <= node.keys()
    ]
    cores = [int(node["Sockets"]) * int(node["CoresPerSocket"]) for node in nodes]
    cpus = min(
        map(int, re.sub(r"\([^)]*\)", "", environment["SLURM_JOB_CPUS_PER_NODE"]).split(","))
    )
    threads = max(
        (int(node["CPUTot"]) // count for node, count in zip(nodes, cores, strict=True)), default=1
    )
    if (
        environment.get("SLURM_HINT") == "nomultithread"
        or environment.get("SLURM_THREADS_PER_CORE") == "1"
    ):
        cpus, threads = min([cpus, *cores]), 1
    fraction = max(1, cpus // ranks)
    return fraction - fraction % threads if fraction > threads else fraction


def part_of_node(nodes: Iterable[Mapping[str, str]], *, gpus: int) -> tuple[int, int, int]:
    """Return the GPUs, CPUs and megabytes of one member: `gpus` GPUs and their fraction of the node
    that has the least for them, or NUM_CPUS CPUs and their fraction of the memory. `nodes`: facts
    of `scontrol show node`."""
    found = [
        (count_gpus(node.get("Gres", "")), int(node.get("CPUEfctv") or node["CPUTot"]), node)
        for node in nodes
        if {"CPUTot", "RealMemory"} <= node.keys()
    ]
    most = max((count for count, _, _ in found), default=0)
    gpus = min(gpus, most)
    shares = [(gpus, count) if gpus else (min(NUM_CPUS, cpus), cpus) for count, cpus, _ in found]
    fitting = [
        (share, each) for share, each in zip(shares, found, strict=True) if share[0] <= share[1]
    ]
    cpus = min((cpus * part // whole for (part, whole), (_, cpus, _) in fitting), default=1)
    memory = (
        (int(node["RealMemory"]) - int(node.get("MemSpecLimit", 0))) * part // whole
        for (part, whole), (_, _, node) in fitting
    )
    return gpus, max(1, cpus), min(memory, default=0)


def max_array_size() -> int | None:
    """Return the site's limit, which is one more than the largest index; None if SLURM does not
    answer."""
    with suppress(SlurmError):
        if found := re.search(r"MaxArraySize\s*=\s*(\d+)", slurm("scontrol", "show", "config")):
            return int(found[1])
    return None


def nodes_of(partitions: str) -> list[dict[str, str]]:
    """Return the facts of the nodes of these partitions, or of the default one if the text is
    empty."""
    chosen = set(partitions.split(",")) - {""}
    if not chosen:
        every = map(facts, slurm("scontrol", "-o", "show", "partition").splitlines())
        chosen = {each["PartitionName"] for each in every if each.get("Default") == "YES"}
    nodes = map(facts, slurm("scontrol", "-o", "show", "node").splitlines())
    return [node for node in nodes if chosen & set(node.get("Partitions", "").split(","))]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain text for terminals, logs and grep: nothing is wrapped, the last column is as long as it
    is."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def about_job(job: str, *, tries: int = 1) -> dict[str, str]:
    return facts(slurm("scontrol", "-o", "show", "job", job, tries=tries))


def inherited(about: Mapping[str, str]) -> list[str]:
    """Return the sbatch options that give another job what this job was given, from `scontrol show
    job`: all but its size."""
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


def hosts(names: str) -> list[str]:
    """n[1-3,5] -> n1 n2 n3 n5"""
    return slurm("scontrol", "show", "hostnames", names).split()


# ---- a submission
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submission:
    """The words after cluster/submit: sbatch's options, a job script, the script's words."""

    options: tuple[str, ...] = ()
    script: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.script or "").name

    def option(self, *names: str) -> str | None:
        """The last value of an option, such as ("--partition", "-p"); "" where it has none."""
        value = None
        for position, word in enumerate(self.options):
            following = self.options[position + 1] if position + 1 < len(self.options) else ""
            for name in names:
                head, is_given, given = word.partition("=")
                # sbatch takes the beginning of a long name: --depend as well as --dependency
                is_short = (
                    len(head) > 4
                    and name.startswith("--")
                    and name.startswith(head)
                    and head not in COMPLETE_NAMES
                )
                if head == name or is_short:
                    value = given if is_given else "" if following.startswith("-") else following
                elif (
                    not name.startswith("--")
                    and word.startswith(name)
                    and not word.startswith("--")
                ):
                    value = word[len(name) :]
        return value

    def ranks(self, environment: Mapping[str, str]) -> tuple[int | None, int | None]:
        """Return the nodes, and the ranks on each (RANKS_PER_NODE, or the GPUs); None if only the
        allocation tells."""
        ranks = environment.get("RANKS_PER_NODE", "")
        if ranks:
            return self.nodes, int(ranks) if ranks.isdigit() else None
        gpus = self.gpus_per_node(environment)
        return self.nodes, None if gpus is None else gpus or 1

    @property
    def nodes(self) -> int | None:
        """The number of nodes; None for a range."""
        nodes = self.option("--nodes", "-N") or "1"
        return int(nodes) if nodes.isdigit() else None

    def gpu_request(self, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Return the options that ask for GPUs, or else the site's variables, by the name of the
        option."""
        short = {"--gpus": ("-G",)}
        options = {name: self.option(name, *short.get(name, ())) or "" for name in GPU_OPTIONS}
        for request in (
            options,
            {name: environment.get(variable, "") for name, variable in GPU_OPTIONS.items()},
        ):
            if found := {
                name: value
                for name, value in request.items()
                if value and (name != "--gres" or count_gpus(value))
            }:
                return found
        return {}

    def gpus_per_node(self, environment: Mapping[str, str]) -> int | None:
        """Return the GPUs of each node that are asked for; None if only the allocation tells."""
        name, value = next(iter(self.gpu_request(environment).items()), ("", ""))
        if name in ("", "--gres"):
            return count_gpus(value)
        count = count_gpus(",".join(f"gpu:{part}" for part in value.split(",")))
        if name == "--gpus":
            return self._on_each_node(count)
        times: int | None = 1
        if name == "--gpus-per-task":
            of_node, tasks = (
                self.option("--ntasks-per-node"),
                self.option("--ntasks", "-n") or str(self.nodes),
            )
            times = (
                int(of_node)
                if of_node
                else self._on_each_node(int(tasks))
                if tasks.isdigit()
                else None
            )
        elif name == "--gpus-per-socket":
            sockets = self.option("--sockets-per-node") or ""
            times = int(sockets) if sockets.isdigit() else None
        return None if times is None else count * times

    def _on_each_node(self, total: int) -> int | None:
        """Return an even fraction; None if there is none."""
        return total // self.nodes if self.nodes and total % self.nodes == 0 else None


def new_job(environment: Mapping[str, str]) -> dict[str, str]:
    """What a job takes along. What site.env sets for jobs, the job reads itself, on its own node
    (cluster/environment.sh); which job, array and start this may be, is not the new job's business,
    and neither is where this one's code is.
    """
    ours = {
        *environment.get("JOB_SETTINGS", "").split(),
        "JOB_SETTINGS",
        "JOB_SETTINGS_GIVEN",
        "PYTHONPATH",
        "PYTHONSAFEPATH",
    }
    ours -= set(environment.get("JOB_SETTINGS_GIVEN", "").split())
    ours |= {name for name in environment if name.startswith("SLURM_")} - {*KEPT_OF_SLURM}
    return {name: value for name, value in environment.items() if name not in ours}


def read_submission(words: Sequence[str]) -> Submission:
    at = next((number for number, word in enumerate(words) if word.endswith(".slurm")), len(words))
    script = words[at] if at < len(words) else None
    return Submission(tuple(words[:at]), script, tuple(words[at + 1 :]))


# ---- who writes what
# --------------------------------------------------------------------------------------------------


class Writer(NamedTuple):
    """A task of a job that is in the queue; `task` is empty where the job is no array."""

    job: str
    task: str
    state: str
    since: str
    """When it was started: ISO, so that texts sort as times do."""

    @property
    def label(self) -> str:
        """As its logs are called."""
        return f"{self.job}_{self.task}" if self.task else self.job

    def __str__(self) -> str:
        return f"job {self.label} ({self.state})"


def lines_of(places: Mapping[str, str]) -> str:
    """For the file: path -> task."""
    return "".join(f"{task}\t{_path(place)}\n" for place, task in places.items())


def writers_of(places: Sequence[str]) -> dict[str, list[Writer]]:
    """Of each place that has any; the one that was started first comes first."""
    wanted = {_path(place): place for place in places}
    found: dict[str, list[Writer]] = {}
    for writer in sorted(
        my_jobs(), key=lambda each: (each.state != "RUNNING", each.since, int(each.job))
    ):
        # one that is ending, which may take long after scancel, writes no more than its last
        # checkpoint
        for path in _noted(writer) & wanted.keys() if writer.state != "COMPLETING" else ():
            found.setdefault(wanted[path], []).append(writer)
    return found


def jobs_of(writers: Iterable[list[Writer]]) -> list[str]:
    """Their numbers, each once."""
    return sorted({writer.job for each in writers for writer in each}, key=int)


def taken_by(place: str, environment: Mapping[str, str]) -> Writer | None:
    """Within a job: another that writes this place and was started before it. Writes down first
    that this one does, so of two that start at once one gives way."""
    job = environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID")
    if not job:
        return None
    me = Writer(job, environment.get("SLURM_ARRAY_TASK_ID", ""), "", "")
    if _path(place) not in _noted(me):
        with suppress(OSError):  # a full disk is reported by whoever needs it
            _file(me.label).parent.mkdir(parents=True, exist_ok=True)
            _file(me.label).write_text(lines_of({place: ALL_TASKS}))
    try:
        first = writers_of([place]).get(place, [me])[0]
    except (
        SlurmError
    ):  # SLURM does not answer, or not from within a container: the run's own lock is left
        return None
    return first if first.state == "RUNNING" and first.label != me.label else None


def my_jobs() -> list[Writer]:
    # all of one's own, not -j: that is an error as soon as SLURM has forgotten one of them
    lines = slurm("squeue", "--noheader", "--me", "--array", "--format=%F %K %T %S").splitlines()
    found = [line.split() for line in lines if len(line.split()) == 4]
    return [
        Writer(job, "" if task == "N/A" else task, state, since)
        for job, task, state, since in found
    ]


def _path(place: str) -> str:
    """The same by whichever way it is named."""
    return str(Path(place).resolve())


def _file(label: str) -> Path:
    return Path("jobs") / label / "writes"


def _noted(writer: Writer) -> set[str]:
    """What it writes."""
    lines: list[str] = []
    for label in {writer.job, writer.label}:
        with suppress(OSError):
            lines += _file(label).read_text().splitlines()
    return {
        path
        for task, _, path in (line.partition("\t") for line in lines)
        if task in (ALL_TASKS, writer.task)
    }
