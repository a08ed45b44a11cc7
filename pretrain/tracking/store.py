"""The tracking database of MLflow. Only this file imports mlflow. Every write can be repeated
without duplicates.

A run is found by its key (`RunIdentity.run_key`), a model version by the hash of its weights. Every
method raises the errors of MLflow; `Store.fault_of` describes them in one line.

If no server is named, the database is an SQLite file next to the runs. One process at a time writes
to it (queue.py). The file is made in a temporary directory of this node, because hundreds of small
writes take long on a shared file system.

MLflow migrates a database piece by piece, outside a transaction, so an older file is never migrated
silently.
"""

import json
import logging
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow.store.db_migrations
from alembic.script import ScriptDirectory
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from data_prep.errors import UserError
from data_prep.publish import atomic_file, make_directory
from pretrain.tracking.queue import SQLITE, database_path
from pretrain.tracking.tracker import RunIdentity

RUN_KEY_TAG, PARENT_KEY_TAG = "wide_mlps.run_key", "wide_mlps.parent_key"
WEIGHTS_TAG = "weights_sha256"
_MAY_PASS = (
    "INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "REQUEST_LIMIT_EXCEEDED",
    "PERMISSION_DENIED",
)
"""Errors that may pass: the server fails, is busy or denies access. The event is sent again
later."""
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # logged errors are raised, too
_LONGEST_FAULT = 300
_SIGNS_OF_DAMAGE = ("malformed", "not a database", "no such table", "no such column")
_ACCURACIES = ("eval/top1", "eval/class_top1", "probe/test_top1", "probe/test_class_mean")
_COLUMNS = (
    *(f"metrics.`{name}`" for name in (*_ACCURACIES, "knn/top1_k20")),
    *(f"tags.`{name}`" for name in ("model", "dataset")),
)
"""Columns on MLflow's page of runs."""
_VIEW = "accuracies"
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100


class Store:
    def __init__(self, uri: str):
        self._uri, self._database = uri, database_path(uri)

    @cached_property
    def _client(self) -> MlflowClient:
        if self._database is not None:
            open_database(self._database)
        return MlflowClient(tracking_uri=self._uri)

    def has_run(self, run_id: str) -> bool:
        """Return False if the database was lost and created again."""
        try:
            self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def fault_of(self, error: Exception) -> str:
        """Return a one-line description of an error, with its fix if known."""
        if isinstance(error, UserError):
            return str(error)
        is_damaged = any(sign in str(error) for sign in _SIGNS_OF_DAMAGE)
        lines = str(error).strip().splitlines() or [""]
        fault = f"{type(error).__name__}: {lines[0]}"[:_LONGEST_FAULT]
        if is_damaged and self._database is not None:
            return str(_unusable(self._database, fault))
        return fault

    def open_run(self, identity: RunIdentity) -> str:
        """Return the id of the run with this key. Create the run if it is missing."""
        client = self._client
        experiment = client.get_experiment_by_name(identity.experiment)
        if experiment is None:
            files = files_of(self._database).as_uri() if self._database is not None else None
            # otherwise the page opens on MLflow's views for language models
            kind = {"mlflow.experimentKind": "custom_model_development"}
            experiment_id = str(
                client.create_experiment(identity.experiment, artifact_location=files, tags=kind)
            )
        else:
            experiment_id = experiment.experiment_id
        known = self._runs(RUN_KEY_TAG, identity.run_key, experiment_id)
        if known:
            return known[0]
        tags = {RUN_KEY_TAG: identity.run_key}
        if identity.parent_key:
            tags[PARENT_KEY_TAG] = identity.parent_key
        run = client.create_run(experiment_id, run_name=identity.name, tags=tags)
        run_id = str(run.info.run_id)
        self.adopt(run_id, identity)
        for child in self._runs(PARENT_KEY_TAG, identity.run_key, experiment_id):
            client.set_tag(child, "mlflow.parentRunId", run_id)  # the child arrived first
        return run_id

    def adopt(self, run_id: str, identity: RunIdentity) -> None:
        """Nest a run under its parent, if the parent is in the experiment. A parent may arrive
        after its child."""
        if identity.parent_key:
            experiment_id = self._client.get_run(run_id).info.experiment_id
            parents = self._runs(RUN_KEY_TAG, identity.parent_key, experiment_id)
            if parents:
                self._client.set_tag(run_id, "mlflow.parentRunId", parents[0])

    def set_status(self, run_id: str, status: str) -> None:
        if status == "RUNNING":
            self._client.update_run(run_id, status)
        else:
            self._client.set_terminated(run_id, status)

    def log_metrics(self, run_id: str, events: Sequence[dict[str, Any]]) -> None:
        metrics = [
            Metric(name, value, event["time_ms"], event["step"])
            for event in events
            for name, value in event["values"].items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def log_params(self, run_id: str, values: dict[str, Any], tags: dict[str, str]) -> None:
        """Log parameters that the run does not have yet, because MLflow sets a parameter only
        once."""
        known = self._client.get_run(run_id).data.params
        params = [
            Param(name, str(value)[:6000]) for name, value in values.items() if name not in known
        ]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_AT_ONCE])
        self._client.log_batch(
            run_id, tags=[RunTag(name, value[:5000]) for name, value in tags.items()]
        )

    def log_datasets(self, run_id: str, datasets: Sequence[dict[str, str]]) -> None:
        inputs = [
            DatasetInput(
                Dataset(**{name: value for name, value in dataset.items() if name != "context"}),
                [InputTag("mlflow.data.context", dataset["context"])],
            )
            for dataset in datasets
        ]
        if inputs:
            self._client.log_inputs(run_id, datasets=inputs)

    def log_file(self, run_id: str, path: Path, *, folder: str) -> None:
        self._client.log_artifact(run_id, str(path), folder or None)

    def register(self, run_id: str, event: dict[str, Any]) -> None:
        """Register the weights of a `version` event as a version of the model, unless a version has
        these weights, and set the version's tags.

        The version's source is the checkpoint metadata of the run that made the weights, or of
        `run_id` if that run is not in this database. (A server accepts no path of another machine.)
        The tag `checkpoint` names the directory of the weights. The event is skipped if the
        database can never accept it, for example without a registry.
        """
        client, name = self._client, event["model"]
        try:
            version = self._version_of(name, event["weights_sha256"]) or self._new_version(
                run_id, event
            )
            for tag, value in event["tags"].items():
                client.set_model_version_tag(name, version, tag, value)
            known = client.get_model_version(name, version).tags
            client.update_model_version(name, version, _described(known))
        except MlflowException as error:
            if error.error_code in _MAY_PASS:
                raise
            print(
                f"model {name!r}: the registry does not accept it ({error}), so the version is"
                " skipped",
                file=sys.stderr,
                flush=True,
            )

    def _new_version(self, run_id: str, event: dict[str, Any]) -> str:
        client = self._client
        makers = self._runs(RUN_KEY_TAG, event["parent_key"]) if event["parent_key"] else []
        maker = makers[0] if makers else run_id
        client.log_artifact(maker, event["path"], "checkpoint")
        source = f"{client.get_run(maker).info.artifact_uri}/checkpoint"
        tags = {WEIGHTS_TAG: event["weights_sha256"], "checkpoint": event["checkpoint"]}
        version = client.create_model_version(event["model"], source, run_id=maker, tags=tags)
        return str(version.version)

    def _version_of(self, name: str, weights_sha256: str) -> str | None:
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = [
            int(each.version)
            for each in self._client.search_model_versions(f"name = '{name}'")
            if each.tags.get(WEIGHTS_TAG) == weights_sha256
        ]
        return str(min(versions)) if versions else None

    def _runs(self, tag: str, key: str, *experiment_ids: str) -> list[str]:
        """Return the ids of the runs whose tag `tag` is `key`, by default in all experiments."""
        ids = list(experiment_ids) or [
            each.experiment_id for each in self._client.search_experiments()
        ]
        runs = self._client.search_runs(ids, f"tags.`{tag}` = '{key}'")
        return [str(run.info.run_id) for run in runs]


