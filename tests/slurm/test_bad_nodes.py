"""The pre-flight and the heartbeat on a real SLURM: a bad node is named and avoided, a frozen rank
ends the attempt, not the job."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.attempts import read_attempts
from tests.slurm.conftest import Cluster

CONFIG = """
run_dir: runs/hurt/run
data: {{dataset: {dataset}}}
model: {{kind: mlp, depth: 2, width: 32}}
augment: {{flip_probability: 0.0}}
optimizer: {{name: lion, lr: 2e-4}}
train: {{duration: 200 steps, global_batch_size: 16, eval_every: 1000 steps, log_every_steps: 50}}
engine: {{zero_stage: 1, precision: fp32, timeout_s: 60, heartbeat_timeout_s: 10, hang_timeout_s: 50}}
checkpoint: {{every: 10 steps}}
"""
# SLURM_WAIT: seconds until frozen tasks are killed after the others' end
OPTIONS = "PREFLIGHT=1,PREFLIGHT_TIMEOUT_S=120,RANKS_PER_NODE=2,SLURM_WAIT=2"
pytestmark = [pytest.mark.timeout(900), pytest.mark.processes, pytest.mark.nightly]


@pytest.fixture
def read_only_on_n2(slurm: Cluster) -> Iterator[Path]:
    """A directory that is read-only on n2."""
    place = slurm.directory / "scratch"
    place.mkdir()
    slurm.tell(f"on n2 mount -t tmpfs -o ro tmpfs {place}")
    try:
        yield place
    finally:
        slurm.tell(f"on n2 umount {place}")


def await_checkpoint(slurm: Cluster, job: str, run_dir: Path) -> None:
    deadline_s = time.monotonic() + 240
    while not (run_dir / "checkpoints/latest").exists():
        assert time.monotonic() < deadline_s and slurm.job(job)["JobState"] != "FAILED", slurm.log(
            job
        )
        time.sleep(0.1)


def test_a_bad_node_is_avoided_and_a_frozen_rank_is_found(
    slurm: Cluster, shapes: Path, read_only_on_n2: Path
) -> None:
    run_dir, config = slurm.root / "runs/hurt/run", slurm.root / "hurt.yaml"
    config.write_text(CONFIG.format(dataset=shapes))
    job = slurm.sbatch(
        "--nodes=2",
        f"--export=ALL,{OPTIONS},NODE_SCRATCH={read_only_on_n2}",
        "cluster/pretrain.slurm",
        config.name,
    )
    slurm.wait_for(job, "attempt 1: 2 x 2 ranks on n[1-2]")
    slurm.wait_for(job, "attempt 2: 2 x 2 ranks on n[1,3]", timeout_s=200)
    reason = f"n2\t{read_only_on_n2} (NODE_SCRATCH) cannot be used: Read-only file system\n"
    assert (slurm.root / "jobs" / job / "bad-nodes").read_text() == reason
    assert slurm.job(job)["ExcNodeList"] == "n2" and "the next attempt avoids n2" in slurm.log(job)

    await_checkpoint(slurm, job, run_dir)
    os.kill(slurm.rank_process(job, rank=3), signal.SIGSTOP)
    slurm.wait(job, "COMPLETED", timeout_s=400)
    log = slurm.log(job)
    verdict = (
        r"rank 3 \(node n3, pid \d+\) sent nothing for 10 s .*; stacks of all ranks:"
        r" runs/hurt/run/stacks"
    )
    assert re.search(verdict, log) and "resuming from step-" in log, log
    for rank in range(3):
        text = (run_dir / "stacks" / f"rank-{rank:04}.txt").read_text()
        assert f"rank {rank} (node n" in text and "pretrain/loop/trainer.py" in text, text

    path = slurm.root / "jobs" / job / "attempts.jsonl"
    nodes = [
        each["nodes"]
        for each in map(json.loads, path.read_text().splitlines())
        if each["event"] == "begin"
    ]
    ends = [each["how"] for each in read_attempts(path)]
    assert nodes[0] == "n[1-2]" and {*nodes[1:]} == {"n[1,3]"}, nodes
    # a machine that is too busy may silence a rank
    assert (ends[0], {*ends[1:-1]}, ends[-1]) == ("bad-node", {"failed"}, "finished"), ends
    assert (run_dir / "result.json").exists()
    assert slurm.mlflow("select name, status from runs", runs="runs/hurt") == [("run", "FINISHED")]
