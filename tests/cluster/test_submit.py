"""Errors that `cluster/submit` reports before it calls sbatch, so that nobody queues for a typing
mistake."""

import json
import re
from pathlib import Path

import pytest

from cluster.plan_file import load_plan
from cluster.queue_jobs import main
from cluster.resolve import main as ask
from cluster.slurm import lines_of, new_job
from cluster.submission import read_submission
from cluster.submit import NothingLeft, Order, RefusedError, examine, indices, submit
from cluster.work import Work
from tests.cluster.checkouts import finish, has_error
from tests.errors import fails

MLP, GRID = "configs/pretrain/demo_mlp.yaml", "configs/plan/demo_grid.yaml"
CIFAR, SHAPES = "configs/data_prep/cifar10.yaml", "configs/data_prep/demo_pretrain.yaml"


KNN = "configs/knn/demo.yaml"
REFUSED = [
    (f"pretrain.slurm {MLP} train.duratoin=3", f"{MLP}: train.duratoin", "unknown-key"),
    (f"pretrain.slurm {MLP} --ranks 2", f"{MLP}: --ranks", "bad-syntax"),
    (f"-a 0-1 pretrain.slurm {MLP}", "--array", "conflict"),
    (f"pretrain.slurm {MLP}", "data/demo-pretrain", "unfinished"),
    (f"pretrain.slurm {MLP} data.dataset=SHAPES data.eval_split=nope", "data.eval_split", ""),
    (f"--array=9%2 grid.slurm {GRID} pretrain", "--array", "unknown-name"),
    (f"grid.slurm {GRID} pretrain train.seed=1", "cluster/grid.slurm", "bad-syntax"),
    (f"grid.slurm {GRID} probe", GRID, "unknown-name"),
    (f"pretrain.slurm --nodes 2 {MLP}", "--nodes", "bad-syntax"),
    (f"mine/pretrain.slurm {MLP}", "mine/pretrain.slurm", "missing-path"),
    (f"pretrian.slurm {MLP}", "cluster/pretrian.slurm", "missing-path"),
    (f"data_prep.slurm {CIFAR}", "source.path", "missing-path"),
    (f"knn.slurm {KNN} data.dataset=SHAPES", "pretrained", "missing-path"),
    (f"knn.slurm {KNN} data.dataset=SHAPES pretrained=null neighbors=9999", "neighbors", "bad-value"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "field", "code"), REFUSED)
def test_what_cannot_run_is_refused(
    checkout: Path,
    shapes: Path,
    words: str,
    field: str,
    code: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine").mkdir()
    Path("mine/pretrain.slurm").touch()
    parts = [
        f"cluster/{word}" if re.fullmatch(r"\w+\.slurm", word) else word for word in words.split()
    ]
    assert main([part.replace("SHAPES", str(shapes)) for part in parts]) == 2
    said = capsys.readouterr()
    assert has_error(said.err, field, code), said.err
    assert said.err.startswith("cluster/submit: ") and said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "site", "warns"),
    [
        (["-N2"], {"SBATCH_GPUS_PER_NODE": "2"}, "2 nodes would take"),
        (
            ["--nodes=2", "--gres=gpu:h100:2"],
            {"GPU_TFLOPS": "100"},
            "at 100 TFLOP/s a GPU and 200 Gbit/s a node); use --nodes=1",
        ),
        (["--nodes=2"], {}, None),  # unknown number of GPUs
        ([], {"SBATCH_GPUS_PER_NODE": "2"}, None),
        (
            ["--nodes=2"],
            {"SBATCH_GPUS_PER_NODE": "2", "GPU_TFLOPS": "1", "NODE_GBIT": "999999"},
            None,
        ),
    ],
)
def test_who_asks_for_nodes_that_make_it_slower_is_warned(
    checkout: Path,
    shapes: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    site: dict[str, str],
    warns: str | None,
) -> None:
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    data = (f"data.dataset={shapes}", "schedule.warmup=0 steps", "train.global_batch_size=24")
    order(*words, "cluster/pretrain.slurm", MLP, *data)
    said = capsys.readouterr().err
    assert (
        (said.startswith("cluster/submit: warning: ") and said.count("\n") == 1 and warns in said)
        if warns
        else said == ""
    )
    plan = Path("nodes.yaml")
    plan.write_text(
        f"pretrain: {{config: {MLP}, overrides: {list(data)}, seeds: [0, 1], run_dir:"
        " 'runs/{seed}'}"
    )
    order(*words, "cluster/grid.slurm", str(plan), "pretrain")
    assert capsys.readouterr().err == said, "of a grid one line, too"


