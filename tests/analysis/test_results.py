"""The results table of a plan whose runs are written by hand: each column is compared with a number
computed in this file."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis import run_rows
from analysis.cli import main
from analysis.results import COLUMNS, read_results, results_below, results_of_plans
from analysis.run_rows import rows_of_run
from cluster.plan_file import Plan, load_plan
from cluster.work import Work
from data_prep.manifest import load_manifest
from data_prep.publish import write_json
from data_prep.settings import dump, read_yaml
from finetune.runs import read_run
from pretrain.checkpoints.card import ModelCard
from pretrain.checkpoints.files import Snapshot, TrainerState, publish
from pretrain.checkpoints.run import run_and_length
from pretrain.config import PretrainSettings
from pretrain.engine.step import EngineState
from pretrain.record import RECORD, Parent, RunRecord
from tests.conftest import Capture, Patch
from tests.errors import fails, printed_errors
from tests.ranks import REPOSITORY

PLAN = """
pretrain:
  config: {configs}/pretrain/demo_mlp.yaml
  overrides: [data.dataset={data}, data.eval_split=val, train.duration=6 epochs,
    "model={{kind: mlp, depth: 2, width: 32}}", train.global_batch_size=50, optimizer.lr=3e-4,
    "checkpoint.milestones=[2 epochs]"]
  seeds: [3, 4]
  run_dir: runs/seed-{{seed}}
probe:
  config: {configs}/probe/demo.yaml
  overrides: [data.dataset={other}]
  for_each: pretrain
  checkpoints: [2 epochs, 6 epochs]
  run_dir: runs/probe-{{pretrained}}
finetune:
  config: {configs}/finetune/demo.yaml
  overrides: [data.dataset={other}, data.eval_split=val, "seeds=[7, 8]", optimizer.lr=0.002]
  for_each: pretrain
  run_dir: runs/tune-{{pretrained}}
