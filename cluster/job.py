"""Run one attempt of a job, up to its end or its requeue. Every *.slurm runs this file on
its first node, outside of containers.

    job.py pretrain train | finetune probe | finetune tune ... CONFIG [key=value ...]
    job.py grid PLAN STAGE                                     one member of a grid
    job.py data_prep [--parts | --merge] CONFIG [key=value]    a part of a dataset, or the merge
    job.py analysis figure PLAN                                on this node only, without ranks
    job.py cluster submit PLAN JOB [option ...]                the next jobs of a plan, no ranks

1. `cluster.resolve` checks the config in a second or two.
2. `cluster.preflight` checks each node.
3. The ranks run, with a log each.
4. USR2 (300 s before the limit, or at preemption) and TERM are passed to the ranks. The ranks then
   save at a step boundary and exit.
5. An unfinished job requeues itself without the bad nodes. If SLURM does not requeue jobs, the job
   submits a successor. A job ends if the config is wrong, if the job was canceled, or if too many
   attempts (also of predecessors) make no progress (attempts.py).

Exit code 2 means a wrong config only in the first attempt with running ranks. Any other failure may
be the node's fault, until a second node has the same failure. An error in this file counts as a
failure of a rank.

jobs/JOB (or jobs/ARRAY_TASK) has the logs of all ranks, attempts.jsonl and bad-nodes. This file
imports only the standard library (Python 3.9 or newer), because it must name a node whose .venv
does not work.

This file is long because one attempt of a job is one procedure, from its first line to its requeue.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.attempts import UNKNOWN, append_attempt, give_up_reason, has_trained, read_attempts
from cluster.slurm import (
    SlurmError,
    about_job,
    cpus_per_rank,
    expand_hosts,
    facts,
    inherited,
    new_job,
    shape,
    slurm,
    state_of,
    wait_for_successor,
)
from data_prep import console

BAD_INPUT, NAMED_BAD, BUSY = 2, 3, 75
"""Exit codes: the config is wrong; the pre-flight check found bad nodes; another attempt holds the
lock of the run."""
PATIENCE = 18
"""Number of tries of a SLURM request, ten seconds apart."""


class End(Exception):  # noqa: N818
    """End of this attempt: a text for the log, and the exit code."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Allocation:
    """Values of SLURM and cluster/site.env for this attempt."""

    script: str
    number: str
    array: str
    """Job number of the array, or of a job without an array."""
    task: str | None
    span: tuple[int, int, int]
    """First task, last task and number of tasks of the array."""
    restarts: int
    node: str
    nodelist: str
    num_nodes: int
    gpus: int
    snapshot: Path
    ranks_per_node: int
    """Value of RANKS_PER_NODE; 0 if unset."""
    idle_limit: int
    preflight_s: int
    wait_s: int
    """Seconds from the end of the first rank until srun kills hanging ranks."""
    cache: str
    python: list[str]
    """Command that starts Python on a node under srun."""
    srun_options: list[str]
    local_python: list[str]
    """Command that starts Python in this script, outside srun."""

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Allocation:
        """Read the environment. RANK_PYTHON or SRUN_OPTIONS run Python in a container. Pyxis makes
        containers only under srun. If SRUN_OPTIONS is set, this script therefore runs Python from
        .venv, or as an srun step of one task if there is no .venv."""
        get = environment.get
        number, task = environment["SLURM_JOB_ID"], get("SLURM_ARRAY_TASK_ID")
        first, last, count = (
            int(get(f"SLURM_ARRAY_TASK_{name}") or 0) for name in ("MIN", "MAX", "COUNT")
        )
        python = shlex.split(get("RANK_PYTHON", "")) or [".venv/bin/python"]
        options = local = shlex.split(get("SRUN_OPTIONS", ""))
        if not options:
            local = python
        elif os.access(".venv/bin/python", os.X_OK):
            local = [".venv/bin/python"]
        else:
            node = f"--nodelist={socket.gethostname().partition('.')[0]}"
            step = ["srun", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1", node]
            local = [*step, *options, *python]
        return cls(
            script=environment["SLURM_JOB_NAME"],
            number=number,
            array=get("SLURM_ARRAY_JOB_ID", number),
            task=task,
            span=(first, last, count),
            restarts=int(get("SLURM_RESTART_COUNT") or 0),
            node=get("SLURMD_NODENAME") or socket.gethostname(),
            nodelist=environment["SLURM_JOB_NODELIST"],
            num_nodes=int(get("SLURM_JOB_NUM_NODES") or 1),
            gpus=int(get("SLURM_GPUS_ON_NODE") or 0),
            snapshot=Path(environment["PYTHONPATH"]),
            ranks_per_node=read_setting(environment, "RANKS_PER_NODE", 0),
            idle_limit=read_setting(environment, "MAX_IDLE_STARTS", 3),
            preflight_s=read_setting(environment, "PREFLIGHT_TIMEOUT_S", 60),
            wait_s=read_setting(environment, "SLURM_WAIT", 45, least=0),
            cache=f"{get('NODE_SCRATCH') or '/tmp'}/wide-mlps-{os.getuid()}",
            python=python,
            srun_options=options,
            local_python=local,
        )

    @property
    def label(self) -> str:
        return self.number if self.task is None else f"{self.array}_{self.task}"

    @property
    def directory(self) -> Path:
        return Path("jobs", self.label)

    def for_ranks(self) -> dict[str, str]:
        """Return the environment variables that ranks get in addition to the script's variables."""
        # Compiled kernels are on the node's disk, because locks on NFS stall, and in a directory
        # of this user, because kernels are code.
        names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        names["TORCH_EXTENSIONS_DIR"] = "extensions"
        found = {name: f"{self.cache}/{directory}" for name, directory in names.items()}
        for name in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONNOUSERSITE"):
            for prefix in ("APPTAINERENV", "SINGULARITYENV"):  # override the image's variables
                found[f"{prefix}_{name}"] = os.environ.get(name, "")
        return found


def read_setting(environment: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
    value = environment.get(name)
    if value and (not value.isdecimal() or int(value) < least):
        problem = f"{name}={value} is not a whole number of at least {least}"
        raise End(f"{problem}. Fix it in cluster/site.env, or in --export", BAD_INPUT)
    return int(value) if value else default


class Job:
    def __init__(self, allocation: Allocation, words: list[str]) -> None:
        self.at = allocation
        self.words = words[1:] if words[0] in ("grid", "data_prep") else words[2:]
        """Arguments of the job script, also for a successor job."""
        self.directory, self.num_nodes = allocation.directory, allocation.num_nodes
        self.directory.mkdir(parents=True, exist_ok=True)
        self.has_begun, self.stopped, self.began_s = False, False, time.monotonic()
        self.step: subprocess.Popen[bytes] | None = None
        self.answer: dict[str, Any] = {}
        """Output of cluster.resolve: the resolved command."""
        # each rank must see all GPUs of its node
        tres = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU")
        for name in (*tres, "SLURM_TRES_PER_TASK"):
            os.environ.pop(name, None)
        os.environ.update(allocation.for_ranks())

    def receive(self, number: int, _frame: object) -> None:
        """Forward a signal to srun as USR2; srun sends USR2 to all ranks. Other signals do not
        work: NCCL uses USR1, and srun kills the ranks at TERM. At preemption, a site sends TERM or
        USR2."""
        del number
        self.stopped = True
        if self.step is not None:
            self.step.send_signal(signal.SIGUSR2)

    def log(self, text: str) -> None:
        print(f"{self.at.script} {time.strftime('%FT%T')}: {text}", flush=True)

    # ---- this node

    def resolve(self, words: list[str]) -> dict[str, Any]:
        """Check the config and return the output of cluster.resolve. Raise End if the config is not
        valid, or if this node cannot check it."""
        kept = f"--kept={self.at.snapshot}"
        code, answer = self.run_python("-m", "cluster.resolve", "--starting", kept, *words)
        if not code:
            self.answer = dict(json.loads(answer))
            return self.answer
        if self.stopped or was_stopped(code):
            raise self.start_again("stopped")
        if code == BAD_INPUT and not has_trained(self.attempts()):
            raise End("the config is not valid, so the job ends", BAD_INPUT)
        if self.run_python("-c", "")[0] == 0:
            # the config was valid in an earlier attempt: this node may lack a mount, or the run may
            # now be another job's
            raise self.blame_node(
                f"the check of the config failed on this node (exit code {code}, see above)",
                once=True,
            )
        raise self.blame_node(f"Python does not run on this node (exit code {code}, see above)")

    def run_python(self, *words: str) -> tuple[int, bytes]:
        words = (*self.at.local_python, *words)
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
        except OSError as error:
            print(f"{words[0]}: {error.strerror}", file=sys.stderr)
            return 127, b""
        return done.returncode, done.stdout

    def blame_node(self, reason: str, *, once: bool = False) -> End:
        """Requeue the job without this node. `once`: end the job if a second node has the same
        fault, because then the config is the cause."""
        others = [node for node, why in self.bad_nodes() if why == reason]
        if others and once:
            return End(f"{reason}; also on {','.join(others)}", BAD_INPUT)
        self.log(f"{self.at.node} is bad: {reason}")
        with open(self.directory / "bad-nodes", "a") as names:
            names.write(f"{self.at.node}\t{reason}\n")
        return self.start_again("bad-node")

    def bad_nodes(self) -> list[tuple[str, str]]:
        try:
            lines = (self.directory / "bad-nodes").read_text(errors="replace").splitlines()
        except OSError:
            return []
        parts = (line.partition("\t") for line in lines)
        return [(node, reason) for node, _, reason in parts if node]

    # ---- ranks

    def place_ranks(self, per_node: int | None = None) -> None:
        """Set the ranks per node, the CPUs per rank, and the address of rank 0 (MASTER_ADDR and
        MASTER_PORT)."""
        environment = os.environ
        self.ranks = per_node or self.at.ranks_per_node or self.at.gpus or 1
        self.nodes = expand_hosts(self.at.nodelist)
        lines: list[str] = []
        with suppress(SlurmError):  # the controller may fail over
            words = ("scontrol", "-o", "show", "node", self.at.nodelist)
            lines = slurm(*words, tries=3).splitlines()
        self.cpus = cpus_per_rank(environment, lines, ranks=self.ranks)
        environment.setdefault("OMP_NUM_THREADS", str(self.cpus))
        # This node is the first, and has rank 0. SLURM reaches it by its NodeAddr, even if its name
        # does not resolve.
        first = next(
            (each for each in map(facts, lines) if each.get("NodeName") == self.nodes[0]), {}
        )
        environment["MASTER_ADDR"] = first.get("NodeAddr", self.nodes[0])
        # Below the ephemeral ports; each attempt has another port, because old ranks may live.
        port = 10000 + (int(self.at.number) * 16 + 2 * self.at.restarts) % 20000
        environment["MASTER_PORT"] = str(free_port(port))

    def run_step(self, name: str, words: list[str], *, wait_s: int, cache: str) -> int:
        """Run srun and return its exit code. Each task has a log; the job's log shows task 0.

        - --wait: srun kills hanging ranks this many seconds after the first rank's end. Saving the
          last checkpoint must be faster.
        - --kill-on-bad-exit=0: a site's default of 1 would kill ranks that should exit with 2.
        - --gres: with --exclusive, steps get no GPU without a request; each rank sees all GPUs.
        - --export: overrides SBATCH_EXPORT=NONE.
        - --distribution: the ranks of a node have successive numbers.
        """
        log = f"{self.directory}/{name}"
        ends = self.directory / "ends" / f"{name}.{self.at.restarts}"
        shutil.rmtree(ends, ignore_errors=True)
        ends.mkdir(parents=True)
        first = Path(f"{log}-0000.log")
        first.touch()
        shape = {"nodes": self.num_nodes, "ntasks": self.num_nodes * self.ranks}
        shape |= {"ntasks-per-node": self.ranks, "cpus-per-task": self.cpus}
        shape |= {"wait": wait_s, "kill-on-bad-exit": 0}
        options = [f"--{option}={value}" for option, value in shape.items()]
        options += ["--export=ALL", "--distribution=block", "--open-mode=append"]
        options += [f"--output={log}-%4t.log", *self.at.srun_options]
        options += [f"--gres=gpu:{self.at.gpus}"] if self.at.gpus else []
        follow = ["tail", "-q", "-s", "0.2", "-F", "-c", f"+{first.stat().st_size + 1}", str(first)]
        with subprocess.Popen(follow, stderr=subprocess.DEVNULL) as tail:
            rank = ["bash", str(self.at.snapshot / "cluster/rank.sh"), str(ends), cache]
            try:
                self.step = subprocess.Popen(["srun", *options, *rank, *words])
            except OSError:
                tail.kill()  # `with` waits for tail
                raise
            while True:  # repeated, because ranks lose signals while they start
                if self.stopped:
                    self.step.send_signal(signal.SIGUSR2)
                with suppress(subprocess.TimeoutExpired):
                    code = self.step.wait(10)
                    break
            self.step = None
            time.sleep(0.5)  # tail prints the last lines
            tail.kill()
        if code not in (0, NAMED_BAD) and not self.stopped and not was_stopped(code):
            with suppress(OSError, ValueError, KeyError):  # a full disk cuts files
                self.show_first_failure(ends, log)
        return code if code >= 0 else 128 - code

    def show_first_failure(self, ends: Path, log: str) -> None:
        """Print the rank that failed first, with the last lines of its log."""
        found = [json.loads(path.read_text()) for path in ends.iterdir()]
        if not found:
            self.log("no rank has recorded its end (see srun's lines above): a node may be lost")
            return
        first = min(found, key=lambda each: float(each["time"]))
        own_log, code = Path(f"{log}-{first['rank']:04}.log"), first["code"]
        how = f"exit code {code}{' (out of memory?)' if code == 137 else ''}"
        who = f"rank {first['rank']} on {first['node']} failed first, with {how}"
        self.log(f"{who}; the last lines of {own_log}:")
        lines = own_log.read_text(errors="replace").rpartition("--- attempt ")[2].splitlines()[1:]
        print("".join(f"    {line}\n" for line in lines[-20:]), end="", flush=True)

    def preflight(self) -> None:
        known = len(self.bad_nodes())
        words = ["-m", "cluster.preflight", str(self.directory), "--nodes", ",".join(self.nodes)]
        words += [f"--read={path}" for path in self.answer["reads"]]
        # rank 0 waits longer, to name missing ranks; without a cache the check starts even if the
        # disk is bad
        wait_s = 8 * (self.at.preflight_s + 1)
        code = self.run_step("preflight", [*self.at.python, *words], wait_s=wait_s, cache="")
        os.environ["MASTER_PORT"] = str(free_port(int(os.environ["MASTER_PORT"]) + 1))
        if len(self.bad_nodes()) > known:
            raise self.start_again("bad-node")
        self.stopped = self.stopped or was_stopped(code)
        if code and not self.stopped:
            self.log(
                f"WARNING: the pre-flight check did not run (exit code {code}); the job continues"
            )

    def run_ranks(self, words: list[str], *, with_preflight: bool) -> int:
        self.give_up_if_idle()  # earlier attempts may have ended without a record
        before = self.attempts()
        if before and before[-1]["how"] == "lost":
            self.log("the previous attempt has recorded no end: its node may be lost")
        self.begin_start()
        commit = (self.at.snapshot / "COMMIT").read_text().strip()
        ranks = f"{self.num_nodes} x {self.ranks} ranks on {self.at.nodelist}"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        code_in = (
            f"code in {os.path.relpath(self.at.snapshot)} ({commit}), logs in {self.directory}"
        )
        self.log(f"attempt {self.at.restarts + 1}: {ranks}, {address}, {code_in}")
        if with_preflight and os.environ.get("PREFLIGHT", "1") != "0":
            self.preflight()
        if self.stopped:
            return 0
        return self.run_step("rank", words, wait_s=self.at.wait_s, cache=self.at.cache)

    def end(self, code: int, *, is_finished: bool) -> int:
        """Return the exit code if the job is finished or its config is wrong. Otherwise requeue the
        job and raise End."""
        place = self.answer["writes"]
        if is_finished:
            self.end_start("finished")
            return 0
        with suppress(OSError, ValueError):
            first = self.directory / f"ends/rank.{self.at.restarts}/0"
            if json.loads(first.read_text())["code"] == BUSY:
                self.log(f"{place} is locked by another attempt (see above); this is no failure")
                raise self.start_again("busy")
        if code == BAD_INPUT and not has_trained(self.attempts()[:-1]):
            self.end_start("refused")
            return BAD_INPUT
        # ranks that received a signal end with these exit codes
        self.stopped = self.stopped or code == 0 or was_stopped(code)
        why = f"{self.why_stopped()}, " if self.stopped else ""
        self.log(f"{place} is not finished: {why}srun ended with exit code {code}")
        raise self.start_again("stopped" if self.stopped else "failed")

    # ---- attempts

    def attempts(self) -> list[dict[str, Any]]:
        return read_attempts(self.directory / "attempts.jsonl")

    def mark(self) -> str:
        """Return a text that changes with the progress: a checksum, or the number of a build's
        files."""
        if not self.answer:
            return UNKNOWN
        total, place = 0, Path(self.answer["writes"])
        if self.answer["is_build"]:
            walk = os.walk(place)  # other tasks rename files at the same time
            return str(sum(len(folders) + len(files) for _, folders, files in walk))
        names = [f"{above}{file}" for above in ("", "*/", "*/*/") for file in PROGRESS]
        for path in sorted(path for name in names for path in place.glob(name)):
            with suppress(OSError):
                total = zlib.crc32(str(path).encode() + path.read_bytes(), total)
        return str(total)

    def record(self, **values: object) -> None:
        line = {"restart": self.at.restarts, "mark": self.mark(), "time": time.strftime("%FT%T")}
        try:
            append_attempt(self.directory / "attempts.jsonl", line | values)
        except OSError as error:  # a job that cannot write must not start for ever
            problem = f"cannot write {self.directory}/attempts.jsonl ({error.strerror})"
            raise End(f"{problem}; not requeued") from None

    def begin_start(self) -> None:
        self.has_begun = True
        self.record(event="begin", nodes=self.at.nodelist)

    def end_start(self, how: str) -> None:
        """Record the end of this attempt in attempts.jsonl. Raise End if SLURM has already requeued
        the job. Its next attempt may have begun, for example if this node was frozen; then nothing
        is recorded."""
        newest = self.at.restarts
        with suppress(SlurmError):
            newest = int(about_job(self.at.label).get("Restarts", newest))
        attempts = self.attempts()
        if newest <= self.at.restarts or (attempts and attempts[-1]["restart"] == self.at.restarts):
            self.record(event="end", how=how, seconds=round(time.monotonic() - self.began_s))
        if newest > self.at.restarts:
            number = self.at.restarts + 1
            raise End(
                f"SLURM has requeued the job; this was attempt {number}, the next is attempt"
                f" {newest + 1}"
            )

    def give_up_if_idle(self) -> None:
        if reason := give_up_reason(self.attempts(), mark=self.mark(), limit=self.at.idle_limit):
            raise End(f"{reason}. See {self.directory}")

    def why_stopped(self) -> str:
        with suppress(SlurmError):
            about = about_job(self.at.label)
            preempted = about.get("PreemptTime", "None")
            # an earlier attempt's preemption is older, because requeued jobs wait before they start
            if preempted != "None" and preempted >= about.get("StartTime", ""):
                return "the job was preempted"
        return "the ranks received a signal"

    def start_again(self, how: str) -> End:
        """Requeue the job and return the end of this attempt. Raise End if the job must not start
        again."""
        if not self.has_begun:
            # each attempt counts; otherwise an early failure would be repeated for ever
            self.begin_start()
        self.end_start(how)
        label = self.at.label
        try:
            state = state_of(label, tries=PATIENCE)
            about = about_job(label, tries=PATIENCE)
            is_alone = about.get("Requeue") == "0"  # SLURM does not requeue this job
            if state != "RUNNING" and not (is_alone and "preempted" in self.why_stopped()):
                why = "the job was canceled or requeued, or a node failed"
                raise End(f"SLURM is ending this attempt ({state}): {why}")
            self.give_up_if_idle()
            bad = sorted({node for node, _ in self.bad_nodes()})
            if bad:
                self.refuse_if_too_few(bad, about)
            if is_alone:
                return self.submit_successor(about, bad)
            self.log("requeueing")
            self.stopped = False
            slurm("scontrol", "requeue", label, tries=PATIENCE)
        except SlurmError as error:
            raise End(f"the job cannot be continued ({error}); submit it again to resume") from None
        if bad:
            before = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", about.get("ExcNodeList", ""))
            self.exclude(",".join(dict.fromkeys([*bad, *before])))
        # SLURM usually sends a signal after the requeue, and kills this process after KillWait
        for _ in range(30):
            if self.stopped:
                break
            time.sleep(0.1)
        return End("")

    def submit_successor(self, about: Mapping[str, str], bad: list[str]) -> End:
        """Submit a successor if SLURM does not requeue this job.

        1. Submit the same script with the same options. The successor begins after this job.
        2. Copy this job's attempts (they still count), bad nodes and output paths
           (jobs/JOB/writes).
        3. Make the jobs that wait for this job wait for the successor.
        4. Exit with 0, because jobs that wait for the complete array need success of this task.
        """
        at, label, noted = self.at, self.at.label, self.directory / "successor"
        if noted.exists():
            return End(f"job {noted.read_text()} continues this job", 0)
        options = [*inherited(about), *shape(about), f"--job-name={at.script}"]
        options += [f"--dependency=afterany:{label}"]
        options += [f"--array={at.task}"] if at.task is not None else []
        options += [f"--exclude={','.join(bad)}"] if bad else []
        # SLURM does not quote the script's path, and adds the arguments
        name = re.findall(r"[^/]+?\.slurm(?!\S)", about["Command"])[0]
        script = at.snapshot / "cluster" / name
        words = ("sbatch", "--parsable", *options, str(script), *self.words)
        said = slurm(*words, tries=PATIENCE, environment=new_job(os.environ))
        number = said.split()[-1].partition(";")[0]
        successor = number if at.task is None else f"{number}_{at.task}"
        noted.write_text(successor)
        directory = Path("jobs", successor)
        directory.mkdir(parents=True, exist_ok=True)
        Path("jobs", number).mkdir(exist_ok=True)
        for name in ("attempts.jsonl", "bad-nodes"):
            with suppress(FileNotFoundError):
                shutil.copy(self.directory / name, directory)
        with suppress(FileNotFoundError):
            lines = Path("jobs", at.array, "writes").read_text().splitlines(keepends=True)
            mine = [line for line in lines if line.partition("\t")[0] in ("-", at.task)]
            Path("jobs", number, "writes").write_text("".join(mine))
        self.log(f"this queue does not requeue jobs; job {successor} continues this job")
        try:
            wait_for_successor(at.array, label, successor)
        except SlurmError as error:
            raise End(
                f"jobs after {label} cannot wait for {successor} ({error}); submit them again"
            ) from None
        return End("", 0)

    def refuse_if_too_few(self, bad: list[str], about: dict[str, str]) -> None:
        """Raise End if the job has too few good nodes and would pend forever."""
        wanted = expand_hosts(about["ReqNodeList"]) if "ReqNodeList" in about else []
        if wanted := sorted(set(wanted) & set(bad)):
            problem = f"--nodelist requests bad nodes ({','.join(wanted)})"
            raise End(f"not requeued: {problem}; submit the job again without them")
        partition = os.environ["SLURM_JOB_PARTITION"]
        try:
            left = set(slurm("sinfo", "-h", "-N", "-p", partition, "-o", "%N", tries=3).split())
        except SlurmError:
            return  # requeue without this check
        left -= set(bad)
        if len(left) < self.num_nodes:
            problem = f"partition {partition} has {len(left)} nodes other than {','.join(bad)}"
            raise End(f"not requeued: {problem}; submit the job again with fewer --nodes")

    def exclude(self, nodes: str) -> None:
        """Exclude nodes from the next attempt. SLURM allows this only for pending jobs. After the
        requeue the job is pending, and SLURM kills this process only KillWait seconds later."""
        for _ in range(20):
            with suppress(SlurmError):
                slurm("scontrol", "update", f"JobId={self.at.label}", f"ExcNodeList={nodes}")
                self.log(f"the next attempt avoids {nodes}")
                return
            time.sleep(0.2)
        self.log(f"WARNING: {nodes} could not be excluded from the next attempt")


PROGRESS = ("checkpoints/latest", "result.json")
"""Files of a run that change when the run makes progress."""


def was_stopped(code: int) -> bool:
    """Return True if a signal or Ctrl-C caused the exit code."""
    return code in (130, 138, 140, 143, -2, -10, -12, -15)


def free_port(port: int) -> int:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
        port += 1


# ---- commands of the job scripts


def run_command(job: Job, words: list[str]) -> int:
    """Run a command, or one member of a grid, and end or requeue the job."""
    if words[0] == "grid":
        words = [*words, job.at.task or ""]
    answer, at = job.resolve(words), job.at
    if words[0] == "grid":
        job.log(f"member {words[3]} of {words[1]} {words[2]}: {' '.join(answer['words'])}")
    place = answer["writes"]
    if answer["state"] == "finished":
        job.log(f"{place} is finished; choose another path to repeat the command")
        return 0
    if answer["state"] == "blind":
        raise job.blame_node(f"{answer['about']} does not exist on this node", once=True)
    if answer["needs_one_rank"]:
        job.num_nodes = 1
    job.place_ranks(per_node=1 if answer["needs_one_rank"] else None)
    extra = []
    if answer["can_stage"] and os.environ.get("STAGE_DATA", "0") != "0":
        extra = [f"data.stage_dir={at.cache}/data"]
    command = answer["words"]
    ranks = [*at.python, "-m", *command[:3], *extra, *command[3:]]
    code, is_finished = job.run_ranks(ranks, with_preflight=True), False
    if Path(place, answer["result"]).exists():
        # finished when all seeds are finished
        failed, found = job.run_python("-m", "cluster.resolve", f"--kept={at.snapshot}", *words)
        is_finished = not failed and json.loads(found)["state"] == "finished"
    return job.end(code, is_finished=is_finished)


def draw(job: Job, words: list[str]) -> int:
    kept = f"--kept={job.at.snapshot}"
    return subprocess.run([*job.at.local_python, "-m", *words, kept], check=False).returncode


def continue_plan(job: Job, words: list[str]) -> int:
    """Submit the next jobs of a plan (see queue_jobs.py), outside of containers, which cannot call
    SLURM."""
    path, since, *options = words[2:]
    os.environ.update(PLAN_KEPT=str(job.at.snapshot), PLAN_SINCE=since)
    command = [".venv/bin/python", "-m", *words[:2], *options, path]
    if subprocess.run(command, check=False).returncode == 0:
        return 0
    job.log(f"the rest of {path} is not submitted (see above); run cluster/submit {path}")
    raise job.start_again("failed")


def prepare(job: Job, words: list[str]) -> int:
    """Build this array task's shards of a dataset, or merge and verify all shards."""
    part, _, task = words[1].partition("=") if words[1:] else ("", "", "")
    part, at = part if part in ("--parts", "--merge") else "", job.at
    words = words[2:] if part else words[1:]
    answer = job.resolve(["data_prep", "build", *words])
    out = answer["writes"]
    if part != "--merge" and answer["state"] == "finished":
        job.log(f"{out} is already built")
        return 0
    job.place_ranks(per_node=1)
    if part == "--merge":
        both = '"${@:2}" -m data_prep merge "$1" && "${@:2}" -m data_prep verify "$1"'
        command = ["bash", "-c", both, "merge-and-verify", out, *at.python]
    else:
        first, last, count = at.span
        if not task and (at.task is None or last - first + 1 != count):
            raise End("request all tasks of an array, without gaps: --array=0-7", BAD_INPUT)
        number = int(at.task or 0)
        if not part and number == first:
            submit_merge(job, words)
        task = task or f"{number - first}/{count}"
        job.words = [f"--parts={task}", *words]  # a successor is an array of one task
        command = [*at.python, "-m", *answer["words"], "--task", task]
    code = job.run_ranks(command, with_preflight=False)
    return job.end(code, is_finished=code == 0 and not job.stopped)


def submit_merge(job: Job, words: list[str]) -> None:
    """Submit the merge job, from the first task of the array. If this attempt is killed before it
    records the merge job, the next attempt submits a second one."""
    noted = Path("jobs", job.at.array, "merge")
    if noted.exists():
        return
    options = [f"--dependency=afterok:{job.at.array}", "--kill-on-invalid-dep=yes", "--array=0"]
    script = [str(job.at.snapshot / "cluster/data_prep.slurm"), "--merge", *words]
    try:  # a minute for each request, because this task's shards wait
        options += inherited(about_job(job.at.label, tries=6))
        sbatch = ("sbatch", "--parsable", *options, *script)
        noted.write_text(slurm(*sbatch, tries=6, environment=new_job(os.environ)))
    except SlurmError as error:
        command = f"sbatch --array=0 cluster/data_prep.slurm --merge {shlex.join(words)}"
        fix = f"submit it after all tasks: {command}"
        job.log(f"WARNING: the merge could not be submitted ({error}); {fix}")


def main(words: list[str]) -> int:
    console.install()
    try:
        job = Job(Allocation.from_env(os.environ), words)
    except End as end:
        print(end, flush=True)
        return end.code
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, job.receive)
    note = os.environ.pop("STOPPED", "")  # start.sh makes this file at a signal
    job.stopped = job.stopped or os.path.exists(note)  # noqa: PTH110
    try:
        try:
            others = {"data_prep": prepare, "analysis": draw, "cluster": continue_plan}
            return others.get(words[0], run_command)(job, words)
        except End:
            raise
        except Exception as error:  # noqa: BLE001 (the run can continue)
            if not isinstance(error, SlurmError):
                traceback.print_exc()
            job.log(f"{type(error).__name__} in cluster/job.py itself: {error}")
            raise job.start_again("failed") from None
    except End as end:
        if str(end):
            job.log(str(end))
        return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
