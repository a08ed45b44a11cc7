"""Tracking in a real SQLite database: nothing is lost or duplicated, the status is correct, and
training never waits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from PIL import Image

from data_prep.errors import UserError
from data_prep.publish import LOCK
from pretrain.config import TrackingSettings
from pretrain.ranks.preemption import SIGNALS
from pretrain.ranks.starts import hold_run
from pretrain.tracking.delivery import deliver_while_training, sync
from pretrain.tracking.tracker import Journal, RunIdentity, Tracker
from tests.errors import fails
from tests.moments import wait_until

MANY_PARAMS = {f"augment.setting_{number}": number for number in range(120)}
"""More parameters than MLflow accepts at once."""
DATASET = {
    "name": "animals train",
    "digest": "0123456789abcdef0123456789abcdef",
    "source_type": "local",
    "source": "{}",
    "schema": "{}",
    "profile": "{}",
    "context": "training",
}


@pytest.fixture(autouse=True)
def store(new_store: Path, tmp_path: Path) -> Path:
    shutil.copy(new_store, tmp_path / "mlflow.db")
    return tmp_path / "mlflow.db"


def identity(run_dir: Path, *, uri: str | None = None) -> RunIdentity:
    return RunIdentity.of(run_dir, experiment="tests", uri=uri)


def tracker(run_dir: Path, *, close_timeout_s: float = 60) -> Tracker:
    return Tracker(
        run_dir,
        params={"optimizer.lr": 0.1} | MANY_PARAMS,
        tags={"task": "pretrain"},
        datasets=(DATASET,),
        close_timeout_s=close_timeout_s,
    )


def runs_in(store: Path) -> list[Any]:
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def losses(store: Path, run: Any) -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    return sorted(
        (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")
    )


def test_a_run_with_a_break_is_one_run_with_every_point_once(tmp_path: Path, by_hand: None) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "mlflow.db"
    identity(run_dir)
    first = tracker(run_dir)
    for step in range(1, 6):
        first.metrics({"loss": 1 / step}, step=step)
    first.close("KILLED")
    sync(run_dir)
    assert [run.info.status for run in runs_in(store)] == ["KILLED"]
    second = tracker(run_dir)
    for step in range(4, 9):  # resumed from the checkpoint at step 3: steps 4 and 5 are repeated
        second.metrics({"loss": 1 / step}, step=step)
    note = tmp_path / "note.txt"
    note.write_text("hello")
    second.artifact(note, folder="notes")
    second.close("FINISHED")
    sync(run_dir)
    (run,) = runs_in(store)
    assert (
        run.info.status == "FINISHED"
        and len(run.data.params) == 121
        and run.data.params["optimizer.lr"] == "0.1"
    )
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == (DATASET["name"], DATASET["digest"])
    assert [(tag.key, tag.value) for tag in dataset.tags] == [("mlflow.data.context", "training")]
    assert losses(store, run) == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
    artifacts = MlflowClient(tracking_uri=f"sqlite:///{store}").list_artifacts(
        run.info.run_id, "notes"
    )
    assert [artifact.path for artifact in artifacts] == ["notes/note.txt"]


@pytest.mark.processes
def test_a_stop_that_comes_while_the_deliverer_still_imports_is_delivered_as_such(
    tmp_path: Path,
) -> None:
    """SLURM sends the signal to every process of a step."""
    run_dir = tmp_path / "run"
    identity(run_dir)
    stopped = tracker(run_dir)
    deliverer = stopped._deliverer
    assert deliverer is not None
    wait_until(lambda: deliverer.process is not None)
    assert deliverer.process is not None
    for number in SIGNALS:
        deliverer.process.send_signal(number)
    stopped.close("KILLED")
    assert deliverer.process.returncode == 0
    assert [run.info.status for run in runs_in(tmp_path / "mlflow.db")] == ["KILLED"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*SIGNALS}


def test_a_dead_store_loses_nothing_and_a_later_sync_delivers(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The database's directory is a file during the run, so every delivery fails."""
    monkeypatch.setattr("pretrain.tracking.tracker.sys.executable", "/bin/false")
    run_dir, blocked = tmp_path / "run", tmp_path / "store"
    blocked.write_text("in the way")
    identity(run_dir, uri=f"sqlite:///{blocked}/mlflow.db")
    dead = tracker(run_dir, close_timeout_s=3)
    dead.metrics({"loss": 0.5}, step=1)
    dead.close("FINISHED")
    with pytest.raises(UserError):
        deliver_after_the_end(run_dir, close_timeout_s=0.0)
    assert "pretrain sync" in capsys.readouterr().err
    blocked.unlink()
    blocked.mkdir()
    store.rename(blocked / "mlflow.db")
    assert sync(run_dir) > 0
    assert sync(run_dir) == 0
    (run,) = runs_in(blocked / "mlflow.db")
    assert run.info.status == "FINISHED" and losses(blocked / "mlflow.db", run) == [(1, 0.5)]