def test_speeds_of_a_site_are_numbers(
    checkout: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_GBIT", "fast")
    with fails("bad-value", "NODE_GBIT"):
        order(
            "-N2",
            "--gpus-per-node=2",
            "cluster/pretrain.slurm",
            MLP,
            f"data.dataset={shapes}",
            "train.global_batch_size=24",
        )


def order(*words: str) -> Order:
    return examine(read_submission(words))


def test_what_waits_for_another_job_may_lack_what_it_reads(checkout: Path) -> None:
    for option in ("--dependency=afterok:7", "--hold"):
        for words in (["cluster/pretrain.slurm", MLP], ["cluster/data_prep.slurm", CIFAR]):
            assert order(option, *words)


def test_what_is_finished_is_not_submitted(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(Work("pretrain", MLP))
    members = load_plan(GRID).stages[0].members
    for member in members:
        finish(member.work)
    for words in (["cluster/pretrain.slurm", MLP], ["cluster/grid.slurm", GRID, "pretrain"]):
        assert main(words) == 0
        said = capsys.readouterr()
        assert said.out == "" and "nothing is submitted" in said.err


def note(job: str, lines: str) -> None:
    Path(f"jobs/{job}").mkdir(parents=True)
    Path(f"jobs/{job}/writes").write_text(lines)


@pytest.mark.processes
def test_only_tasks_that_are_in_the_queue_keep_a_member_from_being_submitted(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--begin=now+1hour", "cluster/grid.slurm", GRID, "pretrain"]
    places = [work.writes for work in load_plan(GRID).stages[0].works]
    first = order(*words)
    assert (
        first.writes == {place: str(index) for index, place in enumerate(places)}
        and GRID not in first.reads
    )
    note("50", lines_of(first.writes))
    (slurm / "queue").write_text("50 2 RUNNING\n50 3 PENDING\n50 1 COMPLETING\n60 0 RUNNING\n")
    second = order(*words)
    assert [*second.writes.values()] == ["0", "1"]
    assert "members 2-3" in capsys.readouterr().err
    assert [*order("--array=1-2", *words).writes.values()] == ["1"]
    for given, chosen in ((["--arr=0,1"], "01"), (["--depend=afterany:50", "--array=1-2"], "12")):
        assert [*order(*given, *words).writes.values()] == [*chosen]
    (slurm / "queue").write_text("".join(f"50 {index} PENDING\n" for index in range(len(places))))
    with pytest.raises(NothingLeft):
        order(*words)


@pytest.mark.processes
def test_a_dataset_that_is_being_built_is_not_built_twice(slurm: Path) -> None:
    for words in (
        ["cluster/data_prep.slurm", SHAPES],
        ["cluster/data_prep.slurm", SHAPES, "--source", "synthetic"],
    ):
        assert order(*words).writes == {"data/demo-pretrain": "-"}
    for number in ("8", "9"):  # the array tasks and their merge
        note(number, f"-\t{Path('data/demo-pretrain').resolve()}\n")
    (slurm / "queue").write_text("9 0 PENDING\n8 1 RUNNING\n")
    with fails("busy", "data/demo-pretrain") as error:
        order("cluster/data_prep.slurm", SHAPES)
    assert "job 8_1 (RUNNING)" in str(error.value) and "afterany:8:9" in str(error.value)


@pytest.mark.processes
def test_a_run_that_is_in_the_queue_is_not_submitted_again(slurm: Path) -> None:
    """The run is the same if its path is written in another way."""
    words = ("--hold", "cluster/pretrain.slurm", MLP)
    note("7", f"-\t{Path('runs/twice').resolve()}\n")
    (slurm / "queue").write_text("7 N/A PENDING\n")
    with fails("busy", "runs/../runs/twice") as error:
        order(*words, "run_dir=runs/../runs/twice")
    assert "job 7 (PENDING)" in str(error.value)
    assert "--dependency=afterany:7" in str(error.value)
    assert order("--dependency=afterany:7", *words, "run_dir=runs/twice")
    assert order(*words, "run_dir=runs/other")


@pytest.mark.processes
def test_a_refused_merge_takes_its_parts_back(slurm: Path) -> None:
    """Otherwise the next submission would find the dataset already queued."""
    (slurm / "refuse").write_text("2\n")
    jobs = ["90"]
    with pytest.raises(RefusedError):
        submit(read_submission(["cluster/data_prep.slurm", SHAPES]), jobs)
    assert jobs == ["90"] and "scancel 101\n" in (slurm / "calls").read_text()
    assert not Path("jobs/101/writes").exists()


def test_indices_of_an_array() -> None:
    assert indices("3") == [3] and indices("0-3,7,8-12:2%4") == [0, 1, 2, 3, 7, 8, 10, 12]
    for wrong in ("", "x", "1-", "-1", "1:0"):
        with fails("bad-syntax", "--array"):
            indices(wrong)


def test_a_job_takes_nothing_along_of_the_one_that_submits_it() -> None:
    here = {
        "PYTHONPATH": "x",
        "PYTHONSAFEPATH": "1",
        "JOB_SETTINGS": "PREFLIGHT STAGE_DATA",
        "JOB_SETTINGS_GIVEN": " STAGE_DATA",
    }
    here |= {"PREFLIGHT": "0", "SLURM_JOB_ID": "7"}
    taken = {"STAGE_DATA": "1", "SLURM_CONF": "c", "HOME": "h"}
    assert new_job(here | taken) == taken


def test_a_job_reads_what_was_kept_and_names_the_users_own_file(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is true for the configs of a plan's members, and of the runs that they read."""
    snapshot, outside, mlp = (
        checkout / "jobs/snapshots/0123abc",
        checkout.parent / "outside.yaml",
        Path(MLP).read_text(),
    )
    plan = """
        pretrain: [mine.yaml, {config: mine.yaml, seeds: [3], run_dir: 'runs/{seed}'}]
        probe: {config: configs/probe/demo.yaml, for_each: pretrain, run_dir: 'runs/of-{pretrained}'}
    """
    for place, text in (
        (snapshot / "plan.yaml", plan), (checkout / "plan.yaml", "{}"),
        (snapshot / "mine.yaml", mlp.replace("runs/demo", "runs/kept")), (checkout / "mine.yaml", mlp),
        (Path(f"{snapshot}/given{outside}"), "modle: {}"), (outside, ""), (snapshot.parent / "outside.yaml", ""),
        (checkout / "new.yaml", ""),
    ):  # fmt: skip
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (snapshot / "configs").symlink_to(checkout / "configs")
    for stage, found in (
        ("pretrain/2", f"{snapshot}/mine.yaml"),
        ("probe", "pretrained=runs/kept/pretrain-mlp"),
    ):
        assert ask([f"--kept={snapshot}", "grid", "plan.yaml", stage, "0"]) == 0
        assert found in json.loads(capsys.readouterr().out)["words"]
    for config, field in (("../outside.yaml", f"{outside}: modle"), ("new.yaml", "new.yaml")):
        assert ask([f"--kept={snapshot}", "pretrain", "train", config]) == 2
        assert f"{field}: " in (complaint := capsys.readouterr().err)
        assert "snapshots" not in complaint


def test_a_job_is_told_what_it_reads_and_what_another_file_system_lacks(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pretrain", "train", MLP, "run_dir=runs/mine", "data.dataset={}"]
    cases = (
        ("/proc/nowhere/set", "blind", "/proc/nowhere/set/manifest.json"),
        ("data/set", "unfinished", ""),
    )
    for dataset, state, about in cases:
        given = [word.format(dataset) for word in words]
        assert ask(["--starting", *given]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["state"], found["about"], found["reads"]) == (
            state,
            about,
            [f"{dataset}/manifest.json"],
        )
        assert (found["words"], found["writes"], found["can_stage"]) == (given, "runs/mine", True)
        assert (found["result"], found["needs_one_rank"]) == ("result.json", False)
    assert (
        ask(
            [
                "--starting",
                "finetune",
                "export",
                "configs/export/demo.yaml",
                "out=exports/mine",
                "pretrained=/proc/nowhere",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["writes"], found["result"]) == (
        "blind",
        "exports/mine",
        "export.json",
    )
    assert found["needs_one_rank"] and not found["can_stage"]
    assert ask(words[:4]) == 0  # the question of a job at its end
    assert json.loads(capsys.readouterr().out)["state"] == "unfinished"


def test_a_task_of_a_grid_is_told_its_member_and_other_numbers_are_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    works = load_plan(GRID).stages[0].works
    assert ask(["grid", GRID, "pretrain", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["words"] == works[1].words
    assert ask(["grid", GRID, "pretrain", "4"]) == 2
    assert capsys.readouterr().err.startswith(f"grid: {GRID}: ")
