"""Tracking against a real SQLite store: nothing lost, nothing doubled, a truthful status, and training never waits."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from pretrain.tracker import RunIdentity, Tracker
from pretrain.tracking import sync
from tests.ranks import REPOSITORY


def identity(run_dir: Path, *, uri: str | None = None, parent_key: str | None = None) -> RunIdentity:
    return RunIdentity.of(run_dir, experiment="tests", uri=uri, parent_key=parent_key)


def tracker(run_dir: Path, *, close_timeout_s: float = 60) -> Tracker:
    return Tracker(run_dir, params={"optimizer.lr": 0.1}, tags={"task": "pretrain"}, close_timeout_s=close_timeout_s)


def runs_in(store: Path) -> list[Any]:
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def points(store: Path, run: Any, metric: str) -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric))


def test_a_run_with_a_break_is_one_run_with_every_point_once(tmp_path: Path) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "mlflow.db"
    identity(run_dir)
    first = tracker(run_dir)
    for step in range(1, 6):
        first.metrics({"loss": 1 / step}, step=step)
    first.close("KILLED")
    assert [run.info.status for run in runs_in(store)] == ["KILLED"]
    second = tracker(run_dir)
    for step in range(4, 9):  # resumed from the checkpoint at step 3: 4 and 5 are walked again
        second.metrics({"loss": 1 / step}, step=step)
    note = tmp_path / "note.txt"
    note.write_text("hello")
    second.artifact(note, folder="notes")
    second.close("FINISHED")
    (run,) = runs_in(store)
    assert run.info.status == "FINISHED" and run.data.params == {"optimizer.lr": "0.1"}
    assert points(store, run, "loss") == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
    artifacts = MlflowClient(tracking_uri=f"sqlite:///{store}").list_artifacts(run.info.run_id, "notes")
    assert [artifact.path for artifact in artifacts] == ["notes/note.txt"]


def test_a_child_run_hangs_under_its_parent(tmp_path: Path) -> None:
    parent = identity(tmp_path / "parent")
    tracker(tmp_path / "parent").close("FINISHED")
    identity(tmp_path / "child", parent_key=parent.run_key)
    tracker(tmp_path / "child").close("FINISHED")
    runs = {run.info.run_name: run for run in runs_in(tmp_path / "mlflow.db")}
    assert runs["child"].data.tags["mlflow.parentRunId"] == runs["parent"].info.run_id


def test_a_dead_store_loses_nothing_and_a_later_sync_delivers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store's directory is a file while the run lasts, so that every delivery fails."""
    run_dir, blocked = tmp_path / "run", tmp_path / "store"
    blocked.write_text("in the way")
    identity(run_dir, uri=f"sqlite:///{blocked}/mlflow.db")
    dead = tracker(run_dir, close_timeout_s=3)
    dead.metrics({"loss": 0.5}, step=1)
    dead.close("FINISHED")
    assert "pretrain sync" in capsys.readouterr().err
    blocked.unlink()
    blocked.mkdir()
    assert sync(run_dir) > 0
    assert sync(run_dir) == 0
    (run,) = runs_in(blocked / "mlflow.db")
    assert run.info.status == "FINISHED" and points(blocked / "mlflow.db", run, "loss") == [(1, 0.5)]


def test_a_killed_trainer_is_marked_failed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    identity(run_dir)
    program = (
        "import sys, time; from pathlib import Path; from pretrain.tracker import Tracker\n"
        "t = Tracker(Path(sys.argv[1]), params={}, tags={})\n"
        "t.metrics({'loss': 1.0}, step=1); print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(run_dir)], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        state = run_dir / "tracking" / "delivered.json"
        if state.exists() and runs_in(tmp_path / "mlflow.db")[0].info.status != "RUNNING":
            break
        time.sleep(0.5)
    (run,) = runs_in(tmp_path / "mlflow.db")
    assert run.info.status == "FAILED" and points(tmp_path / "mlflow.db", run, "loss") == [(1, 1.0)]


def test_a_line_cut_by_a_kill_is_mended(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    identity(run_dir)
    first = tracker(run_dir)
    first.metrics({"loss": 1.0}, step=1)
    first.close("KILLED")
    journal = run_dir / "tracking" / "journal.jsonl"
    with open(journal, "a") as file:
        file.write('{"event": "metr')
    second = tracker(run_dir)
    second.metrics({"loss": 0.5}, step=2)
    second.close("FINISHED")
    assert [json.loads(line)["event"] for line in journal.read_text().splitlines()].count("metrics") == 2
    (run,) = runs_in(tmp_path / "mlflow.db")
    assert points(tmp_path / "mlflow.db", run, "loss") == [(1, 1.0), (2, 0.5)]


def test_other_ranks_and_untracked_runs_write_nothing(tmp_path: Path) -> None:
    silent = Tracker(None, params={}, tags={})
    silent.metrics({"loss": 1.0}, step=1)
    silent.close("FINISHED")
    assert list(tmp_path.iterdir()) == []
