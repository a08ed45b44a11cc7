"""The job supervisor with stand-ins for SLURM: the code that it runs, its requests, avoided nodes,
and when it gives up."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import job as jobs
from cluster.attempts import give_up_reason, has_trained, read_attempts
from cluster.job import Allocation, End, Job
from cluster.slurm import facts, slurm, state_of
from tests.cluster.checkouts import run, stand_in

# ---- the code that it runs


STUB = """
import os, sys, time
from pathlib import Path

assert not Path(os.environ["STOPPED"]).exists(), "another's"
Path("starting").touch()
for _ in range(6000):
    if Path(os.environ["STOPPED"]).exists():
        break
    time.sleep(0.01)
print("\u00e9", sys.argv[1:], os.environ["PYTHONPATH"], flush=True)
sys.exit(7 if Path(os.environ["STOPPED"]).exists() else 1)
"""
"""While it sleeps it ignores signals, like cluster/job.py at its beginning."""


def test_a_job_runs_what_was_kept_and_no_signal_is_lost(tmp_path: Path) -> None:
    """The job runs the snapshot although the checkout is broken. The script's first attempt may be
    SLURM's second (failed prolog, lost node), and the locale may lack \u00e9."""
    root = tmp_path / "a check out"
    for floor in ("data_prep", "pretrain", "finetune", "analysis", "configs", "jobs/77"):
        (root / floor).mkdir(parents=True)
    (root / "jobs/77/writes").write_text("-\tx\n")
    shutil.copytree(Path(jobs.__file__).parent, root / "cluster")
    (root / "cluster/job.py").write_text(STUB)
    (root / ".venv").symlink_to(sys.prefix)
    (root / "pretrain/__pycache__").mkdir()
    for name in ("loops.py", "__pycache__/loops.nbi"):
        (root / "pretrain" / name).touch()
    said = "JobId=77 Command=x SubmitTime=2026-01-01T10:00:00"
    stand_in(
        root,
        "scontrol",
        f'[ "$SLURM_TIME_FORMAT" = standard ] && echo "{said}"; echo "scontrol: warning: odd" >&2',
    )
    plain = shutil.copy(root / "cluster/pretrain.slurm", tmp_path / "plain")
    kept = run(root, "cluster/snapshot").stdout.strip()
    loops, as_kept = (Path(place, "pretrain/loops.py") for place in (root, kept))
    assert (
        as_kept.stat().st_mtime_ns == loops.stat().st_mtime_ns
    )  # numba compares this time with its cache
    assert (as_kept.parent / "__pycache__/loops.nbi").exists()
    submitted = shutil.copy(f"{kept}/cluster/pretrain.slurm", tmp_path / "submitted")
    for name in ("start.sh", "snapshot", "job.py", "environment.sh"):
        (root / "cluster" / name).write_text("exit 9\n")
    environment = os.environ | {"PATH": f"{root}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for restart, script in (("1", submitted), ("2", plain)):
        words = [
            "bash",
            "-c",
            ': >"jobs/.stopped-77-$$"; exec bash "$@"',
            "a killed start's note",
            str(script),
            "mine.yaml",
        ]
        environment["SLURM_RESTART_COUNT"] = restart
        with subprocess.Popen(
            words, cwd=root, env=environment, stdout=subprocess.PIPE, text=True
        ) as job:
            while not (root / "starting").exists():
                assert job.poll() is None
                time.sleep(0.01)
            job.send_signal(signal.SIGUSR2)
            answer = job.communicate(timeout=120)[0]
        assert (job.returncode, answer) == (
            7,
            f"\\xe9 ['pretrain', 'train', 'mine.yaml'] {kept}\n",
        ), restart
        (root / "starting").unlink()
    assert sorted(path.name for path in (root / "jobs").iterdir()) == ["77", "snapshots"]
    shutil.rmtree(root / "jobs/snapshots")
    done = run(root, "bash", str(submitted), "mine.yaml", SLURM_JOB_ID="77")
    words = r"jobs/\S+ does not exist. Submit the job again, from the repository root\n"
    assert done.returncode == 2 and re.fullmatch(words, done.stderr), done


def test_a_nodes_own_python_will_do_if_it_is_new_enough(root: Path) -> None:
    (root / ".venv").unlink()
    (root / "jobs/7").mkdir(parents=True)
    (root / "jobs/7/snapshot").symlink_to(root)
    for name in ("python3", *(f"python3.{minor}" for minor in range(9, 14))):
        stand_in(root, name, "exit 1")
    given = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    done = run(root, "bash", "cluster/pretrain.slurm", "x", **given)
    assert done.returncode == 2 and "has no Python 3.9 or newer" in done.stderr
    stand_in(root, "python3.10", '[ "$1" = -c ] || echo "$@"')
    assert (
        run(root, "bash", "cluster/pretrain.slurm", "x", **given).stdout
        == f"{root}/cluster/job.py pretrain train x\n"
    )


def test_code_that_could_not_be_kept_whole_is_not_run(root: Path) -> None:
    """Plain sbatch takes the snapshot at the first attempt, which fails on a full disk, for
    example."""
    stand_in(
        root,
        "scontrol",
        "echo 'JobId=77 Command=/x/cluster/pretrain.slurm SubmitTime=2199-01-01T10:00:00'",
    )
    stand_in(
        root,
        "tar",
        'case $1 in -x) echo "no space left" >&2; cat >/dev/null; exit 2 ;; esac; exec /bin/tar'
        ' "$@"',
    )
    done = run(
        root,
        "cluster/snapshot",
        "--of-job",
        "",
        "configs/pretrain/demo_mlp.yaml",
        SLURM_JOB_ID="77",
    )
    assert done.returncode != 0 and done.stdout == "" and "no space left" in done.stderr
    assert (
        not (root / "jobs/77/snapshot").is_symlink()
        and list((root / "jobs/snapshots").iterdir()) == []
    )


@pytest.mark.parametrize(
    "name",
    [
        "cluster/job",
        "cluster/slurm",
        "cluster/attempts",
        "data_prep/__init__",
        "data_prep/console",
        "data_prep/errors",
    ],
)
def test_the_supervisor_runs_on_a_nodes_own_python(name: str) -> None:
    """The supervisor names the node if .venv does not run, and stays outside of containers."""
    tree = ast.parse(
        (Path(jobs.__file__).parents[1] / f"{name}.py").read_text(), feature_version=(3, 9)
    )
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {each.partition(".")[0] for each in imported} - {
        "cluster",
        "data_prep",
    } <= sys.stdlib_module_names
    ours = {each for each in imported if each.startswith(("cluster", "data_prep"))}
    known = {"data_prep", "data_prep.console", "data_prep.errors"}
    assert ours <= known | {"cluster.slurm", "cluster.attempts"}


# ---- its requests to SLURM


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Job 7 on one node, with the bad node n2. Programs in `tmp_path` come first on PATH."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    given = {
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_PARTITION": "gpu",
    }
    given |= {
        "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
        "SQUEUE_STATES": "PENDING",
        "SLURM_GPU_BIND": "single:1",
    }
    for name, value in (
        given | {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs, "PATIENCE", 1)
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "sinfo", "printf '%s\\n' n1 n2 n3 n4 n4")
    asks = "case $* in *--jobs=7*) ;; *) exit 1 ;; esac"  # only for its own job
    stand_in(
        tmp_path,
        "squeue",
        f'{asks}; echo "RUNNING${{SQUEUE_STATES}}"; echo "squeue: error: a strange key" >&2',
    )
    before = dict(os.environ)  # a job changes what its ranks inherit
    made = Job(Allocation.from_env(os.environ), ["pretrain", "train", "mine.yaml"])
    (made.directory / "bad-nodes").write_text("n2\tslow\n")
    yield made
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("num_nodes", "is_enough"), [(3, True), (4, False)])
def test_a_job_with_too_few_nodes_left_ends(job: Job, num_nodes: int, is_enough: bool) -> None:
    job.num_nodes = num_nodes
    with nullcontext() if is_enough else pytest.raises(End, match="has 3 nodes other than n2;"):
        job.refuse_if_too_few(["n2"], {})


