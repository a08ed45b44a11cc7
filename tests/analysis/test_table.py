"""The papers' tables with our numbers: synthetic results against literals, and the members of the
papers' plans."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.cli import main
from analysis.results import as_frame
from analysis.run_rows import rows_of_run
from analysis.tables.pages import markdown, pages_of, with_runs
from analysis.tables.published import TABLES
from analysis.tables.table import OURS, cells_of
from cluster.plan_file import load_plan
from finetune.evaluate.config import EvaluateSettings
from finetune.probe.config import ProbeSettings
from finetune.runs import read_run
from finetune.tune.config import TuneSettings, repeats_of
from pretrain.config import PretrainSettings
from tests.analysis.conftest import WriteRun
from tests.conftest import REPOSITORY, Capture, Patch
from tests.errors import printed_errors

ROW = "fine-tune B-12/Wi-1024 + DA"
I21K = "imagenet21k for 400 epochs"


def tuned(name: str, top1: float, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the row of a B-12/Wi-1024 fine-tuned with augmentation."""
    row = {"run": name, "task": "tune", "method": "tune", "model": "B-12/Wi-1024", "recipe": "a"}
    row |= {"repetition": f"seed {seed}", "start": I21K, "benchmark": "cifar10", "split": "test"}
    row |= {"target": "cifar-64", "own_augmented": True, "augmented": True, "labels": "{}"}
    return {**row, "began_ms": 1, "error": 1 - top1, **changes}


def cells(*rows: dict[str, Any]) -> pd.DataFrame:
    return cells_of(TABLES, as_frame(list(rows)))


def cell(found: pd.DataFrame, row: str, column: str = "CIFAR-10") -> Any:
    (index,) = found.index[(found.row == row) & (found.column == column)]
    return found.loc[index]


def test_without_runs_every_cell_is_the_papers_number_and_not_run() -> None:
    found = cells()
    assert len(found) == 6 * 5 + 3 * 6 + 5 * 6 + 3 * 6 + 3 * 2 + 3 * 2 + 2 * 7 * 3
    assert found["mean"].isna().all() and found.gap.isna().all()
    assert cell(found, "MLP-Inv + DA, 5000 epochs", "ImageNet").paper == 31.7
    assert cell(found, "MLP, 100 epochs").paper == 47.1
    assert cell(found, "linear probe B-6/Wi-1024 + DA", "STL-10").paper == 85.2
    public = "100 views B-12/Wi-1024, 800 epochs"
    assert cell(found, public, "TinyImageNet").paper == 73.1
    assert cell(found, public, "ImageNet ReaL").paper == 57.9
    page = markdown(found)
    assert page.count("not run / ") == found[~found.is_cited].paper.notna().sum()
    assert "| beta-LASSO | cited / 85.19 | cited / 59.56 |" in page
    assert "| not run / 76.74 ± 0.19 | not run |" in page


OF_STL = {"benchmark": "stl10", "target": "stl10-64"}
FOLDS = [
    tuned(f"f{n}", 0.80 + 0.01 * n, seed=n, fold=str(n), recipe="f", **OF_STL) for n in range(10)
]


@pytest.mark.parametrize(
    ("rows", "row", "column", "mean", "std", "counts"),
    [
        ([tuned("a", 0.9125)], ROW, "CIFAR-10", 91.25, None, (1, 0)),
        # 0.90, 0.92, 0.97: the deviation is sqrt((9 + 1 + 16) / 2) points
        (
            [tuned(f"s{n}", top1, seed=n) for n, top1 in enumerate((0.90, 0.92, 0.97))],
            *(ROW, "CIFAR-10", 93.0, 3.6056, (3, 0)),
        ),
        # folds have their own row: 0.80 to 0.89, the deviation is sqrt(82.5 / 9) points
        ([tuned("whole", 0.9, **OF_STL), *FOLDS], ROW, "STL-10", 90.0, None, (1, 0)),
        (FOLDS, f"{ROW}, per fold, of {I21K}", "STL-10", 84.5, 3.0277, (10, 0)),
        # the last recipe is used, not the best, and each seed once
        (
            [
                tuned("old", 0.99, recipe="old", began_ms=0),
                tuned("1", 0.5, seed=1, began_ms=1),
                tuned("2", 0.8, seed=1, began_ms=2),
                tuned("3", 0.9, seed=2, began_ms=3),
            ],
            *(ROW, "CIFAR-10", 85.0, 7.0711, (2, 2)),
        ),
        # runs of the table's plan are used, not later and better runs with other batches
        (
            [
                tuned("own", 0.9, plan="scaling_transfer"),
                *(tuned(f"o{n}", 0.99, seed=n, recipe="o", began_ms=9) for n in (0, 1)),
            ],
            *(ROW, "CIFAR-10", 90.0, None, (1, 2)),
        ),
    ],
)
def test_a_cell_has_the_mean_over_the_repetitions_of_one_recipe(
    rows: list[dict[str, Any]],
    row: str,
    column: str,
    mean: float,
    std: float | None,
    counts: tuple[int, int],
) -> None:
    found = cell(cells(*rows), row, column)
    assert found["mean"] == pytest.approx(mean)
    assert (found.num_repetitions, found.num_left_out) == counts
    assert pd.isna(found["std"]) if std is None else found["std"] == pytest.approx(std, abs=1e-3)
    if pd.notna(found.paper):
        assert found.gap == pytest.approx(mean - found.paper)


