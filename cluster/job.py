"""A job from its start to its end or its next start: what every *.slurm runs on its first node,
outside of containers.

    job.py pretrain train | finetune probe | finetune tune ... CONFIG [key=value ...] until their
    run_dir holds result.json job.py grid PLAN STAGE
    the same for a member of a grid job.py data_prep [--parts | --merge] CONFIG [key=value ...]
    a part of a dataset, or their merge job.py analysis figure PLAN
    what the plan names, drawn on this node

1. The config is checked, here, in a second or two (cluster.work answers in JSON). 2. Each node is
   measured (cluster.preflight).
3. The ranks run, a log each. 4. USR2 (300 s before the limit, or at preemption) and TERM are passed
   on to them: they save at a
step boundary and exit. 5. An unfinished job puts itself back into the queue, without the nodes that
were found bad; unless the config is wrong, it was cancelled, or its starts lead nowhere
(starts.py). Only exit code 2, at the first start that gets so far, means that the config is wrong:
whatever else goes wrong may be the node's fault, until a second node has the same.

jobs/JOB (or jobs/ARRAY_TASK) has the logs of all ranks, starts.jsonl and bad-nodes. Imports the
standard library alone (Python
3.9 or newer), and so does data_prep/console.py: it must also run where .venv does not, to name that
node.

An error of this file itself ends a start as a failure of a rank does: it is shown, and the job goes
back into the queue.

Long because it is one start of a job from its first line to its requeue, which a stranger reads in
one piece.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.slurm import (
    ALL_TASKS,
    SlurmError,
    about_job,
    allocated_gpus,
    cpus_per_rank,
    facts,
    hosts,
    inherited,
    lines_of,
    new_job,
    slurm,
    state_of,
)
from cluster.starts import UNKNOWN, give_up_reason, has_trained, read_starts
from data_prep import console

BAD_INPUT, NAMED_BAD, BUSY = 2, 3, 75
"""Exit codes: of a wrong config; of the pre-flight; of ranks whose run another start holds
(pretrain/cli.py)."""
PATIENCE = 18
"""How often SLURM is asked, ten seconds apart."""
IN_CONTAINER = ["/bin/sh", "-c", 'PATH=/opt/wide-mlps/.venv/bin:$PATH exec python3 "$@"', "python3"]
"""The environment of cluster/apptainer.def, if the image is one of these; otherwise the image's own
python3."""


class End(Exception):  # noqa: N818
    """The end of this start, with its exit code; the text is for the log."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


