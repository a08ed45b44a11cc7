"""The SQLite store: one whole file whoever starts together, left alone where it is not whole, made
anew from the journals."""

import errno
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
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient

from data_prep.errors import UserError
from pretrain.tracking import store
from pretrain.tracking.delivery import Delivery, deliver_while_training, sync
from pretrain.tracking.store import EmbeddedStore, Store
from pretrain.tracking.tracker import Journal, RunIdentity

NUM_POINTS = 30
FORK = multiprocessing.get_context("fork")
"""A process of its own has no connection to a file that was moved away; a fork has mlflow imported
already."""


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
    """All at once; their exit codes."""
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
    """A store is made by copying one; forks inherit that."""
    monkeypatch.setattr(store, "make_database", lambda path, *, files: shutil.copy(new_store, path))


@pytest.mark.usefixtures("quickly")
def test_runs_that_start_together_have_one_whole_store(tmp_path: Path) -> None:
    run_dirs = [tmp_path / f"ext{number}" for number in range(2)]
    for run_dir in run_dirs:
        write_run(run_dir)
    assert sync_apart(*run_dirs) == [0, 0]
    assert sorted(runs_in(tmp_path / "mlflow.db")) == ["ext0", "ext1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ext0",
        "ext1",
        "mlartifacts",
        "mlflow.db",
    ]


@pytest.mark.usefixtures("quickly")
def test_of_eight_deliverers_one_writes_at_a_time_and_no_point_is_lost(tmp_path: Path) -> None:
    """As while a sweep trains: none is told of a lock, nobody meets another in the file."""
    run_dirs = [tmp_path / f"run{number}" for number in range(8)]
    for run_dir in run_dirs:
        write_run(run_dir)
    inside = tmp_path / "inside"

    def deliver(run_dir: Path) -> None:
        send = Delivery._send

        def alone(self: Delivery, events: list[dict[str, Any]]) -> None:
            inside.mkdir()  # fails where another is at it
            send(self, events)
            inside.rmdir()

        Delivery._send = alone  # type: ignore[method-assign]
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


@pytest.mark.usefixtures("quickly")
def test_a_damaged_store_is_made_anew_from_the_journals_by_the_remedy_that_is_given(
    new_store: Path, tmp_path: Path
) -> None:
    """The child comes first and is whole before there is a parent."""
    parent, child, store = tmp_path / "parent", tmp_path / "child", tmp_path / "mlflow.db"
    shutil.copy(new_store, store)
    key = write_run(parent)
    write_run(child, parent_key=key)
    assert sync_apart(parent, child) == [0, 0]
    with open(store, "r+b") as file:
        file.truncate(4096 * 3)
    (tmp_path / "mlflow.db-journal").write_bytes(b"of the old one")
    with pytest.raises(UserError, match=r"damaged|never finished") as told:
        sync(child)
    remedy = re.search(r"mkdir .* && mv [^;]*", str(told.value))
    assert remedy is not None and "\n" not in str(told.value)
    subprocess.run(remedy[0], shell=True, check=True)
    assert sync_apart(child) == [0] and sync_apart(parent) == [0]
    runs = runs_in(store)
    assert sorted(runs) == ["child", "parent"]
    assert runs["child"].data.tags["mlflow.parentRunId"] == runs["parent"].info.run_id


def test_a_store_that_is_moved_away_meanwhile_gets_nothing_more(
    new_store: Path, tmp_path: Path
) -> None:
    shutil.copy(new_store, tmp_path / "mlflow.db")
    write_run(tmp_path / "run")
    delivery = Delivery(tmp_path / "run")
    delivery.deliver()
    offset = delivery.offset
    os.rename(tmp_path / "mlflow.db", tmp_path / "elsewhere.db")
    write_run(tmp_path / "run")
    with pytest.raises(UserError, match="moved or removed"):
        delivery.deliver()
    assert delivery.offset == offset and not (tmp_path / "mlflow.db").exists()