def files_of(database: Path) -> Path:
    """Return the directory in which an SQLite database keeps files."""
    return database.parent / "mlartifacts"


def open_database(path: Path) -> None:
    """Create the database if it does not exist. Raise UserError if the installed MLflow cannot use
    it."""
    if not path.exists():
        make_directory(files_of(path))
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / path.name
            make_database(made, files=files_of(path))
            with open(made, "rb") as source, atomic_file(path) as copy:
                shutil.copyfileobj(source, copy)
    uri = f"file:{quote(str(path))}?mode=rw"  # does not create a file
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=20)) as connection:
            revisions = [
                revision
                for (revision,) in connection.execute("select version_num from alembic_version")
            ]
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise UserError(
                str(path),
                "another process locks the database",
                "end that process, or use a server (MLFLOW_TRACKING_URI)",
                code="busy",
            ) from None
        raise _unusable(path, str(error)) from None
    if revisions != [schema_revision()]:
        command = f"mlflow db upgrade {SQLITE}{path}"
        raise _unusable(path, "another MLflow version made it", f"to keep it, run {command}; ")


def _unusable(path: Path, fault: str, fix: str = "") -> UserError:
    old = path.parent / "old-database"
    return UserError(
        str(path),
        f"MLflow cannot use this database ({fault})",
        f"{fix}to replace it, run mkdir {old} && mv {path}* {old}; then `pretrain sync RUN` for"
        f" every run of {path.parent} fills a new database from the event logs",
        code="damaged",
    )


def make_database(path: Path, *, files: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"{SQLITE}{path}", files.as_uri()).engine.dispose()


def schema_revision() -> str | None:
    return ScriptDirectory(*mlflow.store.db_migrations.__path__).get_current_head()


def runs_page(address: str) -> str:
    """Return the address of the page of the newest run's experiment, with columns of accuracies.
    Without a run, return the page of all experiments."""
    client = MlflowClient(tracking_uri=address)
    experiments = [each.experiment_id for each in client.search_experiments()]
    newest = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    if not newest:
        return f"{address}/#/experiments"
    experiment = newest[0].info.experiment_id
    client.set_experiment_tag(
        experiment, f"mlflow.sharedViewState.{_VIEW}", json.dumps({"selectedColumns": _COLUMNS})
    )
    return f"{address}/#/experiments/{experiment}/runs?viewStateShareKey={_VIEW}"


def _described(tags: Mapping[str, str]) -> str:
    results = "".join(f"| {tag} | {value} |\n" for tag, value in sorted(tags.items()) if "/" in tag)
    return f"{tags.get('model', '')}: `{tags['checkpoint']}`\n\n| result | |\n|---|---|\n{results}"