def test_a_node_that_was_asked_for_and_is_bad_ends_the_job(job: Job) -> None:
    stand_in(Path(), "scontrol", "printf 'n2\\nn3\\n'")
    with pytest.raises(End, match="--nodelist requests bad nodes"):
        job.refuse_if_too_few(["n2"], {"ReqNodeList": "n[2-3]"})


REQUEUED = """
import os, signal, sys
from cluster import job as jobs
from cluster.job import Allocation, End, Job
jobs.PATIENCE = 1
job = Job(Allocation.from_env(os.environ), ["pretrain", "train", "mine.yaml"])
signal.signal(signal.SIGTERM, job.receive)
try:
    job.start_again("stopped")
except End as end:
    print(end)
"""


def test_the_end_that_slurm_brings_to_a_requeued_start_spares_what_the_start_still_asks(
    job: Job,
) -> None:
    """After a requeue SLURM sends TERM to all processes, including the scontrol that waits for its
    reply."""
    about = "JobId=7 ExcNodeList=n2,m[1-2],n9 ReqNodeList=(null) Restarts=0"
    does = (
        f"case $1 in requeue) kill -TERM 0; sleep 0.3 ;; -o) echo '{about}' ;; esac; echo $*"
        " >>asked"
    )
    stand_in(Path(), "scontrol", does)
    environment = os.environ | {"PYTHONPATH": str(Path(jobs.__file__).parents[1])}
    words = ["setsid", "--wait", sys.executable, "-c", REQUEUED]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    asked = Path("asked").read_text().splitlines()
    assert asked[-2:] == ["requeue 7", "update JobId=7 ExcNodeList=n2,m[1-2],n9"], done
    said = [line.partition(": ")[2] for line in done.stdout.splitlines() if line]
    assert said == ["requeueing", "the next attempt avoids n2,m[1-2],n9"], done


