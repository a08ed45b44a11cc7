"""The shell parts of a job, with stand-ins for SLURM: which code it finds, what it hears of SLURM, which nodes are left."""

from pathlib import Path

import pytest

from tests.cluster.checkouts import run, stand_in, whole_checkout


@pytest.mark.parametrize("folder", ["checkout", "a check out"])
def test_a_job_that_was_put_back_before_its_first_line_finds_its_code(tmp_path: Path, folder: str) -> None:
    """A failed prolog, a lost node, a preemption: the script's first start is then SLURM's second."""
    (tmp_path / folder).mkdir()
    root = whole_checkout(tmp_path / folder)
    code = root / "jobs/snapshots/0123abc"
    (code / "cluster").mkdir(parents=True)
    (root / "jobs/77").mkdir()
    (root / "jobs/77/writes").write_text("-\tx\n")
    said = f"JobId=77 Command={code}/cluster/pretrain.slurm SubmitTime=2026-01-01T10:00:00"
    stand_in(
        root, "scontrol", f'[ "$SLURM_TIME_FORMAT" = standard ] && echo "{said}"; echo "scontrol: warning: odd" >&2'
    )
    for restart in ("1", "2"):
        done = run(
            root,
            "cluster/snapshot",
            "--of-job",
            "configs/pretrain/demo_mlp.yaml",
            SLURM_JOB_ID="77",
            SLURM_RESTART_COUNT=restart,
        )
        assert (done.returncode, done.stdout) == (0, f"{code}\n"), done.stderr


def test_code_that_could_not_be_kept_whole_is_not_run(root: Path) -> None:
    """Plain sbatch keeps it at the first start: where the disk is full, for one."""
    stand_in(root, "scontrol", "echo 'JobId=77 Command=/x/cluster/pretrain.slurm SubmitTime=2199-01-01T10:00:00'")
    stand_in(root, "tar", 'case $1 in -x) echo "no space left" >&2; cat >/dev/null; exit 2 ;; esac; exec /bin/tar "$@"')
    done = run(root, "cluster/snapshot", "--of-job", "configs/pretrain/demo_mlp.yaml", SLURM_JOB_ID="77")
    assert done.returncode != 0 and done.stdout == "" and "no space left" in done.stderr
    assert not (root / "jobs/77/snapshot").is_symlink() and list((root / "jobs/snapshots").iterdir()) == []


