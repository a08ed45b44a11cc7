"""A tiny run on the lab with two ranks of the real command, and functions that observe it."""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.slurm.conftest import Cluster


def end_of(run_dir: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    assert (run_dir / "result.json").exists()
    tensors: dict[str, torch.Tensor] = load_file(run_dir / "checkpoints/step-00000800" / file)
    assert tensors
    return tensors


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Check that both runs are finished with the same bits in weights and optimizer state."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        theirs, ours = end_of(reference, file), end_of(run_dir, file)
        assert theirs.keys() == ours.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], file


def await_progress(
    slurm: Cluster, job: str, run_dir: Path, *, start: int, ranks: str = "2 x 1"
) -> None:
    """Wait until attempt `start` has resumed, and has written its own checkpoint."""
    slurm.wait_for(job, f"attempt {start}: {ranks} ranks", timeout_s=240)
    pointer = run_dir / "checkpoints/latest"
    before, deadline_s = pointer.read_text() if pointer.exists() else "", time.monotonic() + 240
    while not pointer.exists() or pointer.read_text() == before:
        assert time.monotonic() < deadline_s, slurm.log(job)
        time.sleep(0.02)


def tracked(slurm: Cluster, run_dir: Path) -> list[str]:
    """Return the status of each MLflow run of this run directory."""
    active = "lifecycle_stage = 'active'"
    query = f"select status from runs where {active} and name like '%{run_dir.name}%'"
    return [status for (status,) in slurm.mlflow(query, runs="runs")]