def test_a_successor_has_the_same_script_in_a_folder_with_spaces(job: Job) -> None:
    stand_in(Path(), "sbatch", 'printf "%s\\n" "$@" >>asked; echo 8')
    stand_in(Path(), "squeue", "")
    command = (
        "Command=/a/my project/cluster/probe.slurm mine.yaml b.slurm lr=2 WorkDir=/a/my project"
    )
    about = facts(f"Partition=low AllocNode:Sid=n1:5 NumNodes=1 NodeList= NumTasks=1 {command}")
    assert (about["NodeList"], about["WorkDir"]) == ("", "/a/my project")
    job.submit_successor(about, [])
    asked = Path("asked").read_text().splitlines()
    assert "--partition=low" in asked
    assert asked[-2:] == [f"{Path.cwd()}/cluster/probe.slurm", "mine.yaml"]


@pytest.mark.parametrize(
    ("preempted", "words"),
    [
        ("2026-01-01T10:00:07", "the job was preempted"),  # within the first second of this attempt
        ("2026-01-01T10:00:01", "the ranks received a signal"),  # before this attempt
        ("None", "the ranks received a signal"),
        ("", "the ranks received a signal"),  # SLURM does not reply
    ],
)
def test_why_a_start_was_stopped(job: Job, preempted: str, words: str) -> None:
    answer = f"JobId=7 StartTime=2026-01-01T10:00:07 EndTime=x PreemptTime={preempted} Suspend=x"
    stand_in(Path(), "scontrol", f"echo '{answer}'" if preempted else "exit 1")
    assert job.why_stopped() == words


@pytest.mark.parametrize("has_next", [False, True])
def test_a_requeued_start_records_its_end_unless_the_next_has_begun(
    job: Job, has_next: bool
) -> None:
    """SLURM increments its count when it requeues the job, before the script ends. A frozen node
    wakes up later."""
    stand_in(Path(), "scontrol", "echo 'JobId=7 Restarts=1 Suspend=x'")
    job.begin_start()
    if has_next:
        job.at = replace(job.at, restarts=1)
        job.begin_start()
        job.at = replace(job.at, restarts=0)
    with pytest.raises(
        End, match="SLURM has requeued the job; this was attempt 1, the next is attempt 2"
    ):
        job.end_start("stopped")
    assert [each["how"] for each in read_attempts(Path("jobs/7/attempts.jsonl"))] == (
        ["lost"] * 2 if has_next else ["stopped"]
    )


