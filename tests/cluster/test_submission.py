"""What `cluster/submit` refuses before it asks sbatch, so that nobody waits in the queue for a typing mistake."""

import os
from pathlib import Path

import pytest

from cluster.job import main as job
from cluster.studies.sweep_file import load_sweep
from cluster.studies.work import Work
from cluster.submission import indices, main
from data_prep.settings import SettingsError
from tests.cluster.checkouts import run, stand_in
from tests.cluster.finished import finish

MLP, SWEEP = "configs/pretrain/demo_mlp.yaml", "configs/sweep/demo.yaml"
CIFAR, SHAPES = "configs/data_prep/cifar10.yaml", "configs/data_prep/demo_pretrain.yaml"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["cluster/pretrain.slurm", MLP, "train.duratoin=3"], f"{MLP}: train.duratoin: unknown key; did you mean"),
        (["cluster/pretrain.slurm", MLP, "--ranks", "2"], "--ranks: after CONFIG a job takes key=value alone"),
        (["-a", "0-1", "cluster/pretrain.slurm", MLP], "--array: pretrain.slurm is one run"),
        (["cluster/pretrain.slurm", MLP], "data/demo-pretrain is no finished dataset"),
        (["--array=9%2", "cluster/sweep.slurm", SWEEP], "has no member 9; its members are 0 to 3"),
        (["cluster/sweep.slurm", SWEEP, "train.seed=1"], "a sweep takes no words after its file"),
        (["cluster/sweep.slurm", SWEEP], "data/study-pretrain is no finished dataset"),
        (["cluster/data_prep.slurm", SHAPES, "imagesize=32"], "imagesize: unknown key"),
        (["cluster/data_prep.slurm", CIFAR], "source.path: cifar-10-python.tar.gz is not there"),
        (["--array=0,2", "cluster/data_prep.slurm", SHAPES], "give all of them, without gaps"),
    ],
)
def test_what_cannot_run_is_refused(
    checkout: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.count("\n") == 1 and said.out == ""


@pytest.mark.parametrize("words", [["cluster/pretrain.slurm", MLP], ["cluster/data_prep.slurm", CIFAR]])
def test_what_waits_for_another_job_may_lack_what_it_reads(checkout: Path, words: list[str]) -> None:
    for option in ("--dependency=afterok:7", "--hold"):
        assert main([option, *words]) == 0


def test_what_does_not_fit_the_data_is_one_line(
    checkout: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster/pretrain.slurm", MLP, f"data.dataset={shapes}", "schedule.warmup=99999 steps"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cluster/submit: ") and said.count("\n") == 1, said


def test_what_is_finished_is_not_submitted(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(Work("pretrain", MLP))
    assert main(["cluster/pretrain.slurm", MLP]) == 3
    members = load_sweep(SWEEP).members
    for member in members:
        finish(member.work)
    assert main(["cluster/sweep.slurm", SWEEP]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "finished before, not submitted" in said.err and f"all {len(members)} members" in said.err


SQUEUE = """#!/bin/sh
[ -z "$SQUEUE_STATES" ] && [ "$*" = "--noheader --me --array --format=%F %K %T %S" ] && cat queue
"""


@pytest.fixture
def queue(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the checkout's squeue says."""
    (checkout / "bin").mkdir()
    (checkout / "bin/squeue").write_text(SQUEUE)
    (checkout / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{checkout}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")  # what the user likes to see
    return checkout / "queue"


def note(job: str, lines: str) -> None:
    Path(f"jobs/{job}").mkdir(parents=True)
    Path(f"jobs/{job}/writes").write_text(lines)


def test_only_tasks_that_are_in_the_queue_keep_a_member_from_being_submitted(
    queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--begin=now+1hour", "cluster/sweep.slurm", SWEEP]
    queue.write_text("")
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    noted = "".join(line.removeprefix("writes\t") + "\n" for line in said if line.startswith("writes"))
    places = [member.work.writes for member in load_sweep(SWEEP).members]
    assert noted.splitlines() == [f"{index}\t{Path(place).resolve()}" for index, place in enumerate(places)]
    note("50", noted)
    since = "2026-01-01T10:00:00"
    queue.write_text(f"50 2 RUNNING {since}\n50 3 PENDING N/A\n50 1 COMPLETING {since}\n60 0 RUNNING {since}\n")
    assert main(words) == 0
    found = capsys.readouterr()
    assert "array\t0-1%2" in found.out.splitlines() and "members 2-3 are in the queue already, of job 50" in found.err
    assert [line.split("\t")[1] for line in found.out.splitlines() if line.startswith("writes")] == ["0", "1"]
    assert main(["--array=1-2", *words]) == 2
    assert (
        "--array=1-2: members 2 are in the queue already, of job 50; without them: --array=1%2"
        in capsys.readouterr().err
    )
    assert main(["--arr=0,1", *words]) == 0
    assert "array" not in capsys.readouterr().out
    assert main(["--depend=afterany:50", "--array=1-2", *words]) == 0
    queue.write_text("".join(f"50 {index} PENDING N/A\n" for index in range(len(places))))
    assert main(words) == 3


def test_a_dataset_that_is_being_built_is_not_built_twice(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue.write_text("")
    for words in (["cluster/data_prep.slurm", SHAPES], ["cluster/data_prep.slurm", SHAPES, "--source", "synthetic"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"writes\t-\t{Path('data/demo-pretrain').resolve()}\n"
    for number in ("8", "9"):  # the parts and their merge
        note(number, f"-\t{Path('data/demo-pretrain').resolve()}\n")
    queue.write_text("9 0 PENDING N/A\n8 1 RUNNING 2026-01-01T10:00:00\n")
    assert main(["cluster/data_prep.slurm", SHAPES]) == 2
    said = capsys.readouterr().err
    assert "data/demo-pretrain: job 8_1 (RUNNING) writes it already" in said and "--dependency=afterany:8:9" in said


@pytest.mark.parametrize(
    ("others", "answer"),
    [
        ("", "unfinished"),
        ("4 N/A PENDING N/A", "unfinished"),
        ("4 N/A RUNNING 2026-01-01T09:00:00", "taken by job 4 (RUNNING)"),
        ("4 N/A RUNNING 2026-01-01T11:00:00", "unfinished"),
        ("4 N/A RUNNING 2026-01-01T10:00:00", "taken by job 4 (RUNNING)"),
        ("6 N/A RUNNING 2026-01-01T10:00:00", "unfinished"),
    ],
)
def test_of_two_jobs_for_one_run_the_one_that_was_started_first_has_it(
    queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], others: str, answer: str
) -> None:
    note(others[:1] or "4", f"-\t{Path('runs/mine').resolve()}\n")
    queue.write_text(f"5 N/A RUNNING 2026-01-01T10:00:00\n{others}\n")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for _ in range(2):  # as at a second start
        assert job(["pretrain", "train", MLP, "run_dir=runs/mine", "--starting"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == answer
    assert Path("jobs/5/writes").read_text() == f"-\t{Path('runs/mine').resolve()}\n"


def test_indices_of_an_array() -> None:
    assert indices("3") == [3] and indices("0-3,7,8-12:2%4") == [0, 1, 2, 3, 7, 8, 10, 12]
    for wrong in ("", "x", "1-", "-1", "1:0"):
        with pytest.raises(SettingsError, match="will not do"):
            indices(wrong)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--parsable", "cluster/pretrain.slurm", MLP, "train.duratoin=3"], "train.duratoin: unknown key"),
        (["cluster/pretrain.slurm", "--nodes", "2", MLP], "--nodes: sbatch's options stand before the script"),
        (["mine/pretrain.slurm", MLP], "mine/pretrain.slurm: put it into cluster/"),
        (["--wait", "cluster/pretrain.slurm", MLP], "--dependency=afterok:JOB"),
    ],
)
def test_submit_asks_before_sbatch(root: Path, words: list[str], complaint: str) -> None:
    stand_in(root, "sbatch", "touch asked")
    (root / "mine").mkdir()
    (root / "mine/pretrain.slurm").touch()
    done = run(root, "cluster/submit", *words)
    assert (done.returncode, done.stdout) == (2, "") and complaint in done.stderr
    assert not (root / "asked").exists() and not (root / "jobs").exists()


@pytest.mark.parametrize("where", ["configs", "given/home/a user/configs"])
def test_a_job_names_the_users_own_file(checkout: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept = checkout / "jobs/snapshots/0123abc" / where / "mine.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("modle: {}\n")
    assert job(["pretrain", "train", str(kept)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pretrain: {where.removeprefix('given')}/mine.yaml: ") and "snapshots" not in said


def test_a_job_says_what_it_reads_and_what_another_file_system_lacks(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pretrain", "train", MLP, "run_dir=runs/mine", "data.dataset={}", "--starting"]
    for dataset, state in (("/proc/nowhere/set", "blind: /proc/nowhere/set/manifest.json"), ("data/set", "unfinished")):
        assert job([word.format(dataset) for word in words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (lines[0], lines[3:]) == (state, [f"{dataset}/manifest.json"])
    assert job(words[:-2]) == 0  # what is asked at the end
    assert capsys.readouterr().out.startswith("unfinished\n")
