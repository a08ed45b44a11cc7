"""Studies: what waits for what, what is queued and with which words, what becomes of it when a job is not taken;
and the same without SLURM.
"""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from cluster.studies.local import Here
from cluster.studies.study_file import load_study
from cluster.studies.work import COMMANDS
from cluster.studies.writers import lines_of
from cluster.study import main
from tests.cluster.finished import finish
from tests.ranks import REPOSITORY

DEMO = "configs/study/demo.yaml"
GRAPHS: dict[str, dict[str, tuple[str, ...]]] = {
    "demo.yaml": {
        "prepare study-pretrain": (),
        "prepare study-transfer": (),
        "pretrain": ("prepare study-pretrain",),
        "probe": ("prepare study-transfer", "pretrain"),
        "finetune": ("prepare study-transfer", "pretrain"),
    },
    "imagenet21k_b12_wi1024.yaml": {
        "prepare imagenet21k-64": (),
        "prepare imagenet1k-64": (),
        "prepare cifar10": (),
        "prepare cifar100": (),
        "prepare stl10": (),
        "prepare tinyimagenet": (),
        "pretrain": ("prepare imagenet21k-64",),
        "probe cifar10-b12-wi1024-probe": ("prepare cifar10", "pretrain"),
        "probe cifar100-b12-wi1024-probe": ("prepare cifar100", "pretrain"),
        "finetune cifar10-b12-wi1024": ("prepare cifar10", "pretrain"),
        "finetune cifar100-b12-wi1024": ("prepare cifar100", "pretrain"),
        "finetune stl10-b12-wi1024": ("prepare stl10", "pretrain"),
        "finetune tinyimagenet-b12-wi1024": ("prepare tinyimagenet", "pretrain"),
        "finetune imagenet1k-b12-wi1024": ("prepare imagenet1k-64", "pretrain"),
    },
}

STAND_IN = """#!/bin/sh
# Notes its words; answers as SLURM does, by the files queue, waits and refuse.
name=$(basename "$0")
printf '%s\\n' "$name $*" >>calls
case $name in
submit)
    count=$(grep -c ^submit calls)
    [ "$count" != "$(cat refuse 2>/dev/null)" ] || { echo "sbatch: error: no such partition" >&2; exit 1; }
    [ ! -e parts ] || { mkdir -p "jobs/$((100 + count))" && cp parts "jobs/$((100 + count))/parts"; }
    echo "$((100 + count))" ;;
squeue) cat queue 2>/dev/null; true ;;
scontrol) for job; do :; done
    case $job in
    77) echo "JobId=78 ArrayTaskId=1 StdOut=/x/stage-77_1.log"; echo "JobId=77 ArrayTaskId=0 StdOut=/x/stage-77_4294967294.log" ;;
    101) echo "JobId=101 ArrayTaskId=0 StdOut=/x/stage-101_4294967294.log" ;;
    *) echo "JobId=$job StdOut=/somewhere/stage-$job.log Partition=x" ;;
    esac ;;
esac
"""