NODE = (
    "NodeName=n{} NodeAddr=127.0.0.1 CoresPerSocket=8 CPUTot=16 Sockets=1"
    " CfgTRES=cpu=16,gres/gpu=8,gres/gpu:h100=8"
)


def test_ranks_share_the_cpus_and_meet_at_the_address_of_the_first_node(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = "\n".join(NODE.format(number) for number in (0, 1))
    does = f"case $*_ in *hostnames*) echo n0; echo n1 ;; *) echo '{nodes}' ;; esac"
    stand_in(Path(), "scontrol", does)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "SLURM_GPU_BIND" not in os.environ
    job.at = replace(job.at, gpus=4)
    job.place_ranks()
    assert (job.ranks, job.cpus, os.environ["OMP_NUM_THREADS"]) == (4, 2, "2")
    assert 10000 <= int(os.environ["MASTER_PORT"]) < 30100
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "given",
    ["RANKS_PER_NODE=abc", "RANKS_PER_NODE=0", "PREFLIGHT_TIMEOUT_S=1m", "MAX_IDLE_STARTS=1.5"],
)
def test_a_mistake_in_a_setting_ends_the_job(
    job: Job, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*given.split("="))
    with pytest.raises(End, match=f"^{given} is not a whole number") as end:
        Allocation.from_env(os.environ)
    assert end.value.code == jobs.BAD_INPUT


