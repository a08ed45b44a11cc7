"""`pretrain ui` prints one line with the address of MLflow's page of the runs with columns for
accuracies."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pretrain.tracking.store import Store, runs_page
from pretrain.tracking.tracker import RunIdentity


@pytest.mark.slow
def test_the_page_is_of_the_newest_run_with_columns_of_accuracies(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    store = Store(uri)
    assert not store.has_run("none")
    client = MlflowClient(tracking_uri=uri)
    assert runs_page(uri) == f"{uri}/#/experiments"  # no run yet
    for name in ("first", "second"):
        identity = RunIdentity.of(tmp_path / name, experiment=name, uri=uri)
        client.set_terminated(store.open_run(identity))
    newest = client.get_experiment_by_name("second")
    assert newest is not None
    page = runs_page(uri)
    key = re.fullmatch(
        re.escape(f"{uri}/#/experiments/{newest.experiment_id}/runs?viewStateShareKey=") + r"(\w+)",
        page,
    )
    assert key is not None
    view = client.get_experiment(newest.experiment_id).tags[f"mlflow.sharedViewState.{key[1]}"]
    assert "metrics.`eval/top1`" in json.loads(view)["selectedColumns"]


@pytest.mark.processes
def test_the_console_has_the_address_and_the_log_has_the_rest(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pretrain", "ui", str(tmp_path)]
    closed = {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}  # no proxy is needed or used
    with subprocess.Popen(
        words, env=os.environ | closed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        first = server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        more, errors = server.communicate(timeout=60)
    assert (
        re.search(r"http://127\.0\.0\.1:\d+/#/experiments", first)
        and more.count("\n") == 1
        and server.returncode == 0
    )
    assert errors in ("", "loading MLflow\n")
    assert "Started server process" in (tmp_path / "mlflow.db.log").read_text()