@pytest.fixture
def slurm(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose `cluster/submit`, and whose SLURM, are stand-ins that keep what they are asked in `calls`."""
    (checkout / "cluster").mkdir()
    (checkout / "bin").mkdir()
    stand_in = checkout / "bin/stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    for path in ("cluster/submit", "bin/squeue", "bin/scancel", "bin/scontrol"):
        (checkout / path).symlink_to(stand_in)
    for command in COMMANDS.values():
        (checkout / command.script).touch()
    monkeypatch.setenv("PATH", f"{checkout}/bin:{os.environ['PATH']}")
    return checkout


def calls(checkout: Path, name: str) -> list[list[str]]:
    path = checkout / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == name]


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "configs/study").glob("*.yaml")))
def test_a_shipped_study_resolves_to_its_graph(checkout: Path, name: str) -> None:
    lines = Path(f"configs/study/{name}").read_text().splitlines()
    assert len(lines) <= 40
    for word in ("command", "hardware", "result"):
        assert sum(line.startswith(f"# {word} ") for line in lines) == 1, word
    study = load_study(f"configs/study/{name}")
    assert {stage.name: stage.after for stage in study.stages} == GRAPHS[name]
    places = [stage.work.writes for stage in study.stages]
    assert len(set(places)) == len(places) and not any("demo" in place for place in places)


def test_each_job_waits_for_what_it_reads(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "parts").write_text("77\n")  # the parts of a dataset, whose merge has the number
    assert main([DEMO, "--", "--partition=low"]) == 0
    common, parts = ["--parsable", "--partition=low"], ["--array=0-1", "--cpus-per-task=1", "--mem=1G"]
    waiting = [*common, "--dependency=afterok:102:103", "--kill-on-invalid-dep=yes"]
    found = calls(slurm, "submit")
    assert [words[: words.index(script)] for words, script in zip(found, _scripts(found), strict=True)] == [
        ["--parsable", *parts, "--partition=low"],
        ["--parsable", *parts, "--partition=low"],
        [*common, "--dependency=afterok:101", "--kill-on-invalid-dep=yes"],
        waiting,
        waiting,
    ]
    assert _scripts(found) == [
        f"cluster/{name}.slurm" for name in ("data_prep", "data_prep", "pretrain", "probe", "finetune")
    ]
    assert found[3][-4:] == [
        "configs/probe/demo.yaml", "run_dir=runs/study/probe", "pretrained=runs/study/pretrain", "dataset=data/study-transfer",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert (
        "squeue -j 77,101,77,102,103,104,105" in said
        and "stage-77_*.log, stage-101_0.log" in said
        and "stage-103.log" in said
    )


def _scripts(commands: list[list[str]]) -> list[str]:
    return [next(word for word in words if word.endswith(".slurm")) for words in commands]


def test_nodes_and_options_are_of_their_own_stage(slurm: Path) -> None:
    Path("archives").mkdir()
    for stage in load_study("configs/study/imagenet21k_b12_wi1024.yaml").stages[:6]:
        (slurm / stage.work.settings.source.path).touch()  # type: ignore[attr-defined]
    assert main(["configs/study/imagenet21k_b12_wi1024.yaml"]) == 0
    found = calls(slurm, "submit")
    assert found[0][:2] == ["--parsable", "--array=0-31"]
    assert found[6][:4] == ["--parsable", "--nodes=4", "--dependency=afterok:101", "--kill-on-invalid-dep=yes"]
    assert [words[1] for words in found[7:]] == [
        f"--dependency=afterok:{job}:107" for job in (103, 104, 103, 104, 105, 106, 102)
    ]


def test_when_one_is_not_taken_the_others_are_cancelled(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "refuse").write_text("4\n")
    (slurm / "parts").write_text("77\n")  # the parts of a dataset, whose merge has the number
    assert main([DEMO]) == 1
    assert calls(slurm, "scancel") == [["77", "101", "77", "102", "103"]]
    assert len(calls(slurm, "submit")) == 4
    said = capsys.readouterr().err
    assert "probe was not taken" in said and "no such partition" in said and "are cancelled: 77, 101" in said


def test_what_is_queued_is_not_queued_again(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([DEMO]) == 0
    for job, stage in (("101", 0), ("105", 4)):  # as cluster/submit notes it
        (slurm / "jobs" / job).mkdir(parents=True)
        [noted] = lines_of({load_study(DEMO).stages[stage].work.writes: "-"})
        (slurm / "jobs" / job / "writes").write_text(f"{noted}\n")
    (slurm / "queue").write_text(
        "101 1 PENDING N/A\n101 0 RUNNING 2026-01-01T10:00:00\n9 N/A RUNNING 2026-01-01T10:00:00\n105 N/A PENDING N/A\n"
    )
    Path("again.yaml").write_text(Path(DEMO).read_text())  # under another name it writes the same places
    capsys.readouterr()
    for path in (DEMO, "again.yaml"):
        assert main([path]) == 2
        said = capsys.readouterr().err
        assert "prepare study-pretrain is in the queue already: job 101_0 (RUNNING) writes data/study-pretrain" in said
        assert "squeue -j 101,105" in said and "scancel 101 105" in said
    assert len(calls(slurm, "submit")) == 5
    (slurm / "queue").write_text("9 N/A RUNNING 2026-01-01T10:00:00\n")
    assert main([DEMO]) == 0
    assert len(calls(slurm, "submit")) == 10


def test_what_is_finished_is_left_out_and_not_waited_for(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {stage.name: stage for stage in load_study(DEMO).stages}
    finish(stages["pretrain"].work)
    finish(stages["probe"].work)
    assert main([DEMO]) == 0
    found = calls(slurm, "submit")
    assert _scripts(found) == [f"cluster/{name}.slurm" for name in ("data_prep", "data_prep", "finetune")]
    assert "--dependency=afterok:102" in found[2]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("pr")].count(
        "finished"
    ) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("probe: configs/probe/demo.yaml", "probe: data/demo-transfer is no finished dataset, and nothing under `prepare`"),
        ("probe: configs/probe/demo.yaml", "probe: runs/demo/pretrain-mlp is not there, and nothing under `pretrain`"),
        ("prepare: configs/data_prep/cifar10.yaml", "prepare: source.path cifar-10-python.tar.gz is not there"),
        ("pretrain: [configs/pretrain/demo_mlp.yaml, configs/pretrain/demo_mlp.yaml]", "writes runs/demo/pretrain-mlp, as"),
        ("pretrain: {config: configs/pretrain/demo_mlp.yaml, nodes: 0}", "nodes: 0 will not do"),
        ("pretrain: {config: configs/pretrain/demo_mlp.yaml, overrides: [a=1]}", "configs/pretrain/demo_mlp.yaml: a: unknown"),
        ("pretrain: {confg: a}", "confg: unknown key; did you mean 'config'?"),
        ("pretrain: [[a]]", "['a'] will not do; give the path of a config"),
        ("{}", "nothing to do"),
    ],
)  # fmt: skip
def test_mistakes_are_named_and_nothing_is_queued(
    slurm: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.yaml").write_text(text)
    assert main(["wrong.yaml"]) == main(["wrong.yaml", "--dry-run"]) == main(["wrong.yaml", "--local"]) == 2
    assert complaint in capsys.readouterr().err
    assert not calls(slurm, "submit") and not (slurm / "jobs").exists()


def test_without_slurm_it_stops_at_a_failure_and_goes_on_from_there(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataset is built and verified by the real commands; 3 ranks cannot share a batch of 256, which the real one refuses."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    small = "source.num_train_per_class=2, source.num_val_per_class=1, source.num_classes=4"
    Path("small.yaml").write_text(
        f"prepare: {{config: configs/data_prep/demo_pretrain.yaml, overrides: [out=data/small, {small}]}}\n"
        "pretrain: {config: configs/pretrain/demo_mixer.yaml, overrides: [data.dataset=data/small, train.duration=50 steps]}\n"
    )
    assert main(["small.yaml", "--local", "--ranks", "3"]) == 1
    assert (checkout / "data/small/manifest.json").exists() and not list((checkout / "jobs/unverified").iterdir())
    assert "pretrain failed with exit code 2; left out: nothing" in capsys.readouterr().err
    asked: list[list[str]] = []

    def run(here: Here, words: list[str]) -> int:
        asked.append(words)
        finish(load_study("small.yaml").stages[1].work)
        return 0

    monkeypatch.setattr(Here, "run", run)
    assert main(["small.yaml", "--local", "--ranks", "2"]) == 0
    assert [words[:2] for words in asked] == [["pretrain", "train"]] and asked[0][-2:] == ["--ranks", "2"]


def test_a_dataset_that_was_not_verified_is_not_finished(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(here: Here, words: list[str]) -> int:
        asked.append(words[1])
        if words[1] == "build":
            done = subprocess.run(["cp", "-r", str(shapes), "data/demo-pretrain"], check=False)
            return done.returncode
        return 1 if len(asked) == 2 else 0

    shapes = checkout / "made"
    shapes.mkdir()
    monkeypatch.setattr(Here, "run", run)
    monkeypatch.setattr("cluster.studies.work._is_built", lambda settings: Path(settings.out).exists())
    Path("data").mkdir()
    Path("one.yaml").write_text("prepare: configs/data_prep/demo_pretrain.yaml")
    assert [main(["one.yaml", "--local"]) for _ in range(3)] == [1, 0, 0]
    assert asked == ["build", "verify", "build", "verify"]


def test_a_signal_reaches_the_command_which_may_save(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "saves.py").write_text(
        "import pathlib, signal, time\n"
        "def save(number, frame):\n    pathlib.Path('saved').write_text(signal.Signals(number).name)\n    raise SystemExit(0)\n"
        "signal.signal(signal.SIGUSR2, save)\npathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )

    def send() -> None:
        while not (checkout / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.getsignal(signal.SIGUSR2)
    with Here().listening() as here:
        threading.Thread(target=send, daemon=True).start()
        assert here.run(["saves"]) == 0 and here.stopped
        assert here.run(["saves"]) == 130  # nothing more is started
    assert (checkout / "saved").read_text() == "SIGUSR2" and signal.getsignal(signal.SIGUSR2) == before


def test_study_sh_says_what_is_missing(checkout: Path) -> None:
    done = subprocess.run([REPOSITORY / "cluster/study.sh", DEMO], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no .venv/bin/python" in done.stderr and "sh install.sh" in done.stderr
