"""Runs are found by what they left on disk, each with the right task, result and curves, finished or not."""

from pathlib import Path
from typing import Any

import pytest

from analysis.collect import Run, collect
from tests.analysis.conftest import MIXER, MLP, WriteRun

PRETRAIN: dict[str, Any] = {"data": {"dataset": "data/animals"}, "model": {"kind": "mlp"}}
PROBE: dict[str, Any] = {"dataset": "data/animals", "lrs": [1e-3], "pretrained": None}
TUNE: dict[str, Any] = {"data": {"dataset": "data/animals"}, "pretrained": "runs/a", "init": "pretrained"}


def runs_below(folder: Path) -> dict[str, Run]:
    return {run.directory.name: run for run in collect(folder)}


def test_runs_are_sorted_by_task_and_name(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("d", TUNE | {"init": "scratch"})
    write_run("c", TUNE)
    write_run("b", PROBE)
    write_run("z", PRETRAIN)
    write_run("deeper/a", PRETRAIN)
    assert [(run.directory.name, run.task) for run in collect(tmp_path / "runs")] == [
        ("a", "pretrain"),
        ("z", "pretrain"),
        ("b", "probe"),
        ("c", "tune"),
        ("d", "scratch"),
    ]


def test_a_run_folder_is_a_folder_of_one_run(write_run: WriteRun) -> None:
    assert [run.directory.name for run in collect(write_run("alone", PRETRAIN))] == ["alone"]


def test_a_config_among_the_artifacts_of_the_store_is_no_run(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("a", PRETRAIN)
    copy = tmp_path / "runs" / "mlartifacts" / "0123" / "artifacts"
    copy.mkdir(parents=True)
    (copy / "config.yaml").write_text("data: {dataset: x}\n")
    assert list(runs_below(tmp_path / "runs")) == ["a"]


def test_a_result_makes_a_run_finished(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("a", PRETRAIN, result={"eval/top1": 0.75, "images_per_s": 1234.5})
    write_run("b", PRETRAIN)
    write_run("c", PROBE, result={"test_top1": 0.5})
    runs = runs_below(tmp_path / "runs")
    assert {name: run.top1 for name, run in runs.items()} == {"a": 0.75, "b": None, "c": 0.5}
    assert runs["b"].result == {}


def test_a_curve_is_what_the_journal_says(tmp_path: Path, write_run: WriteRun) -> None:
    metrics = [(10, {"train/loss": 2.5}), (20, {"train/loss": 2.0, "eval/top1": 0.25}), (30, {"train/loss": 1.5})]
    write_run("a", PRETRAIN, metrics=metrics)
    run = runs_below(tmp_path / "runs")["a"]
    assert run.curve("train/loss") == ([10, 20, 30], [2.5, 2.0, 1.5])
    assert run.curve("eval/top1") == ([20], [0.25])
    assert run.curve("nothing") == ([], [])


def test_a_journal_that_a_kill_has_cut_is_read_up_to_the_cut(tmp_path: Path, write_run: WriteRun) -> None:
    run = write_run("a", PRETRAIN, metrics=[(10, {"train/loss": 2.5}), (20, {"train/loss": 2.0})])
    path = run / "tracking" / "journal.jsonl"
    path.write_text(path.read_text()[:-5])
    assert runs_below(tmp_path / "runs")["a"].curve("train/loss") == ([10], [2.5])
    path.unlink()
    assert runs_below(tmp_path / "runs")["a"].curve("train/loss") == ([], [])


def test_a_model_is_named_after_its_checkpoint(tmp_path: Path, write_run: WriteRun) -> None:
    mixer = write_run("mixer", PRETRAIN, spec=MIXER)
    write_run("mlp", PRETRAIN, spec=MLP)
    write_run("begun", PRETRAIN)
    write_run("probe", PROBE | {"pretrained": str(mixer)})
    write_run("pixels", PROBE)
    assert {name: run.model_name for name, run in runs_below(tmp_path / "runs").items()} == {
        "mixer": "Mixer P4 C8 L3",
        "mlp": "B-2/Wi-6",
        "begun": "?",
        "probe": "Mixer P4 C8 L3",
        "pixels": "pixels",
    }


def test_checkpoints_are_found_or_not(tmp_path: Path, write_run: WriteRun) -> None:
    run = write_run("mlp", PRETRAIN, spec=MLP)
    write_run("begun", PRETRAIN)
    runs = runs_below(tmp_path / "runs")
    assert runs["mlp"].checkpoint() == run / "checkpoints" / "step-00000010"
    assert runs["begun"].checkpoint() is None


def test_chance_is_one_in_the_number_of_classes(tmp_path: Path, write_run: WriteRun, shapes: Path) -> None:
    write_run("known", PRETRAIN | {"data": {"dataset": str(shapes)}})
    write_run("probe", PROBE | {"dataset": str(shapes)})
    write_run("gone", PRETRAIN | {"data": {"dataset": str(tmp_path / "gone")}})
    runs = runs_below(tmp_path / "runs")
    assert {name: run.chance for name, run in runs.items()} == {"known": 0.125, "probe": 0.125, "gone": None}
    assert Path(runs["probe"].dataset) == shapes


def test_what_a_run_started_from_is_known(tmp_path: Path, write_run: WriteRun) -> None:
    write_run("tuned", TUNE)
    write_run("pixels", PROBE)
    runs = runs_below(tmp_path / "runs")
    assert runs["tuned"].pretrained == Path("runs/a")
    assert runs["pixels"].pretrained is None


@pytest.mark.parametrize(("exists", "message"), [(False, "no such directory of runs"), (True, "holds no runs")])
def test_a_folder_without_runs_is_one_clear_message(tmp_path: Path, exists: bool, message: str) -> None:
    if exists:
        (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match=message) as caught:
        collect(tmp_path / "runs")
    assert str(caught.value).startswith(str(tmp_path / "runs"))