def test_a_cell_as_words() -> None:
    rows = [tuned(f"s{seed}", top1, seed=seed) for seed, top1 in enumerate((0.90, 0.92, 0.97))]
    assert "93.0 ± 3.6 (n=3) / 93.6 ± 0.03 / -0.6" in markdown(cells(*rows))


SMALL, PLAIN = {"model": "B-6/Wi-1024"}, {"own_augmented": False}
BATCH_NORM = "B-12/Wi-1024, norm batch"
WITHOUT = f"{I21K} without DA"


def scratch(length: str, **changes: Any) -> dict[str, Any]:
    return {"method": "scratch", "task": "pretrain", "start": "", "length": length} | changes


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        (SMALL | {"start": WITHOUT}, "fine-tune B-6/Wi-1024, no DA"),
        (SMALL, "fine-tune B-6/Wi-1024 + DA"),
        ({"start": "published imagenet21k weights (800 epochs)"}, "fine-tune B-12/Wi-1024, 800 epochs"),
        ({"start": "published imagenet21k weights (400 epochs)"}, ROW),
        (SMALL | scratch("1000 epochs"), "MLP-Inv + DA, 1000 epochs"),
        # runs without a row in the papers
        (SMALL | PLAIN | {"start": "x"}, "fine-tune B-6/Wi-1024, no DA, of x"),
        ({"start": "imagenet21k for 800 epochs"}, f"{ROW}, of imagenet21k for 800 epochs"),
        ({"start": f"cifar100, of {I21K}"}, f"{ROW}, of cifar100, of {I21K}"),
        ({"start": "unknown"}, f"{ROW}, of unknown"),
        ({"split": "val"}, f"{ROW}, of {I21K}, on val"),
        ({"model": BATCH_NORM}, f"fine-tune {BATCH_NORM} + DA, of {I21K}"),
        (SMALL | scratch("300 epochs"), "from scratch B-6/Wi-1024 + DA, 300 epochs"),
        ({"method": "knn", "neighbors": 20}, f"k-NN B-12/Wi-1024, k = 20, of {I21K}"),
    ],
)  # fmt: skip
def test_a_run_has_the_row_of_its_model_augmentation_and_weights(
    changes: dict[str, Any], row: str
) -> None:
    found = cells(tuned("a", 0.5, **changes))
    assert found.row[found["mean"] == 50.0].tolist() == [row]


def test_other_datasets_and_real_labels_are_columns() -> None:
    rows = [
        tuned("a", 0.432, benchmark="imagenet1k", split="val", error_real=0.5),
        tuned("b", 0.2, benchmark="synthetic", target="shapes-b", split="val"),
    ]
    found = cells(*rows)
    assert cell(found, ROW, "ImageNet")["mean"] == pytest.approx(43.2)
    assert cell(found, ROW, "ImageNet ReaL")["mean"] == pytest.approx(50)
    assert found[found.table == OURS].column.tolist() == ["shapes-b"]


