"""A diverged run keeps its weights, stops after `max_skipped_steps` steps, and names the
samples."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest, load_paths
from pretrain.config import PretrainSettings
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split
from pretrain.loop.skipped_steps import SkippedSteps, samples_of_rank
from pretrain.ranks.collectives import Agreed
from tests.errors import fails, printed_errors
from tests.training import final_state, start, write_config

TAKEN, SKIPPED = (Agreed(1.0, 1.0, 0, 0, 1.0, applied=applied) for applied in (True, False))
BAD = replace(SKIPPED, loss=float("nan"))


@pytest.mark.processes
def test_a_diverged_run_stops_and_names_its_samples(shapes: Path, tmp_path: Path) -> None:
    """The first step changes the weights so much that no later loss is finite."""
    words = [
        "optimizer={name: sgd, lr: 1e30}",
        "schedule={name: constant}",
        "train.max_skipped_steps=3",
    ]
    words += ["engine.gradient_clip_norm=0", "checkpoint.every=2 steps", "train.log_every_steps=1"]
    process = start(write_config(tmp_path, dataset=shapes), tmp_path / "run", *words)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert printed_errors(output) == [("train.max_skipped_steps", "not-finite")]
    assert "Traceback" not in output
    lines = [
        json.loads(line)
        for log in sorted((tmp_path / "run" / "skipped_steps").iterdir())
        for line in log.read_text().splitlines()
    ]
    assert [sum(line["step"] == step for line in lines) for step in range(1, 6)] == [
        0,
        16,
        16,
        16,
        0,
    ]
    keys = {
        shard.name: load_paths(shapes, shard)
        for shard in load_manifest(shapes).split("train").shards
    }
    assert all(line["key"] in keys[line["shard"]] for line in lines)
    assert all(torch.isfinite(tensor).all() for tensor in final_state(tmp_path / "run").values())


def of_rank(run_dir: Path, shapes: Path, precision: str = "fp32") -> SkippedSteps:
    """Return the record of the first of two ranks."""
    tree = {
        "run_dir": str(run_dir),
        "data": {"dataset": str(shapes)},
        "model": {"kind": "mlp"},
        "train": {"duration": "1 epochs", "max_skipped_steps": 3},
        "engine": {"precision": precision},
    }
    reader = open_split(shapes, load_manifest(shapes), "train")
    order, plan = Order(reader.num_samples, 3), BatchPlan(8, 2, 2)
    return SkippedSteps(PretrainSettings.model_validate(tree), reader, order, plan, rank=0)


def test_the_ranks_shares_are_the_global_batch(shapes: Path) -> None:
    plan, order = BatchPlan(8, 2, 2), Order(100, 3)
    shares = [samples_of_rank(order, plan, step=5, rank=rank) for rank in range(2)]
    assert sorted(np.concatenate(shares)) == sorted(order.locate(np.arange(40, 48))[1])


def test_a_rank_writes_its_share_where_its_own_loss_is_at_fault(
    shapes: Path, tmp_path: Path
) -> None:
    mine, log = of_rank(tmp_path, shapes), tmp_path / "skipped_steps" / "rank-0.jsonl"
    mine.note(1, BAD)  # the other rank has the bad loss
    assert mine.total == 1 and not log.exists()
    mine.note(2, replace(BAD, own_loss=float("nan")))
    assert len(log.read_text().splitlines()) == 4
    mine.note(3, TAKEN)
    for step in (4, 5):
        mine.note(step, SKIPPED)  # bad gradients
    assert len(log.read_text().splitlines()) == 12
    with fails("not-finite", "train.max_skipped_steps"):
        mine.note(6, SKIPPED)


def test_overflows_of_fp16_are_blamed_on_no_sample_and_counted_across_a_restart(
    shapes: Path, tmp_path: Path
) -> None:
    mine, log = of_rank(tmp_path, shapes, "fp16"), tmp_path / "skipped_steps" / "rank-0.jsonl"
    mine.go_on(total=7, in_a_row=1)
    mine.note(11, SKIPPED)
    assert (mine.total, mine.in_a_row) == (8, 2)
    with fails("not-finite", "train.max_skipped_steps") as found:
        mine.note(12, SKIPPED)
    assert "engine.precision=bf16" in found.value.fix
    assert str(tmp_path) not in str(found.value) and not log.exists()