def test_what_slurm_warns_of_is_no_part_of_its_answer(root: Path) -> None:
    stand_in(root, "squeue", 'echo "squeue: error: a strange key" >&2; echo RUNNING')
    script = '. cluster/patiently.sh; echo "[$(patiently squeue)]"'
    assert run(root, "bash", "-c", script).stdout == "[RUNNING]\n"
    stand_in(root, "squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert run(root, "bash", "-c", script).stdout == "[]\n"


@pytest.mark.parametrize(
    ("features", "num_nodes", "answer"),
    [
        ("(null)", 3, ""),
        ("(null)", 4, "has 3 nodes;"),
        ("h100", 2, "has 1 nodes with h100;"),
        ("a100|h100", 3, ""),
        ("a100&big", 1, ""),
    ],
)
def test_only_nodes_that_a_job_may_have_are_counted(root: Path, features: str, num_nodes: int, answer: str) -> None:
    stand_in(root, "scontrol", f"echo 'JobId=7 Features={features} ReqNodeList=(null) Command=x'")
    stand_in(root, "sinfo", "printf '%s\\n' 'n1 h100,big' 'n2 h100' 'n3 a100,big' 'n4 a100' 'n4 a100'")
    said = with_starts(root, "check_nodes_left", SLURM_JOB_NUM_NODES=str(num_nodes))
    assert answer in said and bool(said) == bool(answer), said


def with_starts(root: Path, does: str, **environment: str) -> str:
    """What cluster/starts.sh says when it does that in a job where n2 is bad; in a session of its own."""
    script = f"""
        job=7 job_dir=. snapshot=. SLURM_JOB_PARTITION=gpu stopped='' run_dir=runs/x
        fail() {{ echo "$1"; exit 1; }}
        say() {{ echo "$*"; }}
        progress() {{ echo here; }}
        . cluster/starts.sh
        printf 'n2\\tslow\\n' >bad-nodes
        {does}
    """
    return run(root, "setsid", "--wait", "bash", "-c", script, **environment).stdout


def test_a_node_that_was_asked_for_and_is_bad_ends_the_job(root: Path) -> None:
    """It would wait for ever: SLURM may neither leave it out nor take it."""
    stand_in(root, "sinfo", "printf '%s x\\n' n1 n2 n3")
    answer = "JobId=7 ReqNodeList=n[2-3] Features=(null)"
    stand_in(root, "scontrol", f"case $2 in hostnames) printf 'n2\\nn3\\n' ;; *) echo '{answer}' ;; esac")
    assert "n2 will not do, and --nodelist asks for it" in with_starts(
        root, "check_nodes_left", SLURM_JOB_NUM_NODES="2"
    )


def test_the_end_that_slurm_brings_to_a_requeued_start_spares_what_the_start_still_asks(root: Path) -> None:
    """TERM goes to all its processes as soon as the requeue is taken: also to the scontrol that waits for the answer."""
    stand_in(root, "squeue", "echo RUNNING")
    stand_in(root, "sinfo", "printf '%s x\\n' n1 n2 n3")
    job = "JobId=7 ExcNodeList=n9 ReqNodeList=(null)"
    does = f"case $1 in requeue) kill -TERM 0; sleep 0.3 ;; -o) echo '{job}' ;; esac; echo $* >>asked"
    stand_in(root, "scontrol", does)
    said = with_starts(root, "trap 'stopped=1' USR2 TERM; start_again", SLURM_JOB_NUM_NODES="1")
    asked = (root / "asked").read_text().splitlines()
    assert asked[-2:] == ["requeue 7", "update JobId=7 ExcNodeList=n2,n9"], asked
    assert said.splitlines() == ["requeueing", "the next start avoids n2,n9"]


@pytest.mark.parametrize(
    ("started", "preempted", "words"),
    [
        ("2026-01-01T10:00:07", "2026-01-01T10:00:07", "it was preempted"),  # within its first second
        ("2026-01-01T10:00:07", "2026-01-01T10:00:01", "its ranks were told to stop"),  # the start before it was
        ("2026-01-01T10:00:07", "None", "its ranks were told to stop"),
        ("2026-01-01T10:00:07", "", "its ranks were told to stop"),  # SLURM does not answer
    ],
)
def test_why_a_start_was_stopped(root: Path, started: str, preempted: str, words: str) -> None:
    answer = f"JobId=7 StartTime={started} EndTime=x PreemptTime={preempted} Suspend=x"
    stand_in(root, "scontrol", f"echo '{answer}'" if preempted else "exit 1")
    assert with_starts(root, "why_stopped") == f"{words}\n"


@pytest.mark.parametrize(("others", "says_its_end"), [("", True), ("begin 1 here n2 x\n", False)])
def test_a_requeued_start_says_how_it_ended_unless_the_next_has_begun(
    root: Path, others: str, says_its_end: bool
) -> None:
    """SLURM raises its count when it takes the job back, before the shell has ended; a frozen node wakes up later."""
    (root / "starts").write_text(begun := "begin 0 here n1 x\n" + others)
    stand_in(root, "scontrol", "echo 'JobId=7 Restarts=1 x'")
    said = with_starts(root, "restarts=0; end_start stopped; echo goes on")
    assert said == "SLURM has taken the job back; this was start 1, the next is start 2\n"
    added = (root / "starts").read_text().removeprefix(begun)
    assert added.startswith("end 0 here stopped ") if says_its_end else not added


BUSY = "begin 0 here n1 x\nend 0 here busy x 180\n"
FAILED, LONG = "begin 0 {mark} n1 x\nend 0 {mark} failed x 60\n", "begin 0 {mark} n1 x\nend 0 {mark} failed x 9000\n"


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (2 * [FAILED.format(mark="here")], ""),
        (3 * [FAILED.format(mark="here")], "failed 3 times without a new checkpoint"),
        # a start that ended before it knew the run's mark was of no use, either
        ([*2 * [FAILED.format(mark="here")], "begin 1 unknown n1 x\n", FAILED.format(mark="here")], "failed 3 times"),
        ([*2 * [FAILED.format(mark="here")], FAILED.format(mark="there")], ""),
        ([FAILED.format(mark=number) for number in range(9)], "failed 9 times in a row"),
        ([LONG.format(mark=number) for number in range(20)], ""),
        # another start's lock is no failure; for ever it does not go on, either
        ([*2 * [FAILED.format(mark="here")], *6 * [BUSY]], ""),
        (9 * [BUSY], "9 of them met another start that holds runs/x, and that the log names: end that one"),
        (
            [BUSY, *8 * [BUSY.replace("busy", "stopped")]],
            "9 starts without a new checkpoint (3 x MAX_IDLE_STARTS), 0 of them failures",
        ),
        ([BUSY, *8 * [BUSY.replace("busy", "stopped")]], "Is the time limit too short"),
    ],
)
def test_when_a_job_gives_up(root: Path, starts: list[str], words: str) -> None:
    (root / "starts").write_text("".join(starts))
    said = with_starts(root, "give_up_reason")
    assert words in said and bool(words) == bool(said), said


NODES = "NodeName=n{} NodeAddr=127.0.0.1 CfgTRES=cpu=8,mem=9,gres/gpu={},gres/gpu:h100={} AllocTRES=gres/gpu=1"


@pytest.mark.parametrize(
    ("gpus", "of_nodes", "answer"),
    [
        ("4", (4, 4), "4 ranks, 2 cores each, of 4"),
        ("4", (4, 8), "4 ranks, 2 cores each, of 4"),
        ("8", (8, 4), "its nodes have from 4 to 8 GPUs"),
        ("2", (4, 8), "2 ranks, 4"),
    ],
)
def test_the_shape_of_a_step_suits_the_smallest_node(
    root: Path, gpus: str, of_nodes: tuple[int, int], answer: str
) -> None:
    facts = [NODES.format(number, count, count) for number, count in enumerate(of_nodes)]
    both, first = "\n".join(facts), facts[0]
    stand_in(root, "scontrol", f"case $*_ in *hostnames*) echo n0 ;; *n0_) echo '{first}' ;; *) echo '{both}' ;; esac")
    script = """
        snapshot=. && . cluster/job.sh && settle_ranks &&
            echo "$ranks ranks, $cpus cores each, of $gpus_of_node${SQUEUE_STATES:-}${SLURM_GPU_BIND:-}"
    """
    given = {
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
        "SLURM_GPUS_ON_NODE": gpus,
        "SQUEUE_STATES": "PENDING",
        "SLURM_GPU_BIND": "single:1",
        "RANKS_PER_NODE": gpus,
    }
    done = run(root, "bash", "-c", script, **given)
    assert answer in done.stdout + done.stderr, done
    assert "PENDING" not in done.stdout and "single" not in done.stdout
