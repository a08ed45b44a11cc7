"""Two jobs for one run, on a real SLURM: the second is not taken by cluster/submit, and gives way
if plain sbatch took it."""

import subprocess
import time
from pathlib import Path

from tests.slurm.conftest import SCRIPT, Cluster


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


def test_of_two_jobs_for_one_run_the_later_start_gives_way(slurm: Cluster, config: Path) -> None:
    late = slurm.sbatch("--hold", SCRIPT, config, "run_dir=runs/shared")
    early = slurm.sbatch("--wrap", "sleep 300")
    slurm.wait(early, "RUNNING")
    time.sleep(2)  # SLURM tells starts to the second; of the same one the lower number is the first
    noted = slurm.root / "jobs" / early / "writes"
    noted.parent.mkdir(parents=True)
    noted.write_text(f"-\t{slurm.root}/runs/shared\n")  # as a job of ours does at its start
    slurm("scontrol", "release", late)
    assert slurm.wait(late, "FAILED")["Restarts"] == "0"
    said = slurm.log(late)
    assert f"runs/shared is taken by job {early} (RUNNING), which was started first" in said, said
    assert (slurm.root / "jobs" / late / "writes").read_text() == noted.read_text()
    slurm("scancel", early)
    slurm.wait(early, "CANCELLED")
    assert not (slurm.root / "runs/shared").exists()