def deliver_after_the_end(run_dir: Path, *, close_timeout_s: float = 5) -> int:
    """Deliver like a deliverer whose trainer has ended."""
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as pipe:
        return deliver_while_training(run_dir, pipe, close_timeout_s=close_timeout_s)


def test_a_deliverer_that_dies_is_started_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dies, births = tmp_path / "dies", tmp_path / "births"
    dies.write_text(f"#!/bin/sh\necho born >>{births}\nkill -9 $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr("pretrain.tracking.tracker.sys.executable", str(dies))
    monkeypatch.setattr("pretrain.tracking.tracker.RESTART_S", 0.01)
    run_dir = tmp_path / "run"
    identity(run_dir)
    run = tracker(run_dir)
    wait_until(lambda: births.exists() and births.read_text().count("born") >= 3)
    run.close("FINISHED")
    warned, ended = capsys.readouterr().err.splitlines()
    assert "SIGKILL" in warned and f"pretrain sync {run_dir}" in ended


def test_a_run_that_is_not_sent_keeps_its_journal_alone(tmp_path: Path, store: Path) -> None:
    """`pretrain sync` may send it later."""
    run_dir = tmp_path / "run"
    identity(run_dir)
    run = Tracker(
        run_dir,
        params={"lr": 0.1},
        tags={"task": "pretrain"},
        settings=TrackingSettings(enabled=False),
    )
    run.metrics({"loss": 1.0}, step=1)
    run.picture("first", lambda: Image.new("RGB", (8, 8)), step=0)
    run.close("FINISHED")
    assert sorted(path.name for path in (run_dir / "tracking").iterdir()) == [
        "identity.json",
        "journal.jsonl",
    ]
    sync(run_dir)
    (sent,) = runs_in(store)
    assert (sent.info.status, losses(store, sent)) == ("FINISHED", [(1, 1.0)])


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    silent = Tracker(None, params={}, tags={})
    silent.metrics({"loss": 1.0}, step=1)
    silent.close("FINISHED")
    silent.system({"cpu_utilization_percentage": 1.0})
    silent.sample_system(dict)
    silent.picture("first", lambda: Image.new("RGB", (8, 8)), step=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


# ---- a journal written by hand, delivered in this process


def write_journal(run_dir: Path, *events: dict[str, Any]) -> None:
    identity(run_dir)
    journal = Journal(run_dir / "tracking" / "journal.jsonl")
    for event in events:
        journal.append(event)
    assert journal.close(timeout_s=30)


START: dict[str, Any] = {"event": "start", "params": {}, "tags": {}, "datasets": [DATASET]}


def loss(step: int) -> dict[str, Any]:
    return {"event": "metrics", "step": step, "values": {"loss": 1 / step}}


def end(status: str) -> dict[str, Any]:
    return {"event": "end", "status": status}


def picture(run_dir: Path, *, step: int) -> dict[str, Any]:
    path = run_dir.parent / f"{step}.png"
    Image.new("RGB", (300, 600), (200, 0, 0)).save(path)
    return {"event": "image", "path": str(path), "key": "first", "step": step}


def files(tmp_path: Path) -> list[str]:
    return sorted(
        path.name
        for path in (tmp_path / "mlartifacts").rglob("*")
        if path.is_file() and path.name != LOCK
    )


def test_a_run_that_died_unseen_has_failed_but_not_while_its_trainer_lives(
    tmp_path: Path, store: Path
) -> None:
    run_dir = tmp_path / "run"
    write_journal(run_dir, START, loss(1))
    with hold_run(run_dir, lock_wait_s=0):
        sync(run_dir)
        assert [run.info.status for run in runs_in(store)] == ["RUNNING"]
    sync(run_dir)
    assert [run.info.status for run in runs_in(store)] == ["FAILED"]


def test_a_store_that_takes_no_files_takes_the_figures_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    run_dir = tmp_path / "run"
    write_journal(run_dir, START, picture(run_dir, step=1), loss(1))
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise PermissionError("no credentials")

        patch.setattr(MlflowClient, "log_artifact", refuse)
        with fails("unreachable"):
            sync(run_dir)
        write_journal(run_dir, loss(2), end("FINISHED"))
        with fails("unreachable"):
            sync(run_dir)
    (run,) = runs_in(store)
    assert run.info.status == "FINISHED" and [step for step, _ in losses(store, run)] == [1, 2]
    assert files(tmp_path) == []
    sync(run_dir)
    assert files(tmp_path) == ["1.png"]


def test_what_is_sent_again_stands_once(tmp_path: Path, store: Path) -> None:
    """The position was lost, so all events are sent again. A missing or damaged image does not
    block later files."""
    run_dir = tmp_path / "run"
    gone, torn, whole = (picture(run_dir, step=step) for step in (0, 10, 20))
    Path(gone["path"]).unlink()
    Path(torn["path"]).write_bytes(b"no picture")
    write_journal(run_dir, START, gone, torn, loss(1), whole, loss(2), end("FINISHED"))
    assert sync(run_dir) > 0 and sync(run_dir) == 0
    (run_dir / "tracking" / "delivered.json").unlink()
    sync(run_dir)
    (run,) = runs_in(store)
    assert losses(store, run) == [(1, 1.0), (2, 0.5)] and len(run.inputs.dataset_inputs) == 1
    assert files(tmp_path) == ["10.png", "20.png"]
    kept = tmp_path / "mlartifacts" / run.info.run_id / "artifacts" / "pictures" / "20.png"
    assert kept.read_bytes() == Path(whole["path"]).read_bytes()
    assert json.loads((run_dir / "tracking" / "delivered.json").read_text())["owed"] == []


@pytest.mark.parametrize("num_new", [1, 3, 40])
def test_a_journal_that_a_power_cut_made_shorter_delivers_every_new_event(
    tmp_path: Path, store: Path, num_new: int
) -> None:
    """The log with its new events is shorter than the delivered part, about as long, or longer."""
    run_dir = tmp_path / "run"
    write_journal(run_dir, START, *(loss(step) for step in range(1, 7)), picture(run_dir, step=1))
    sync(run_dir)
    journal = run_dir / "tracking" / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:4]))
    write_journal(run_dir, START, *(loss(step) for step in range(7, 7 + num_new)), end("FINISHED"))
    sync(run_dir)
    (run,) = runs_in(store)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in losses(store, run)] == list(range(1, 7 + num_new))
    assert sync(run_dir) == 0 and files(tmp_path) == ["1.png"]


