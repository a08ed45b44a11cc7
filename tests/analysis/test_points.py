"""Points of a plan whose runs are made by hand: every column against a number worked out here."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis import points
from analysis.cli import main
from analysis.points import SCHEMA, Point, collect, read_points
from cluster.plan_file import Plan, load_plan
from cluster.work import Work
from data_prep.errors import SettingsError
from data_prep.manifest import load_manifest
from data_prep.settings import dump
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.files import Snapshot, TrainerState, publish
from pretrain.config import PretrainSettings
from pretrain.engine.step import EngineState
from tests.ranks import REPOSITORY
from tests.records import write_record_of

PLAN = """
pretrain:
  config: {configs}/pretrain/demo_mlp.yaml
  overrides: [data.dataset={data}, data.eval_split=val, "model={{kind: mlp, depth: 2, width: 32}}", train.duration=6 epochs,
    train.global_batch_size=50, optimizer.lr=3e-4, "checkpoint.keep_at=[2 epochs]"]
  seeds: [3, 4]
  run_dir: runs/seed-{{seed}}
probe:
  config: {configs}/probe/demo.yaml
  overrides: [data.dataset={other}]
  each_pretrained: true
  checkpoints: [2 epochs, 6 epochs]
  run_dir: runs/probe-{{pretrained}}
finetune:
  config: {configs}/finetune/demo.yaml
  overrides: [data.dataset={other}, data.eval_split=val, "seeds=[7, 8]"]
  each_pretrained: true
  run_dir: runs/tune-{{pretrained}}
