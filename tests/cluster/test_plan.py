"""Plans: the members of a file, their dependencies, the queued jobs, and a job that SLURM rejects.
The same without SLURM.
"""

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.plan import Here
from cluster.plan_file import compressed, load_checked, load_plan
from cluster.queue_jobs import main as submit
from cluster.submit import indices
from data_prep.errors import UserError
from pretrain.config import PretrainSettings
from tests.cluster.checkouts import finish, has_error, stand_in
from tests.errors import fails
from tests.ranks import REPOSITORY

DEMO = "configs/plan/demo.yaml"
GRAPH: dict[str, tuple[int, tuple[str, ...]]] = {
    "prepare/1": (1, ()),
    "prepare/2": (1, ()),
    "pretrain": (1, ("prepare/1",)),
    "probe": (1, ("prepare/2", "pretrain")),
    "finetune": (1, ("prepare/2", "pretrain")),
}
SMALL = """
pretrain:
  config: configs/pretrain/demo_mlp.yaml
  overrides: [train.duration=2 epochs]
  grid:
    shape:
      narrow: {model.width: 64, model.depth: 8}
      wide: {model.width: 256, model.depth: 2}
    optimizer.lr: [1e-4, 0.001]
  seeds: [7, 8]
  run_dir: runs/{name}/{shape}-lr-{optimizer.lr}-{seed}
  max_concurrent: 3
"""
TUNED = """
finetune: {config: configs/finetune/demo.yaml, overrides: [run_dir=runs/t, %s]}
export: {config: configs/export/demo.yaml, """


