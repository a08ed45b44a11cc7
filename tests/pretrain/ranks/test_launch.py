"""Starting local ranks: their environment, and no wait for a dead rank."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pretrain.cli import leave
from pretrain.ranks import launch
from pretrain.ranks.preemption import LAST_WRITE_S
from pretrain.ranks.world import World, free_port, read_world
from tests.ranks import REPOSITORY

START = """
import sys, time
import pretrain.ranks.launch as launcher
launcher.LAST_WORDS_S = 0.1
{}
sys.exit(launcher.launch([sys.executable, '-c', sys.argv[1]], num_ranks=3))
"""


def start(program: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", START.format(textwrap.dedent(before)), textwrap.dedent(program)]
    return subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.processes
def test_ranks_get_what_torchrun_would_give_them() -> None:
    program = """
        import os
        line = " ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))
        os.write(1, f"{line}\\n".encode())  # print writes in pieces where Python is unbuffered, and ranks share the pipe
    """
    done = start(program)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"{rank} {rank} 3 127.0.0.1" for rank in range(3)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("sys.exit(7)", 7, "exit code 7"), ("os.kill(os.getpid(), 9)", 137, "SIGKILL")],
)
def test_a_dead_rank_ends_the_others_at_once(ending: str, code: int, words: str) -> None:
    done = start(f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(50)")
    assert done.returncode == code
    assert f"rank 1 ended with {words}; ending the others" in done.stderr


@pytest.mark.processes
def test_a_rank_that_writes_is_waited_for_and_one_that_hangs_is_not(tmp_path: Path) -> None:
    """The test ends the wait for the rank that saves when only the rank that ignores SIGTERM is
    left."""
    assert launch.GRACE_S > LAST_WRITE_S
    wait = """
        def wait(ranks, timeout_s):
            while timeout_s == launcher.GRACE_S and sum(rank.poll() is None for rank in ranks) > 1:
                time.sleep(0.01)
        launcher._wait = wait
        """
    rank = f"""
        import os, signal, sys, time
        from pretrain.ranks.launch import report_joined
        report_joined()
        number = os.environ["RANK"]
        if number == "0": signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), os.write(1, b"written"), os._exit(0)))
        if number == "2": signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{tmp_path}/{{number}}", "w").close()
        while len(os.listdir("{tmp_path}")) < 3: time.sleep(0.01)
        if number == "1": sys.exit(7)
        time.sleep(50)
        """
    done = start(rank, before=wait)
    assert done.returncode == 7 and done.stdout == "written"


BLOCKED = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); open(f'{ready}/{rank}', 'w').close();"
    " time.sleep(600)"
)
NUM_READY = "while len(os.listdir(ready)) < 2: time.sleep(0.01)"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("sys.exit(75)", 75, ""), ("os.kill(os.getpid(), 9)", 137, "SIGKILL")],
)
def test_a_rank_that_has_not_joined_is_ended_at_once(
    tmp_path: Path, ending: str, code: int, words: str
) -> None:
    """The rank waits within torch, where no SIGTERM handler runs. A grace time for saving would
    never end here."""
    rank = f"""
        import os, signal, sys, time
        rank, ready = os.environ["RANK"], {str(tmp_path)!r}
        if rank != "0": {BLOCKED}
        {NUM_READY}
        print("rank 0 says who holds the run", file=sys.stderr, flush=True)
        {ending}
        """
    done = start(rank, before="launcher.GRACE_S = launcher.LAST_WORDS_S = 1e9")
    assert done.returncode == code
    said = [f"launch: rank 0 ended with {words}; ending the others"] if words else []
    assert done.stderr.splitlines() == ["rank 0 says who holds the run", *said]


def test_one_process_is_a_world_of_its_own() -> None:
    environment: dict[str, str] = {}
    assert read_world(environment) == World(0, 0, 1, num_cores=len(os.sched_getaffinity(0)))
    assert environment["MASTER_ADDR"] == "127.0.0.1" and int(environment["MASTER_PORT"]) > 0


@pytest.mark.parametrize(
    ("given", "filled_in"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_WAIT_POLICY": "PASSIVE"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native", "OMP_WAIT_POLICY": "ACTIVE"}, {}),
    ],
)
def test_runtime_settings_have_defaults_that_a_user_can_replace(
    given: dict[str, str], filled_in: dict[str, str]
) -> None:
    environment = dict(given)
    read_world(environment)
    found = {
        key: value
        for key, value in environment.items()
        if "ALLOC" in key or key == "OMP_WAIT_POLICY"
    }
    assert found == given | filled_in


@pytest.mark.processes
def test_torch_loads_after_the_wait_policy_is_set() -> None:
    """When torch loads libgomp, it reads its environment once."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | {
        "OMP_DISPLAY_ENV": "TRUE"
    }
    command = [
        sys.executable,
        "-c",
        "from pretrain.ranks.world import read_world; read_world(); import torch",
    ]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, cwd=REPOSITORY
    ).stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said


SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "12345"}


def test_srun_is_understood() -> None:
    facts = SRUN | {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "1"}
    assert read_world(facts) == World(5, 1, 8, num_cores=1, num_local_ranks=8)
    assert facts["RANK"] == "5" and facts["WORLD_SIZE"] == "8"


@pytest.mark.parametrize(
    ("step", "job", "per_node", "node", "expected"),
    [
        ("", "", "4", "", 4),
        ("4(x3),2", "", "", "3", 2),
        ("4(x3),2", "", "", "2", 4),
        ("", "6,4(x2)", "", "0", 6),
        ("7(x2)", "8(x2)", "", "1", 7),
        ("", "8(x2)", "5", "1", 5),  # the job's, not the step's
        ("", "7(x2)", "8", "1", 7),  # 8 is only a limit
        ("what is this", "", "", "1", 14),
    ],
)
def test_srun_says_how_many_ranks_this_node_has(
    step: str, job: str, per_node: str, node: str, expected: int
) -> None:
    facts = {
        "SLURM_STEP_TASKS_PER_NODE": step,
        "SLURM_TASKS_PER_NODE": job,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NODEID": node,
    }
    given = {name: value for name, value in facts.items() if value}
    world = read_world(SRUN | {"SLURM_NTASKS": "14"} | given)
    assert world.num_local_ranks == expected and world.is_one_node == (expected == 14)


@pytest.mark.parametrize(
    ("local_rank", "gpus_on_node", "num_tasks", "num_visible", "gpu"),
    [
        (3, "4", "8", 1, 0),  # srun --ntasks-per-node=4 --gpus-per-task=1
        (3, "4", "8", 4, 3),
        (3, "4", "1", 1, None),  # CUDA_VISIBLE_DEVICES=0 torchrun, within one task
        (1, "1", "8", 1, None),  # two tasks, one GPU
        (1, "", "", 1, None),  # no SLURM
        (0, "", "", 1, 0),
        (0, "", "", 0, None),
    ],
)
def test_a_rank_that_sees_one_of_the_nodes_gpus_uses_it(
    local_rank: int, gpus_on_node: str, num_tasks: str, num_visible: int, gpu: int | None
) -> None:
    num_local = "2" if gpus_on_node in ("", "1") else "4"
    facts = {
        "RANK": "1",
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": num_local,
    }
    slurm = {"SLURM_GPUS_ON_NODE": gpus_on_node, "SLURM_NTASKS": num_tasks or "1"}
    world = read_world(facts | {"MASTER_ADDR": "x", "MASTER_PORT": "1"} | slurm)
    assert world.gpu(num_visible) == gpu