def test_the_merge_is_submitted_though_the_controller_is_away_at_first(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    stand_in(
        Path(),
        "sbatch",
        'echo "$*" >>asked; [ $(wc -l <asked) -ge 3 ] && echo "8${SLURM_JOB_ID:-}"',
    )
    stand_in(Path(), "scontrol", f"[ -e once ] || {{ touch once; exit 1; }}; echo '{PARTS}'")
    for _ in range(2):
        jobs.submit_merge(job, ["x.yaml"])
    assert (
        Path("jobs/7/merge").read_text() == "8\n"
        and Path("asked").read_text().count("--merge x.yaml\n") == 3
    )
    options = {word for word in Path("asked").read_text().split() if word.startswith("--")}
    assert options - {"--parsable", "--dependency=afterok:7", "--kill-on-invalid-dep=yes", "--array=0", "--merge"} == {
        "--partition=long", "--account=vision", "--reservation=week", "--time=1-02:00:00", "--constraint=ssd&big", "--mem=24G",
        "--cpus-per-task=6",
    }  # fmt: skip


PARTS = """JobId=7 ArrayJobId=7 Account=vision QOS=N/A TimeLimit=1-02:00:00 Partition=long NumCPUs=6 CPUs/Task=6 MinCPUsNode=6
MinMemoryNode=24G Features=ssd&big DelayBoot=00:00:00 Reservation=week OverSubscribe=OK Licenses=(null)"""


@pytest.mark.parametrize(
    ("does", "state"),
    [
        ("echo PENDING", "PENDING"),
        ("true", "gone"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "gone"),
    ],
)
def test_the_state_of_one_job(job: Job, does: str, state: str) -> None:
    stand_in(Path(), "squeue", does)
    assert state_of("7") == state


def test_an_error_of_the_supervisor_is_a_failed_start_and_three_are_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(
        Path(), "scontrol", "case $1 in -o) echo 'JobId=7 Restarts=0' ;; *) echo $* >>asked ;; esac"
    )
    (job.directory / "bad-nodes").unlink()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(jobs, "run_command", lambda job, words: {True: {}}[job.stopped]["words"])
    for restart in ("0", "1", "2"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        # the file exists: a signal came before
        monkeypatch.setenv("STOPPED", str(job.directory))
        assert jobs.main(["pretrain", "train", "x"]) == 1
    said = capsys.readouterr()
    assert (
        said.out.count("KeyError in cluster/job.py itself: 'words'")
        == said.err.count("Traceback")
        == 3
    )
    assert (
        Path("asked").read_text() == "requeue 7\n" * 2
        and "failed 3 times without a new checkpoint" in said.out
    )


def test_python_is_started_by_the_words_of_the_site(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "apptainer", 'echo "$@" >drawn; exit 3')
    monkeypatch.setenv("RANK_PYTHON", "apptainer exec '/x y.sif' /opt/python")
    job.at = Allocation.from_env(os.environ)
    python = ["apptainer", "exec", "/x y.sif", "/opt/python"]
    assert job.at.local_python == job.at.python == python and job.at.srun_options == []
    assert os.environ["APPTAINERENV_PYTHONPATH"] == str(tmp_path)
    assert jobs.draw(job, ["analysis", "figure", "plan.yaml"]) == 3
    drawn = f"exec /x y.sif /opt/python -m analysis figure plan.yaml --kept={job.at.snapshot}\n"
    assert Path("drawn").read_text() == drawn
    monkeypatch.setenv("SRUN_OPTIONS", "--container-image=/x.sqsh")
    at = Allocation.from_env(os.environ)
    assert at.srun_options == ["--container-image=/x.sqsh"]
    assert at.local_python[:2] == ["srun", "--overlap"]
    assert at.local_python[-len(python) - 1 :] == [*at.srun_options, *python]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    stand_in(tmp_path / ".venv/bin", "python", "true")
    assert Allocation.from_env(os.environ).local_python == [".venv/bin/python"]


def test_the_rank_that_failed_first_is_shown_with_its_last_words(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = job.directory / "ends"
    ends.mkdir()
    for rank, end_s, code, words in ((0, 100.9, 1, "rank 1 is lost"), (1, 100.5, 137, "on fire")):
        record = {"time": end_s, "rank": rank, "node": f"n{rank}", "code": code}
        (ends / str(rank)).write_text(json.dumps(record))
        log = Path(f"{job.directory}/rank-{rank:04}.log")
        log.write_text(f"--- attempt 1: x\nof the start before\n--- attempt 2: x\n{words}\n")
    job.show_first_failure(ends, f"{job.directory}/rank")
    said = capsys.readouterr().out
    assert "rank 1 on n1 failed first, with exit code 137 (out of memory?)" in said
    assert said.endswith("rank-0001.log:\n    on fire\n")


def test_slurm_is_asked_again_and_ignores_the_end_of_the_start(job: Job) -> None:
    stand_in(
        Path(),
        "flaky",
        "[ -e once ] || { touch once; exit 1; }; kill -TERM $$; kill -USR2 $$; echo"
        ' "[$SLURM_TIME_FORMAT]"',
    )
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        assert slurm("flaky", tries=2) == "[standard]\n" and 10 in slept
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ---- when it gives up


def starts(text: str) -> list[dict[str, Any]]:
    """Return the attempts of a text such as `here failed,here lost`: mark at the beginning and
    outcome."""
    return [
        {"restart": number, "began": mark, "how": how}
        for number, (mark, how) in enumerate(each.split() for each in text.split(",") if each)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (2 * "here failed,", ""),
        (3 * "here failed,", "failed 3 times without a new checkpoint"),
        # an attempt that ended before it knew the run's mark also made no progress
        (2 * "here failed," + "unknown lost,here failed", "failed 3 times"),
        (2 * "here failed," + "there failed", ""),
        # another attempt's lock is no failure, but the job does not wait for ever
        (2 * "here failed," + 6 * "here busy,", ""),
        (9 * "here busy,", "9 found the run locked"),
        ("here busy," + 8 * "here stopped,", "9 attempts made no new checkpoint"),
    ],
)  # fmt: skip
def test_when_a_job_gives_up(text: str, words: str) -> None:
    reason = give_up_reason(starts(text), mark="here", limit=3) or ""
    assert words in reason and bool(words) == bool(reason), reason


def test_a_config_is_only_wrong_at_the_first_start_that_gets_to_its_ranks() -> None:
    assert not has_trained(starts("here bad-node,here busy,here lost"))
    assert has_trained(starts("here bad-node,here stopped"))
