"""Runs are found by their files, each with its task, result, curves and origin. The report has a
row for each run, finished or not, and a bar for each finished transfer next to the chance of its
dataset.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.cli import main
from analysis.report import collect, draw, draw_accuracies, draw_curves, first_images, rows_of
from data_prep.manifest import Manifest, load_manifest, save_manifest
from finetune.runs import Run, read_run, run_of, runs_below
from tests.analysis.conftest import MIXER, MLP, WriteRun
from tests.conftest import Capture


def pretraining(dataset: Path, **data: str) -> dict[str, Any]:
    return {"data": {"dataset": str(dataset), **data}, "model": {"kind": "mlp"}}


def probing(dataset: Path, pretrained: Path | None, **data: str) -> dict[str, Any]:
    source = pretrained and str(pretrained)
    return {"data": {"dataset": str(dataset), **data}, "lrs": [1e-3], "pretrained": source}


def tuning(
    dataset: Path, pretrained: Path, init: str = "pretrained", **data: str
) -> dict[str, Any]:
    settings = {"dataset": str(dataset), **data}
    return {"data": settings, "pretrained": str(pretrained), "init": init}


ANIMALS = Path("data/animals")
PRETRAIN, PROBE = pretraining(ANIMALS), probing(ANIMALS, None)
TUNE = tuning(ANIMALS, Path("runs/a"))


@pytest.fixture
def runs(tmp_path: Path, write_run: WriteRun, shapes: Path, other_shapes: Path) -> Path:
    """Runs on `shapes` and transfers to `other_shapes`: one of each task, and two unfinished
    runs."""
    curve = [(step, {"train/loss": 3.0 / step, "eval/top1": step / 100}) for step in (10, 20, 30)]
    body, result = pretraining(shapes), {"eval/top1": 0.75, "images_per_s": 1234.5}
    mlp = write_run("mlp", body, result=result, metrics=curve, spec=MLP)
    write_run("mixer", body, metrics=curve[:1], spec=MIXER)
    write_run("nothing-yet", body)
    write_run("not-evaluated", body, result={"step": 30, "images_per_s": 99.0})
    write_run("probe", probing(other_shapes, mlp), result={"test_top1": 0.5})
    write_run("pixels", probing(other_shapes, None), result={"test_top1": 0.25})
    write_run("tuned", tuning(other_shapes, mlp), result={"eval/top1": 0.625}, spec=MLP)
    scratch = tuning(other_shapes, mlp, "scratch")
    write_run("scratch", scratch, result={"eval/top1": 0.375}, spec=MLP)
    return tmp_path / "runs"


def marks_of(axes: Axes) -> list[float]:
    """Return the drawn accuracies of chance and of the largest class."""
    lines: Any = axes.collections
    segments = [segment for line in lines for segment in line.get_segments()]
    return [float(segment[0, 0]) for segment in segments if len(segment)]


@pytest.mark.slow
def test_every_run_has_a_row_with_task_result_and_chance(runs: Path, capsys: Capture) -> None:
    rows = rows_of(collect(runs)).set_index("run")
    columns = ["training", "model", "dataset", "chance"]
    for run, expected in {
        "mlp": ["pretrained", "B-2/Wi-6", "shapes-a", 1 / 8],
        "probe": ["linear probe", "B-2/Wi-6", "shapes-b", 1 / 5],
        "pixels": ["linear on pixels", "pixels", "shapes-b", 1 / 5],
        "scratch": ["from scratch", "B-2/Wi-6", "shapes-b", 1 / 5],
    }.items():
        assert rows.loc[run, columns].tolist() == expected
    finished = {"mlp": 0.75, "pixels": 0.25, "probe": 0.5, "tuned": 0.625, "scratch": 0.375}
    assert rows.top1.dropna().to_dict() == finished
    states = rows.state[["mixer", "nothing-yet", "not-evaluated"]].tolist()
    assert states == ["unfinished, 10.0% at step 10", "unfinished", "finished"]
    assert main(["report", str(runs)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tuned", "fine-tuned", "B-2/Wi-6", "shapes-b", "62.5%", "20%"] in lines
    assert all((runs / f"report.{ending}").stat().st_size > 5_000 for ending in ("png", "svg"))


def test_unequal_classes_have_the_largest_and_the_class_mean(
    write_run: WriteRun, unequal: Path, tmp_path: Path
) -> None:
    """The largest of 8 classes has 9 of 23 images."""
    scores, tags = {"eval/top1": 0.5, "eval/class_top1": 0.25}, {"model": "B-2/Wi-6"}
    body = pretraining(unequal, eval_split="val")
    mlp = write_run("mlp", body, result=scores, metrics=[(10, scores)], tags=tags)
    write_run("tuned", tuning(unequal, mlp, eval_split="val"), result=scores, tags=tags)
    found = collect(tmp_path / "runs")
    rows = rows_of(found)
    assert (rows.largest_class == 9 / 23).all() and (rows.class_mean == 0.25).all()
    loss, curves, bars = Figure().subplots(1, 3)
    draw_curves(found[:1], loss, curves)
    draw_accuracies(rows[1:], bars)
    heights = [next(iter(line.get_ydata())) for line in curves.lines]
    assert heights == pytest.approx([0.5, 1 / 8, 0.25, 9 / 23])
    assert marks_of(bars) == pytest.approx([1 / 8, 9 / 23])
    assert [list(line.get_xdata()) for line in bars.lines] == [[0.25]]


def test_repetitions_are_one_row_with_their_deviation(
    tmp_path: Path, write_run: WriteRun, shapes: Path
) -> None:
    tuned = tuning(shapes, write_run("mlp", pretraining(shapes), spec=MLP))
    both = {"eval/top1": 0.5, "eval/top1_std": 0.0123, "num_runs": 2}
    write_run("tuned", tuned | {"seeds": [0, 1]}, result=both)
    for seed, top1 in enumerate((0.4913, 0.5087)):
        write_run(f"tuned/seed-{seed}", tuned, result={"eval/top1": top1})
    rows, axes = rows_of(collect(tmp_path / "runs")), Figure().subplots()
    assert rows.run.tolist() == ["mlp", "tuned"] and rows.top1_std[1] == 0.0123
    draw_accuracies(rows[1:], axes)
    assert axes.texts[0].get_text() == "50.0% ± 1.2"


def test_every_transfer_is_a_bar_next_to_the_chance_of_its_dataset(
    runs: Path, write_run: WriteRun, shapes: Path, other_shapes: Path
) -> None:
    settings = tuning(other_shapes, runs / "mlp")
    write_run("again", settings, result={"eval/top1": 0.6875}, spec=MLP)
    write_run("home", probing(shapes, runs / "mlp"), result={"test_top1": 0.875})
    rows, axes = rows_of(collect(runs)), Figure().subplots()
    draw_accuracies(rows[(rows.task != "pretrain") & rows.top1.notna()], axes)
    widths = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
    assert widths == [0.25, 0.375, 0.5, 0.625, 0.6875, 0.875]
    labels = [label.get_text().split("\n") for label in axes.get_yticklabels()]
    assert labels[0] == ["pixels", "linear on pixels, shapes-b"]
    assert labels[-1] == ["home", "B-2/Wi-6, linear probe, shapes-a"]
    assert marks_of(axes) == pytest.approx([0.2] * 5 + [0.125])


def test_a_bar_has_its_split_if_there_are_several(
    tmp_path: Path, write_run: WriteRun, shapes: Path
) -> None:
    for name, split in (("a", "val"), ("b", "test")):
        write_run(name, probing(shapes, None, test_split=split), result={"test_top1": 0.5})
    for folder, words in (("runs/a", ["50.0%"]), ("runs", ["50.0% on val", "50.0% on test"])):
        draw_accuracies(rows_of(collect(tmp_path / folder)), axes := Figure().subplots())
        assert [each.get_text() for each in axes.texts] == words


def test_curves_of_unfinished_runs_are_drawn_to_their_end(runs: Path) -> None:
    loss, accuracy = Figure().subplots(1, 2)
    draw_curves([run for run in collect(runs) if run.task == "pretrain"], loss, accuracy)
    curves = {line.get_label(): line.get_xydata().tolist() for line in loss.lines[::2]}
    expected = {"mlp": [[10, 0.3], [20, 0.15], [30, 0.1]], "mixer": [[10, 0.3]]}
    assert curves == expected | {"nothing-yet": [], "not-evaluated": []}
    for lines, chance in ((loss.lines, np.log(8)), (accuracy.lines, 1 / 8)):  # for 8 classes
        assert [list(line.get_ydata()) for line in lines[1::2]] == [[pytest.approx(chance)] * 2] * 4
        colors = [line.get_color() for line in lines]
        assert colors[::2] == colors[1::2]


def test_the_sheet_has_the_first_training_images_in_order(shapes: Path) -> None:
    sheet = first_images(shapes, load_manifest(shapes), count=5)
    assert sheet.shape == (16, 5 * 16, 3)
    index = np.load(shapes / "train-000000.npy")
    content = (shapes / "train-000000.tar").read_bytes()
    for place, (offset, length, _) in enumerate(index[:5].tolist()):
        pixels = np.frombuffer(content[offset : offset + length][13:], np.uint8).reshape(16, 16, 3)
        np.testing.assert_array_equal(sheet[:, place * 16 : (place + 1) * 16], pixels)


def test_images_of_remote_shards_are_not_drawn(
    tmp_path: Path, write_run: WriteRun, shapes: Path
) -> None:
    manifest = load_manifest(shapes)
    tree = manifest.model_dump(mode="json")
    for shard in tree["splits"]["train"]["shards"]:
        shard["file"] = f"http://127.0.0.1/{shard['file']}"
    (remote := tmp_path / "remote").mkdir()
    save_manifest(remote, Manifest.model_validate_json(json.dumps(tree)))
    write_run("mlp", pretraining(remote), result={"eval/top1": 0.75}, spec=MLP)
    runs = collect(tmp_path / "runs")
    assert runs[0].manifest is not None
    figure = draw(runs, rows_of(runs))
    assert not any(axes.images for axes in figure.axes) and len(figure.axes) == 2


def found_in(folder: Path) -> dict[str, Run]:
    return {run.name: run for run in collect(folder)}


def test_runs_are_sorted_by_task_and_name(tmp_path: Path, write_run: WriteRun) -> None:
    evaluation = {"data": {"dataset": "data/animals", "split": "val"}, "pretrained": "runs/a"}
    neighbors = {"data": {"dataset": "data/animals"}, "neighbors": [20]}
    for name, settings in {
        "d": TUNE | {"init": "scratch"},
        "c": TUNE,
        "b": PROBE,
        "z": PRETRAIN,
        "deeper/a": PRETRAIN,
        "e": evaluation,
        "k": neighbors,
    }.items():
        run = write_run(name, settings)
    tasks = ["pretrain", "pretrain", "probe", "knn", "tune", "scratch", "evaluate"]
    found = [(run.name, run.task) for run in collect(tmp_path / "runs")]
    assert found == list(zip("azbkcde", tasks, strict=True))
    assert [run.name for run in collect(run)] == ["k"]  # a run directory gives one run
    assert [run.name for run in runs_below(tmp_path, deepest=2)] == ["b", "c", "d", "e", "k", "z"]


def test_copies_of_configs_and_unreadable_runs_are_left_out(
    tmp_path: Path, write_run: WriteRun, capsys: Capture
) -> None:
    write_run("a", PRETRAIN)
    copy = tmp_path / "runs" / "mlartifacts" / "0123" / "artifacts"
    copy.mkdir(parents=True)
    (copy / "config.yaml").write_text("data: {dataset: x}\n")
    (write_run("b", PRETRAIN) / "config.yaml").write_text("data: [\n")
    assert list(found_in(tmp_path / "runs")) == ["a"]
    assert str(tmp_path / "runs" / "b" / "config.yaml") in capsys.readouterr().err
    assert run_of(tmp_path / "runs" / "b") is None
    # the group's config is not run b's config
    (tmp_path / "runs" / "config.yaml").write_text("seeds: [1]\n")
    assert run_of(tmp_path / "runs" / "b") is None


def test_a_curve_is_what_the_event_log_has_until_a_kill(
    tmp_path: Path, write_run: WriteRun
) -> None:
    metrics = [(10, {"train/loss": 2.5}), (20, {"train/loss": 2.0, "eval/top1": 0.25})]
    metrics.append((30, {"train/loss": 1.5}))
    journal = write_run("a", PRETRAIN, metrics=metrics) / "tracking" / "journal.jsonl"
    run = found_in(tmp_path / "runs")["a"]
    curves = [([10, 20, 30], [2.5, 2.0, 1.5]), ([20], [0.25]), ([], [])]
    assert run.curves("train/loss", "eval/top1", "nothing") == curves
    journal.write_text(journal.read_text()[:-5])
    assert run.curves("train/loss") == [([10, 20], [2.5, 2.0])]
    journal.unlink()
    assert found_in(tmp_path / "runs")["a"].curves("train/loss") == [([], [])]


def test_facts_that_the_table_does_not_show(tmp_path: Path, write_run: WriteRun) -> None:
    """A model with the name in its tag, no chance without the dataset, each accuracy of a result,
    and the initial weights."""
    first = write_run("a", PRETRAIN, spec=MLP)
    write_run("tuned", TUNE | {"run_dir": "runs/tuned"})
    write_run("tagged", PRETRAIN, tags={"model": "B-1/Wi-2"})
    write_run("probe", PROBE, result={"test_top1": 0.5, "test_top5": 0.9, "holdout_top1": 0.6})
    runs = found_in(tmp_path / "runs")
    tagged, probe, tuned = runs["tagged"], runs["probe"], runs["tuned"]
    assert (tagged.model_name, tagged.chance, tagged.result) == ("B-1/Wi-2", None, {})
    assert probe.accuracies == {"top-1": 0.5, "top-5": 0.9}
    assert (probe.pretrained, probe.started_from) == (None, "")
    assert (tuned.pretrained, tuned.started_from) == (first, "B-2/Wi-6 trained on animals")
    assert read_run(first).started_from == "random weights"
