"""Runs are found by what they left on disk, each with its task, result, curves and origin. The
report shows each as a row, finished or not; finished transfers as one bar each beside their own
chance; and its picture is a PNG that others can open.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from analysis.cli import main
from analysis.report import collect, contact_sheet, draw_accuracies, draw_curves, drawn, print_table
from finetune.looks import looks
from finetune.runs import Run, read_run, run_of, runs_below
from tests.analysis.conftest import MIXER, MLP, WriteRun
from tests.conftest import Capture


def pretraining(dataset: Path) -> dict[str, Any]:
    return {"data": {"dataset": str(dataset)}, "model": {"kind": "mlp"}}


def probing(dataset: Path, pretrained: Path | None) -> dict[str, Any]:
    return {
        "data": {"dataset": str(dataset)},
        "lrs": [1e-3],
        "pretrained": pretrained and str(pretrained),
    }


def tuning(dataset: Path, pretrained: Path, init: str = "pretrained") -> dict[str, Any]:
    return {"data": {"dataset": str(dataset)}, "pretrained": str(pretrained), "init": init}


ANIMALS = Path("data/animals")
PRETRAIN, PROBE, TUNE = (
    pretraining(ANIMALS),
    probing(ANIMALS, None),
    tuning(ANIMALS, Path("runs/a")),
)


@pytest.fixture
def runs(tmp_path: Path, write_run: WriteRun, shapes: Path, other_shapes: Path) -> Path:
    """Pretrained on `shapes`, transferred to `other_shapes`; one of each task, and two unfinished
    ones."""
    curve = [(step, {"train/loss": 3.0 / step, "eval/top1": step / 100}) for step in (10, 20, 30)]
    mlp = write_run(
        "mlp",
        pretraining(shapes),
        result={"eval/top1": 0.75, "images_per_s": 1234.5},
        metrics=curve,
        spec=MLP,
    )
    write_run("mixer", pretraining(shapes), metrics=curve[:1], spec=MIXER)
    write_run("nothing-yet", pretraining(shapes))
    write_run("not-judged", pretraining(shapes), result={"step": 30, "images_per_s": 99.0})
    write_run("probe", probing(other_shapes, mlp), result={"test_top1": 0.5})
    write_run("pixels", probing(other_shapes, None), result={"test_top1": 0.25})
    write_run("tuned", tuning(other_shapes, mlp), result={"eval/top1": 0.625}, spec=MLP)
    write_run(
        "scratch", tuning(other_shapes, mlp, "scratch"), result={"eval/top1": 0.375}, spec=MLP
    )
    return tmp_path / "runs"


def test_the_table_has_a_row_with_task_result_and_chance_for_every_run(runs: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    print_table(collect(runs), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = {
        line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()
    }
    assert rows["mlp"] == "pretrained B-2/Wi-6 shapes-a 75.0% 12.5% 1,234"
    assert rows["mixer"] == "pretrained Mixer P4 C8 L3 shapes-a unfinished, 10.0% at step 10 12.5%"
    assert rows["not-judged"] == "pretrained ? shapes-a not evaluated 12.5% 99"
    assert rows["nothing-yet"] == "pretrained ? shapes-a unfinished 12.5%"
    assert rows["probe"] == "linear probe B-2/Wi-6 shapes-b 50.0% 20%"
    assert rows["pixels"] == "linear on pixels pixels shapes-b 25.0% 20%"
    assert rows["tuned"] == "fine-tuned B-2/Wi-6 shapes-b 62.5% 20%"
    assert rows["scratch"] == "from scratch B-2/Wi-6 shapes-b 37.5% 20%"


def test_unequal_classes_are_shown_with_the_largest_and_the_class_mean(
    write_run: WriteRun, unequal: Path, tmp_path: Path
) -> None:
    """9 of 23 images are of the largest of 8 classes."""
    where, scores = (
        {"data": {"dataset": str(unequal), "eval_split": "val"}},
        {"eval/top1": 0.5, "eval/class_top1": 0.25},
    )
    write_run(
        "mlp",
        pretraining(unequal) | where,
        result=scores,
        metrics=[(10, scores)],
        tags={"model": "B-2/Wi-6"},
    )
    write_run(
        "tuned",
        tuning(unequal, tmp_path / "runs" / "mlp") | where,
        result=scores,
        tags={"model": "B-2/Wi-6"},
    )
    found = collect(tmp_path / "runs")
    console = Console(file=io.StringIO(), width=160)
    print_table(found, console)
    rows = {
        line.split()[0]: " ".join(line.split()[1:]) for line in console.file.getvalue().splitlines()
    }  # type: ignore[attr-defined]
    assert rows["mlp"] == "pretrained B-2/Wi-6 unequal 50.0% 25.0% 39.1% 12.5%"
    assert rows["tuned"] == "fine-tuned B-2/Wi-6 unequal 50.0% 25.0% 39.1% 12.5%"
    with looks():
        _, panels = drawn(found).subfigs
    _, curves, bars = panels.axes
    assert "dashed: largest class" in curves.get_title(
        loc="left"
    ) and "diamond: class mean" in bars.get_title(loc="left")
    heights = [next(iter(line.get_ydata())) for line in curves.lines]
    assert heights == pytest.approx([0.5, 1 / 8, 0.25, 9 / 23])
    assert [float(each.get_segments()[0][0, 0]) for each in bars.collections] == pytest.approx(
        [1 / 8, 9 / 23]
    )
    assert [list(line.get_xdata()) for line in bars.lines] == [[0.25]]


def test_repetitions_are_one_row_with_their_spread(
    tmp_path: Path, write_run: WriteRun, shapes: Path
) -> None:
    of = tuning(shapes, write_run("mlp", pretraining(shapes), spec=MLP))
    write_run(
        "tuned",
        of | {"seeds": [0, 1]},
        result={"eval/top1": 0.5, "eval/top1_std": 0.0123, "num_runs": 2},
    )
    write_run("tuned/seed-0", of, result={"eval/top1": 0.4913})
    write_run("tuned/seed-1", of, result={"eval/top1": 0.5087})
    found = collect(tmp_path / "runs")
    console, axes = Console(file=io.StringIO(), width=160), Figure().subplots()
    print_table(found, console)
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert rows[-1] == "tuned fine-tuned B-2/Wi-6 shapes-a 50.0% ± 1.2 12.5%" and len(found) == 2
    draw_accuracies(found[1:], axes)
    assert axes.texts[0].get_text() == "50.0% ± 1.2"


def test_the_picture_has_something_on_it(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    for words, path in (
        (["--out", str(tmp_path / "p.png")], tmp_path / "p.png"),
        ([], runs / "report.png"),
    ):
        assert main(["report", str(runs), *words]) == 0
        assert f"picture: {path}" in capsys.readouterr().out
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.size) == (
                "PNG",
                (1540, 672),
            )  # 11 x 4.8 inches of 140 points
            assert len(image.convert("RGB").getcolors(1 << 24)) > 500
    assert main(["report", str(runs), "--out", str(tmp_path / "p.svg")]) == 0
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_the_picture_has_panels_of_what_there_is_alone(
    tmp_path: Path, write_run: WriteRun, shapes: Path
) -> None:
    found = (
        read_run(write_run("mlp", pretraining(shapes))),
        read_run(write_run("probe", probing(shapes, None))),
    )
    judged = read_run(write_run("judged", probing(shapes, None), result={"test_top1": 0.5}))
    gone = read_run(write_run("gone", PROBE, result={"test_top1": 0.5}))
    curves = [
        f"pretraining: {what} (dotted: chance)" for what in ("training loss", "top-1 on not stated")
    ]
    bars = ["transfer: top-1 on not stated (dotted: chance)"]
    for runs, titles in (
        ([found[0]], curves),
        ([judged], bars),
        ([*found, judged], [*curves, *bars]),
        ([found[1]], []),
        ([gone], bars),
    ):
        with looks():
            figures = drawn(runs).subfigs
        sheet = (
            [] if runs == [gone] else ["shapes-a: 8 classes"]
        )  # a dataset that is not there any more
        assert [axes.get_title(loc="left") for figure in figures for axes in figure.axes] == [
            *sheet,
            *titles,
        ]


def test_every_finished_transfer_is_a_bar_even_under_one_name(
    runs: Path, write_run: WriteRun, other_shapes: Path
) -> None:
    write_run(
        "tuned-again", tuning(other_shapes, runs / "mlp"), result={"eval/top1": 0.6875}, spec=MLP
    )
    write_run("tuned-unfinished", tuning(other_shapes, runs / "mlp"), spec=MLP)
    axes = Figure().subplots()
    draw_accuracies(
        [run for run in collect(runs) if run.task != "pretrain" and run.top1 is not None], axes
    )
    bars = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in axes.patches}  # type: ignore[attr-defined]
    assert bars == {0: 0.25, 1: 0.375, 2: 0.5, 3: 0.625, 4: 0.6875}
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "pixels\nlinear on pixels",
        "scratch\nB-2/Wi-6, from scratch",
        "probe\nB-2/Wi-6, linear probe",
        "tuned\nB-2/Wi-6, fine-tuned",
        "tuned-again\nB-2/Wi-6, fine-tuned",
    ]
    assert [text.get_text() for text in axes.texts] == ["25.0%", "37.5%", "50.0%", "62.5%", "68.8%"]
    assert axes.xaxis.get_major_formatter()(0.5) == "50%"


def test_a_bar_tells_its_split(tmp_path: Path, write_run: WriteRun, shapes: Path) -> None:
    for name, split in (("a", "val"), ("b", "test")):
        write_run(
            name,
            probing(shapes, None) | {"data": {"dataset": str(shapes), "test_split": split}},
            result={"test_top1": 0.5},
        )
    figure = Figure()
    for runs, title, words in (
        (collect(tmp_path / "runs" / "a"), "transfer: top-1 on val (dotted: chance)", ["50.0%"]),
        (
            collect(tmp_path / "runs"),
            "transfer: top-1 on test or val (dotted: chance)",
            ["50.0% on val", "50.0% on test"],
        ),
    ):
        draw_accuracies(runs, axes := figure.add_subplot())
        assert (
            axes.get_title(loc="center") or axes.get_title(loc="left"),
            [each.get_text() for each in axes.texts],
        ) == (title, words)


def test_every_bar_is_held_against_the_chance_of_its_own_dataset(
    runs: Path, write_run: WriteRun, shapes: Path
) -> None:
    write_run("home", probing(shapes, runs / "mlp"), result={"test_top1": 0.875})
    axes = Figure().subplots()
    draw_accuracies([run for run in collect(runs) if run.task == "probe"], axes)
    lines = [collection.get_segments()[0] for collection in axes.collections]  # type: ignore[attr-defined]
    assert [(round(float(line[:, 1].mean())), round(float(line[0, 0]), 3)) for line in lines] == [
        (0, 0.2),
        (1, 0.2),
        (2, 0.125),
    ]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.split("\n")[1] for label in labels] == [
        *(
            "linear on pixels, shapes-b",
            "B-2/Wi-6, linear probe, shapes-b",
            "B-2/Wi-6, linear probe, shapes-a",
        )
    ]


def test_curves_of_unfinished_runs_are_drawn_as_far_as_they_go(runs: Path) -> None:
    loss, accuracy = Figure().subplots(1, 2)
    draw_curves([run for run in collect(runs) if run.task == "pretrain"], loss, accuracy)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in loss.lines[::2]}
    assert drawn == {
        "mlp": [[10, 0.3], [20, 0.15], [30, 0.1]],
        "mixer": [[10, 0.3]],
        "nothing-yet": [],
        "not-judged": [],
    }
    assert [line.get_ydata().tolist() for line in accuracy.lines[::2]] == [
        [0.1],
        [0.1, 0.2, 0.3],
        [],
        [],
    ]
    for lines, chance in (
        (loss.lines, np.log(8)),
        (accuracy.lines, 1 / 8),
    ):  # of 8 classes, beside each curve in its colour
        assert [list(line.get_ydata()) for line in lines[1::2]] == [[pytest.approx(chance)] * 2] * 4
        assert [line.get_color() for line in lines[::2]] == [
            line.get_color() for line in lines[1::2]
        ]


def test_the_contact_sheet_shows_the_first_training_pictures_in_order(shapes: Path) -> None:
    sheet = np.asarray(contact_sheet(shapes, count=5))
    assert sheet.shape == (16, 5 * 16, 3)
    index = np.load(shapes / "train-000000.npy")
    content = (shapes / "train-000000.tar").read_bytes()
    for place, (offset, length, _) in enumerate(index[:5].tolist()):
        pixels = np.frombuffer(content[offset : offset + length][13:], np.uint8).reshape(16, 16, 3)
        np.testing.assert_array_equal(sheet[:, place * 16 : (place + 1) * 16], pixels)


def test_what_cannot_be_read_or_written_is_one_clear_line(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "empty").mkdir()
    for folder, out, message in (
        (tmp_path / "gone", "x.png", "gone: is not there; name the folder that holds the runs"),
        (tmp_path / "empty", "x.png", "holds no runs"),
        (runs, "nowhere/x.png", "nowhere"),
    ):
        assert main(["report", str(folder), "--out", str(tmp_path / out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("analysis: ") and message in error and error.count("\n") == 1


def found_in(folder: Path) -> dict[str, Run]:
    return {run.name: run for run in collect(folder)}


def test_runs_are_sorted_by_task_and_name(tmp_path: Path, write_run: WriteRun) -> None:
    evaluation = {"data": {"dataset": "data/animals", "split": "val"}, "pretrained": "runs/a"}
    for name, settings in (
        *(
            ("d", TUNE | {"init": "scratch"}),
            ("c", TUNE),
            ("b", PROBE),
            ("z", PRETRAIN),
            ("deeper/a", PRETRAIN),
        ),
        *(("e", evaluation), ("k", {"data": {"dataset": "data/animals"}, "neighbours": [20]})),
    ):
        run = write_run(name, settings)
    assert [(run.name, run.task) for run in collect(tmp_path / "runs")] == [
        *(
            ("a", "pretrain"),
            ("z", "pretrain"),
            ("b", "probe"),
            ("k", "knn"),
            ("c", "tune"),
            ("d", "scratch"),
        ),
        ("e", "evaluate"),
    ]
    assert [run.name for run in collect(run)] == ["k"]  # the folder of a run is a folder of one run
    assert [run.name for run in runs_below(tmp_path, deepest=2)] == ["b", "c", "d", "e", "k", "z"]


def test_what_is_no_run_and_what_cannot_be_read_is_left_out(
    tmp_path: Path, write_run: WriteRun, capsys: Capture
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
    (tmp_path / "runs" / "config.yaml").write_text(
        "seeds: [1]\n"
    )  # of a group, whose facts are not b's
    assert run_of(tmp_path / "runs" / "b") is None


def test_a_curve_is_what_the_journal_has_up_to_where_a_kill_cut_it(
    tmp_path: Path, write_run: WriteRun
) -> None:
    metrics = [
        (10, {"train/loss": 2.5}),
        (20, {"train/loss": 2.0, "eval/top1": 0.25}),
        (30, {"train/loss": 1.5}),
    ]
    journal = write_run("a", PRETRAIN, metrics=metrics) / "tracking" / "journal.jsonl"
    run = found_in(tmp_path / "runs")["a"]
    loss, top1, nothing = run.curves("train/loss", "eval/top1", "nothing")
    assert loss == ([10, 20, 30], [2.5, 2.0, 1.5])
    assert top1 == ([20], [0.25])
    assert nothing == ([], [])
    journal.write_text(journal.read_text()[:-5])
    assert run.curves("train/loss") == [([10, 20], [2.5, 2.0])]
    journal.unlink()
    assert found_in(tmp_path / "runs")["a"].curves("train/loss") == [([], [])]


def test_what_the_table_does_not_show(tmp_path: Path, write_run: WriteRun) -> None:
    """A model named after its tag, no chance where the dataset is gone, each accuracy of a
    result."""
    write_run("tagged", PRETRAIN, tags={"model": "B-1/Wi-2"})
    write_run("probe", PROBE, result={"test_top1": 0.5, "test_top5": 0.9, "holdout_top1": 0.6})
    runs = found_in(tmp_path / "runs")
    assert (runs["tagged"].model_name, runs["tagged"].chance, runs["tagged"].result) == (
        "B-1/Wi-2",
        None,
        {},
    )
    assert runs["probe"].accuracies == {"top-1": 0.5, "top-5": 0.9}


def test_what_a_run_started_from_is_known_wherever_one_looks_from(
    tmp_path: Path, write_run: WriteRun
) -> None:
    first = write_run("a", PRETRAIN, spec=MLP)
    write_run("tuned", TUNE | {"run_dir": "runs/tuned"})
    write_run("pixels", PROBE)
    runs = found_in(tmp_path / "runs")
    assert runs["tuned"].pretrained == first
    assert runs["tuned"].started_from == "B-2/Wi-6 trained on animals"
    assert runs["pixels"].pretrained is None and runs["pixels"].started_from == ""
    assert read_run(first).started_from == "random weights"