class Job:
    def __init__(self) -> None:
        environment = os.environ
        self.name, self.number = environment["SLURM_JOB_NAME"], environment["SLURM_JOB_ID"]
        self.array, self.task = (
            environment.get("SLURM_ARRAY_JOB_ID"),
            environment.get("SLURM_ARRAY_TASK_ID"),
        )
        self.label = f"{self.array}_{self.task}" if self.array else self.number
        self.directory, self.restarts = (
            Path("jobs", self.label),
            int(environment.get("SLURM_RESTART_COUNT") or 0),
        )
        self.snapshot, self.node = (
            Path(environment["PYTHONPATH"]),
            environment.get("SLURMD_NODENAME") or socket.gethostname(),
        )
        self.num_nodes = int(environment.get("SLURM_JOB_NUM_NODES") or 1)
        self.has_begun, self.stopped, self.began_s = False, False, time.monotonic()
        self.step: subprocess.Popen[bytes] | None = None
        self.run_dir, self.reads = str(self.directory), list[str]()
        self.mark: Callable[[], str] = lambda: UNKNOWN
        self.directory.mkdir(parents=True, exist_ok=True)
        # each rank sees all GPUs, however they were asked for
        for name in (
            "SLURM_GPUS_PER_TASK",
            "SLURM_GPU_BIND",
            "SLURM_NTASKS_PER_GPU",
            "SLURM_TRES_PER_TASK",
        ):
            environment.pop(name, None)
        # Compiled kernels on the node itself (locks on NFS stall) and in our own directory only:
        # they are loaded as code.
        self.cache = f"{environment.get('NODE_SCRATCH') or '/tmp'}/wide-mlps-{os.getuid()}"
        environment["TRITON_CACHE_DIR"], environment["TORCHINDUCTOR_CACHE_DIR"] = (
            f"{self.cache}/triton",
            f"{self.cache}/inductor",
        )
        environment["TORCH_EXTENSIONS_DIR"] = f"{self.cache}/extensions"
        self.python, self.container_options, self.python_here = python_words()

    def receive(self, number: int, _frame: object) -> None:
        """USR2, because NCCL takes USR1; TERM as well, for at preemption sites send the one or the
        other. To srun, which passes it on to all ranks (at TERM it would kill them)."""
        del number
        self.stopped = True
        if self.step is not None:
            self.step.send_signal(signal.SIGUSR2)

    def log(self, text: str) -> None:
        print(f"{self.name} {time.strftime('%FT%T')}: {text}", flush=True)

    # ---- what this node can do
    # ----------------------------------------------------------------------------------------

    def ask(self, words: list[str]) -> dict[str, Any]:
        """cluster.work's answer. Where its exit code is 2 the config is wrong, and where Python
        does not run this node is bad."""
        was_good = self.directory / "config-was-good"
        code, answer = self.run_python(
            "-m", "cluster.work", "--starting", f"--kept={self.snapshot}", *words
        )
        if code and (self.stopped or was_stopped(code)):
            raise self.start_again("stopped")
        if code == BAD_INPUT and not was_good.exists():
            raise End("the config will not do; not started", BAD_INPUT)
        if code and self.run_python("-c", "")[0] == 0:
            # a config that was good at a start before has not become bad: this node may see less,
            # or the run is another's by now
            raise self.bad_here(
                f"the check of the config failed there (exit code {code}, see above)"
            )
        if code:
            raise self.this_node_is_bad(f"Python does not run there (exit code {code}, see above)")
        was_good.touch()
        return dict(json.loads(answer))

    def run_python(self, *words: str) -> tuple[int, bytes]:
        try:
            done = subprocess.run([*self.python_here, *words], stdout=subprocess.PIPE, check=False)
        except OSError as error:
            print(f"{self.python_here[0]}: {error.strerror}", file=sys.stderr)
            return 127, b""
        return done.returncode, done.stdout

    def bad_here(self, reason: str) -> End:
        """Of one node it is that node's fault; of two it is not."""
        others = [node for node, why in self.bad_nodes() if why == reason]
        return (
            End(f"{reason}; on {','.join(others)} as well", BAD_INPUT)
            if others
            else self.this_node_is_bad(reason)
        )

    def this_node_is_bad(self, reason: str) -> End:
        self.log(f"{self.node} is bad: {reason}")
        with open(self.directory / "bad-nodes", "a") as names:
            names.write(f"{self.node}\t{reason}\n")
        return self.start_again("bad-node")

    def bad_nodes(self) -> list[tuple[str, str]]:
        try:
            lines = (self.directory / "bad-nodes").read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [
            (node, reason) for node, _, reason in (line.partition("\t") for line in lines) if node
        ]

    # ---- ranks
    # ----------------------------------------------------------------------------------------------

    def settle_ranks(self, per_node: int | None = None) -> None:
        """How many, and where they meet."""
        environment = os.environ
        self.gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
        self.ranks = per_node or setting("RANKS_PER_NODE", self.gpus or 1)
        self.nodes = hosts(environment["SLURM_JOB_NODELIST"])
        lines, about = list[str](), ""
        with suppress(
            SlurmError
        ):  # a controller that fails over now ends no job: the names are used as they are
            lines = slurm(
                "scontrol", "-o", "show", "node", environment["SLURM_JOB_NODELIST"], tries=3
            ).splitlines()
            about = slurm("scontrol", "-d", "-o", "show", "job", self.label, tries=3)
        self.cpus = cpus_per_rank(environment, lines, ranks=self.ranks)
        environment.setdefault("OMP_NUM_THREADS", str(self.cpus))
        least = min(allocated_gpus(about), default=self.gpus)
        if least < self.gpus:
            text = (
                f"its nodes have from {least} to {self.gpus} GPUs and more; ask for as many of"
                " each: --gpus-per-node=N"
            )
            raise End(text, BAD_INPUT)
        if not (self.gpus or per_node or environment.get("RANKS_PER_NODE")):
            self.warn_of_idle_gpus()
        # This node is the first, and rank 0's. torch waits minutes for a name that does not
        # resolve: then the address in SLURM.
        of_slurm = next(
            (
                facts(line).get("NodeAddr", "")
                for line in lines
                if facts(line).get("NodeName") == self.nodes[0]
            ),
            "",
        )
        own: list[str] = []
        with suppress(OSError):  # a node may lack that program
            own = subprocess.run(
                ["hostname", "-I"], capture_output=True, text=True, check=False
            ).stdout.split()
        names = (self.nodes[0], of_slurm, *own[:1])
        environment["MASTER_ADDR"] = next(
            (name for name in names if name and resolves(name)), names[0]
        )
        # Below the ephemeral ports; another for each job and each start, whose ranks may linger;
        # the next one if it is taken.
        environment["MASTER_PORT"] = str(
            free_port(10000 + (int(self.number) * 16 + 2 * self.restarts) % 20000)
        )

    def warn_of_idle_gpus(self) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                ["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20
            )
            idle = done.stdout.count("GPU ")
            remedy = (
                f"ask for them (SBATCH_GPUS_PER_NODE={idle} in cluster/site.env), or set"
                f" RANKS_PER_NODE={idle}"
            )
            if idle > 1:
                self.log(
                    f"WARNING: {self.node} has {idle} GPUs, and the job has asked for none: one"
                    f" rank takes one; {remedy}"
                )

    def run_step(self, name: str, words: list[str], *, wait_s: int, cache: str) -> int:
        """srun's exit code; one log for each task, that of the first shown in the job's.

        --wait: how many seconds after the first rank has ended those that hang are killed; longer
        than a checkpoint's last write. No --kill-on-bad-exit, which sites may have as their
        default: it kills ranks that are about to exit with 2. --gres: with
        --exclusive steps get no GPU unasked; each rank sees all. --export: against
        SBATCH_EXPORT=NONE. --distribution: the ranks of a node have successive numbers, whatever
        SLURM_DISTRIBUTION or the site's default says.
        """
        log, ends = f"{self.directory}/{name}", self.directory / "ends" / f"{name}.{self.restarts}"
        shutil.rmtree(ends, ignore_errors=True)
        ends.mkdir(parents=True)
        first = Path(f"{log}-0000.log")
        first.touch()
        options = [
            f"--nodes={self.num_nodes}",
            f"--ntasks={self.num_nodes * self.ranks}",
            f"--ntasks-per-node={self.ranks}",
        ]
        options += [
            f"--cpus-per-task={self.cpus}",
            f"--wait={wait_s}",
            "--kill-on-bad-exit=0",
            "--export=ALL",
        ]
        options += [
            "--distribution=block",
            "--open-mode=append",
            f"--output={log}-%4t.log",
            *self.container_options,
        ]
        options += [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        follow = ["tail", "-q", "-s", "0.2", "-F", "-c", f"+{first.stat().st_size + 1}", str(first)]
        with subprocess.Popen(follow, stderr=subprocess.DEVNULL) as tail:
            rank = ["bash", str(self.snapshot / "cluster/rank.sh"), str(ends), cache]
            try:
                self.step = subprocess.Popen(["srun", *options, *rank, *words])
            except OSError:
                tail.kill()  # or its `with` would wait for it
                raise
            while True:  # again and again: what comes while they start is lost
                if self.stopped:
                    self.step.send_signal(signal.SIGUSR2)
                with suppress(subprocess.TimeoutExpired):
                    code = self.step.wait(10)
                    break
            self.step = None
            time.sleep(0.5)  # for the last lines
            tail.kill()
        if code not in (0, NAMED_BAD) and not self.stopped and not was_stopped(code):
            with suppress(
                OSError, ValueError, KeyError
            ):  # a record or a log that a full disk has cut
                self.show_first_failure(ends, log)
        return code if code >= 0 else 128 - code

    def show_first_failure(self, ends: Path, log: str) -> None:
        """Of the ranks' own ends the earliest bad one; of those of the same seconds, one that has
        written why."""
        found = sorted(
            (json.loads(path.read_text()) for path in ends.iterdir()),
            key=lambda each: float(each["time"]),
        )
        if not found:
            self.log(
                "no rank has recorded its end (see srun's lines above): was a node lost, or SLURM's"
                " daemon there?"
            )
            return
        words: list[str] = []
        for each in [each for each in found if each["time"] <= found[0]["time"] + 2]:
            lines = Path(f"{log}-{each['rank']:04}.log").read_text(errors="replace").splitlines()
            begins = [number for number, line in enumerate(lines) if line.startswith("--- start ")]
            words = lines[begins[-1] + 1 if begins else 0 :][-20:]
            if words:
                break
        else:
            each = found[0]
        code, place = each["code"], f"{log}-{each['rank']:04}.log"
        how = f", by signal {signal.Signals(code - 128).name}" if 128 < code < 160 else ""
        how += ": out of memory?" if code == 137 else ""
        self.log(
            f"rank {each['rank']} on {each['node']} failed first, with exit code {code}{how}; the"
            f" last lines of {place}:"
        )
        print("".join(f"    {line}\n" for line in words), end="", flush=True)

    def preflight(self) -> None:
        """Ends the start if a node is bad."""
        known, patience_s = len(self.bad_nodes()), setting("PREFLIGHT_TIMEOUT_S", 60)
        words = [
            *self.python,
            "-m",
            "cluster.preflight",
            str(self.directory),
            "--nodes",
            ",".join(self.nodes),
        ]
        words += [f"--read={path}" for path in self.reads]
        # its first rank waits longer for those that do not come, to name them; without a cache it
        # starts where that disk is bad
        code = self.run_step("preflight", words, wait_s=8 * (patience_s + 1), cache="")
        os.environ["MASTER_PORT"] = str(free_port(int(os.environ["MASTER_PORT"]) + 1))
        if len(self.bad_nodes()) > known:
            raise self.start_again("bad-node")
        self.stopped = self.stopped or was_stopped(code)
        if code and not self.stopped:
            self.log(f"WARNING: the pre-flight could not be made ({code}); going on without it")

    def live(
        self, words: list[str], *, is_finished: Callable[[int], bool], with_preflight: bool
    ) -> int:
        """One start; returns when all is done, raises `End` otherwise."""
        wait_s = setting("SLURM_WAIT", 45, least=0)
        self.give_up_if_idle()  # the starts before may have ended without a word
        before = read_starts(self.directory / "starts.jsonl")
        if before and before[-1]["how"] == "lost":
            self.log("the start before has left no end: was its node lost?")
        self.begin_start()
        commit = (self.snapshot / "COMMIT").read_text().strip()
        ranks = f"{self.num_nodes} x {self.ranks} ranks on {os.environ['SLURM_JOB_NODELIST']}"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        code_in = f"code in {os.path.relpath(self.snapshot)} ({commit}), logs in {self.directory}"
        self.log(f"start {self.restarts + 1}: {ranks}, {address}, {code_in}")
        if with_preflight and os.environ.get("PREFLIGHT", "1") != "0":
            self.preflight()
        code = 0 if self.stopped else self.run_step("rank", words, wait_s=wait_s, cache=self.cache)
        if is_finished(code):
            self.end_start("finished")
            return 0
        with suppress(OSError, ValueError):
            first = json.loads((self.directory / f"ends/rank.{self.restarts}/0").read_text())
            if first["code"] == BUSY:
                self.log(
                    f"{self.run_dir} is held by another start (see above), which is no failure of"
                    " this one"
                )
                raise self.start_again("busy")
        if code == BAD_INPUT and not has_trained(read_starts(self.directory / "starts.jsonl")[:-1]):
            self.end_start("refused")
            return BAD_INPUT
        self.stopped = (
            self.stopped or code == 0 or was_stopped(code)
        )  # as ranks exit that receive a signal, whoever sent it
        why = f"{self.why_stopped()}, " if self.stopped else ""
        self.log(f"{self.run_dir} is not finished: {why}srun ended with {code}")
        raise self.start_again("stopped" if self.stopped else "failed")

    # ---- starts
    # ----------------------------------------------------------------------------------------------

    def record(self, **values: object) -> None:
        """Or a job that cannot write would start again for ever."""
        line = {
            "restart": self.restarts,
            "mark": self.mark(),
            "time": time.strftime("%FT%T"),
            **values,
        }
        try:
            with open(self.directory / "starts.jsonl", "ab+") as file:
                file.seek(max(0, file.tell() - 1))
                is_cut = file.read() not in (b"", b"\n")  # by the end of the node that wrote it
                file.write(("\n" * is_cut + json.dumps(line) + "\n").encode())
        except OSError as error:
            raise End(
                f"cannot write {self.directory}/starts.jsonl ({error.strerror}); not started again"
            ) from None

    def begin_start(self) -> None:
        self.has_begun = True
        self.record(event="begin", nodes=os.environ["SLURM_JOB_NODELIST"])

    def end_start(self, how: str) -> None:
        """SLURM counts on as soon as it takes the job back, so a start that is requeued still
        records its end. One whose node was frozen may wake up when the next has begun: then it
        records nothing, and puts nothing back.
        """
        newest = self.restarts
        with suppress(SlurmError):
            newest = int(about_job(self.label).get("Restarts", newest))
        starts = read_starts(self.directory / "starts.jsonl")
        if newest <= self.restarts or (starts and starts[-1]["restart"] == self.restarts):
            self.record(event="end", how=how, seconds=round(time.monotonic() - self.began_s))
        if newest > self.restarts:
            raise End(
                f"SLURM has taken the job back; this was start {self.restarts + 1}, the next is"
                f" start {newest + 1}"
            )

    def give_up_if_idle(self) -> None:
        starts, limit = read_starts(self.directory / "starts.jsonl"), setting("MAX_IDLE_STARTS", 3)
        reason = give_up_reason(starts, mark=self.mark(), limit=limit, run_dir=self.run_dir)
        if reason:
            raise End(f"{reason}. See {self.directory}")

    def why_stopped(self) -> str:
        """Whole seconds: a preemption before this start was earlier than that, for what is requeued
        waits."""
        with suppress(SlurmError):
            about = about_job(self.label)
            preempted = about.get("PreemptTime", "None")
            if preempted != "None" and preempted >= about.get("StartTime", ""):
                return "it was preempted"
        return "its ranks received a signal"

    def start_again(self, how: str) -> End:
        """Puts the job back into the queue, or raises the reason why not. Returned, to be raised,
        is the end of this start."""
        if not self.has_begun:
            # each start counts, or one that fails early would be repeated for ever
            self.begin_start()
        self.end_start(how)
        try:
            state = state_of(self.label, tries=PATIENCE)
            if state != "RUNNING":
                raise End(
                    f"SLURM is ending this start ({state}): the job was cancelled or requeued, or a"
                    " node failed"
                )
            self.give_up_if_idle()
            about = about_job(self.label, tries=PATIENCE)
            bad = sorted({node for node, _ in self.bad_nodes()})
            if bad:
                self.refuse_if_too_few(bad, about)
        except SlurmError as error:
            raise End(f"SLURM does not answer ({error}); submit it again to go on") from None
        self.log("requeueing")
        self.stopped = False
        try:
            slurm("scontrol", "requeue", self.label, tries=PATIENCE)
        except SlurmError as error:
            raise End(
                f"the job cannot be requeued here ({error}); submit it again to go on"
            ) from None
        if bad:
            before = re.findall(
                r"(?:[^,\[]|\[[^\]]*\])+", about.get("ExcNodeList", "")
            )  # n9,m[1-3]
            self.exclude(",".join(dict.fromkeys([*bad, *before])))
        # SLURM mostly sends a signal once it has taken the job back, and kills after KillWait: no
        # need to wait for that
        for _ in range(30):
            if self.stopped:
                break
            time.sleep(0.1)
        return End("")

    def refuse_if_too_few(self, bad: list[str], about: dict[str, str]) -> None:
        """A job whose nodes do not suffice would pend for ever: SLURM may neither leave a
        --nodelist's node out nor take it."""
        wanted = (
            sorted(set(hosts(about["ReqNodeList"])) & set(bad)) if "ReqNodeList" in about else []
        )
        if wanted:
            raise End(
                f"not started again: {','.join(wanted)} will not do, and --nodelist asks for it;"
                " submit it again without"
            )
        features, partition = about.get("Features", ""), os.environ["SLURM_JOB_PARTITION"]
        needed = set(filter(None, features.split("&")))
        if not re.fullmatch(r"[A-Za-z0-9_.\-&]*", features):
            features, needed = "", set()  # more than a list of what nodes must have
        try:
            lines = [
                line.split()
                for line in slurm(
                    "sinfo", "-h", "-N", "-p", partition, "-o", "%N %f", tries=3
                ).splitlines()
            ]
        except SlurmError:
            return  # it goes into the queue without the estimate
        left = {node for node, has in lines if needed <= set(has.split(","))} - set(bad)
        if len(left) < self.num_nodes:
            has_left = (
                f"without {','.join(bad)} partition {partition} has {len(left)}"
                f" nodes{' with ' * bool(features)}{features}"
            )
            raise End(f"not started again: {has_left}; submit it again with fewer --nodes")

    def exclude(self, nodes: str) -> None:
        """Only a pending job's nodes can be chosen, and only now is it one: SLURM lets this process
        go on for KillWait."""
        for _ in range(20):
            with suppress(SlurmError):
                slurm("scontrol", "update", f"JobId={self.label}", f"ExcNodeList={nodes}")
                self.log(f"the next start avoids {nodes}")
                return
            time.sleep(0.2)
        self.log(f"WARNING: {nodes} could not be excluded from the next start")


def setting(name: str, otherwise: int, *, least: int = 1) -> int:
    """A mistake in it would meet every start."""
    value = os.environ.get(name) or str(otherwise)
    if not value.isdecimal() or int(value) < least:
        raise End(
            f"{name}={value} is no whole number from {least} on; mend it in cluster/site.env, or in"
            " --export",
            BAD_INPUT,
        )
    return int(value)


def was_stopped(code: int) -> bool:
    """By a signal, or as after Ctrl-C."""
    return code in (130, 138, 140, 143, -2, -10, -12, -15)


def resolves(name: str) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        words = ["getent", "ahosts", name]
        return (
            subprocess.run(words, stdout=subprocess.DEVNULL, check=False, timeout=5).returncode == 0
        )
    return False


def free_port(port: int) -> int:
    """The first from there on that nobody listens on."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
        port += 1


def python_words() -> tuple[list[str], list[str], list[str]]:
    """The words that start Python on a node under srun, options for that srun, and the words that
    start it here, outside of srun.

    In a container the repository is seen at its own path, with CONTAINER_MOUNTS and NODE_SCRATCH;
    variables of the job win over the image's own; packages in ~/.local are not used, for they would
    shadow the locked ones. Pyxis makes containers in srun alone: there .venv if there is one,
    otherwise a step of one task beside the others.
    """
    environment, here = os.environ, str(Path.cwd())
    mounts = [
        here,
        *filter(
            None,
            [*environment.get("CONTAINER_MOUNTS", "").split(","), environment.get("NODE_SCRATCH")],
        ),
    ]
    image = environment.get("APPTAINER_IMAGE")
    if image:
        program = "apptainer" if shutil.which("apptainer") else "singularity"
        environment["PYTHONNOUSERSITE"] = "1"
        for name in (
            "PYTHONPATH",
            "PYTHONSAFEPATH",
            "PYTHONNOUSERSITE",
        ):  # variables of this prefix win over the image's own
            environment[f"{program.upper()}ENV_{name}"] = environment.get(name, "")
        words = [program, "exec", "--bind", ",".join(mounts), "--pwd", here]
        words += ["--nv"] if Path("/dev/nvidiactl").exists() else []
        words += [image, *IN_CONTAINER]
        return words, [], words
    image = environment.get("PYXIS_IMAGE")
    if image:
        environment["PYTHONNOUSERSITE"] = "1"
        pairs = ",".join(each if ":" in each else f"{each}:{each}" for each in mounts)
        options = [
            f"--container-image={image}",
            f"--container-mounts={pairs}",
            f"--container-workdir={here}",
        ]
        options += ["--container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONNOUSERSITE"]
        if os.access(".venv/bin/python", os.X_OK):
            return IN_CONTAINER, options, [".venv/bin/python"]
        node = f"--nodelist={socket.gethostname().partition('.')[0]}"
        alone = ["srun", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1", node]
        return IN_CONTAINER, options, [*alone, *options, *IN_CONTAINER]
    return [".venv/bin/python"], [], [".venv/bin/python"]


# ---- what the job scripts run
# -----------------------------------------------------------------------------------------


def run_verb(job: Job, words: list[str]) -> int:
    if len(words) < (3 if words[0] != "grid" else 2):
        raise End(
            f"no config given; sbatch cluster/{job.name}.slurm CONFIG [key=value ...]", BAD_INPUT
        )
    if words[0] == "grid":
        if len(words) != 3:
            raise End(
                "overrides are written in the plan file; sbatch --array=... cluster/grid.slurm PLAN"
                " STAGE",
                BAD_INPUT,
            )
        if job.task is None:
            raise End(
                f"which members? cluster/submit cluster/grid.slurm {words[1]} {words[2]}", BAD_INPUT
            )
        words = [*words, job.task]
    elif job.task is not None:
        raise End(
            "an array of one run would fight over it; many runs are a plan: cluster/submit PLAN",
            BAD_INPUT,
        )
    answer = job.ask(words)
    if words[0] == "grid":
        job.log(f"member {job.task} of {words[1]} {words[2]}: {' '.join(answer['words'])}")
    job.run_dir, job.reads = answer["writes"], answer["reads"]
    if answer["state"] == "finished":
        job.log(f"{job.run_dir}: finished before; name another place to do it anew")
        return 0
    if answer["state"] == "blind":
        raise job.bad_here(f"{answer['about']} is not there")
    if answer["state"] == "taken":
        raise End(
            f"{job.run_dir} is taken by {answer['about']}, which was started first; submit this"
            " again when it has ended"
        )
    job.mark = lambda: checksum(Path(job.run_dir))
    if answer["needs_one_rank"]:
        job.num_nodes = 1
    job.settle_ranks(per_node=1 if answer["needs_one_rank"] else None)
    extra = (
        [f"data.stage_dir={job.cache}/data"]
        if answer["can_stage"] and os.environ.get("STAGE_DATA", "0") != "0"
        else []
    )
    command = answer["words"]

    def is_finished(_code: int) -> bool:
        if not Path(job.run_dir, answer["result"]).exists():
            return False
        # with several seeds it is finished when all of them are
        failed, found = job.run_python("-m", "cluster.work", f"--kept={job.snapshot}", *words)
        return not failed and json.loads(found)["state"] == "finished"

    return job.live(
        [*job.python, "-m", *command[:3], *extra, *command[3:]],
        is_finished=is_finished,
        with_preflight=True,
    )


def draw(job: Job, words: list[str]) -> int:
    """No ranks, and nothing to go on with: killed, it begins anew."""
    return subprocess.run(
        [*job.python_here, "-m", *words, f"--kept={job.snapshot}"], check=False
    ).returncode


def checksum(run_dir: Path) -> str:
    """Of what changes whenever a start was of use."""
    total, files = 0, ("checkpoints/latest", "result.json")
    for path in sorted(
        path
        for above in ("", "*/", "*/*/")
        for file in files
        for path in run_dir.glob(above + file)
    ):
        with suppress(OSError):
            total = zlib.crc32(str(path).encode() + path.read_bytes(), total)
    return str(total)


def prepare(job: Job, words: list[str]) -> int:
    stage = words[1] if words[1:2] in (["--parts"], ["--merge"]) else ""
    words = words[2:] if stage else words[1:]
    if not words:
        raise End(
            "no config given; sbatch cluster/data_prep.slurm CONFIG [key=value ...]", BAD_INPUT
        )
    answer = job.ask(["data_prep", "build", *words])
    out = answer["writes"]
    if stage != "--merge" and answer["state"] == "finished":
        job.log(f"{out} is built already")
        return 0
    if not Path("jobs", job.array or job.number, "writes").exists():
        (job.directory / "writes").write_text(lines_of({out: ALL_TASKS}))
    job.mark = lambda: str(
        sum(len(folders) + len(files) for _, folders, files in os.walk(answer["work"] or out))
    )  # others rename there meanwhile
    job.settle_ranks(per_node=1)
    is_done = lambda code: code == 0 and not job.stopped  # noqa: E731
    if (
        stage == "--merge" and "://" in out
    ):  # a store has verified what it was given; what is missing is written, then published
        return job.live(
            [*job.python, "-m", *answer["words"]], is_finished=is_done, with_preflight=False
        )
    if stage == "--merge":
        both = '"${@:2}" -m data_prep merge "$1" && "${@:2}" -m data_prep verify "$1"'
        return job.live(
            ["bash", "-c", both, "merge-and-verify", out, *job.python],
            is_finished=is_done,
            with_preflight=False,
        )
    first, last, count = (
        int(os.environ.get(f"SLURM_ARRAY_TASK_{name}") or 0) for name in ("MIN", "MAX", "COUNT")
    )
    if job.task is None or last - first + 1 != count:
        raise End("give all tasks of an array, without gaps: --array=0-7", BAD_INPUT)
    if not stage and int(job.task) == first:
        submit_merge(job, words)
    command = [*job.python, "-m", *answer["words"], "--task", f"{int(job.task) - first}/{count}"]
    return job.live(command, is_finished=is_done, with_preflight=False)


def submit_merge(job: Job, words: list[str]) -> None:
    """By the array's first task, once: a start that is killed between the two lines does it twice,
    and the merges take turns."""
    noted = Path("jobs", str(job.array), "merge")
    if noted.exists():
        return
    options = [f"--dependency=afterok:{job.array}", "--kill-on-invalid-dep=yes", "--array=0"]
    script = [str(job.snapshot / "cluster/data_prep.slurm"), "--merge", *words]
    try:  # for a minute each, because its own part waits as long
        options += inherited(about_job(job.label, tries=6))
        noted.write_text(
            slurm(
                "sbatch", "--parsable", *options, *script, tries=6, environment=new_job(os.environ)
            )
        )
    except SlurmError as error:
        remedy = "sbatch --array=0 cluster/data_prep.slurm --merge ..."
        job.log(
            f"WARNING: the merge could not be submitted ({error}); when the parts are done:"
            f" {remedy}"
        )


def main(words: list[str]) -> int:
    console.install()
    job = Job()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, job.receive)
    job.stopped = job.stopped or os.path.exists(os.environ.pop("STOPPED", ""))  # noqa: PTH110 (by a signal before: start.sh)
    try:
        try:
            return {"data_prep": prepare, "analysis": draw}.get(words[0], run_verb)(job, words)
        except End:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the run can go on)
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
