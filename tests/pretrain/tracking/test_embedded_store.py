"""The SQLite database is one complete file for any simultaneous starts. A damaged database is not
changed, and is rebuilt from the event logs."""

import multiprocessing
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from data_prep.publish import Busy, sole_writer
from pretrain.ranks.starts import hold_run
from pretrain.tracking import delivery, store
from pretrain.tracking.delivery import (
    Deliveries,
    Delivery,
    deliver_while_training,
    open_store,
    sync,
)
from pretrain.tracking.queue import Queue, database_path
from pretrain.tracking.store import open_database
from pretrain.tracking.tracker import Journal, RunIdentity
from tests.errors import fails

NUM_POINTS = 30
FORK = multiprocessing.get_context("fork")
"""A separate process has no connection to a file that was moved away. A fork has already imported
mlflow."""


def write_run(run_dir: Path, *, parent_key: str | None = None) -> str:
    key = RunIdentity.of(run_dir, experiment="tests", uri=None, parent_key=parent_key).run_key
    journal = Journal(run_dir / "tracking" / "journal.jsonl")
    dataset = {
        "name": "a",
        "digest": "b",
        "source_type": "local",
        "source": "{}",
        "schema": "{}",
        "profile": "{}",
    }
    journal.append(
        {
            "event": "start",
            "params": {},
            "tags": {},
            "datasets": [dataset | {"context": "training"}],
        }
    )
    for step in range(NUM_POINTS):
        journal.append({"event": "metrics", "step": step, "values": {"loss": float(step)}})
    journal.append({"event": "end", "status": "FINISHED"})
    assert journal.close(timeout_s=30)
    return key


