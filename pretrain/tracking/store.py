"""The MLflow store: the only file that imports mlflow. What is sent twice is stored once, for
deliveries are repeated.

A run is found by its key (`RunIdentity.run_key`), whatever process asks; a model version by the
hash of its weights. Every method raises what the store raises; `fault_of` makes a line of it.

Where no server is named the store is an SQLite file (`EmbeddedStore`): it appears whole, or is
refused in one line. Who finds none makes one aside, and publishes it unless another process has
been faster. A file that is there is never migrated here: MLflow does so piece by piece, outside a
transaction, so a process that dies on the way leaves a store that nobody can use, and others may be
writing. What cannot be used is named with a remedy, and the runs' journals hold all of it.

It has one writer at a time, whichever node it is on: who writes holds the lock in the folder of its
files meanwhile (`lease`), and the journals of the others wait. A server of that store (server.py)
holds it as long as it serves, and leaves its address beside the file: then everybody writes through
it.

Long because no other file may import mlflow.
"""

import json
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from data_prep.errors import UserError
from data_prep.publish import TEMPORARY_PREFIX, Superseded, make_directory, sole_writer, sync
from pretrain.tracking.tracker import RunIdentity

RUN_KEY_TAG, PARENT_KEY_TAG, WEIGHTS_TAG = (
    "wide_mlps.run_key",
    "wide_mlps.parent_key",
    "weights_sha256",
)
_MAY_PASS = (
    "INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "REQUEST_LIMIT_EXCEEDED",
    "PERMISSION_DENIED",
)
"""Errors of a store that is out of order, or not reached: the event is sent again later."""
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # an error is raised as well
_LONGEST_FAULT = 300
LOCKED_S = 20.0
"""How long a reader of an SQLite file waits for those that write."""
ANSWER_S = 5.0
"""How long a server may take to say that it is there."""
_SQLITE = "sqlite:///"
_BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite writes beside a database and rolls back into whatever has its name."""
_SIGNS_OF_DAMAGE = ("malformed", "not a database", "no such table", "no such column")
_COLUMNS = (
    *(
        f"metrics.`{name}`"
        for name in (
            "eval/top1",
            "eval/class_top1",
            "probe/test_top1",
            "probe/test_class_mean",
            "knn/top1_k20",
        )
    ),
    *(f"tags.`{name}`" for name in ("model", "dataset")),
)
_VIEW = "accuracies"
"""Columns of the page of runs, and the name under which MLflow's page keeps them."""
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100


