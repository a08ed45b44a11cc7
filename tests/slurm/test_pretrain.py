"""cluster/pretrain.slurm on a real SLURM: two nodes with a rank each, the real command, a tiny run, and all that befalls it."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.starts import read_starts
from tests.slurm.conftest import Cluster

CONFIG = """
run_dir: runs/tiny
data: {{dataset: {dataset}}}
model: {{kind: mlp, depth: 2, width: 32, expansion: 2}}
augment: {{crop_scale: [0.6, 1.0], mixup_alpha: 0.8}}
optimizer: {{name: lion, lr: 2e-4}}
schedule: {{warmup: 5 steps}}
train: {{duration: 800 steps, global_batch_size: 16, eval_every: 1000 steps, log_every_steps: 50}}
engine: {{zero_stage: 2, precision: fp32, gradient_clip_norm: 1.0, timeout_s: 60}}
checkpoint: {{every: 10 steps}}
"""
SCRIPT = "cluster/pretrain.slurm"
pytestmark = pytest.mark.timeout(900)  # they wait for SLURM, and for five starts of torch


@pytest.fixture(scope="session")
def config(slurm: Cluster, shapes: Path) -> Path:
    path = slurm.root / "tiny.yaml"
    path.write_text(CONFIG.format(dataset=shapes))
    return path


@pytest.fixture(scope="session")
def undisturbed(slurm: Cluster, config: Path) -> Path:
    """The run directory of the same config, run without SLURM."""
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "train", config, "run_dir=runs/local", "tracking.enabled=false", "--ranks", "2"],
        cwd=slurm.root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return slurm.root / "runs/local"


def end_of(run_dir: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    assert (run_dir / "result.json").exists()
    tensors: dict[str, torch.Tensor] = load_file(run_dir / "checkpoints/step-00000800" / file)
    assert tensors
    return tensors


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Both runs are finished, with the same bits in weights and optimizer."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        theirs, ours = end_of(reference, file), end_of(run_dir, file)
        assert theirs.keys() == ours.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], file


def await_progress(slurm: Cluster, job: str, run_dir: Path, *, start: int, ranks: str = "2 x 1") -> None:
    """Until start number `start` has gone on, and has made a checkpoint of its own."""
    slurm.wait_for(job, f"start {start}: {ranks} ranks", timeout_s=240)
    pointer = run_dir / "checkpoints/latest"
    before, deadline_s = pointer.read_text() if pointer.exists() else "", time.monotonic() + 240
    while not pointer.exists() or pointer.read_text() == before:
        assert time.monotonic() < deadline_s, slurm.log(job)
        time.sleep(0.02)


def tracked(slurm: Cluster, run_dir: Path) -> list[str]:
    """The status of each MLflow run of this run directory."""
    with sqlite3.connect(slurm.root / "runs/mlflow.db") as store:
        rows = store.execute(
            "select status from runs where lifecycle_stage = 'active' and name like ?", (f"%{run_dir.name}%",)
        ).fetchall()
    return [status for (status,) in rows]


def test_the_life_of_a_job(slurm: Cluster, config: Path, undisturbed: Path) -> None:
    run_dir = slurm.root / "runs/lively"
    job = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/lively")

    await_progress(slurm, job, run_dir, start=1)
    slurm("scancel", "--batch", "--signal=USR2", job)  # what SLURM sends before the time limit
    await_progress(slurm, job, run_dir, start=2)
    slurm("scontrol", "requeue", job)
    await_progress(slurm, job, run_dir, start=3)
    assert read_starts(slurm.root / "jobs" / job / "starts.jsonl")[1]["how"] == "stopped"
    slurm.tell("crash n2")
    try:
        await_progress(slurm, job, run_dir, start=4)
    finally:
        slurm.tell("revive n2")

    slurm("scancel", job)
    slurm.wait(job, "CANCELLED")
    slurm.wait_for(job, "stopped with a checkpoint")
    assert tracked(slurm, run_dir) == ["KILLED"]

    again = slurm.sbatch("--nodes=2", SCRIPT, config, "run_dir=runs/lively")
    assert slurm.wait(again, "COMPLETED")["Restarts"] == "0"
    assert_same_end(run_dir, undisturbed)
    assert tracked(slurm, run_dir) == ["FINISHED"]
    log = slurm.log(job)
    assert log.count("going on from step-") == 3, log
    assert "its ranks received a signal, srun ended with 0" in log, log


def test_a_node_that_freezes_is_taken_over_from_and_changes_nothing_when_it_wakes_up(
    slurm: Cluster, config: Path, undisturbed: Path
) -> None:
    run_dir = slurm.root / "runs/icy"
    # both ranks there: in the lab SLURM would drain a node whose tasks cannot tell the frozen one of their end
    words = ("--export=ALL,RANKS_PER_NODE=2", SCRIPT, config, "run_dir=runs/icy")
    job = slurm.sbatch("--nodes=1", *words, "engine.lock_wait_s=2")
    await_progress(slurm, job, run_dir, start=1, ranks="1 x 2")
    slurm.tell("hang n1")  # the run's lock is held for good
    try:
        slurm.wait_for(job, "SLURM reports that it is over, so this start takes over from it", timeout_s=300)
        await_progress(slurm, job, run_dir, start=2, ranks="1 x 2")
        slurm.tell("thaw n1")
        assert slurm.wait(job, "COMPLETED", timeout_s=400)["Restarts"] == "1"
    finally:
        slurm.tell("revive n1")
    assert_same_end(run_dir, undisturbed)
    assert re.search(r"start 1 of this run holds it \(process \d+ on n1, job \d+, start 1, since ", slurm.log(job))
    assert [path.name for path in (run_dir / "starts").iterdir()] == ["0002"]
    events = map(json.loads, (run_dir / "tracking/journal.jsonl").read_text().splitlines())
    steps = [each["step"] for each in events if "train/loss" in each.get("values", ())]
    assert steps == list(range(50, 801, 50))
    assert tracked(slurm, run_dir) == ["FINISHED"]


def test_fewer_nodes_go_on_where_that_was_asked_for(slurm: Cluster, config: Path, undisturbed: Path) -> None:
    run_dir = slurm.root / "runs/fewer"
    job = slurm.sbatch("--nodes=1-2", "--exclude=n3", SCRIPT, config, "run_dir=runs/fewer")
    await_progress(slurm, job, run_dir, start=1)
    slurm.tell("crash n1")  # where the job's script runs
    try:
        slurm.wait_for(job, "start 2: 1 x 1 ranks on n2")
    finally:
        slurm.tell("revive n1")
    slurm.wait(job, "COMPLETED")
    ours, theirs = end_of(run_dir), end_of(undisturbed)
    for name, tensor in ours.items():
        # the same batches; sums in another order, and lion's sign of a gradient near 0 may differ
        torch.testing.assert_close(tensor, theirs[name], rtol=0.05, atol=0.02)


def test_a_wrong_config_fails_at_once(slurm: Cluster, config: Path) -> None:
    cases = {
        # found before anything is started
        "optimizer.lrr=1e-4": "optimizer.lrr: unknown key; did you mean 'lr'?",
        # found by the ranks
        "train.global_batch_size=17": "pretrain: train.global_batch_size: 17 does not split over 2 ranks",
    }
    words = (SCRIPT, config, "augment.mixup_alpha=0")
    jobs = {case: slurm.sbatch("--nodes=2", *words, f"run_dir=runs/wrong-{number}", case) for number, case in enumerate(cases)}
    for case, job in jobs.items():
        ended = slurm.wait(job, "FAILED")
        assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0")
        assert cases[case] in slurm.log(job), slurm.log(job)
    assert not list((slurm.root / "runs").glob("wrong-*"))
