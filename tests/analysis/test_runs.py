"""Runs are found by what they left on disk, each with the right task, result, curves and origin, finished or not."""

from pathlib import Path
from typing import Any

import pytest

from analysis.report import collect
from finetune.runs import Run, read_run, run_of, runs_below
from tests.analysis.conftest import MIXER, MLP, WriteRun

PRETRAIN: dict[str, Any] = {"data": {"dataset": "data/animals"}, "model": {"kind": "mlp"}}
PROBE: dict[str, Any] = {"dataset": "data/animals", "lrs": [1e-3], "pretrained": None}
TUNE: dict[str, Any] = {"data": {"dataset": "data/animals"}, "pretrained": "runs/a", "init": "pretrained"}


def found_in(folder: Path) -> dict[str, Run]:
    return {run.name: run for run in collect(folder)}


def test_runs_are_sorted_by_task_and_name(tmp_path: Path, write_run: WriteRun) -> None:
    evaluation = {"dataset": "data/animals", "split": "val", "pretrained": "runs/a"}
    for name, settings in (
        *(("d", TUNE | {"init": "scratch"}), ("c", TUNE), ("b", PROBE), ("z", PRETRAIN), ("deeper/a", PRETRAIN)),
        *(("e", evaluation), ("k", {"dataset": "data/animals", "neighbours": [20]})),
    ):
        run = write_run(name, settings)
    assert [(run.name, run.task) for run in collect(tmp_path / "runs")] == [
        *(("a", "pretrain"), ("z", "pretrain"), ("b", "probe"), ("k", "knn"), ("c", "tune"), ("d", "scratch")),
        ("e", "evaluate"),
    ]
    assert [run.name for run in collect(run)] == ["k"]  # the folder of a run is a folder of one run
    assert [run.name for run in runs_below(tmp_path, deepest=2)] == ["b", "c", "d", "e", "k", "z"]


def test_what_is_no_run_and_what_cannot_be_read_is_left_out(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("a", PRETRAIN)
    copy = tmp_path / "runs" / "mlartifacts" / "0123" / "artifacts"
    copy.mkdir(parents=True)
    (copy / "config.yaml").write_text("data: {dataset: x}\n")
    (write_run("b", PRETRAIN) / "config.yaml").write_text("data: [\n")
    assert list(found_in(tmp_path / "runs")) == ["a"]
    error = capsys.readouterr().err
    assert str(tmp_path / "runs" / "b" / "config.yaml") in error and "the run is left out" in error
    assert run_of(tmp_path / "runs" / "b") is None


def test_a_result_makes_a_run_finished(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("a", PRETRAIN, result={"eval/top1": 0.75, "images_per_s": 1234.5})
    write_run("b", PRETRAIN)
    write_run("c", PROBE, result={"test_top1": 0.5, "test_top5": 0.9, "holdout_top1": 0.6})
    runs = found_in(tmp_path / "runs")
    assert {name: run.top1 for name, run in runs.items()} == {"a": 0.75, "b": None, "c": 0.5}
    assert runs["b"].result == {} and runs["c"].accuracies == {"top-1": 0.5, "top-5": 0.9}


def test_a_curve_is_what_the_journal_has_up_to_where_a_kill_cut_it(tmp_path: Path, write_run: WriteRun) -> None:
    metrics = [(10, {"train/loss": 2.5}), (20, {"train/loss": 2.0, "eval/top1": 0.25}), (30, {"train/loss": 1.5})]
    journal = write_run("a", PRETRAIN, metrics=metrics) / "tracking" / "journal.jsonl"
    run = found_in(tmp_path / "runs")["a"]
    assert run.curve("train/loss") == ([10, 20, 30], [2.5, 2.0, 1.5])
    assert run.curve("eval/top1") == ([20], [0.25])
    assert run.curve("nothing") == ([], [])
    journal.write_text(journal.read_text()[:-5])
    assert run.curve("train/loss") == ([10, 20], [2.5, 2.0])
    journal.unlink()
    assert found_in(tmp_path / "runs")["a"].curve("train/loss") == ([], [])


def test_a_model_is_named_after_its_tag_or_its_checkpoint(tmp_path: Path, write_run: WriteRun) -> None:
    mixer = write_run("mixer", PRETRAIN, spec=MIXER)
    write_run("mlp", PRETRAIN, spec=MLP)
    write_run("begun", PRETRAIN)
    write_run("tagged", PRETRAIN, tags={"model": "B-1/Wi-2"})
    write_run("probe", PROBE | {"pretrained": str(mixer)})
    write_run("pixels", PROBE)
    assert {name: run.model_name for name, run in found_in(tmp_path / "runs").items()} == {
        "mixer": "Mixer P4 C8 L3",
        "mlp": "B-2/Wi-6",
        "begun": "?",
        "tagged": "B-1/Wi-2",
        "probe": "Mixer P4 C8 L3",
        "pixels": "pixels",
    }


def test_chance_is_one_in_the_number_of_classes(tmp_path: Path, write_run: WriteRun, shapes: Path) -> None:
    write_run("known", PRETRAIN | {"data": {"dataset": str(shapes)}})
    write_run("probe", PROBE | {"dataset": str(shapes)})
    write_run("gone", PRETRAIN | {"data": {"dataset": str(tmp_path / "gone")}})
    runs = found_in(tmp_path / "runs")
    assert {name: run.chance for name, run in runs.items()} == {"known": 0.125, "probe": 0.125, "gone": None}
    assert runs["probe"].dataset == shapes


def test_what_a_run_started_from_is_known_wherever_one_looks_from(tmp_path: Path, write_run: WriteRun) -> None:
    first = write_run("a", PRETRAIN, spec=MLP)
    write_run("tuned", TUNE | {"run_dir": "runs/tuned"})
    write_run("pixels", PROBE)
    runs = found_in(tmp_path / "runs")
    assert runs["tuned"].pretrained == first
    assert runs["tuned"].started_from == "B-2/Wi-6 trained on animals"
    assert runs["pixels"].pretrained is None and runs["pixels"].started_from == ""
    assert read_run(first).started_from == "random weights"