"""


@pytest.fixture
def plan(shapes: Path, other_shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(
        PLAN.format(configs=REPOSITORY / "configs", data=shapes, other=other_shapes)
    )
    for cache in (points._run_at, points._card_in, points._loaded):
        cache.cache_clear()
    return load_plan("study.yaml")


def write_run(
    work: Work,
    result: dict[str, Any],
    *,
    steps: tuple[int, ...] = (),
    metrics: Mapping[int, dict[str, float]] | None = None,
) -> None:
    """What the command itself leaves, without its training."""
    run, settings = Path(work.writes), work.settings
    (run / "tracking").mkdir(parents=True)
    (run / "config.yaml").write_text(dump(settings))
    write_record_of(run, settings.model_dump(mode="json"), root=Path.cwd())
    events = [
        {"event": "metrics", "step": step, "values": values, "time_ms": 2}
        for step, values in (metrics or {}).items()
    ]
    lines = [{"event": "start", "params": {}, "tags": {}, "time_ms": 1}, *events]
    (run / "tracking" / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    for step in steps:
        assert isinstance(settings, PretrainSettings)
        manifest = load_manifest(settings.data.dataset)
        classes, mean, std = tuple(manifest.classes), manifest.channel_mean, manifest.channel_std
        card = ModelCard(
            model=settings.model,
            image_size=32,
            classes=classes,
            channel_mean=mean,
            channel_std=std,
            dataset=manifest.name,
            step=step,
        )
        state = EngineState(weights={"head.bias": torch.zeros(2)}, optimizer={}, num_updates=step)
        publish(run, Snapshot(state, TrainerState(step=step, samples_consumed=50 * step), card))
    (run / "result.json").write_text(json.dumps(result))


def finish_all(plan: Plan, shapes: Path) -> tuple[int, int]:
    """(step, step) of 2 and of 6 epochs."""
    num_images = load_manifest(shapes).splits["train"].num_samples
    early, late = (-(-epochs * num_images // 50) for epochs in (2, 6))
    pretrain, probe, tune = plan.stages
    for number, work in enumerate(pretrain.works):
        seen = {
            early: {"eval/top1": 0.2, "eval/loss": 2.5, "train/loss": 3.0},
            late: {"eval/top1": 0.25, "eval/loss": 2.0, "train/loss": 1.0},
        }
        result = {
            "step": late,
            "eval/top1": 0.25 + number / 8,
            "eval/loss": 2.0,
            "images_per_s": 1e3,
        }
        write_run(work, result, steps=(early, late), metrics=seen)
    for work, step in zip(probe.works, (early, late) * 2, strict=True):
        write_run(work, {"test_top1": 0.5, "weights_step": step})
    for work in tune.works:
        each = {"eval/top1": 0.75, "eval/loss": 1.0, "step": 9, "weights_step": late}
        write_run(work, {"runs": {"seed-7": each, "seed-8": each}, "eval/top1": 0.75})
        for seed in (7, 8):
            write_run(
                Work(
                    "tune",
                    work.config,
                    (
                        *work.overrides,
                        "seeds=null",
                        f"train.seed={seed}",
                        f"run_dir={work.writes}/seed-{seed}",
                    ),
                ),
                each,
            )
    return early, late


def test_points_of_a_plan(plan: Plan, shapes: Path, other_shapes: Path) -> None:
    early, late = finish_all(plan, shapes)
    found = collect([plan])
    assert [point.task for point in found] == ["pretrain"] * 4 + ["probe"] * 4 + ["tune"] * 4
    assert [(point.step, point.seed, point.error) for point in found[:4]] == [
        (early, 3, 0.8),
        (late, 3, 0.75),
        (early, 4, 0.8),
        (late, 4, 0.625),
    ]
    assert [(point.step, point.weights, point.own_seed) for point in found[4:8]] == [
        (early, "runs/seed-3", 0), (late, "runs/seed-3", 0), (early, "runs/seed-4", 0), (late, "runs/seed-4", 0)
    ]  # fmt: skip
    assert [(point.run, point.step, point.seed, point.own_seed) for point in found[8:10]] == [
        ("runs/tune-seed-3/seed-7", late, 3, 7),
        ("runs/tune-seed-3/seed-8", late, 3, 8),
    ]
    first, num_images, num_classes = (
        found[0],
        load_manifest(shapes).splits["train"].num_samples,
        len(load_manifest(shapes).classes),
    )
    adds = 3 * 32 * 32 * 32 + 2 * 2 * 32 * 128 + 32 * num_classes
    assert (first.images, first.samples, first.epochs) == (
        num_images,
        50 * early,
        50 * early / num_images,
    )
    assert (first.multiply_adds, first.compute, first.flop) == (
        adds,
        3.0 * adds * 50 * early,
        6.0 * adds * 50 * early,
    )
    assert first.block_parameters == 2 * (2 * 32 + 32 * 128 + 128 + 128 * 32 + 32)
    assert (
        first.parameters
        == first.block_parameters + 3 * 32 * 32 * 32 + 32 + 32 * num_classes + num_classes
    )
    assert (first.width, first.gamma, first.hidden_width, first.depth, first.lr) == (
        32,
        4.0,
        128.0,
        2,
        3e-4,
    )
    assert json.loads(first.labels)["seed"] == "3"
    assert (found[1].train_losses, found[1].test_losses, found[1].test_errors) == (
        [3.0, 1.0],
        [2.5, 2.0],
        [0.8, 0.75],
    )
    assert found[1].test_epochs == [50 * early / num_images, 50 * late / num_images]
    target = load_manifest(other_shapes)
    assert {(point.target, point.target_hash) for point in found[4:]} == {
        (target.name, target.content_hash)
    }
    assert {point.num_test for point in found[8:]} == {target.splits["val"].num_samples}


def test_what_is_not_finished_is_named(
    plan: Plan, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_all(plan, shapes)
    Path("runs/probe-seed-4-6epochs/result.json").unlink()
    with pytest.raises(
        SettingsError,
        match="study: probe 3: not finished; run the plan to its end, or give --partial",
    ):
        collect([plan])
    with pytest.raises(
        SettingsError, match="study: two of the plans are called so"
    ):  # each of its runs would count twice
        collect([plan, plan], partial=True)
    words = ["analysis", "points", "study.yaml", "--out", "all.parquet"]
    assert main(words[1:]) == 2
    assert main([*words[1:], "--partial"]) == 0
    assert capsys.readouterr().out == "all.parquet: 11 points of 9 runs\n"
    read = read_points([Path("all.parquet")])
    assert len(read) == 11
    assert read[0].train_losses is None
    assert read[1].labels == collect([plan], partial=True)[1].labels


def test_every_column_has_a_type() -> None:
    assert [each.name for each in fields(Point)] == SCHEMA.names
    assert str(SCHEMA.field("train_epochs").type) == "list<item: float>"
    assert str(SCHEMA.field("augmented").type) == "bool"


@pytest.mark.parametrize("content", [None, b"", b"compute,error\n"])
def test_a_file_without_points(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.parquet: (no such file|holds no points)"):
        read_points([path])
