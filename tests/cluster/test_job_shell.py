"""The shell parts of a job, with stand-ins for SLURM: which code it finds, what it hears of SLURM, which nodes are left."""

from pathlib import Path

import pytest

from tests.cluster.checkouts import run, stand_in


def test_a_job_that_was_put_back_before_its_first_line_finds_its_code(root: Path) -> None:
    """A failed prolog, a lost node, a preemption: the script's first start is then SLURM's second."""
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
    stand_in(root, "scontrol", f"echo 'JobId=7 Features={features} Command=x'")
    stand_in(root, "sinfo", "printf '%s\\n' 'n1 h100,big' 'n2 h100' 'n3 a100,big' 'n4 a100' 'n4 a100'")
    script = """
        job=7 job_dir=. snapshot=. SLURM_JOB_PARTITION=gpu SLURM_JOB_NUM_NODES=$1
        fail() { echo "$1"; exit 1; }
        . cluster/starts.sh
        printf 'n2\\tslow\\n' >bad-nodes
        check_nodes_left
    """
    said = run(root, "bash", "-c", script, "check", str(num_nodes)).stdout
    assert answer in said and bool(said) == bool(answer), said