def test_an_experiment_that_another_process_makes_meanwhile_is_used(
    new_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(new_store, tmp_path / "mlflow.db")
    first, second = (
        RunIdentity.of(tmp_path / name, experiment="tests", uri=None)
        for name in ("first", "second")
    )
    Store(first.uri).open_run(first)
    real, asked = MlflowClient.get_experiment_by_name, list[str]()

    def not_yet(client: MlflowClient, name: str) -> Any:
        asked.append(name)
        return real(client, name) if len(asked) > 1 else None

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", not_yet)
    Store(second.uri).open_run(second)
    client = MlflowClient(tracking_uri=second.uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    assert len(client.search_runs(experiments)) == 2 and len(asked) == 2


# ---- without mlflow
# ---------------------------------------------------------------------------------------------------


def database(
    path: Path, *, revision: str | None = "two", tables: tuple[str, ...] = ("runs",)
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for table in ("alembic_version", *tables):
            connection.execute(f"create table {table} (version_num text)")
        if revision:
            connection.execute("insert into alembic_version values (?)", (revision,))
        connection.commit()


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The stores that are made, in no time, of a schema of ours."""
    made = list[Path]()

    def make(path: Path, *, files: Path) -> None:
        made.append(path)
        database(path)

    monkeypatch.setattr(store, "make_database", make)
    monkeypatch.setattr(store, "schema_revisions", lambda: ["two", "one"])
    return made


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_that_make_a_store_at_once_the_first_has_made_that_of_both(
    tmp_path: Path, makes: list[Path], monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """No lock keeps them apart: they may be on two nodes of which neither sees the other's."""
    path, make, published = tmp_path / "mlflow.db", store.make_database, list[os.stat_result]()

    def make_slowly(aside: Path, *, files: Path) -> None:
        monkeypatch.setattr(store, "make_database", make)
        EmbeddedStore(path).open()
        published.append(path.stat())
        make(aside, files=files)

    monkeypatch.setattr(store, "make_database", make_slowly)
    if not has_links:
        monkeypatch.setattr(store.os, "link", Mock(side_effect=PermissionError("no links here")))
    EmbeddedStore(path).open()
    assert [(each.st_ino, each.st_mtime_ns) for each in published] == [
        (path.stat().st_ino, path.stat().st_mtime_ns)
    ]
    assert len(makes) == 2 and sorted(path.name for path in tmp_path.iterdir()) == [
        "mlartifacts",
        "mlflow.db",
    ]


def test_who_dies_while_making_a_store_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path, *, files: Path) -> None:
        database(path, tables=("_alembic_tmp_experiments",))
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "make_database", die)
    with pytest.raises(KeyboardInterrupt):
        EmbeddedStore(tmp_path / "mlflow.db").open()
    assert [path.name for path in tmp_path.iterdir()] == ["mlartifacts"]


@pytest.mark.usefixtures("makes")
@pytest.mark.parametrize("has_links", [True, False])
def test_a_disk_that_fills_up_leaves_no_part_of_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(store.os, "link", Mock(side_effect=PermissionError("no links here")))
    monkeypatch.setattr(*((store, "sync") if has_links else (store.os, "fsync")), full)
    with pytest.raises(OSError, match="No space left"):
        EmbeddedStore(tmp_path / "mlflow.db").open()
    assert [path.name for path in tmp_path.iterdir()] == ["mlartifacts"]


@pytest.mark.usefixtures("makes")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda path: database(path, tables=("runs", "_alembic_tmp_experiments")),
            "never finished: mkdir",
        ),
        (lambda path: database(path, revision=None), "never finished: mkdir"),
        (lambda path: path.touch(), "never finished: mkdir"),
        (
            lambda path: path.write_bytes(b"no database at all, but something else" * 99),
            "damaged .*mkdir",
        ),
        (
            lambda path: sqlite3.connect(path).execute("create table other (x)").connection.close(),
            "no store of MLflow",
        ),
        (lambda path: database(path, revision="three"), "newer MLflow"),
        (lambda path: database(path, revision="one"), "mlflow db upgrade sqlite:///"),
        (lambda path: path.mkdir(), "cannot be read"),
    ],
)
def test_what_is_no_whole_store_of_this_schema_is_named_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "mlflow.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UserError, match=words) as told:
        EmbeddedStore(path).open()
    assert "\n" not in str(told.value) and (path.read_bytes() if path.is_file() else None) == before


def test_a_locked_store_is_said_to_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOCKED_S", 0.0)
    path = tmp_path / "mlflow.db"
    database(path)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("begin exclusive")
        with pytest.raises(UserError, match=r"database is locked.*try again"):
            EmbeddedStore(path).open()


def test_what_a_store_that_is_gone_has_left_is_not_rolled_back_into_a_new_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "mlflow.db-journal").touch()
    with pytest.raises(UserError, match=r"mlflow\.db-journal.*move it away"):
        EmbeddedStore(tmp_path / "mlflow.db").open()


def test_only_a_file_is_embedded() -> None:
    assert [
        EmbeddedStore.of(uri) is None for uri in ("http://host", "sqlite://", "sqlite:///:memory:")
    ] == [True] * 3
    found = EmbeddedStore.of("sqlite:////a/b.db?timeout=3")
    assert found is not None and found.path == Path("/a/b.db")
