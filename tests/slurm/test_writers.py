"""A second `cluster/submit` for a run fails on a real SLURM."""

from pathlib import Path

import pytest

from tests.slurm.conftest import SCRIPT, Cluster

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


def test_a_run_that_is_in_the_queue_is_not_submitted_again(slurm: Cluster, config: Path) -> None:
    first = slurm.submit("--parsable", "--hold", SCRIPT, config, "run_dir=runs/twice")
    assert first.returncode == 0, first.stderr
    job = first.stdout.strip()
    again = slurm.submit("--parsable", SCRIPT, config, "run_dir=runs/../runs/twice")
    assert again.returncode == 2 and again.stdout == ""
    assert f"job {job} (PENDING) already writes it" in again.stderr, again.stderr
    assert f"--dependency=afterany:{job}" in again.stderr
    others = [
        slurm.submit("--parsable", "--hold", SCRIPT, config, "run_dir=runs/other"),
        slurm.submit(
            "--parsable",
            f"--dependency=afterany:{job}",
            "--hold",
            SCRIPT,
            config,
            "run_dir=runs/twice",
        ),
    ]
    assert [other.returncode for other in others] == [0, 0], others
    slurm("scancel", job, *(other.stdout.strip() for other in others))
    slurm.wait(job, "CANCELLED")
    assert (
        slurm.submit("--parsable", "--test-only", SCRIPT, config, "run_dir=runs/twice").returncode
        == 0
    )
    assert not (slurm.root / "jobs/writes").exists()
