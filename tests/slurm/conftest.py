"""A real SLURM cluster for tests on loopback (lab.sh), private to this test session. Without its
programs tests skip."""

import contextlib
import os
import re
import select
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import pytest

from tests.forked import begin, wait
from tests.ranks import REPOSITORY
from tests.training import finish, start

LAB = Path(__file__).parent / "lab.sh"
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")
USABLE = ("idle", "mixed", "allocated")
CONFIG = """
run_dir: runs/tiny
data: {{dataset: {dataset}}}
model: {{kind: mlp, depth: 2, width: 32, expansion: 2}}
augment: {{crop_scale: [0.6, 1.0], mixup_alpha: 0.8}}
optimizer: {{name: lion, lr: 2e-4}}
schedule: {{warmup: 5 steps}}
train: {{duration: 800 steps, global_batch_size: 16, eval_every: 1000 steps, log_every_steps: 50}}
engine: {{zero_stage: 2, precision: fp32, gradient_clip_norm: 1.0, timeout_s: 60}}
checkpoint: {{every: 10 steps}}
"""
SCRIPT = "cluster/pretrain.slurm"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def why_not(*others: str) -> str | None:
    """Return what this machine lacks for a private SLURM, or None. `others`: further programs."""
    programs = (*PROGRAMS, *others)
    missing = [program for program in programs if shutil.which(program, path=PATH) is None]
    if missing:
        return (
            f"SLURM is not installed: no {', '.join(missing)} (Debian: apt-get install slurm-wlm"
            " munge slurmdbd mariadb-server)"
        )
    if os.geteuid() != 0:
        return "a private SLURM needs root"
    tried = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(tried, capture_output=True, check=False).returncode != 0:
        return "a private SLURM needs namespaces, which are forbidden here"
    return None


