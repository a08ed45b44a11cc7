"""A run whose node freezes or is lost on a real SLURM: the next attempt resumes on other or fewer
nodes."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.slurm.conftest import SCRIPT, Cluster
from tests.slurm.tiny_run import assert_same_end, await_progress, end_of, tracked

pytestmark = [pytest.mark.timeout(900), pytest.mark.processes, pytest.mark.nightly]


def test_a_node_that_freezes_is_taken_over_from_and_changes_nothing_when_it_wakes_up(
    slurm: Cluster, config: Path, undisturbed: Path
) -> None:
    run_dir = slurm.root / "runs/icy"
    # both ranks on one node: otherwise the lab's SLURM drains the other node, whose tasks cannot
    # notify the frozen node
    words = ("--export=ALL,RANKS_PER_NODE=2", SCRIPT, config, "run_dir=runs/icy")
    job = slurm.sbatch("--nodes=1", *words, "engine.lock_wait_s=2")
    await_progress(slurm, job, run_dir, start=1, ranks="1 x 2")
    slurm.tell("hang n1")  # the frozen node keeps the run's lock
    try:
        slurm.wait_for(job, "SLURM reports that the attempt is over", timeout_s=300)
        await_progress(slurm, job, run_dir, start=2, ranks="1 x 2")
        slurm.tell("thaw n1")
        assert slurm.wait(job, "COMPLETED", timeout_s=400)["Restarts"] == "1"
    finally:
        slurm.tell("revive n1")
    assert_same_end(run_dir, undisturbed)
    assert re.search(
        r"attempt 1 has locked this run \(process \d+ on n1, job \d+, attempt 1, since ",
        slurm.log(job),
    )
    assert [path.name for path in (run_dir / "starts").iterdir()] == ["0002"]
    events = map(json.loads, (run_dir / "tracking/journal.jsonl").read_text().splitlines())
    steps = [each["step"] for each in events if "train/loss" in each.get("values", ())]
    assert steps == list(range(50, 801, 50))
    assert tracked(slurm, run_dir) == ["FINISHED"]


def test_fewer_nodes_go_on_where_that_was_asked_for(
    slurm: Cluster, config: Path, undisturbed: Path
) -> None:
    run_dir = slurm.root / "runs/fewer"
    job = slurm.sbatch(
        "--nodes=1-2",
        "--exclude=n3",
        SCRIPT,
        config,
        "run_dir=runs/fewer",
        "tracking.enabled=false",
    )
    await_progress(slurm, job, run_dir, start=1)
    slurm.tell("crash n1")  # the job's script runs on n1
    try:
        slurm.wait_for(job, "attempt 2: 1 x 1 ranks on n2")
    finally:
        slurm.tell("revive n1")
    slurm.wait(job, "COMPLETED")
    ours, theirs = end_of(run_dir), end_of(undisturbed)
    for name, tensor in ours.items():
        # the same batches; another order of sums can change lion's sign of a gradient near 0
        torch.testing.assert_close(tensor, theirs[name], rtol=0.05, atol=0.02)
