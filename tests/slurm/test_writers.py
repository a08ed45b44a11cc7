"""cluster/submit refuses a second job for one run, on a real SLURM."""

import subprocess
from pathlib import Path

import pytest

from tests.slurm.conftest import SCRIPT, Cluster

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


def submit(slurm: Cluster, *words: object) -> subprocess.CompletedProcess[str]:
    command = ["cluster/submit", "--parsable", *map(str, words)]
    return subprocess.run(
        command,
        cwd=slurm.root,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_run_that_is_in_the_queue_is_not_submitted_again(slurm: Cluster, config: Path) -> None:
    first = submit(slurm, "--hold", SCRIPT, config, "run_dir=runs/twice")
    assert first.returncode == 0, first.stderr
    job = first.stdout.strip()
    again = submit(slurm, SCRIPT, config, "run_dir=runs/../runs/twice")
    assert again.returncode == 2 and again.stdout == ""
    assert f"job {job} (PENDING) writes it already" in again.stderr, again.stderr
    assert f"--dependency=afterany:{job}" in again.stderr
    others = [
        submit(slurm, "--hold", SCRIPT, config, "run_dir=runs/other"),
        submit(
            slurm, f"--dependency=afterany:{job}", "--hold", SCRIPT, config, "run_dir=runs/twice"
        ),
    ]
    assert [other.returncode for other in others] == [0, 0], others
    slurm("scancel", job, *(other.stdout.strip() for other in others))
    slurm.wait(job, "CANCELLED")
    assert submit(slurm, "--test-only", SCRIPT, config, "run_dir=runs/twice").returncode == 0
    assert not (slurm.root / "jobs/writes").exists()