"""


@pytest.fixture
def plan(shapes: Path, other_shapes: Path, tmp_path: Path, monkeypatch: Patch) -> Plan:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(
        PLAN.format(configs=REPOSITORY / "configs", data=shapes, other=other_shapes)
    )
    for cache in (run_rows._run_at, run_rows._card_in, run_rows._load_data):
        cache.cache_clear()
    return load_plan("study.yaml")


TAGS = {"mlflow.source.git.commit": "0123456789ab-dirty", "hardware": "2 x H100"}


def write_run(
    work: Work,
    result: dict[str, Any],
    *,
    seed: int,
    taken_at: int = 0,
    steps: tuple[int, ...] = (),
    metrics: Mapping[int, dict[str, float]] | None = None,
) -> None:
    """Write the files of the command, without its training."""
    run, settings = Path(work.writes), work.settings
    (run / "tracking").mkdir(parents=True)
    (run / "config.yaml").write_text(dump(settings))
    place = settings.record  # type: ignore[attr-defined]
    source = run_and_length(work.pretrained or "")[0]
    parents = (Parent(str(Path(source).absolute()), taken_at),) if source else ()
    about = (place.plan, place.stage, place.member, place.labels, seed, parents)
    write_json(run / RECORD, asdict(RunRecord(work.kind, *about)))  # type: ignore[arg-type]
    events: list[dict[str, Any]] = [{"event": "start", "params": {}, "tags": TAGS, "time_ms": 1}]
    events += [
        {"event": "metrics", "step": step, "values": values, "time_ms": 2}
        for step, values in (metrics or {}).items()
    ]
    lines = "".join(json.dumps(line) + "\n" for line in events)
    (run / "tracking" / "journal.jsonl").write_text(lines)
    for step in steps:
        assert isinstance(settings, PretrainSettings)
        manifest = load_manifest(settings.data.dataset)
        card = ModelCard(
            model=settings.model,
            image_size=32,
            classes=tuple(manifest.classes),
            channel_mean=manifest.channel_mean,
            channel_std=manifest.channel_std,
            dataset=manifest.name,
            step=step,
        )
        state = EngineState(weights={"head.bias": torch.zeros(2)}, optimizer={}, num_updates=step)
        publish(run, Snapshot(state, TrainerState(step=step, samples_consumed=50 * step), card))
    (run / "result.json").write_text(json.dumps(result))


def finish_all(plan: Plan, shapes: Path) -> tuple[int, int]:
    """Finish all runs. Return the steps of 2 and of 6 epochs. The runs also keep the best
    checkpoint, of 4 epochs."""
    num_images = load_manifest(shapes).splits["train"].num_samples
    early, best, late = (-(-epochs * num_images // 50) for epochs in (2, 4, 6))
    pretrain, probe, tune = plan.stages
    seen = {
        early: {"eval/top1": 0.2, "eval/loss": 2.5, "train/loss": 3.0},
        best: {"eval/top1": 0.5, "eval/loss": 1.5},
        late: {"eval/top1": 0.25, "eval/loss": 2.0, "train/loss": 1.0},
    }
    for step, values in seen.items():
        values |= {"train/samples": 50.0 * step, "train/epoch": 50 * step / num_images}
    for number, work in enumerate(pretrain.works):
        result = {"step": late, "eval/top1": 0.25 + number / 8, "eval/loss": 2.0}
        write_run(work, result, seed=3 + number, steps=(early, best, late), metrics=seen)
    for work, step in zip(probe.works, (early, late) * 2, strict=True):
        write_run(work, {"test_top1": 0.5, "weights_step": step}, seed=0, taken_at=step)
    for work in tune.works:
        each = {"eval/top1": 0.75, "eval/loss": 1.0, "step": 9, "weights_step": late}
        both = {"runs": {"seed-7": each, "seed-8": each}, "eval/top1": 0.75}
        write_run(work, both, seed=0, taken_at=late)
        for seed in (7, 8):
            own = ("seeds=null", f"train.seed={seed}", f"run_dir={work.writes}/seed-{seed}")
            repeat = Work("tune", work.config, (*work.overrides, *own))
            write_run(repeat, each, seed=seed, taken_at=late)
    return early, late


def test_results_of_a_plan(plan: Plan, shapes: Path, other_shapes: Path) -> None:
    early, late = finish_all(plan, shapes)
    frame = results_of_plans([plan])
    assert frame.task.tolist() == ["pretrain"] * 4 + ["probe"] * 4 + ["tune"] * 4
    trained, probed, tuned = frame[:4], frame[4:8], frame[8:]
    assert trained.step.tolist() == [early, late] * 2 and trained.seed.tolist() == [3, 3, 4, 4]
    assert trained.error.tolist() == [0.8, 0.75, 0.8, 0.625]
    assert probed.step.tolist() == [early, late] * 2
    assert probed.weights.tolist() == ["runs/seed-3"] * 2 + ["runs/seed-4"] * 2
    assert (probed.own_seed == 0).all()
    lengths = ["for 2 epochs without DA", "for 6 epochs without DA"] * 2
    for start, length in zip(probed.start, lengths, strict=True):
        assert start.endswith(length.removesuffix(" without DA" * bool(trained.augmented.iloc[0])))
    assert tuned.run.tolist()[:2] == ["runs/tune-seed-3/seed-7", "runs/tune-seed-3/seed-8"]
    assert (tuned.step == late).all() and tuned.own_seed.tolist() == [7, 8, 7, 8]
    assert (tuned.own_lr == 0.002).all() and (tuned.lr == 0.0003).all()
    first, second = frame.iloc[0], frame.iloc[1]
    num_images = load_manifest(shapes).splits["train"].num_samples
    num_classes = len(load_manifest(shapes).classes)
    macs = 3 * 32 * 32 * 32 + 2 * 2 * 32 * 128 + 32 * num_classes
    blocks = 2 * (2 * 32 + 32 * 128 + 128 + 128 * 32 + 32)
    expected = {
        "images": num_images,
        "samples": 50 * early,
        "epochs": 50 * early / num_images,
        "multiply_adds": macs,
        "compute": 3.0 * macs * 50 * early,
        "flop": 6.0 * macs * 50 * early,
        "block_parameters": blocks,
        "parameters": blocks + 3 * 32 * 32 * 32 + 32 + 32 * num_classes + num_classes,
        "width": 32,
        "gamma": 4.0,
        "hidden_width": 128.0,
        "depth": 2,
        "lr": 3e-4,
    }
    assert {name: first[name] for name in expected} == expected
    assert json.loads(first.labels)["seed"] == "3"
    assert json.loads(probed.labels.iloc[2])["seed"] == "4"  # the seed of its weights
    assert (second.train_losses, second.test_losses) == ([3.0, 1.0], [2.5, 1.5, 2.0])
    assert second.test_errors == [0.8, 0.5, 0.75] and not isinstance(first.train_losses, list)
    assert second.test_epochs[::2] == [50 * early / num_images, 50 * late / num_images]
    target = load_manifest(other_shapes)
    assert set(frame.target_hash[4:]) == {target.content_hash}
    assert set(tuned.num_test) == {target.splits["val"].num_samples}
    assert set(frame.commit) == {"0123456789ab-dirty"} and set(frame.hardware) == {"2 x H100"}
    assert set(frame) == set(COLUMNS) and tuned.recipe.nunique() == 1


def test_a_family_is_all_settings_but_sizes_and_lengths(plan: Plan, shapes: Path) -> None:
    finish_all(plan, shapes)

    path = Path("runs/seed-4")
    text = (path / "config.yaml").read_text()

    def family(old: str, new: str) -> str:
        assert old in text
        (path / "config.yaml").write_text(text.replace(old, new))
        return str(rows_of_run(read_run(path))[-1]["family"])

    same = {("seed: 4", "seed: 5"), ("width: 32", "width: 64"), ("depth: 2", "depth: 9")}
    same |= {("6 epochs", "9 epochs"), (str(shapes), "data/other")}
    assert len({family(*each) for each in same}) == 1
    others = [("lr: 0.0003", "lr: 0.003"), ("expansion: 4", "expansion: 2"), ("seed: 4", "seed: 5")]
    assert len({family(*each) for each in others}) == 3


def test_epochs_of_a_deleted_stream(plan: Plan, shapes: Path, capsys: Capture) -> None:
    finish_all(plan, shapes)
    path = Path("runs/seed-4/config.yaml")
    tree = read_yaml(path)
    stream = {"stream": True, "samples_per_epoch": 25, "dataset": "gone"}
    tree["data"] |= stream | {"eval_dataset": str(shapes)}
    path.write_text(json.dumps(tree))
    last = rows_of_run(read_run(path.parent))[-1]
    assert last["epochs"] == last["step"] * 2 and not capsys.readouterr().err


def test_a_result_without_top1_is_an_error(plan: Plan, shapes: Path) -> None:
    """A training run without an evaluation split has no top1."""
    finish_all(plan, shapes)
    result = Path("runs/seed-4/result.json")
    result.write_text(result.read_text().replace("eval/top1", "eval/top5"))
    with fails("missing-value", "runs/seed-4"):
        results_of_plans([plan])
    frame = results_below(Path("runs"))
    frame.to_parquet("results.parquet")
    with fails("missing-value", "runs/seed-4"):
        read_results([Path("results.parquet")])
    frame.loc[frame.error.isna(), "split"] = "not stated"
    frame.to_parquet("results.parquet")
    assert read_results([Path("results.parquet")]).error.isna().sum() == 1


def test_unfinished_members_are_named(plan: Plan, shapes: Path, capsys: Capture) -> None:
    finish_all(plan, shapes)
    Path("runs/probe-seed-4-6epochs/result.json").unlink()
    with fails("unfinished", "study") as caught:
        results_of_plans([plan])
    assert "study: probe 3" in str(caught.value)
    with fails("conflict"):  # each run would be included twice
        results_of_plans([plan, plan], partial=True)
    words = ["collect", "study.yaml", "--out", "all.parquet"]
    assert main(words) == 2
    assert main([*words, "--allow-incomplete"]) == 0
    assert capsys.readouterr().out.startswith("11 results of 9 runs\n")
    frame = read_results([Path("all.parquet")])
    assert frame.run.tolist() == results_of_plans([plan], partial=True).run.tolist()
    assert pd.isna(frame.train_losses[0]) and list(frame.train_losses[1]) == [3.0, 1.0]


@pytest.mark.parametrize(
    ("figure", "field", "code"),
    [
        ("{kind: sweep, x: seed}", "", None),
        ("{kind: sweep, x: lrr}", "figure", "unknown-name"),
        ("{kind: sweep}", "figure.x", "conflict"),
        ("{kind: sweep, x: width, accuracy: true}", "figure.accuracy", "conflict"),
        ("{kind: line}", "kind", "bad-value"),
        ("{kind: curves, hues: lr}", "hues", "unknown-key"),
    ],
)
def test_a_figure_is_checked_without_runs(
    plan: Plan, capsys: Capture, figure: str, field: str, code: str | None
) -> None:
    path = Path(plan.path)
    path.write_text(f"{path.read_text()}figure: {figure}\n")
    assert main(["figure", "study.yaml", "--check"]) == (2 if code else 0)
    assert printed_errors(capsys.readouterr().err) == ([(field, code)] if code else [])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("content", "code"), [(None, "missing-path"), (b"", "unknown-format"), (b"a", "unknown-format")]
)
def test_a_file_without_results(tmp_path: Path, content: bytes | None, code: Any) -> None:
    path = tmp_path / "x.parquet"
    if content is not None:
        path.write_bytes(content)
    with fails(code, str(path)):
        read_results([path])
