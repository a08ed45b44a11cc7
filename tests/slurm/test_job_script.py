"""What cluster/pretrain.slurm does with its ranks, seen with ranks that only pretend: no import of torch, a second a test."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster, why_not

PYTHON = r"""#!/bin/bash
# stands in for .venv/bin/python: -m pretrain show|train CONFIG, where CONFIG says what the ranks do
if [ "$3" = show ]; then echo "run_dir: runs/$4"; exit; fi
echo "rank $SLURM_PROCID of $SLURM_NTASKS, local $SLURM_LOCALID of $SLURM_NTASKS_PER_NODE, gpus $CUDA_VISIBLE_DEVICES," \
    "master $MASTER_ADDR, on $(hostname), caches $TRITON_CACHE_DIR $TORCH_EXTENSIONS_DIR"
finish() { [ "$SLURM_PROCID" != 0 ] || { mkdir -p "runs/$1" && echo {} >"runs/$1/result.json"; }; exit 0; }
trap 'echo "rank $SLURM_PROCID got USR2"; exit 0' USR2
trap 'echo "rank $SLURM_PROCID got TERM"; exit 0' TERM
case $4 in
    quick*) finish "$4" ;;
    second-time*) [ -z "${SLURM_RESTART_COUNT:-}" ] || finish "$4" ;;
    crash*) exit 1 ;;
esac
while :; do sleep 0.1; done
"""
SCRIPT = "cluster/pretrain.slurm"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def lab(stand_in: Path) -> Iterator[Cluster]:
    with Cluster(python=stand_in) as cluster:
        yield cluster


def wait_for(lab: Cluster, job: str, text: str) -> None:
    deadline_s = time.monotonic() + 30
    while text not in lab.log(job):
        assert time.monotonic() < deadline_s, lab.log(job)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "gpus"), [([], "0,1,2,3"), (["--oversubscribe", "--gpus-per-node=2", "--cpus-per-task=2"], "0,1")]
)
def test_one_rank_per_gpu_and_every_rank_sees_all(lab: Cluster, options: list[str], gpus: str) -> None:
    name = f"quick-{len(options)}"
    job = lab.sbatch("--partition=gpu", *options, SCRIPT, name)
    lab.wait(job, "COMPLETED")
    ranks = sorted(line for line in lab.log(job).splitlines() if line.startswith("rank"))
    count = len(gpus.split(","))
    mine = lab.directory / "node" / f"wide-mlps-{os.getuid()}"  # NODE_SCRATCH comes from cluster/site.env
    assert ranks == [
        f"rank {rank} of {count}, local {rank} of {count}, gpus {gpus}, master g1, on g1,"
        f" caches {mine}/triton {mine}/extensions"
        for rank in range(count)
    ]
    assert mine.stat().st_mode & 0o777 == 0o700


def test_node_names_that_do_not_resolve_are_replaced_by_addresses(stand_in: Path) -> None:
    with Cluster(python=stand_in, LAB_HOSTS="none") as lab:
        job = lab.sbatch("--nodes=2", SCRIPT, "quick")
        lab.wait(job, "COMPLETED")
        assert lab.log(job).count("master 127.0.0.11, on n") == 2, lab.log(job)


def test_a_preempted_job_comes_back_though_only_its_ranks_were_told(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", SCRIPT, "second-time")
    wait_for(lab, job, "rank 1")
    urgent = lab.sbatch("--partition=high", "--nodes=2", "--exclusive", "--wrap", "true")
    lab.wait(urgent, "COMPLETED")
    assert lab.wait(job, "COMPLETED")["Restarts"] == "1"
    log = lab.log(job)
    assert "rank 0 got TERM" in log and "rank 1 got TERM" in log and "srun ended with 0\n" in log, log


def test_a_cancelled_job_stays_cancelled(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", SCRIPT, "for-ever")
    wait_for(lab, job, "rank 1")
    lab("scancel", job)
    lab.wait(job, "CANCELLED")
    wait_for(lab, job, "SLURM is ending the job")
    assert lab.job(job)["JobState"] == "CANCELLED"


def test_restarts_have_an_end(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", "--export=ALL,MAX_RESTARTS=0", SCRIPT, "for-ever")
    wait_for(lab, job, "rank 1")
    lab("scancel", "--batch", "--signal=USR2", job)
    lab.wait(job, "FAILED")
    assert "all 0 restarts (MAX_RESTARTS) are used up" in lab.log(job)


def test_what_fails_three_times_from_one_checkpoint_is_given_up(lab: Cluster) -> None:
    job = lab.sbatch("--nodes=2", SCRIPT, "crash")
    assert lab.wait(job, "FAILED")["Restarts"] == "2"
    assert "failed three times" in lab.log(job)
