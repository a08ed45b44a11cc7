"""The script cluster/pretrain.slurm on a real SLURM: two nodes with a rank each, the real command,
a tiny run, and its interruptions."""

from pathlib import Path

import pytest

from cluster.attempts import read_attempts
from pretrain.tracking.delivery import sync
from tests.slurm.conftest import SCRIPT, Cluster
from tests.slurm.tiny_run import assert_same_end, await_progress, tracked

pytestmark = [pytest.mark.timeout(900), pytest.mark.processes, pytest.mark.nightly]


def test_the_life_of_a_job(slurm: Cluster, config: Path, undisturbed: Path) -> None:
    run_dir = slurm.root / "runs/lively"
    job = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/lively")

    await_progress(slurm, job, run_dir, start=1)
    slurm("scancel", "--batch", "--signal=USR2", job)  # SLURM's signal before the time limit
    await_progress(slurm, job, run_dir, start=2)
    slurm("scontrol", "requeue", job)
    await_progress(slurm, job, run_dir, start=3)
    assert read_attempts(slurm.root / "jobs" / job / "attempts.jsonl")[1]["how"] == "stopped"
    slurm.tell("crash n2")
    try:
        await_progress(slurm, job, run_dir, start=4)
    finally:
        slurm.tell("revive n2")

    slurm("scancel", job)
    slurm.wait(job, "CANCELLED")
    said = slurm.rank_logs(job)[0].rpartition("--- attempt 4")[2]
    assert "stopped with a checkpoint" in said and "delivery ended with SIG" not in said, said
    sync(run_dir)  # on a busy machine a job may end before the complete event log has arrived
    assert tracked(slurm, run_dir) == ["KILLED"], said

    again = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/lively")
    assert slurm.wait(again, "COMPLETED")["Restarts"] == "0"
    assert_same_end(run_dir, undisturbed)
    assert tracked(slurm, run_dir) == ["FINISHED"]
    log = slurm.log(job)
    assert log.count("resuming from step-") == 3, log
    assert "the ranks received a signal, srun ended with exit code 130" in log, log