def sync_apart(*run_dirs: Path) -> list[int | None]:
    """Synchronize all runs at the same time. Return the exit codes."""
    together = FORK.Barrier(len(run_dirs))
    processes = [
        FORK.Process(target=_meet_and_sync, args=(together, run_dir)) for run_dir in run_dirs
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _meet_and_sync(together: Any, run_dir: Path) -> None:
    together.wait()
    sync(run_dir)


def runs_in(store: Path) -> dict[str, Any]:
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    (experiment,) = (each for each in client.search_experiments() if each.name == "tests")
    found = list(client.search_runs([experiment.experiment_id]))
    assert all(
        len(client.get_metric_history(run.info.run_id, "loss")) == NUM_POINTS for run in found
    )
    assert {run.info.status for run in found} == {"FINISHED"}
    return {str(run.info.run_name): run for run in found}


@pytest.fixture
def quickly(new_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a database instead of creating one, also in forks."""
    monkeypatch.setattr(store, "make_database", lambda path, *, files: shutil.copy(new_store, path))


@pytest.mark.processes
@pytest.mark.usefixtures("quickly")
def test_one_of_eight_deliverers_delivers_all_runs(tmp_path: Path) -> None:
    """Like a sweep's runs: one process writes at a time, and no metric is lost."""
    run_dirs = [tmp_path / f"run{number}" for number in range(8)]
    for run_dir in run_dirs:
        write_run(run_dir)
    inside = tmp_path / "inside"

    def deliver(run_dir: Path) -> None:
        send = Delivery._send

        def send_alone(self: Delivery, events: list[dict[str, Any]]) -> None:
            inside.mkdir()  # fails if another process is sending
            send(self, events)
            inside.rmdir()

        Delivery._send = send_alone  # type: ignore[method-assign]
        reader, writer = os.pipe()
        os.close(writer)  # the trainer has ended
        assert deliver_while_training(run_dir, open(reader, "rb"), close_timeout_s=300) == 0

    processes = [FORK.Process(target=deliver, args=(run_dir,)) for run_dir in run_dirs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert sorted(runs_in(tmp_path / "mlflow.db")) == sorted(path.name for path in run_dirs)
    assert Queue(f"sqlite:///{tmp_path}/mlflow.db", tmp_path).runs() == {}


@pytest.mark.usefixtures("quickly")
def test_a_run_whose_deliverer_was_killed_is_delivered_by_another(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name)
    identity = RunIdentity.read(tmp_path / "first")
    queue = Queue(identity.uri, tmp_path / "first")
    queue.add(identity.run_key, tmp_path / "first")  # the deliverer's last action
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert deliver_while_training(tmp_path / "second", pipe, close_timeout_s=300) == 0
    assert sorted(runs_in(tmp_path / "mlflow.db")) == ["first", "second"]


@pytest.mark.processes
@pytest.mark.usefixtures("quickly")
def test_a_damaged_store_is_made_anew_from_the_journals_by_the_remedy_that_is_given(
    new_store: Path, tmp_path: Path
) -> None:
    """The child is delivered first, and is complete before its parent exists."""
    parent, child, store = tmp_path / "parent", tmp_path / "child", tmp_path / "mlflow.db"
    shutil.copy(new_store, store)
    key = write_run(parent)
    write_run(child, parent_key=key)
    assert sync_apart(parent, child) == [0, 0]
    with open(store, "r+b") as file:
        file.truncate(4096 * 3)
    with fails("damaged", str(store)) as told:
        sync(child)
    remedy = re.search(r"[mM]kdir .* && mv [^;]*", str(told.value))
    assert remedy is not None and "\n" not in str(told.value)
    subprocess.run(remedy[0].lower()[:1] + remedy[0][1:], shell=True, check=True)
    assert sync_apart(child) == [0] and sync_apart(parent) == [0]
    runs = runs_in(store)
    assert sorted(runs) == ["child", "parent"]
    assert runs["child"].data.tags["mlflow.parentRunId"] == runs["parent"].info.run_id


# ---- the queue and the turn


def queue_of(run_dir: Path) -> Queue:
    return Queue(RunIdentity.read(run_dir).uri, run_dir)


def open_deliveries(run_dir: Path) -> Deliveries:
    return Deliveries(queue_of(run_dir), lambda: open_store(RunIdentity.read(run_dir).uri))


def is_free(queue: Queue) -> bool:
    try:
        with sole_writer(queue.directory):
            return True
    except Busy:
        return False


def test_the_queue_follows_a_renamed_run_and_skips_an_entry_that_is_just_removed(
    tmp_path: Path,
) -> None:
    queue = Queue(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    queue.add("a", tmp_path / "old")
    queue.add("a", tmp_path / "new")
    (queue.directory / "b").symlink_to("removed")  # listed, but unreadable
    assert queue.runs() == {"a": tmp_path / "new"}


@pytest.mark.usefixtures("quickly")
def test_a_sync_ends_although_another_process_keeps_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    monkeypatch.setattr(delivery, "_SYNC_LIMIT_S", 0.0)
    (run_dir / "tracking" / "delivery.log").write_text("the last fault")
    with sole_writer(queue_of(run_dir).directory), fails("busy") as caught:
        sync(run_dir)
    assert "the last fault" in str(caught.value)
    assert sync(run_dir) > 0
    with open(run_dir / "tracking" / "journal.jsonl", "ab") as file:
        file.write(b'{"event": "met')  # the trainer was killed
    with sole_writer(queue_of(run_dir).directory):
        assert sync(run_dir) == 0


@pytest.mark.usefixtures("quickly")
def test_a_sync_of_a_live_run_waits_for_the_events_of_its_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    sync(run_dir)
    delivered = run_dir / "tracking" / "delivered.json"
    delivered.write_text(delivered.read_text().replace("FINISHED", "RUNNING"))
    with hold_run(run_dir, lock_wait_s=0), sole_writer(queue_of(run_dir).directory):
        assert sync(run_dir) == 0


@pytest.mark.usefixtures("quickly")
def test_a_run_that_fails_delays_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = list[str]()

    def deliver(self: Delivery) -> None:
        attempts.append(self.run_dir.name)
        if self.run_dir.name == "bad":
            raise OSError("a fault")

    monkeypatch.setattr(Delivery, "deliver", deliver)
    for name in ("bad", "good"):
        key = write_run(tmp_path / name)
        queue_of(tmp_path / name).add(key, tmp_path / name)
    with closing(open_deliveries(tmp_path / "bad")) as deliveries:
        for _ in range(3):
            deliveries.deliver()
        assert (attempts.count("bad"), attempts.count("good")) == (1, 3)
        monkeypatch.setattr(delivery, "_RETRY_S", 0.0)
        deliveries.deliver()
    assert attempts.count("bad") == 2
    assert (tmp_path / "bad" / "tracking" / "delivery.log").read_text().count("\n") == 1


@pytest.mark.usefixtures("quickly")
def test_the_turn_is_given_up_for_runs_on_other_nodes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_TURN_S", 0.0)
    queue = Queue(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    write_run(tmp_path / "run")
    with closing(open_deliveries(tmp_path / "run")) as deliveries:
        deliveries.deliver()
        assert not is_free(queue)
        queue.add("other", tmp_path / "on another node")
        deliveries.deliver()
        assert is_free(queue)
        queue.remove("other")
        deliveries.deliver()
        assert not is_free(queue)
    assert is_free(queue)


# ---- databases that MLflow did not make


def database(
    path: Path, *, revision: str | None = "two", tables: tuple[str, ...] = ("runs",)
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for table in ("alembic_version", *tables):
            connection.execute(f"create table {table} (version_num text)")
        if revision:
            connection.execute("insert into alembic_version values (?)", (revision,))
        connection.commit()


def test_a_process_that_dies_while_making_a_database_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path, *, files: Path) -> None:
        database(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "make_database", die)
    with pytest.raises(KeyboardInterrupt):
        open_database(tmp_path / "mlflow.db")
    assert [path.name for path in tmp_path.iterdir()] == ["mlartifacts"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: database(path, revision=None),
        lambda path: path.touch(),
        lambda path: path.write_bytes(b"no database at all, but something else" * 99),
        lambda path: sqlite3.connect(path).execute("create table other (x)").connection.close(),
        lambda path: database(path, revision="another"),
        lambda path: path.mkdir(),
    ],
)
def test_an_unusable_database_is_named_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path = tmp_path / "mlflow.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with fails("damaged", str(path)):
        open_database(path)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_only_a_file_is_embedded() -> None:
    for uri in ("http://host", "sqlite://", "sqlite:///:memory:"):
        assert database_path(uri) is None
    assert database_path("sqlite:////a/b.db?timeout=3") == Path("/a/b.db")