def written(text: str, name: str = "small.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_stages_wait_for_what_they_read(checkout: Path) -> None:
    plan = load_checked(DEMO)
    found = {
        each.name: (len(each.members), tuple(other.name for other in plan.after(each)))
        for each in plan.stages
    }
    assert found == GRAPH


def test_members_are_the_product_in_the_order_of_the_file(checkout: Path) -> None:
    first, second = (
        [work.words for work in load_plan(written(SMALL)).stages[0].works] for _ in "ab"
    )
    common = ["pretrain", "train", "configs/pretrain/demo_mlp.yaml", "train.duration=2 epochs"]
    assert first[0][:-1] == [
        *common, "model.width=64", "model.depth=8", "optimizer.lr=0.0001", "train.seed=7", "run_dir=runs/small/narrow-lr-0.0001-7",
    ]  # fmt: skip
    assert first[6][4:-1] == [
        "model.width=256", "model.depth=2", "optimizer.lr=0.001", "train.seed=7", "run_dir=runs/small/wide-lr-0.001-7",
    ]  # fmt: skip
    assert len(first) == 8 and first == second
    settings = load_plan("small.yaml").stages[0].works[7].settings
    assert isinstance(settings, PretrainSettings) and (
        settings.optimizer.lr,
        settings.train.seed,
    ) == (0.001, 8)


def test_each_pretrained_member_is_probed_on_each_dataset(checkout: Path) -> None:
    axis = (
        "probe: {config: configs/probe/demo.yaml, for_each: pretrain, grid: {dataset: [data/a,"
        " data/b]}, "
    )
    pretrained, probed = load_plan(
        written(SMALL + axis + "run_dir: 'runs/{pretrained}-{dataset}'}\n")
    ).stages
    assert [probe.pretrained for probe in probed.works] == [
        work.writes for work in pretrained.works for _ in range(2)
    ]
    assert {probe.datasets for probe in probed.works} == {("data/a",), ("data/b",)}


def test_a_probe_may_be_of_the_checkpoints_that_each_run_keeps(checkout: Path) -> None:
    probe = (
        "probe: {config: configs/probe/demo.yaml, for_each: pretrain, checkpoints: [%s],"
        " run_dir: 'runs/p-{pretrained}'}"
    )
    kept = SMALL.replace("epochs]", "epochs, 'checkpoint.milestones=[1 epochs, 1.5 epochs]']")
    Path("kept.yaml").write_text(kept + probe % "1 epochs, 1.50 epochs, 2 epochs, 7 steps")
    pretrained, probed = load_plan("kept.yaml").stages
    assert load_plan("kept.yaml").after(probed) == [pretrained] and len(probed.works) == 8 * 4
    assert [work.pretrained for work in probed.works[:2]] == [
        f"{pretrained.works[0].writes}@{length}" for length in ("1epochs", "1.50epochs")
    ]
    assert probed.works[1].writes == "runs/p-narrow-lr-0.0001-7-1.50epochs"
    Path("kept.yaml").write_text(kept + probe % "1 epochs, 3 epochs")
    with fails("mismatch", "kept.yaml: probe: member 1: pretrained"):
        load_checked("kept.yaml")


EACH_TUNED = """
finetune:
  config: configs/finetune/demo.yaml
  overrides: ['seeds=[3, 4]']
  grid: {on: {a: {data.dataset: data/a, data.eval_split: test}, b: {data.dataset: data/b}}}
  run_dir: 'runs/t-{on}'
knn: {config: configs/knn/demo.yaml, for_each: finetune, run_dir: 'runs/knn-{finetuned}'}
evaluate:
- {config: configs/evaluate/demo.yaml, for_each: finetune, seeds: [5], run_dir: 'runs/{finetuned}-views'}
- {config: configs/evaluate/demo.yaml, overrides: [split=train], for_each: finetune, run_dir: 'runs/{finetuned}'}
export: {config: configs/export/demo.yaml, for_each: finetune, run_dir: 'exports/{finetuned}'}
"""


def test_each_tuned_run_is_evaluated_on_its_own_data_and_exported_after_that(
    checkout: Path,
) -> None:
    """Each seed is a run. An entry's own settings take precedence."""
    plan = load_plan(written(EACH_TUNED))
    tuned, knn, views, train, export = plan.stages
    runs = [f"runs/t-{on}/seed-{seed}" for on in "ab" for seed in (3, 4)]
    assert [work.pretrained for work in views.works] == runs
    assert [work.pretrained for work in export.works] == runs
    assert export.works[0].writes == "exports/t-a-seed-3"
    judged = [
        [(work.settings.data.dataset, work.settings.data.split) for work in stage.works]
        for stage in (views, train)
    ]
    assert judged[0] == [("data/a", "test")] * 2 + [("data/b", "val")] * 2
    assert judged[1] == [("data/a", "train")] * 2 + [("data/b", "train")] * 2
    assert {work.settings.seed for work in views.works} == {5}
    assert {work.datasets for work in knn.works} == {("data/demo-transfer",)}
    assert plan.after(views) == plan.after(knn) == [tuned]
    assert plan.after(export) == [tuned, knn, views, train]


def test_array_ranges_parse_back_to_the_set() -> None:
    draw = random.Random(0)
    for chosen in [sorted(draw.sample(range(40), draw.randint(1, 40))) for _ in range(200)]:
        assert indices(compressed(chosen)) == chosen
    assert compressed([2, 5, 6, 7, 9, 10]) == "2,5-7,9-10"


MLP = "configs/pretrain/demo_mlp.yaml"
MISTAKES: list[tuple[str | tuple[str, str], str, str]] = [
    (("{shape}-lr", "{shap}-lr"), "pretrain: run_dir", "unknown-name"),
    (("-{seed}", ""), "pretrain: member 1", "conflict"),
    (("0.001]", "-1]"), f"pretrain: member 2: {MLP}: optimizer.lr", "bad-value"),
    (("model.depth: 2", "model.depht: 2"), f"pretrain: member 4: {MLP}: model.depht", "unknown-key"),
    (("0.001]", "1e-4]"), "pretrain: optimizer.lr", "conflict"),
    (("[1e-4, 0.001]", "3"), "pretrain: grid.optimizer.lr", "bad-value"),
    (("    shape:\n", "    seed:\n"), "pretrain.grid.seed", "bad-value"),
    (("seeds: [7, 8]", "for_each: pretrain"), "pretrain: for_each", "conflict"),
    ("evaluate: {config: configs/evaluate/demo.yaml, for_each: finetune, run_dir: x}", "evaluate: for_each", "conflict"),
    ("finetune: {config: configs/finetune/demo.yaml, for_each: finetune, run_dir: x}", "finetune: for_each", "conflict"),
    ("knn: {config: configs/knn/demo.yaml, seeds: [0, 1], run_dir: 'x-{seed}'}", "knn: seeds", "unsupported"),
    ("evaluate: {config: configs/evaluate/demo.yaml, overrides: [run_dir=null]}", "evaluate: configs/evaluate/demo.yaml: run_dir", "missing-value"),
    ("export: configs/export/demo.yaml", "export: pretrained", "missing-path"),
    (TUNED % "folds=true" + "for_each: finetune, run_dir: x}", "export: for_each", "unsupported"),
    (TUNED % "'seeds=[3, 4]'" + "overrides: [pretrained=runs/t]}", "export: pretrained", "conflict"),
    (TUNED % "'seeds=[3, 4]'" + "for_each: finetune, checkpoints: [9 epochs], run_dir: x}", "export: member 0: pretrained", "mismatch"),
    (("  run_dir: runs/{name}/{shape}-lr-{optimizer.lr}-{seed}\n", ""), "pretrain.run_dir", "missing-value"),
    ("probe: configs/probe/demo.yaml", "probe: data/demo-transfer", "unfinished"),
    ("probe: configs/probe/demo.yaml", "probe: pretrained", "missing-path"),
    ("prepare: configs/data_prep/cifar10.yaml", "prepare: source.path", "missing-path"),
    ("prepare: {config: configs/data_prep/cifar10.yaml, seeds: [1], run_dir: x}", "prepare", "unsupported"),
    (f"pretrain: {{config: {MLP}, nodes: 1, gpus: 1}}", "pretrain.gpus", "conflict"),
    ("pretrain: [[a]]", "pretrain", "bad-value"),
    ("{}", "", "empty"),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(("text", "field", "code"), MISTAKES)
def test_mistakes_are_named_and_nothing_is_queued(
    slurm: Path,
    text: str | tuple[str, str],
    field: str,
    code: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert isinstance(text, str) or text[0] in SMALL
    path = written(text if isinstance(text, str) else SMALL.replace(*text))
    assert main(["run", path]) == main(["run", path, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert has_error(said.err, f"small.yaml: {field}".removesuffix(": "), code), said.err
    assert submit([path]) == submit(["--dry-run", path]) == 2
    assert said.out == capsys.readouterr().out == ""
    assert not calls(slurm, "sbatch") and not (slurm / "jobs").exists()


def test_a_member_that_its_dataset_refuses_is_named(checkout: Path, shapes: Path) -> None:
    text = SMALL.replace(
        "[train.duration=2 epochs]",
        f"[data.eval_split=nope, data.dataset={shapes}, train.global_batch_size=24]",
    )
    with pytest.raises(UserError) as error:
        load_checked(written(text))
    assert error.value.field == "small.yaml: pretrain: member 0: data.eval_split"
    assert len(error.value.others) == 7
    with pytest.raises(UserError, match="24 mistakes"):
        load_checked(written(text.replace("[7, 8]", "[1, 2, 3, 4, 5, 6]")))


def test_a_place_with_another_run_in_it_is_no_finished_member(checkout: Path) -> None:
    finish(load_plan(written(SMALL)).stages[0].works[0])
    longer, *_ = load_plan(written(SMALL.replace("2 epochs", "3 epochs"))).stages[0].works
    assert not longer.is_finished()  # it resumes
    first, second, *_ = (
        load_plan(written(SMALL.replace("2 epochs", "2 epochs, train.label_smoothing=0.2")))
        .stages[0]
        .works
    )
    with pytest.raises(UserError):
        first.is_finished()
    assert (first.state(), second.state()) == ("other settings", "not begun")


# ---- on SLURM


def calls(checkout: Path, name: str) -> list[list[str]]:
    path = checkout / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == name]


def submitted(checkout: Path) -> list[tuple[str, list[str]]]:
    """Return the script and the options of each sbatch call."""
    found = []
    for words in calls(checkout, "sbatch"):
        script = next(word for word in words if word.endswith(".slurm"))
        found.append((script.removeprefix("/kept/cluster/"), words[1 : words.index(script)]))
    return found


@pytest.mark.processes
def test_each_job_waits_for_what_it_reads(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["--partition=low", DEMO]) == 0
    parts = ["--array=0-1", "--cpus-per-task=1", "--mem=1G", "--partition=low"]
    kill = "--kill-on-invalid-dep=yes"
    assert submitted(slurm) == [
        ("data_prep.slurm", parts),
        ("data_prep.slurm", [*parts, "--dependency=afterok:101", kill, "--array=0"]),
        ("data_prep.slurm", parts),
        ("data_prep.slurm", [*parts, "--dependency=afterok:103", kill, "--array=0"]),
        ("pretrain.slurm", ["--partition=low", "--dependency=afterok:102", kill]),
        ("probe.slurm", ["--partition=low", "--dependency=afterok:104:105", kill]),
        ("finetune.slurm", ["--partition=low", "--dependency=afterok:104:105", kill]),
    ]
    assert calls(slurm, "sbatch")[5][-5:] == [
        "configs/probe/demo.yaml", "run_dir=runs/study/probe", "pretrained=runs/study/pretrain", "data.dataset=data/study-transfer",
        'record={"plan":"demo","stage":"probe","member":"0","labels":{"config":"demo"}}',
    ]  # fmt: skip
    assert "squeue -j 101,102,103,104,105,106,107" in capsys.readouterr().out
    noted = {path.parent.name: path.read_text() for path in (slurm / "jobs").glob("*/writes")}
    assert noted["101"] == noted["102"] == f"-\t{slurm}/data/study-pretrain\n" and len(noted) == 7


@pytest.mark.processes
def test_nodes_and_options_are_of_their_own_stage_and_a_grid_is_one_array(slurm: Path) -> None:
    (slurm / "archives").mkdir()
    (slurm / "archives/winter21_whole").mkdir()
    path = written(
        "prepare: {config: configs/data_prep/imagenet21k_64.yaml, overrides:"
        " [source.path=archives/winter21_whole]}\npretrain: {config:"
        " configs/pretrain/imagenet21k_b12_wi1024_paper.yaml, nodes: 4, seeds: [0, 1], run_dir:"
        " 'runs/{seed}'}\nprobe: {config: configs/probe/demo.yaml, for_each: pretrain, run_dir:"
        " 'runs/p-{pretrained}', max_concurrent: 1,\n        overrides:"
        " [dataset=data/imagenet21k-64]}\n"
    )
    assert submit([path]) == 0
    kill = "--kill-on-invalid-dep=yes"
    assert submitted(slurm)[2:] == [
        ("grid.slurm", ["--nodes=4", "--dependency=afterok:102", kill, "--array=0-1"]),
        ("grid.slurm", ["--dependency=afterok:102,afterany:103", kill, "--array=0-1%1"]),
    ]
    assert calls(slurm, "sbatch")[3][-2:] == ["small.yaml", "probe"]


@pytest.mark.processes
def test_a_trial_asks_slurm_about_each_job_and_queues_none(slurm: Path) -> None:
    assert submit(["--test-only", DEMO]) == 0
    scripts = [*["data_prep.slurm"] * 2, "pretrain.slurm", "probe.slurm", "finetune.slurm"]
    assert [script for script, _ in submitted(slurm)] == scripts
    assert (
        all("--test-only" in words for _, words in submitted(slurm))
        and not (slurm / "jobs").exists()
    )


@pytest.mark.processes
def test_what_is_queued_is_not_queued_again(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit([DEMO]) == 0
    (slurm / "queue").write_text("101 1 PENDING\n101 0 RUNNING\n9 N/A RUNNING\n107 N/A PENDING\n")
    (slurm / "again.yaml").write_text(
        Path(DEMO).read_text()
    )  # a second plan that writes to the same places
    capsys.readouterr()
    for path in (DEMO, "again.yaml"):
        assert submit([path, "--dry-run"][::-1]) == 0
        said = capsys.readouterr()
        assert "job 101_0 (RUNNING)" in said.err and "job 107 (PENDING)" in said.err
        assert re.findall(r"cluster/(\w+)\.slurm", said.out) == ["data_prep", "pretrain", "probe"]
        assert "--dependency=afterok:101_0:101_1" in said.out
    assert len(calls(slurm, "sbatch")) == 7
    (slurm / "queue").write_text("9 N/A RUNNING\n")
    assert submit([DEMO]) == 0 and len(calls(slurm, "sbatch")) == 14


SITE = """case $* in
*partition) echo "PartitionName=gpu Default=YES"; echo "PartitionName=cpu Default=NO" ;;
*node) cat <<END
NodeName=g1 CPUEfctv=62 CPUTot=64 Gres=gpu:h100:4(S:0-1) MemSpecLimit=1000 Partitions=gpu RealMemory=401000
NodeName=g2 CPUEfctv=64 CPUTot=64 Gres=gpu:h100:8 Partitions=gpu,all RealMemory=600000
NodeName=g3 CPUEfctv=8 CPUTot=8 Gres=gpu:k80:2 Partitions=old RealMemory=8000
NodeName=n1 CPUTot=32 Gres=(null) Partitions=cpu RealMemory=64000
NodeName=s1 CPUTot=16 Gres=gpu:1 Partitions=small RealMemory=1
END
;; *) exit 1 ;; esac"""
TWO_GPUS = "--oversubscribe --gpus-per-node=2 --cpus-per-task=16 --mem=150000M"
ONE_GPU = "--oversubscribe --gpus-per-node=1 --cpus-per-task=8 --mem=75000M"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stage", "options", "site", "booked"),
    [
        ("knn: {%s}", "", {}, ONE_GPU),
        ("knn: {%s, grid: {neighbors: [1, 2]}, run_dir: 'runs/{neighbors}'}", "", {}, ONE_GPU),
        ("knn: {%s, gpus: 2}", "", {}, TWO_GPUS),
        (
            "knn: {%s, gpus: 8}",
            "",
            {},
            "--oversubscribe --gpus-per-node=8 --cpus-per-task=64 --mem=600000M",
        ),
        ("knn: {%s, gpus: 0}", "", {}, "--oversubscribe --cpus-per-task=4 --mem=25806M"),
        ("knn: {%s, nodes: 1}", "", {}, "--nodes=1"),
        ("knn: {%s}", "--exclusive", {}, "--exclusive"),
        ("knn: {%s}", "--gpus=3", {}, "--gpus=3"),
        (
            "knn: {%s}",
            "--gpus-per-node=2",
            {},
            "--oversubscribe --cpus-per-task=16 --mem=150000M --gpus-per-node=2",
        ),
        (
            "knn: {%s}",
            "-c 3 --mem-per-gpu=9G",
            {},
            "--oversubscribe --gpus-per-node=1 -c 3 --mem-per-gpu=9G",
        ),
        ("knn: {%s}", "-p cpu", {}, "--oversubscribe --cpus-per-task=4 --mem=8000M -p cpu"),
        (
            "knn: {%s}",
            "",
            {"SBATCH_PARTITION": "cpu"},
            "--oversubscribe --cpus-per-task=4 --mem=8000M",
        ),
        (
            "knn: {%s}",
            "-p old",
            {},
            "--oversubscribe --gpus-per-node=1 --cpus-per-task=4 --mem=4000M -p old",
        ),
        (
            "knn: {%s}",
            "-p small",
            {},
            "--oversubscribe --gpus-per-node=1 --cpus-per-task=16 -p small",
        ),
        ("knn: {%s}", "", {"SBATCH_GPUS_PER_NODE": "h100:8"}, ONE_GPU.replace("=1", "=h100:1")),
        (
            "knn: {%s}",
            "",
            {"SBATCH_GRES": "x:1,gpu:8"},
            ONE_GPU.replace("--gpus-per-node=", "--gres=gpu:"),
        ),
        ("knn: {%s}", "", {"SBATCH_GPUS": "16"}, ONE_GPU.replace("--gpus-per-node=", "--gpus=")),
        ("knn: {%s}", "", {"RANKS_PER_NODE": "8"}, ""),  # SLURM does not know the GPUs
        ("knn: {%s}", "-p nowhere", {}, "-p nowhere"),
        ("pretrain: {%s}", "", {}, ""),
        ("pretrain: {%s, gpus: 2}", "", {}, TWO_GPUS),
    ],
)
def test_a_member_books_a_part_of_a_node(
    slurm: Path,
    shapes: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    options: str,
    site: dict[str, str],
    booked: str,
) -> None:
    stand_in(slurm, "bin/scontrol", SITE)
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    config, more = (
        ("knn/demo", "pretrained=null")
        if stage.startswith("knn")
        else ("pretrain/demo_mlp", "schedule.warmup=0 steps, train.global_batch_size=24")
    )
    path = written(
        stage % f"config: configs/{config}.yaml, overrides: ['data.dataset={shapes}', {more}]"
    )
    assert submit([*options.split(), path]) == 0
    words = [word for word in calls(slurm, "sbatch")[0][1:] if not word.startswith("--array")]
    assert (
        words[: words.index(next(word for word in words if word.endswith(".slurm")))]
        == booked.split()
    )


@pytest.mark.processes
def test_what_is_finished_is_left_out_and_not_waited_for(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {stage.name: stage for stage in load_plan(DEMO).stages}
    for name in ("pretrain", "probe"):
        finish(stages[name].works[0])
    assert submit([DEMO]) == 0
    assert [script for script, _ in submitted(slurm)] == [
        *["data_prep.slurm"] * 4,
        "finetune.slurm",
    ]
    assert "--dependency=afterok:104" in submitted(slurm)[4][1]
    assert "pretrain: finished, not submitted" in capsys.readouterr().out
    members = load_plan(written(SMALL)).stages[0].works
    for index in (0, 3, 4):
        finish(members[index])
    assert submit(["--begin=tomorrow", "small.yaml"]) == 0
    assert submitted(slurm)[-1] == ("grid.slurm", ["--begin=tomorrow", "--array=1-2,5-7%3"])
    noted = (slurm / "jobs/106/writes").read_text().splitlines()
    assert [line.split("\t")[0] for line in noted] == ["1", "2", "5", "6", "7"]
    assert main(["list", "small.yaml"]) == 0
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines() if line.startswith("pretrain ")]
    assert [int(row[1]) for row in rows if row[2] == "finished"] == [
        0,
        3,
        4,
    ] and "3 of 8 finished" in table
    for work in members:
        finish(work)
    assert submit(["--begin=tomorrow", "small.yaml"]) == 0 and len(calls(slurm, "sbatch")) == 6


# ---- without SLURM


@pytest.mark.processes
def test_it_stops_after_a_failure_and_goes_on_from_there(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real commands build and verify the dataset."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    small = "source.num_train_per_class=2, source.num_val_per_class=1, source.num_classes=4"
    path = written(
        "prepare: {config: configs/data_prep/demo_pretrain.yaml, overrides: [out=data/small,"
        f" {small}]}}\npretrain: {{config: configs/pretrain/demo_mlp.yaml, overrides:"
        " [data.dataset=data/small, train.global_batch_size=8], seeds: [0, 1, 2], run_dir:"
        " 'runs/{seed}'}\nprobe: {config: configs/probe/demo.yaml, overrides:"
        " [pretrained=runs/1, dataset=data/small]}\n"
    )
    asked: list[list[str]] = []
    real = Here.run

    def run(here: Here, words: list[str]) -> int:
        if words[0] == "data_prep":
            return real(here, words)
        asked.append(words)
        works = [work for stage in load_plan(path).stages for work in stage.works]
        work = next(each for each in works if words[: len(each.words)] == each.words)
        if work.writes == "runs/1" and len(asked) < 4:
            return 9
        finish(work)
        return 0

    monkeypatch.setattr(Here, "run", run)
    assert main(["run", path, "--ranks", "3"]) == 1
    assert (checkout / "data/small/manifest.json").exists()
    said = capsys.readouterr()
    assert "failed with exit code 9" in said.out and "skipped: probe" in said.err
    works = load_plan(path).stages[1].works
    assert asked == [[*work.words, "--ranks", "3"] for work in works]  # the rest of the grid, too
    assert main(["run", path, "--ranks", "2"]) == 0
    assert [words[:2] for words in asked[3:]] == [["pretrain", "train"], ["finetune", "probe"]]
    assert asked[3] == [*works[1].words, "--ranks", "2"]


@pytest.mark.processes
def test_a_signal_reaches_the_command_which_may_save(checkout: Path) -> None:
    (checkout / "saves.py").write_text(
        "import pathlib, signal, time\ndef save(number, frame):\n   "
        " pathlib.Path('saved').write_text(signal.Signals(number).name)\n    raise"
        " SystemExit(0)\nsignal.signal(signal.SIGUSR2,"
        " save)\npathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )

    def send() -> None:
        while not (checkout / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    here = Here()
    threading.Thread(target=send, daemon=True).start()
    assert here.run(["saves"]) == 0 and here.received == [signal.SIGUSR2]
    assert here.run(["saves"]) == 130  # no further command starts
    assert (checkout / "saved").read_text() == "SIGUSR2"


@pytest.mark.processes
def test_the_figure_waits_for_all_others(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "figure.yaml").write_text(
        Path(DEMO).read_text() + "figure: {kind: sweep, x: task, facet: target}\n"
    )
    assert submit(["--partition=low", "figure.yaml"]) == 0
    waits = "--dependency=afterok:102:104:105:106:107"
    assert submitted(slurm)[-1] == (
        "figure.slurm",
        ["--partition=low", waits, "--kill-on-invalid-dep=yes"],
    )
    assert calls(slurm, "sbatch")[-1][-1] == "figure.yaml" and len(calls(slurm, "sbatch")) == 8
    assert "squeue -j 101,102,103,104,105,106,107,108" in capsys.readouterr().out
    assert main(["run", "--dry-run", "figure.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "$ analysis figure figure.yaml"


@pytest.mark.processes
def test_where_the_figure_is_not_taken_nothing_is_queued(slurm: Path) -> None:
    (slurm / "figure.yaml").write_text(
        Path(DEMO).read_text() + "figure: {kind: sweep, x: task, facet: target}\n"
    )
    (slurm / "refuse").write_text("8\n")
    assert submit(["figure.yaml"]) == 1
    assert calls(slurm, "scancel") == [["101", "102", "103", "104", "105", "106", "107"]]