@pytest.mark.parametrize(
    "half", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}], ids=str
)
def test_half_an_environment_is_one_clear_error(half: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT: not set"):
        read_world(half)


@pytest.mark.parametrize(
    ("on_node", "per_task", "num_tasks", "hint", "world_size", "bound", "cores"),
    [
        (32, 0, 16, "", 16, 8, 8),  # bound without --cpus-per-task
        (32, 0, 16, "", 16, 64, 8),  # not bound
        (32, 0, 16, "nomultithread", 16, 4, 4),  # one thread of each core
        (30, 0, 16, "", 16, 62, 7),  # core specialization keeps two
        (2, 0, 4, "", 4, 2, 1),  # srun --overcommit
        (16, 16, 4, "", 4, 16, 4),  # sbatch's, not srun's
        (0, 8, 16, "", 16, 64, 8),  # srun started each rank
        (0, 32, 1, "", 4, 64, 8),  # --ranks 4 or torchrun in one task
        (0, 32, 2, "", 8, 64, 8),  # torchrun on each of two nodes
        (0, 32, 0, "", 4, 64, 8),
        (0, 2, 1, "", 4, 64, 1),
        (0, 0, 0, "", 4, 64, 16),
    ],
)
def test_ranks_of_one_task_share_its_cores(
    on_node: int,
    per_task: int,
    num_tasks: int,
    hint: str,
    world_size: int,
    bound: int,
    cores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
    slurm = {
        "SLURM_CPUS_ON_NODE": on_node,
        "SLURM_CPUS_PER_TASK": per_task,
        "SLURM_NTASKS": num_tasks,
        "SLURM_HINT": hint,
    }
    facts = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "4"}
    given = {name: str(value) for name, value in slurm.items() if value}
    assert read_world(facts | sizes | given).num_cores == cores


@pytest.mark.processes
@pytest.mark.parametrize(
    ("job", "finished", "is_first", "code"),
    [("", False, True, 0), ("7", True, True, 0), ("7", False, True, 130), ("7", False, False, 0)],
)
def test_an_unfinished_run_does_not_succeed_in_a_slurm_job(
    job: str, finished: bool, is_first: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise jobs that depend on this one (--dependency=afterok) would begin. Outside SLURM a
    stopped run exits with 0."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    pid = os.fork()
    if pid == 0:
        try:
            leave(finished, run_dir=None, is_first=is_first)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code


def begun(rank: str) -> "subprocess.Popen[str]":
    """Start a launcher with one rank that saves, and wait until both handle signals."""
    code = (
        "import sys; from pretrain.ranks.launch import launch; sys.exit(launch([sys.executable,"
        f" '-c', {rank!r}], "
    )
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-c", code + "num_ranks=1, heed_signals=True))"]
    process = subprocess.Popen(words, **pipes, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.processes
def test_ctrl_c_is_answered_at_once_and_the_second_ends_it() -> None:
    """A step may take long, especially while it waits for data. This rank ends only when its stdin
    is closed."""
    process = begun(
        "import signal, sys; signal.signal(2, lambda *_: None); print('ready', flush=True);"
        " sys.stdin.read()"
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert [process.stderr.readline() for _ in range(2)] == [
        "\n",
        "launch: stopping at the next step, with a checkpoint; Ctrl-C again ends the command at once\n",
    ]
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and said == ""


@pytest.mark.processes
@pytest.mark.parametrize(("ignored", "raised_by"), [(False, "SIGHUP"), (True, "None")])
def test_a_closed_terminal_has_ranks_save_unless_nohup_has_started_them(
    ignored: bool, raised_by: str
) -> None:
    rank = """if True:
        import os, select, sys
        from pretrain.ranks.preemption import StopFlag
        stop = StopFlag().install()
        print("ready", flush=True)
        while stop.raised_by is None and not select.select([sys.stdin], [], [], 0.01)[0]: pass
        print(stop.raised_by, flush=True)
        os._exit(0)  # as `leave` does: the launcher passes the signal on once more, and an interpreter that ends no longer heeds it
        """
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # for the child
    process = begun(rank)
    os.killpg(process.pid, signal.SIGHUP)
    said, _ = process.communicate("the terminal has been closed\n", timeout=120)
    assert (process.returncode, said) == (0, f"{raised_by}\n")


@pytest.mark.processes
def test_an_interrupt_of_the_launcher_alone_has_its_ranks_save() -> None:
    """`kill -INT` signals only the launcher, a terminal all processes."""
    save = (
        "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0)));"
        " signal.pthread_sigmask(signal.SIG_UNBLOCK, {15})"
    )
    process = begun(
        f"import signal, sys, time; {save}; print('ready', flush=True); time.sleep(600)"
    )
    process.send_signal(signal.SIGINT)
    saved, said = process.communicate(timeout=120)
    assert (process.returncode, saved, said.count("stopping at the next step")) == (0, "saved\n", 1)


def test_a_free_port_is_none_that_linux_gives_to_connections() -> None:
    assert all(1024 <= free_port() < 32768 for _ in range(20))
