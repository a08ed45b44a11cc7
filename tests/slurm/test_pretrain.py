"""cluster/pretrain.slurm on a real SLURM: two nodes with a rank each, the real command, a tiny run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.slurm.conftest import Cluster

CONFIG = """
run_dir: runs/tiny
data: {{dataset: {dataset}}}
model: {{kind: mlp, depth: 2, width: 32, expansion: 2}}
augment: {{crop_scale: [0.6, 1.0], mixup_alpha: 0.8}}
optimizer: {{name: lion, lr: 2e-4}}
schedule: {{warmup: 5 steps}}
train: {{duration: 200 steps, global_batch_size: 16, eval_every: 1000 steps, log_every_steps: 50}}
engine: {{zero_stage: 2, precision: fp32, gradient_clip_norm: 1.0, timeout_s: 60}}
checkpoint: {{every: 10 steps}}
tracking: {{enabled: false}}
"""
SCRIPT = "cluster/pretrain.slurm"


@pytest.fixture(scope="session")
def config(slurm: Cluster, shapes: Path) -> Path:
    path = slurm.root / "tiny.yaml"
    path.write_text(CONFIG.format(dataset=shapes))
    return path


@pytest.fixture(scope="session")
def local_run(slurm: Cluster, config: Path) -> Path:
    """The run directory of the same config, run without SLURM and without interruption."""
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "train", str(config), "run_dir=runs/local", "--ranks", "2"],
        cwd=slurm.root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return slurm.root / "runs/local"


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Both runs are finished, with the same bits in weights and optimizer."""
    assert (run_dir / "result.json").exists()
    for file in ("model.safetensors", "optimizer.safetensors"):
        ends = [load_file(run / "checkpoints/step-00000200" / file) for run in (run_dir, reference)]
        assert ends[0] and ends[0].keys() == ends[1].keys()
        differing = [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])]
        assert not differing, f"{file} of {run_dir}: {differing}"


def test_two_nodes_learn_what_two_local_ranks_learn(slurm: Cluster, config: Path, local_run: Path) -> None:
    job = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/nodes")
    assert slurm.wait(job, "COMPLETED")["Restarts"] == "0"
    assert "2 nodes x 1 ranks on n[1-2], n1:" in slurm.log(job)
    assert_same_end(slurm.root / "runs/nodes", local_run)


def test_a_signalled_job_requeues_itself_and_ends_the_same(slurm: Cluster, config: Path, local_run: Path) -> None:
    run_dir = slurm.root / "runs/requeued"
    job = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/requeued")
    deadline_s = time.monotonic() + 60
    while not (run_dir / "checkpoints/latest").exists():
        assert time.monotonic() < deadline_s, slurm.log(job)
        time.sleep(0.05)
    slurm("scancel", "--batch", "--signal=USR2", job)  # what SLURM sends before the time limit
    assert slurm.wait(job, "COMPLETED", timeout_s=90)["Restarts"] == "1"
    log = slurm.log(job)
    assert "stopped with a checkpoint" in log and "srun ended with 0 after a signal" in log, log
    resumed_at = int(log.partition("going on from step-")[2].split()[0])
    assert 0 < resumed_at < 200
    assert log.index("restart 0 of") < log.index("restart 1 of"), log  # one log of both starts
    assert_same_end(run_dir, local_run)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # found before anything is started
        ("optimizer.lrr=1e-4", "pretrain: optimizer.lrr: unknown key; did you mean 'lr'?"),
        # found by the ranks
        ("train.global_batch_size=17", "pretrain: train.global_batch_size: 17 does not split over 2 ranks"),
    ],
)
def test_a_wrong_config_fails_at_once(slurm: Cluster, config: Path, override: str, message: str) -> None:
    job = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/wrong", "augment.mixup_alpha=0", override)
    ended = slurm.wait(job, "FAILED", timeout_s=30)
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0")
    assert slurm.log(job).count(message) == 1, slurm.log(job)
    assert not (slurm.root / "runs/wrong").exists()