class Store:
    def __init__(self, uri: str):
        self.uri = uri
        self._embedded = EmbeddedStore.of(uri)
        self._served_at: str | None = None
        self._is_leased = False

    @contextmanager
    def lease(self, *, wait: bool = False) -> Iterator[None]:
        """The right to write, for as long as the block lasts; of one that is held already, nothing.
        Raises `Busy` where another process has it, unless it is to `wait`."""
        if self._embedded is None or self._is_leased:
            yield
            return
        served_at = self._embedded.server()
        if served_at != self._served_at:
            self._served_at = served_at
            self.__dict__.pop("_client", None)
        if served_at is not None:
            yield
            return
        notice = f"{self._embedded.path}: waiting for others that deliver to it"
        with sole_writer(self._embedded.files, wait=wait, notice=notice):
            self._embedded.check_in_place()
            self._is_leased = True
            try:
                yield
            finally:
                self._is_leased = False

    def has_run(self, run_id: str) -> bool:
        """Not, where the store was lost and made anew."""
        try:
            self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def fault_of(self, error: Exception) -> str:
        """One line for what a method has raised, with the remedy where one is known."""
        if isinstance(error, UserError):
            return str(error)
        damage = self._embedded.remedy_for(error) if self._embedded is not None else None
        lines = str(error).strip().splitlines() or [""]
        return damage or f"{type(error).__name__}: {lines[0]}"[:_LONGEST_FAULT]

    def open_run(self, identity: RunIdentity, *, check: Callable[[], None] = lambda: None) -> str:
        """The id of the run of this key, found or new. `check` raises `Superseded` in a deliverer
        that was frozen between looking for the run and making one: the newer start has made its own
        meanwhile, and this second one is deleted again.
        """
        client = self._client
        experiment = client.get_experiment_by_name(identity.experiment)
        experiment_id = (
            experiment.experiment_id if experiment else self._create_experiment(identity.experiment)
        )
        known = self._runs(RUN_KEY_TAG, identity.run_key, experiment_id)
        if known:
            return known[0]
        tags = {RUN_KEY_TAG: identity.run_key} | (
            {PARENT_KEY_TAG: identity.parent_key} if identity.parent_key else {}
        )
        run_id = str(
            client.create_run(experiment_id, run_name=identity.name, tags=tags).info.run_id
        )
        try:
            check()
        except Superseded:
            if len(self._runs(RUN_KEY_TAG, identity.run_key, experiment_id)) > 1:
                client.delete_run(run_id)
            raise
        self.adopt(run_id, identity)
        for child in self._runs(PARENT_KEY_TAG, identity.run_key, experiment_id):
            client.set_tag(child, "mlflow.parentRunId", run_id)  # delivered sooner, and at its end
        return run_id

    def adopt(self, run_id: str, identity: RunIdentity) -> None:
        """Puts a run under its parent, where that is in the experiment: it may be delivered later
        than its child."""
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

    def log_metrics(self, run_id: str, events: Iterable[dict[str, Any]]) -> None:
        """`metrics` events of a journal, with its times."""
        metrics = [
            Metric(name, value, event["time_ms"], event["step"])
            for event in events
            for name, value in event["values"].items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def log_params(self, run_id: str, values: dict[str, Any], tags: dict[str, str]) -> None:
        """What the store has under the same name stays: a parameter is set once."""
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
        """A `version` event: the weights become a version of the model of that name, or are one;
        then it gets the event's tags.

        Its source is the card among the artifacts of the run that made the weights, where that is
        in this store, else of `run_id`: a server takes no path of another machine. The weights stay
        where they are; the tag `checkpoint` says where. What the store will never take (it may have
        no registry) is left out.
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
                f"model {name!r}: the registry does not take it ({error}); it is left out",
                file=sys.stderr,
                flush=True,
            )

    def _new_version(self, run_id: str, event: dict[str, Any]) -> str:
        """Made, unless another process has made it just now."""
        client, name, weights = self._client, event["model"], event["weights_sha256"]
        makers = self._runs(RUN_KEY_TAG, event["parent_key"]) if event["parent_key"] else []
        maker = makers[0] if makers else run_id
        client.log_artifact(maker, event["path"], "checkpoint")
        source = f"{client.get_run(maker).info.artifact_uri}/checkpoint"
        tags = {WEIGHTS_TAG: weights, "checkpoint": event["checkpoint"]}
        made = str(client.create_model_version(name, source, run_id=maker, tags=tags).version)
        first = self._version_of(name, weights)
        if first is not None and first != made:
            client.delete_model_version(name, made)
        return first or made

    def _version_of(self, name: str, weights_sha256: str) -> str | None:
        """The oldest, where there are several."""
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self._client.search_model_versions(f"name = '{name}'")
        same = [
            int(version.version)
            for version in versions
            if version.tags.get(WEIGHTS_TAG) == weights_sha256
        ]
        return str(min(same)) if same else None

    def _create_experiment(self, name: str) -> str:
        """Made, unless another process has made it just now."""
        location = self._embedded.files.as_uri() if self._embedded is not None else None
        # or the page opens on its views for language models
        kind = {"mlflow.experimentKind": "custom_model_development"}
        try:
            return str(self._client.create_experiment(name, artifact_location=location, tags=kind))
        except MlflowException as error:
            first = self._client.get_experiment_by_name(name)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or first is None:
                raise
            return str(first.experiment_id)

    def _runs(self, tag: str, key: str, *experiment_ids: str) -> list[str]:
        """The ids of those with this key in the tag; in all experiments, if none is named."""
        places = list(experiment_ids) or [
            each.experiment_id for each in self._client.search_experiments()
        ]
        return [
            str(run.info.run_id)
            for run in self._client.search_runs(places, f"tags.`{tag}` = '{key}'")
        ]

    @cached_property
    def _client(self) -> "MlflowClient":
        if self._embedded is not None and self._served_at is None:
            self._embedded.open()
        return MlflowClient(tracking_uri=self._served_at or self.uri)


class EmbeddedStore:
    def __init__(self, path: Path):
        self.path = path
        self.files = path.parent.absolute() / "mlartifacts"
        """Where it keeps files."""
        self.log = path.with_name(path.name + ".log")
        """What a server of it prints."""
        self.address = path.with_name(path.name + ".server")
        """Where a server of it says where it is."""
        self._file: tuple[int, int] | None = None

    @staticmethod
    def of(uri: str) -> "EmbeddedStore | None":
        """None for a server."""
        path = uri.removeprefix(_SQLITE).partition("?")[0]
        is_file = (
            uri.startswith(_SQLITE)
            and path not in ("", ":memory:")
            and not path.startswith("file:")
        )
        return EmbeddedStore(Path(path)) if is_file else None

    @property
    def uri(self) -> str:
        return f"{_SQLITE}{self.path.absolute()}"

    def server(self) -> str | None:
        """The address of a server that answers."""
        with suppress(FileNotFoundError):
            address = self.address.read_text()
            return address if self.answers(address) else None
        return None

    @staticmethod
    def answers(address: str) -> bool:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=ANSWER_S):
                return True
        except (OSError, ValueError):
            return False

    def open(self) -> None:
        """Afterwards there is a whole store of the MLflow that is installed; otherwise a UserError
        names what is there, and a remedy."""
        if not self.path.exists():
            self._make()
        self._check()
        self._file = self._identity()

    def check_in_place(self) -> None:
        """A store that was moved away while it was open would go on taking what nobody finds."""
        if self._file is not None and self._file != self._identity():
            raise UserError(
                f"{self.path}: was moved or removed while this run wrote to it; when the run has"
                " ended: sync it"
            )

    def remedy_for(self, error: Exception) -> str | None:
        """Where the error is of a damaged file."""
        signs = [sign for sign in _SIGNS_OF_DAMAGE if sign in str(error)]
        return self._remedy(f"is damaged ({signs[0]})") if signs else None

    def _identity(self) -> tuple[int, int] | None:
        with suppress(FileNotFoundError):
            found = self.path.stat()
            return found.st_dev, found.st_ino
        return None

    def _make(self) -> None:
        """On this node, then copied: hundreds of small writes, which take a shared file system
        long. A link replaces nothing: of several processes, on nodes whose locks may not reach each
        other, the first has published the store of all.
        """
        make_directory(self.files)
        for left in [self.path.with_name(self.path.name + end) for end in _BESIDE]:
            if (
                left.exists() and not self.path.exists()
            ):  # in this order: one that another process has just published has a journal
                raise UserError(
                    f"{left}: was left by a store that is gone and would spoil a new one; move it"
                    " away, too"
                )
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / self.path.name
            make_database(made, files=self.files)
            copy = self.path.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}-{self.path.name}")
            try:
                shutil.copyfile(made, copy)
                sync(copy)
                self._publish(copy)
            finally:
                copy.unlink(missing_ok=True)
        sync(self.path.parent)

    def _publish(self, copy: Path) -> None:
        """Replaces nothing."""
        try:
            os.link(copy, self.path)
        except FileExistsError:
            pass
        except OSError:  # no links, as on exFAT: it appears piece by piece
            with suppress(FileExistsError), open(self.path, "xb") as file:
                try:
                    file.write(copy.read_bytes())
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    self.path.unlink()
                    raise

    def _check(self) -> None:
        uri = (  # makes no file; reads one that may only be read
            f"file:{quote(str(self.path.absolute()))}?mode=rw"
        )
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=LOCKED_S)) as connection:
                tables = {
                    name
                    for (name,) in connection.execute(
                        "select name from sqlite_master where type = 'table'"
                    )
                }
                found = (
                    connection.execute("select version_num from alembic_version").fetchall()
                    if tables
                    else []
                )
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                raise UserError(self._remedy("is no store of MLflow's")) from None
            raise UserError(
                f"{self.path}: cannot be read ({error}); try again, and see that the file system"
                " locks files: if it does not, give runs a server (MLFLOW_TRACKING_URI)"
            ) from None
        except sqlite3.DatabaseError as error:
            raise UserError(self._remedy(f"is damaged ({error})")) from None
        if len(found) != 1 or any(name.startswith("_alembic_tmp_") for name in tables):
            raise UserError(self._remedy("is a store that was never finished"))
        ((revision,),), known = found, schema_revisions()
        if revision not in known:
            raise UserError(
                self._remedy("is of a newer MLflow than this one: install that one. Or else")
            )
        if revision != known[0]:
            command = (
                f"cp {self.path} {self.path}.old && mlflow db upgrade"
                f" {_SQLITE}{self.path.absolute()}"
            )
            raise UserError(
                self._remedy(f"is of an older MLflow: when no run is writing, {command}. Or else")
            )

    def _remedy(self, fault: str) -> str:
        old = self.path.parent / "old-store"
        return (
            f"{self.path} {fault}: mkdir {old} && mv {self.path}* {old}; then `pretrain sync RUN`"
            f" for every run of {self.path.parent}, from whose journals it is made anew, whole"
        )


def runs_page(address: str) -> str:
    """The page of the newest run's experiment, with columns of accuracies; the page of all
    experiments if there is no run.

    The columns are a shared view, a tag of the experiment, as the Share button of the page makes
    one.
    """
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


def schema_revisions() -> list[str]:
    """Of the MLflow that is installed, the newest first."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    return [
        each.revision
        for each in ScriptDirectory.from_config(_get_alembic_config("")).walk_revisions()
    ]


def make_database(path: Path, *, files: Path) -> None:
    """With MLflow's own first experiment, which the first two that open a store would otherwise
    both make."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import event

    uri = f"{_SQLITE}{path}"
    engine = SqlAlchemyStore._get_or_create_engine(uri)
    event.listen(
        engine, "connect", lambda connection, _: connection.execute("pragma synchronous = off")
    )
    engine.dispose()  # the connection that was made before the event
    SqlAlchemyStore(uri, files.as_uri())
    engine.dispose()


def _described(tags: Mapping[str, str]) -> str:
    """Markdown: where a version's weights lie, and what was found out about them."""
    results = "".join(f"| {tag} | {value} |\n" for tag, value in sorted(tags.items()) if "/" in tag)
    return f"{tags.get('model', '')}: `{tags['checkpoint']}`\n\n| result | |\n|---|---|\n{results}"