def test_events_are_on_disk_before_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    run_dir, synced, fsync, sent = tmp_path / "run", [0], os.fsync, []
    write_journal(run_dir, START, loss(1))
    journal = (run_dir / "tracking" / "journal.jsonl").stat()

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), journal):
            synced.append(journal.st_size)

    real = MlflowClient.log_batch
    monkeypatch.setattr("os.fsync", noted)
    monkeypatch.setattr(
        MlflowClient,
        "log_batch",
        lambda *words, **more: (sent.append(synced[-1]), real(*words, **more)),
    )
    sync(run_dir)
    assert sent and set(sent) == {journal.st_size}


@pytest.mark.parametrize("deliver", [sync, deliver_after_the_end], ids=["sync", "deliverer"])
def test_a_finished_run_whose_journal_lost_its_end_is_finished(
    tmp_path: Path, store: Path, deliver: Callable[[Path], int]
) -> None:
    run_dir = tmp_path / "run"
    write_journal(run_dir, START, loss(1))
    (run_dir / "result.json").write_text("{}")
    deliver(run_dir)
    assert [run.info.status for run in runs_in(store)] == ["FINISHED"]


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["no lock", "no log"])
def test_a_deliverer_whose_disk_refuses_ends_without_a_traceback(
    tmp_path: Path, fault: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "run" / "tracking" / "delivery.log"
    write_journal(run_dir, START)
    (tmp_path / ".mlflow.db.queue" / LOCK).mkdir(parents=True)
    if fault == "no log":
        log.mkdir()
    words = [sys.executable, "-m", "pretrain.tracking.delivery", str(run_dir), "0", ""]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    if fault == "no lock":
        assert LOCK in log.read_text() and log.read_text().count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_line(
    tmp_path: Path, by_hand: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run directory has been removed."""
    run_dir = tmp_path / "run"
    identity(run_dir)
    run, raised = tracker(run_dir), list[Any]()
    shutil.rmtree(run_dir)
    run_dir.write_bytes(b"")
    before, threading.excepthook = threading.excepthook, raised.append
    run.picture("first", lambda: Image.new("RGB", (8, 8)), step=0)
    run.close("FAILED")
    threading.excepthook = before
    assert not raised and "pictures" in capsys.readouterr().err


def test_figures_of_nodes_are_numbered_each_for_itself(tmp_path: Path, by_hand: None) -> None:
    run_dir = tmp_path / "run"
    write_journal(
        run_dir, {"event": "metrics", "step": 6, "values": {"system/cpu": 1.0}}, end("KILLED")
    )
    live = tracker(run_dir)
    for value in (2.0, 3.0):
        live.system({"cpu": value})
    live.system({"cpu": 9.0}, node="node-3")
    live.close("FINISHED")
    lines = (run_dir / "tracking" / "journal.jsonl").read_text().splitlines()
    told = [
        (event["step"], event["values"])
        for event in map(json.loads, lines)
        if event["event"] == "metrics"
    ]
    assert told == [
        (6, {"system/cpu": 1.0}),
        (7, {"system/cpu": 2.0}),
        (8, {"system/cpu": 3.0}),
        (0, {"system/node-3/cpu": 9.0}),
    ]


def test_no_password_of_a_server_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:word@host")
    with pytest.raises(UserError):
        identity(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert identity(tmp_path / "run", uri="https://host").uri == "https://host"