class Cluster:
    """A running lab: n1, n2, ... with CPUs, g1 with simulated GPUs. Jobs start in `root`, a
    checkout with this `python`."""

    RUNNING: ClassVar[list["Cluster"]] = []

    def __init__(self, *, python: Path | None = None, num_nodes: int = 3, **lab_environment: str):
        # not pytest's tmp_path: a munge socket's path is limited to 107 characters
        self.directory = Path(tempfile.mkdtemp(prefix="slurm.", dir="/tmp"))
        self.directory.chmod(0o755)
        self.root = self.directory / "checkout"
        self.root.mkdir()
        if python is None:
            # numba's files are copied, too: compiling ranks on a busy machine look like hanging
            # ranks
            compiled = begin("time:sleep", 0, environment=os.environ, output=Path(os.devnull))
            assert wait([compiled], timeout_s=600) == [0]
        for floor in ("data_prep", "pretrain", "finetune", "analysis", "cluster", "configs"):
            shutil.copytree(
                REPOSITORY / floor, self.root / floor, ignore=shutil.ignore_patterns("*.pyc")
            )
        # a scratch path that only jobs can resolve, as on many clusters
        scratch = f"{self.directory}/node/$SLURM_CLUSTER_NAME"
        (self.root / "cluster/site.env").write_text(f"export NODE_SCRATCH={scratch} PREFLIGHT=0\n")
        if python is None:
            (self.root / ".venv").symlink_to(sys.prefix)
        else:
            (self.root / ".venv/bin").mkdir(parents=True)
            (self.root / ".venv/bin/python").symlink_to(python)
        outer = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        # one thread, as in the local runs for comparison
        self.environment = outer | {
            "PATH": PATH,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        self._num_nodes, self._lab_environment = (
            num_nodes,
            lab_environment | {"LAB_NODES": str(num_nodes)},
        )

    def __enter__(self) -> Self:
        self._errors = open(self.directory / "lab.log", "w+")
        self._lab = subprocess.Popen(
            [LAB, self.directory, str(_free_ports(self._num_nodes + 3))],
            env=self.environment | self._lab_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        try:
            self._expect(b"ready\n", timeout_s=90)
        except BaseException:
            self.__exit__()
            raise
        self.RUNNING.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the lab's stdin: it ends with all daemons and tasks."""
        self.RUNNING[:] = [each for each in self.RUNNING if each is not self]
        with self._lab, self._errors:
            assert self._lab.stdin is not None
            self._lab.stdin.close()
            try:
                self._lab.wait(60)
            except subprocess.TimeoutExpired:
                self._lab.kill()
        shutil.rmtree(self.directory)

    def settle(self) -> None:
        """Wait until no node is occupied by an ended job or coming back: the next jobs get the
        first nodes."""
        deadline_s = time.monotonic() + 90
        while busy := [
            each
            for each in self("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
            if each.split()[1] not in USABLE
        ]:
            assert time.monotonic() < deadline_s, busy
            time.sleep(0.1)

    def tell(self, command: str) -> None:
        """Send `crash NODE`, `hang NODE`, `thaw NODE`, `revive NODE` or `on NODE COMMAND` to the
        lab."""
        assert self._lab.stdin is not None
        self._lab.stdin.write(command.encode() + b"\n")
        self._expect(b"done\n", timeout_s=30)

    def __call__(self, *words: object) -> str:
        """Return the output of a SLURM command. Queries are repeated if the machine is too busy."""
        is_question = words[0] in ("squeue", "sinfo") or "show" in words
        for _ in range(10 if is_question else 1):
            done = subprocess.run(
                [str(word) for word in words],
                env=self.environment,
                cwd=self.root,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode == 0:
                break
            time.sleep(1)
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout.strip()

    def sbatch(self, *words: object) -> str:
        """Return the number of a new job."""
        return self("sbatch", "--parsable", *words)

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "-o", "show", "job", number)))

    def tasks(self, number: str) -> list[dict[str, str]]:
        """Return the job's record, or the record of each array task."""
        lines = self("scontrol", "-o", "show", "job", number).splitlines()
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]

    def mlflow(self, query: str, *, runs: str) -> list[tuple[str, ...]]:
        """Query the tracking database of the runs in a directory."""
        # a wrong path is an error, not a new database
        store = f"file:{self.root / runs}/mlflow.db?mode=ro"
        with contextlib.closing(sqlite3.connect(store, uri=True)) as opened:
            return opened.execute(query).fetchall()

    def submit(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["cluster/submit", *map(str, words)],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def wait(self, number: str, *states: str, timeout_s: float = 200) -> dict[str, str]:
        """Return the job when it is in one of `states`. (`sbatch --wait` only polls after 2, 10, 42
        and 106 s.)"""
        deadline_s = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] not in states:
            late = time.monotonic() > deadline_s
            assert not late and job["JobState"] not in ENDED, (
                f"{job}, wanted {states}\n{self.log(number)}"
            )
            time.sleep(0.1)
        return job

    def log(self, number: str) -> str:
        """Return the job's own output from all attempts."""
        return "".join(path.read_text() for path in sorted(self.root.glob(f"*-{number}.log")))

    def rank_logs(self, number: str) -> list[str]:
        return [
            path.read_text() for path in sorted((self.root / "jobs" / number).glob("rank-*.log"))
        ]

    def wait_for(self, number: str, text: str, *, timeout_s: float = 150) -> None:
        """Wait until the job or one of its ranks has written `text`."""
        deadline_s = time.monotonic() + timeout_s
        while text not in (said := self.log(number) + "".join(self.rank_logs(number))):
            late = time.monotonic() > deadline_s
            over = self.job(number)["JobState"] in ("FAILED", "CANCELLED")
            assert not late and not over, f"no {text!r}: {said}"
            time.sleep(0.1)

    def rank_process(self, number: str, *, rank: int) -> int:
        """Return the pid of a running rank; the nodes' pid namespaces are inside this one."""
        wanted = {
            f"SLURM_CONF={self.environment['SLURM_CONF']}",
            f"SLURM_JOB_ID={number}",
            f"SLURM_PROCID={rank}",
        }
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended meanwhile
                words = (place / "cmdline").read_text().split("\0")
                if words[1:3] == ["-m", "pretrain"] and wanted <= set(
                    (place / "environ").read_text().split("\0")
                ):
                    found.append(int(place.name))
        assert len(found) == 1, found
        return found[0]

    def _expect(self, line: bytes, *, timeout_s: float) -> None:
        assert self._lab.stdout is not None
        ready, _, _ = select.select([self._lab.stdout], [], [], timeout_s)
        said = self._lab.stdout.readline() if ready else b""
        if said != line:
            self._errors.seek(0)
            raise AssertionError(
                f"the lab said {said!r}, not {line!r}:\n{self._errors.read()[-5000:]}"
            )


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports below the ephemeral range and the jobs'
    ports. Two sessions start at different ports."""
    for base in range(5000 + os.getpid() % 400 * 10, 10000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", base + offset))
            return base
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")


def need_slurm(*others: str) -> None:
    """Skip without SLURM, or fail if it is required (`make cluster-test`, CI)."""
    reason = why_not(*others)
    if reason is not None and os.environ.get("REQUIRE_SLURM"):
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    need_slurm()
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def settled() -> None:
    """Wait until the previous test's jobs are gone."""
    for cluster in Cluster.RUNNING:
        cluster.settle()


@pytest.fixture(scope="session")
def config(slurm: Cluster, shapes: Path) -> Path:
    path = slurm.root / "tiny.yaml"
    path.write_text(CONFIG.format(dataset=shapes))
    return path


@pytest.fixture(scope="session")
def undisturbed(slurm: Cluster, config: Path) -> Path:
    """Return a run directory of the same config, trained without SLURM."""
    finish(start(config, slurm.root / "runs/local", "tracking.enabled=false"))
    return slurm.root / "runs/local"
