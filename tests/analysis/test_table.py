"""The papers' tables with our numbers: by hand-made runs, against literals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from analysis.cli import main as analysis
from analysis.tables.pages import markdown, with_runs
from analysis.tables.published import TABLES
from analysis.tables.table import Cell, Filled, Line, fill
from cluster.plan_file import load_plan
from data_prep.settings import flatten
from finetune.evaluate.config import EvaluateSettings
from finetune.probe.config import ProbeSettings
from finetune.runs import Run, read_run
from finetune.tune.config import TuneSettings, repeats_of
from pretrain.config import PretrainSettings
from tests.analysis.conftest import WriteRun
from tests.conftest import REPOSITORY, Capture, Patch
from tests.records import record_of

FLIPPED = {"augment.flip_probability": "0.5", "augment.crop_scale": "None"}
PLAIN = {
    "augment.flip_probability": "0.0",
    "augment.crop_scale": "None",
    "augment.mixup_alpha": "0.0",
}


TASKS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "continued": {"start_from": "runs/body@50 epochs"},
    "tune": {"init": "pretrained"},
    "scratch": {"init": "scratch"},
    "tune_seeds": {"init": "pretrained", "seeds": [0, 1, 2]},
    "probe": {"pretrained": "body", "lrs": [0.1]},
    "knn": {"pretrained": "body", "neighbours": [20]},
    "evaluate": {"pretrained": "body"},
}


def run(
    key: str,
    task: str,
    top1: float | None,
    *,
    metric: str = "eval/top1",
    parent_key: str = "",
    **more: Any,
) -> Run:
    """`top1` None: unfinished."""
    params = more.get("params", {})
    data = {
        name.removeprefix("data."): value
        for name, value in params.items()
        if name.startswith("data.")
    }
    data = {"dataset": "d"} | ({"split": "val"} if task == "evaluate" else {}) | data
    settings = {
        "data": data,
        **{name: params[name] for name in ("views",) if name in params},
    } | TASKS[task]
    settings |= more.get("settings", {})
    tags = {"model": "B-12/Wi-1024"} | more.get("tags", {})
    result = {} if top1 is None else {metric: top1}
    return Run(
        Path(key),
        record_of(settings),
        settings,
        result=result,
        params=params,
        tags=tags,
        key=key,
        parent_key=parent_key,
    )


I21K = {"target": "imagenet21k", "dataset": "imagenet21k-64"}
LONG = {"train.duration": "400 epochs"}
BODY = run("body", "pretrain", 0.4, tags=I21K, params=FLIPPED | LONG)
PLAIN_BODY = run("plain", "pretrain", 0.4, tags=I21K, params=PLAIN | LONG)
OF = "of imagenet21k for 400 epochs"


def tuned(
    key: str, top1: float | None, *, seed: int = 0, target: str = "cifar10", **more: Any
) -> Run:
    split = "val" if target in ("tinyimagenet", "imagenet1k", "synthetic") else "test"
    params = FLIPPED | {"train.seed": str(seed), "run_dir": f"runs/{key}", "optimizer.lr": "0.001"}
    params |= {"data.eval_split": split, "data.fold": "None"}
    words: dict[str, Any] = {"parent_key": "body", "params": params | more.pop("params", {})}
    tags = {"target": target, "dataset": f"{target}-64"} | more.pop("tags", {})
    return run(key, more.pop("task", "tune"), top1, tags=tags, **words | more)


def cell(tables: list[Filled], row: str, column: str) -> Cell:
    """Of the only row of that name."""
    ((table, line),) = [
        (table, line) for table in tables for line in table.lines if line.name == row
    ]
    return line.cells[table.columns.index(column)]


ROW = "fine-tune B-12/Wi-1024 + DA"


def test_without_runs_every_cell_is_the_papers_number_and_not_run() -> None:
    tables = fill(TABLES, [])
    assert [len(table.lines) for table in tables] == [6, 5, 3, 3, 3, 7, 7]
    cells = [cell for table in tables for line in table.lines for cell in line.cells]
    assert len(cells) == 6 * 5 + 5 * 6 + 3 * 6 + 3 * 3 + 3 * 2 + 7 * 4 + 7 * 2
    assert all(each.mean is None and each.gap is None for each in cells)
    assert cell(tables, "MLP-Inv + DA, 5000 epochs", "ImageNet").paper == 31.7
    assert cell(tables, "MLP, 100 epochs", "CIFAR-10").paper == 47.1
    assert cell(tables, "linear probe B-6/Wi-1024 + DA", "STL-10").paper == 85.2
    assert (
        cell(tables, "fine-tune B-12/Wi-1024 + DA + TTA, public checkpoint", "TinyImageNet").paper
        == 73.1
    )
    assert [each.paper for each in tables[2].lines[0].cells] == [65.1, 41.3, 53.4, 45.6, 13.0, None]
    assert [line.cells[-1].paper for line in tables[1].lines] == [None, None, None, 48.6, 57.9]
    page = markdown(tables)
    assert (
        page.count("not run / ") == 20 + 27 + 15 + 4 + 3 and page.count("not run") == len(cells) - 3
    )
    assert (
        "| beta-LASSO | cited / 85.19 | cited / 59.56 | - |" in page
        and "| not run / 76.74 ± 0.19 | not run |" in page
    )


def test_the_gap_is_ours_less_the_papers_and_unfinished_runs_do_not_count() -> None:
    found = cell(fill(TABLES, [BODY, tuned("a", 0.9125)]), ROW, "CIFAR-10")
    assert (found.mean, found.num_repetitions, found.std, found.num_left_out) == (
        pytest.approx(91.25),
        1,
        None,
        0,
    )
    assert found.gap == pytest.approx(-2.35)  # 91.25 - 93.6
    begun = tuned("b", 0.5, task="continued")  # with other weights: neither from scratch nor tuned
    assert begun.pretrained == Path("runs/body") and begun.started_from == "body"
    assert fill(TABLES, [begun]) == fill(TABLES, [])
    tables = fill(TABLES, [BODY, tuned("a", None)])
    assert cell(tables, ROW, "CIFAR-10").mean is None and "not run / 93.6" in markdown(tables)


def test_seeds_make_a_mean_and_a_deviation() -> None:
    """0.90, 0.92, 0.97: mean 0.93, deviation sqrt((9 + 1 + 16) / 2) = 3.6056 points."""
    three = [tuned(f"s{seed}", top1, seed=seed) for seed, top1 in enumerate((0.90, 0.92, 0.97))]
    parent = run("seeds", "tune_seeds", 0.93, parent_key="body", tags={"target": "cifar10"})
    below = [
        tuned(f"s{seed}", top1, seed=seed, parent_key="seeds")
        for seed, top1 in enumerate((0.90, 0.92, 0.97))
    ]
    for found in ([BODY, *three], [BODY, parent, *below]):
        tables = fill(TABLES, found)
        assert cell(tables, ROW, "CIFAR-10").mean == pytest.approx(93.0)
        assert cell(tables, ROW, "CIFAR-10").std == pytest.approx(3.6056, abs=1e-3)
        assert "93.0 ± 3.6 (n=3) / 93.6 / -0.6" in markdown(tables)
    alone = tuned("s3", 0.93, seed=3)  # the same recipe, run by itself
    assert cell(fill(TABLES, [BODY, parent, *below, alone]), ROW, "CIFAR-10").num_repetitions == 4


def test_folds_are_repetitions_and_stay_apart_from_runs_on_the_whole_split() -> None:
    """0.80 to 0.89 in steps of 0.01: mean 84.5, deviation sqrt(82.5 / 9) = 3.0277 points. Without
    folds the paper has 88.9."""
    folds = [
        tuned(
            f"f{n}",
            0.80 + 0.01 * n,
            target="stl10",
            parent_key="group",
            params={"data.fold": str(n)},
        )
        for n in range(10)
    ]
    group = run("group", "tune_seeds", 0.845, parent_key="body", tags={"target": "stl10"})
    tables = fill(TABLES, [BODY, tuned("whole", 0.9, target="stl10"), group, *folds])
    whole, single = cell(tables, ROW, "STL-10"), cell(tables, f"{ROW}, per fold, {OF}", "STL-10")
    assert (whole.mean, whole.num_repetitions, whole.num_left_out) == (pytest.approx(90.0), 1, 0)
    assert (single.mean, single.std) == (pytest.approx(84.5), pytest.approx(3.0277, abs=1e-3))
    assert (single.num_repetitions, single.num_left_out) == (
        10,
        0,
    ) and "84.5 ± 3.0 (n=10)" in markdown(tables)
    again = tuned(
        "f3-1", 0.93, seed=1, target="stl10", parent_key="group", params={"data.fold": "3"}
    )
    assert (
        cell(
            fill(TABLES, [BODY, group, *folds, again]), f"{ROW}, per fold, {OF}", "STL-10"
        ).num_repetitions
        == 11
    )


def test_ranks_and_paths_make_no_other_recipe_and_what_a_label_hides_makes_another_model() -> None:
    """As the journal of a run has them."""
    elsewhere = [
        tuned(
            f"s{seed}",
            0.9,
            seed=seed,
            params={"num_ranks": str(seed + 1), "data.dataset": f"/node{seed}/cifar"},
        )
        for seed in (0, 1)
    ]
    assert cell(fill(TABLES, [BODY, *elsewhere]), ROW, "CIFAR-10").num_repetitions == 2
    mlp = {"kind": "mlp", "depth": 12, "expansion": 4.0}
    for model, row in (
        (mlp, ROW),
        (
            mlp | {"norm": "batch", "bias": False},
            f"fine-tune B-12/Wi-1024, norm batch, bias False + DA, {OF}",
        ),
    ):
        body = run(
            "body", "pretrain", None, settings={"model": model}, params=FLIPPED | LONG, tags=I21K
        )
        tables = fill(TABLES, [body, tuned("a", 0.9)])
        assert cell(tables, row, "CIFAR-10").mean == pytest.approx(90)


def test_the_last_recipe_stands_not_the_best_and_a_seed_counts_once() -> None:
    old = tuned("old", 0.99, params={"optimizer.lr": "0.1"})
    again = [tuned("first", 0.5, seed=1), tuned("second", 0.8, seed=1), tuned("third", 0.9, seed=2)]
    found = cell(fill(TABLES, [BODY, old, *again]), ROW, "CIFAR-10")
    assert (found.mean, found.num_repetitions, found.num_left_out) == (pytest.approx(85.0), 2, 2)


def test_a_papers_cell_holds_the_runs_of_its_own_plan_where_that_has_any() -> None:
    """Others train the same model with other batches: later, and better."""
    own = replace(
        tuned("own", 0.9), directory=Path("runs/plans/b_transfer/tune-b12-da-cifar10/seed-0")
    )
    other = [
        tuned(f"o{seed}", 0.99, seed=seed, params={"train.global_batch_size": "256"})
        for seed in (0, 1)
    ]
    found = cell(
        fill(TABLES, [BODY, own, *(replace(each, began_ms=9) for each in other)]), ROW, "CIFAR-10"
    )
    assert (found.mean, found.num_repetitions, found.num_left_out) == (pytest.approx(90.0), 1, 2)


SMALL = {"tags": {"model": "B-6/Wi-1024"}}
STANDARD = {"settings": {"model": {"kind": "mlp", "bottleneck": "none", "activation": "relu"}}}


def origin(length: int) -> dict[str, Any]:
    return {
        "tags": {
            "origin": (
                f"scaling_mlps: B-12_Wi-1024_res_64_imagenet21_epochs_{length}_weights, sha256 0"
            )
        }
    }


def scratch(epochs: int, **params: str) -> dict[str, Any]:
    return {"task": "scratch", "params": {"train.duration": f"{epochs} epochs"} | params}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        (SMALL | {"params": PLAIN, "parent_key": "plain"}, "fine-tune B-6/Wi-1024, no DA"),
        (SMALL | {"params": PLAIN | {"augment.mixup_alpha": "0.8"}}, "fine-tune B-6/Wi-1024 + DA"),
        (origin(800) | {"parent_key": ""}, "fine-tune B-12/Wi-1024 + DA, public checkpoint"),
        (origin(400) | {"parent_key": ""}, ROW),
        (SMALL | scratch(1000), "MLP-Inv + DA, 1000 epochs"),
        (STANDARD | scratch(100, **PLAIN), "MLP, 100 epochs"),
        # what the papers have no row for
        (SMALL | {"params": PLAIN}, f"fine-tune B-6/Wi-1024, no DA, {OF}"),
        (SMALL | {"parent_key": "plain"}, f"fine-tune B-6/Wi-1024 + DA, {OF} without DA"),
        (
            origin(100) | {"parent_key": ""},
            "fine-tune B-12/Wi-1024 + DA, of imagenet21k for 100 epochs",
        ),
        (
            {"settings": {"pretrained": "body@50epochs"}},
            "fine-tune B-12/Wi-1024 + DA, of imagenet21k for 50 epochs",
        ),
        ({"settings": {"pretrained": "body@400epochs"}}, ROW),
        (
            {"settings": {"pretrained": "body/checkpoints/step-00000007"}},
            "fine-tune B-12/Wi-1024 + DA, of imagenet21k for 7 steps",
        ),
        ({"tags": {"model": "Mixer P4 C24 L2"}}, f"fine-tune Mixer P4 C24 L2 + DA, {OF}"),
        ({"parent_key": ""}, "fine-tune B-12/Wi-1024 + DA, of unknown"),
        ({"params": {"data.eval_split": "val"}}, f"fine-tune B-12/Wi-1024 + DA, {OF}, on val"),
        (origin(800) | {"parent_key": "gone"}, "fine-tune B-12/Wi-1024 + DA, of unknown"),
        (SMALL | scratch(300), "from scratch B-6/Wi-1024 + DA, 300 epochs"),
    ],
)
def test_a_run_stands_in_the_row_of_its_model_augmentation_and_weights(
    changes: dict[str, Any], row: str
) -> None:
    tables = fill(TABLES, [BODY, PLAIN_BODY, tuned("a", 0.5, **changes)])
    filled = [line.name for table in tables for line in table.lines if line.cells[0].mean == 50.0]
    assert filled == [row]


@pytest.mark.parametrize(
    ("weights_step", "present", "length"),
    [
        (
            25,
            {"result": {"step": 87, "eval/top1": 0.5}, "duration": "7 epochs"},
            "2 epochs",
        ),  # extended since then
        (25, {"result": None, "duration": "7 epochs"}, "2 epochs"),  # its extension is not finished
        (
            20,
            {"result": {"step": 87, "eval/top1": 0.5}, "duration": "7 epochs"},
            "20 steps",
        ),  # no epoch ends there
        (13, {"result": {"step": 87, "eval/top1": 0.5}, "duration": "7 epochs"}, "1 epoch"),
        (87, {"result": {"step": 87, "eval/top1": 0.5}, "duration": "7 epochs"}, "7 epochs"),
        (
            None,
            {"result": {"step": 87, "eval/top1": 0.5}, "duration": "7 epochs"},
            "7 epochs",
        ),  # by an early version
    ],
)
def test_a_probe_is_of_the_length_that_its_checkpoint_had(
    write_run: WriteRun, weights_step: int | None, present: dict[str, Any], length: str
) -> None:
    """785 images in batches of 64: an epoch ends with steps 13, 25, 37, ..., 87."""
    settings = {
        "data": {"dataset": "d"},
        "train": {"duration": present["duration"], "global_batch_size": 64},
    }
    curve = [(25, {"train/samples": 1600.0, "train/epoch": 1600 / 785})]
    tags = {"model": "B-12/Wi-1024", "dataset": "im"}
    body = write_run(
        "body", settings, result=present["result"], metrics=curve, key="body", tags=tags
    )
    result = {"test_top1": 0.5} | ({"weights_step": weights_step} if weights_step else {})
    probed = write_run(
        "probe", {"pretrained": "body", "lrs": [0.1]}, result=result, parent_key="body", tags=tags
    )
    *_, ours = fill(TABLES, [read_run(body), read_run(probed)])
    assert [line.name for line in ours.lines if "probe" in line.name] == [
        f"linear probe B-12/Wi-1024, no DA, of im for {length} without DA"
    ]


def test_what_was_tuned_on_another_dataset_first_is_no_number_beside_the_papers() -> None:
    middle = tuned("middle", 0.7, target="cifar100")
    tables = fill(TABLES, [BODY, middle, tuned("a", 0.95, parent_key="middle")])
    assert cell(tables, ROW, "CIFAR-10").mean is None and cell(
        tables, ROW, "CIFAR-100"
    ).mean == pytest.approx(70)
    name = f"fine-tune B-12/Wi-1024 + DA, of cifar100, {OF}"
    assert cell(tables, name, "CIFAR-10").mean == pytest.approx(95)


def test_probes_neighbours_and_other_datasets() -> None:
    common: dict[str, Any] = {"parent_key": "body", "tags": {"target": "stl10", "dataset": "stl"}}
    synthetic = run(
        "s", "pretrain", 0.3, tags={"target": "synthetic", "dataset": "shapes-a"}, params=FLIPPED
    )
    tables = fill(
        TABLES,
        [
            BODY,
            synthetic,
            run(
                "p",
                "probe",
                0.883,
                metric="test_top1",
                params={"views": "8", "data.test_split": "test"},
                **common,
            ),
            run(
                "q",
                "probe",
                0.7,
                metric="test_top1",
                params={"views": "0", "data.test_split": "test"},
                **common,
            ),
            run(
                "h",
                "probe",
                0.99,
                metric="test_top1",
                params={"views": "8", "data.test_split": "unlabelled"},
                **common,
            ),
            run("k", "knn", 0.6, metric="top1_k20", params={"data.test_split": "test"}, **common),
            tuned("t", 0.2, parent_key="s", target="synthetic", tags={"dataset": "shapes-b"}),
        ],
    )
    assert cell(tables, "linear probe B-12/Wi-1024 + DA", "STL-10").gap == pytest.approx(0.0)
    assert cell(tables, f"linear probe B-12/Wi-1024, no DA, {OF}", "STL-10").mean == pytest.approx(
        70
    )
    assert cell(tables, f"k-NN B-12/Wi-1024, k = 20, {OF}", "STL-10").mean == pytest.approx(60)
    assert cell(
        tables, "fine-tune B-12/Wi-1024 + DA, of shapes-a", "shapes-b"
    ).mean == pytest.approx(20)
    assert cell(tables, "from scratch B-12/Wi-1024 + DA", "shapes-a").mean == pytest.approx(30)
    assert tables[-1].columns == ("STL-10", "imagenet21k", "shapes-a", "shapes-b")


def test_test_time_augmentation_is_an_evaluation_with_views_of_a_tuned_run() -> None:
    origin = {"origin": "B-12_Wi-1024_res_64_imagenet21_epochs_800"}
    body = [tuned(f"t{seed}", 0.9, seed=seed, parent_key="", tags=origin) for seed in (0, 1)]

    def judged(key: str, top1: float, of: str, **params: str) -> Run:
        return run(
            key, "evaluate", top1, parent_key=of, params=params, tags={"target": "cifar10"} | origin
        )

    both = ((0, 0.95), (1, 0.97))
    seen = [
        judged(
            f"e{n}", top1, f"t{n}", views="100", pretrained=f"runs/t{n}", **{"data.split": "test"}
        )
        for n, top1 in both
    ]
    others = [
        judged("e", 0.1, "t0", views="0"),
        judged("e2", 0.999, "t0", views="100", **{"data.split": "train"}),
    ]
    tables = fill(TABLES, [*body, *seen, *others])
    found = cell(tables, "fine-tune B-12/Wi-1024 + DA + TTA, public checkpoint", "CIFAR-10")
    assert (found.mean, found.num_repetitions) == (
        pytest.approx(96.0),
        2,
    ) and found.gap == pytest.approx(0.5)
    assert cell(
        tables, "fine-tune B-12/Wi-1024 + DA, public checkpoint", "CIFAR-10"
    ).mean == pytest.approx(90.0)
    own = "fine-tune, TTA B-12/Wi-1024 + DA, of imagenet21k for 800 epochs, on train"
    assert [line.name for line in tables[-1].lines] == [own]


def test_reassessed_labels_are_a_column_of_their_own() -> None:
    both = {"metric": "eval/real", "target": "imagenet1k", "parent_key": "", **origin(800)}
    judged = tuned("a", 0.5, **both)
    tables = fill(TABLES, [replace(judged, result={"eval/top1": 0.432, "eval/real": 0.5})])
    found = [
        cell(tables, f"{ROW}, public checkpoint", column)
        for column in ("ImageNet", "ImageNet ReaL")
    ]
    assert [each.gap for each in found] == [pytest.approx(0), pytest.approx(1.4)] and len(
        tables
    ) == len(TABLES)


def test_the_picture_begins_with_ones_own_and_leaves_out_tables_without_a_run() -> None:
    paper, other = (
        Filled(name, "a paper", ("c",), (Line("row", (Cell(50.0, mean),)),))
        for name, mean in (("A", 1.0), ("B", None))
    )
    ours = Filled("Ours", "", ("c",), (Line("row", (Cell(None, 2.0),)),))
    assert [table.title for table in with_runs([other, paper, ours])] == ["Ours", "A"]
    assert [table.title for table in with_runs([other])] == ["B"]


def test_the_command_writes_both_files(
    tmp_path: Path, write_run: WriteRun, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # or a narrow terminal would break a cell in two
    assert analysis(["table", str(tmp_path)]) == 2
    assert "holds no runs; name the folder that they lie in" in capsys.readouterr().err
    write_run("begun", {"data": {}})
    assert analysis(["table", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(
        "tables.md (all tables), tables.png: of 0 finished runs among 1\n"
    )
    data: dict[str, Any] = {
        "data": {"dataset": "cifar", "eval_split": "test"},
        "augment": {"flip_probability": 0.5},
    }
    start = {"model": "B-12/Wi-1024", "target": "cifar10", "dataset": "cifar"}
    body = start | {"target": "imagenet21k", "dataset": "i21k"}
    write_run(
        "body",
        {"data": {}, "augment": {"flip_probability": 0.5}, "train": {"duration": "400 epochs"}},
        result={"eval/top1": 0.4},
        tags=body,
        key="body",
    )
    for name, result in (("a", {"eval/top1": 0.912}), ("b", None)):
        write_run(
            name,
            data | {"init": "pretrained"},
            result=result,
            tags=start,
            key=name,
            parent_key="body",
        )
    other = start | {"target": "shapes", "dataset": "shapes"}
    write_run(
        "c",
        data | {"init": "scratch"},
        result={"eval/top1": 0.2},
        tags=other,
        key="c",
        parent_key="body",
    )
    runs = tmp_path / "runs"
    assert analysis(["table", str(runs), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "of 3 finished runs among 5" in shown and "91.2 / 93.6 / -2.4" in shown
    assert analysis(["table", str(runs)]) == 0
    assert (runs / "tables.md").read_bytes() == (tmp_path / "out" / "tables.md").read_bytes()
    lines = [
        line for line in (runs / "tables.md").read_text().splitlines() if line.startswith("| ")
    ]
    rows = [[word.strip() for word in line.strip("|").split(" | ")] for line in lines]
    assert {len(row) for row in rows[:8]} == {6} and {len(row) for row in rows[8:15]} == {7}
    assert [row[1:3] for row in rows if row[0] == ROW] == [["91.2 / 93.6 / -2.4", "not run / 79.2"]]
    with Image.open(runs / "tables.png") as picture:
        assert picture.format == "PNG" and picture.width > 1000


# ---- the papers' plans
# --------------------------------------------------------------------------------------------------

PLANS = (
    "b_scratch",
    "b_transfer",
    "b_probe",
    "a_table1_cifar",
    "a_table1_imagenet",
    "a_fig6_tableS2",
)
PRINTED = {
    "b_scratch/cifar10-mlp": 47.1,
    "b_scratch/tinyimagenet-mlp-da": 8.7,
    "b_scratch/imagenet1k-inv": 8.7,
    "b_scratch/cifar100-inv-da-1000": 48.3,
    "b_scratch/imagenet1k-inv-da-5000": 31.7,
    "b_scratch/cifar10-resnet18": None,
    "b_transfer/tune-b6-no-da-stl10/seed-1": 51.5,
    "b_transfer/tune-b6-da-tinyimagenet/seed-0": 62.7,
    "b_transfer/tune-b12-da-imagenet1k/seed-2": 42.5,
    "b_probe/b6-no-da-cifar100": 41.3,
    "b_probe/b6-da-imagenet1k": 39.2,
    "b_probe/b12-da-cifar10": 90.6,
    "a_table1_cifar/ss-8-cifar10-seed-0": 100 - 15.91,
    "a_table1_cifar/ss-w-cifar100-seed-2": 100 - 38.13,
    "a_table1_cifar/ss-w-stl10-seed-2": None,
    "a_table1_imagenet/mixer_b_16-seed-0": 100 - 23.56,
    "a_table1_imagenet/mixer_b_w-seed-1": 100 - 23.26,
    "a_fig6_tableS2/stl10-omega18-c83-rp-seed-0": None,
}
"""Of some members, what the paper has where they stand."""


def test_each_member_of_the_papers_plans_is_in_one_cell_and_each_cell_of_theirs_has_them(
    write_run: WriteRun, monkeypatch: Patch
) -> None:
    """By results that are made up, each another. Of each stage one run is written and read."""
    monkeypatch.chdir(REPOSITORY)
    stages = [
        stage
        for name in PLANS
        for stage in load_plan(f"configs/plan/{name}.yaml").stages
        if stage.kind != "build"
    ]
    works = {
        work.writes: work for stage in stages for work in stage.works
    }  # two of the plans share their pretraining
    firsts, runs = {stage.works[0].writes for stage in stages}, dict[str, Run]()
    for place, work in works.items():
        settings = work.settings
        assert isinstance(
            settings, PretrainSettings | TuneSettings | ProbeSettings | EvaluateSettings
        )
        model = (
            settings.model.label
            if isinstance(settings, PretrainSettings)
            else runs[work.pretrained or ""].tags["model"]
        )
        dataset = Path(settings.data.dataset).name
        tags = {"model": model, "target": dataset.split("-")[0], "dataset": dataset}
        for each in repeats_of(settings) if isinstance(settings, TuneSettings) else [settings]:
            dump, result = (
                each.model_dump(mode="json"),
                {"test_top1" if work.kind == "probe" else "eval/top1": len(runs) / 1000},
            )
            params = {name: str(value) for name, value in flatten(dump).items()}
            keys = {"key": str(each.run_dir), "parent_key": work.pretrained or ""}
            runs[keys["key"]] = Run(
                Path(keys["key"]),
                record_of(dump),
                dump,
                result=result,
                params=params,
                tags=tags,
                began_ms=1,
                **keys,
            )
        if place in firsts:
            written = write_run(place, dump, result=result, tags=tags, **keys)
            own = {"directory": Path(keys["key"]), "record": record_of(dump)}
            assert replace(read_run(written), **own) == runs[keys["key"]]
    assert len(runs) == 24 + (3 + 3 * 5 * 3 * 2) + 3 * 5 + 18 + 9 + 182
    bodies = [run for run in runs.values() if run.tags["target"] == "imagenet21k"]
    of_targets = {
        place: run for place, run in runs.items() if run not in bodies and run.task != "evaluate"
    }
    for seed in range(5):  # of which each cell then has one run
        some = {
            place: run
            for place, run in of_targets.items()
            if run.params.get("train.seed", "0") == str(seed)
        }
        cells = [
            cell
            for table in fill(TABLES, [*bodies, *some.values()])[:-1]
            for line in table.lines
            for cell in line.cells
        ]
        paper = {round(cell.mean * 10): cell.paper for cell in cells if cell.mean is not None}
        assert len(paper) == len(some) == sum(cell.mean is not None for cell in cells)
        assert paper.keys() == {
            round(next(iter(run.result.values())) * 1000) for run in some.values()
        }
        for place, run in some.items():
            printed = paper[round(next(iter(run.result.values())) * 1000)]
            assert printed == pytest.approx(
                PRINTED.get(place.removeprefix("runs/plans/"), printed)
            ), place
    assert PRINTED.keys() <= {place.removeprefix("runs/plans/") for place in of_targets}
    *tables, own = fill(TABLES, list(runs.values()))
    models = ("B-6/Wi-1024, no DA", "B-6/Wi-1024 + DA", "B-12/Wi-1024 + DA")
    bare, with_views = (
        (f"from scratch {model}, 400 epochs" for model in models),
        (f"fine-tune, TTA {model}, {OF}" for model in models),
    )
    assert {line.name.removesuffix(" without DA") for line in own.lines} == {
        *bare,
        *with_views,
    }  # no paper has the results of these
    assert sum(cell.num_repetitions for line in own.lines for cell in line.cells) == 3 + 3 * 5 * 3
    # No result here has ReaL, no checkpoint is public.
    counts = [
        [[cell.num_repetitions for cell in line.cells] for line in table.lines] for table in tables
    ]
    assert counts[:3] == [
        [[1] * 4 + [0]] * 6,
        [[3] * 5 + [0]] * 3 + [[0] * 6] * 2,
        [[1] * 5 + [0]] * 3,
    ]
    assert counts[3:] == [[[3] * 3] * 2 + [[0] * 3], [[3, 0]] * 3, [[5] * 4] * 7, [[3] * 2] * 7]
    assert {table.plan for table in TABLES} == set(PLANS)
    assert not any(
        cell.num_left_out for table in tables for line in table.lines for cell in line.cells
    )