def test_our_table_is_first_and_tables_without_a_run_are_left_out() -> None:
    found = cells(tuned("a", 0.5), tuned("b", 0.2, benchmark="synthetic", target="x"))
    shown = [page.title for page in pages_of(with_runs(found))]
    assert shown == [OURS, "Pretrained on ImageNet-21k, fine-tuned"]
    assert len(list(pages_of(with_runs(cells())))) == len(TABLES)


def test_the_command_writes_all_files(tmp_path: Path, write_run: WriteRun, capsys: Capture) -> None:
    assert main(["table", str(tmp_path)]) == 2
    assert printed_errors(capsys.readouterr().err) == [(str(tmp_path), "empty")]
    augment = {"augment": {"flip_probability": 0.5}}
    tags = {"model": "B-12/Wi-1024", "target": "cifar10", "dataset": "cifar"}
    train = {"data": {"dataset": "i21k"}, "train": {"duration": "400 epochs"}, **augment}
    body = tags | {"target": "imagenet21k", "dataset": "i21k"}
    write_run("body", train, result={"eval/top1": 0.4, "step": 0}, tags=body)
    tune = {"data": {"dataset": "cifar", "eval_split": "test"}, **augment, "init": "pretrained"}
    for name, result in (("a", {"eval/top1": 0.912}), ("b", None)):
        write_run(name, tune | {"pretrained": "runs/body@400epochs"}, result=result, tags=tags)
    runs = tmp_path / "runs"
    capsys.readouterr()
    assert main(["table", str(runs)]) == 0
    assert "2 finished runs" in capsys.readouterr().out
    page = (runs / "tables.md").read_text()
    assert f"| {ROW} | 91.2 / 93.6 ± 0.03 / -2.4 | not run / 79.2 ± 0.1 |" in page
    assert all((runs / f"tables.{ending}").exists() for ending in ("png", "svg", "parquet"))
    assert json.loads((runs / "tables.json").read_text())["finished_runs"] == 2


# ---- the papers' plans

PLANS = {
    "scaling_scratch": {"pretrain": 24},
    "scaling_transfer": {"tune": 45},
    "scaling_probe": {"probe": 15},
    "mixer_table1_cifar": {"pretrain": 12},
    "mixer_table1_imagenet": {"pretrain": 9},
    "mixer_fig6_tableS2": {"pretrain": 182},
}


@pytest.mark.slow
def test_each_member_of_the_papers_plans_is_in_one_cell(
    write_run: WriteRun, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each member has its own accuracy. Each cell of a seed has exactly one of these."""
    monkeypatch.chdir(REPOSITORY)
    rows, models = list[dict[str, Any]](), dict[str, str]()
    for plan in PLANS:
        stages = load_plan(f"configs/plan/{plan}.yaml").stages
        for work in (work for stage in stages if stage.kind != "build" for work in stage.works):
            settings = work.settings
            if work.writes in models or isinstance(settings, EvaluateSettings):
                continue
            assert isinstance(settings, PretrainSettings | TuneSettings | ProbeSettings)
            models[work.writes] = model = (
                settings.model.label
                if isinstance(settings, PretrainSettings)
                else models[work.pretrained or ""]
            )
            dataset = Path(settings.data.dataset).name
            tags = {"model": model, "target": dataset.split("-")[0], "dataset": dataset}
            for each in repeats_of(settings) if isinstance(settings, TuneSettings) else [settings]:
                metric = "test_top1" if work.kind == "probe" else "eval/top1"
                result = {metric: (len(rows) + 1) / 1000, "step": 0}
                name = str(each.run_dir).removeprefix("runs/")
                dump = each.model_dump(mode="json")
                place = write_run(name, dump, result=result, tags=tags)
                rows += [row | {"plan": plan} for row in rows_of_run(read_run(place))]
    frame = as_frame(rows)
    bodies = frame.benchmark == "imagenet21k"
    assert frame[~bodies].groupby(["plan", "task"]).size().to_dict() == {
        (plan, task): count for plan, tasks in PLANS.items() for task, count in tasks.items()
    }
    seed = frame.repetition.str.extract(r"\"(\d+)\"")[0]
    for number in seed[~bodies].unique():
        some = frame[~bodies & (seed == number)]
        found = cells_of(TABLES, some)
        assert found[found.table == OURS].row.tolist() == []
        shown = found["mean"].dropna().round(1).tolist()
        assert sorted(shown) == sorted((100 - 100 * some.error).round(1))
