"""MLflow, at arm's length: the only file that imports mlflow, in a process of its own that delivers a run's journal.

Its imports, retries and stalls cost training nothing, and a dead server costs nothing but time: what was not delivered stays in the
journal and goes out when the server is back, when the run is resumed, or when `pretrain sync RUN_DIR` is called.

    RUN/tracking/delivered.json     the run's id in the store, how many bytes of the journal have arrived, and which files are owed

Delivery is idempotent: metrics and pictures carry the journal's times, so what is sent twice stands once, and the run is found by
its key. A run that is resumed goes on in the same MLflow run. Files are sent after the figures and are owed until they arrive: a
store for files that is out of order holds up no figure. The status is the journal's; where that has no end, and there is no trainer
any more, the run has FAILED.
"""

import json
import os
import select
import signal
import struct
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import UUID, uuid5

from PIL import Image

from data_prep.publish import sole_writer, write_json
from data_prep.settings import UserError
from pretrain.journal import readable_events
from pretrain.preemption import SIGNALS
from pretrain.tracker import RunIdentity, Status

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_KEY_TAG = "wide_mlps.run_key"
POLL_S = 1.0
_BATCH_EVENTS = 200
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _THUMBNAIL = 1000, 100, 256
_FILES = ("artifact", "image")


class Delivery:
    """Carries the journal of one run to its store, from where the last delivery stopped."""

    def __init__(self, run_dir: Path):
        self.directory = run_dir / "tracking"
        self.identity = RunIdentity.model_validate_json((self.directory / "identity.json").read_text())
        self._position_path, self._journal_path = self.directory / "delivered.json", self.directory / "journal.jsonl"
        position = json.loads(self._position_path.read_text()) if self._position_path.exists() else {}
        self.run_id: str | None = position.get("run_id")
        self.offset: int = position.get("offset", 0)
        self.ended = _has_ended(self._journal_path, self.offset)
        """Whether the journal, as far as it has arrived, says how the run ended."""
        self._owed: list[dict[str, Any]] = position.get("owed", [])
        self._said: str | None = None
        """The status that this delivery has given the run."""
        self._client: MlflowClient | None = None

    def deliver(self) -> None:
        """Sends all complete lines; raises what the store raises, having kept what arrived."""
        if not self._journal_path.exists():
            return
        with open(self._journal_path, "rb") as journal:
            journal.seek(self.offset)
            while True:
                lines = [line for line in (journal.readline() for _ in range(_BATCH_EVENTS)) if line.endswith(b"\n")]
                if not lines:
                    break
                events = readable_events(lines)
                self._send(events)
                self._owed += [event for event in events if event["event"] in _FILES]
                self.offset += sum(len(line) for line in lines)
                self._keep_position()
                journal.seek(self.offset)
        self._send_files()

    def say(self, status: Status | str) -> None:
        if self.run_id is None or self._said == status:
            return
        if status == "RUNNING":
            self._store().update_run(self.run_id, status)
        else:
            self._store().set_terminated(self.run_id, status)
        self._said = status

    def _keep_position(self) -> None:
        position = {"run_id": self.run_id, "offset": self.offset, "owed": self._owed}
        write_json(self._position_path, position)

    def _send(self, events: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics, status = [], None
        for event in events:
            match event["event"]:
                case "start":
                    self._open_run()
                    self._send_params(event["params"], event["tags"])
                    self._send_datasets(event.get("datasets", []))
                    status = "RUNNING"
                case "params":
                    self._send_params(event["params"], {})
                case "metrics":
                    metrics += [
                        Metric(name, value, event["time_ms"], event["step"]) for name, value in event["values"].items()
                    ]
                case "end":
                    status = event["status"]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._store().log_batch(self.run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])
        if status is not None:
            self.say(status)
            self.ended = status != "RUNNING"

    def _send_params(self, values: dict[str, Any], tags: dict[str, str]) -> None:
        """What the store has under the same name stays: a parameter is set once."""
        from mlflow.entities import Param, RunTag

        known = self._store().get_run(self.run_id).data.params
        params = [Param(name, str(value)[:6000]) for name, value in values.items() if name not in known]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._store().log_batch(self.run_id, params=params[start : start + _PARAMS_AT_ONCE])
        self._store().log_batch(self.run_id, tags=[RunTag(name, value[:5000]) for name, value in tags.items()])

    def _send_datasets(self, datasets: list[dict[str, str]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(**{name: value for name, value in dataset.items() if name != "context"}),
                [InputTag("mlflow.data.context", dataset["context"])],
            )
            for dataset in datasets
        ]
        if inputs:
            self._store().log_inputs(self.run_id, datasets=inputs)

    def _send_files(self) -> None:
        """One that is gone by now (the run's folder was tidied) is owed no longer."""
        while self._owed:
            event = self._owed[0]
            if Path(event["path"]).exists():
                if event["event"] == "image":
                    self._send_image(event, Path(event["path"]).read_bytes())
                else:
                    self._store().log_artifact(self.run_id, event["path"], event["folder"] or None)
            del self._owed[0]
            self._keep_position()

    def _send_image(self, event: dict[str, Any], data: bytes) -> None:
        """As `log_image` does, but under a name that is the same each time, so that what is sent again stands once. A picture that
        is damaged would be so for ever: it is left out."""
        key, step, time_ms = event["key"].replace("/", "~"), event["step"], event["time_ms"]
        unique = uuid5(UUID(self.identity.run_key), f"{key} {step}")
        try:
            image = Image.open(BytesIO(data))
            image.load()
        except (OSError, SyntaxError, ValueError, struct.error) as error:
            print(f"{event['path']}: is damaged ({error}); it is left out", file=sys.stderr, flush=True)
            return
        with tempfile.TemporaryDirectory() as folder:
            stem = f"{key}+step+{step}+timestamp+{time_ms}+{unique}"
            image.save(Path(folder) / f"{stem}.png")
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            image.save(Path(folder) / f"{stem}+compressed.webp")
            for file in sorted(Path(folder).iterdir()):
                self._store().log_artifact(self.run_id, str(file), "images")
        self._store().set_tag(self.run_id, "mlflow.loggedImages", "True")

    def _open_run(self) -> None:
        """The run of this run key: known from before, found in the store, or new."""
        if self.run_id is not None:
            return
        store, identity = self._store(), self.identity
        experiment = store.get_experiment_by_name(identity.experiment)
        experiment_id = experiment.experiment_id if experiment else self._create_experiment()
        self.run_id = self._find(experiment_id, identity.run_key)
        if self.run_id is None:
            tags = {RUN_KEY_TAG: identity.run_key}
            parent = self._find(experiment_id, identity.parent_key) if identity.parent_key else None
            if parent is not None:
                tags["mlflow.parentRunId"] = parent
            self.run_id = store.create_run(experiment_id, run_name=identity.name, tags=tags).info.run_id
            self._said = "RUNNING"

    def _create_experiment(self) -> Any:
        uri = self.identity.uri
        beside = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" if uri.startswith("sqlite:///") else None
        location = beside.as_uri() if beside else None
        # or the page opens on its views for language models
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return self._store().create_experiment(self.identity.experiment, artifact_location=location, tags=kind)

    def _find(self, experiment_id: str, run_key: str) -> str | None:
        found = self._store().search_runs([experiment_id], f"tags.`{RUN_KEY_TAG}` = '{run_key}'", max_results=1)
        return found[0].info.run_id if found else None

    def _store(self) -> Any:
        if self._client is None:
            import logging

            from mlflow import MlflowClient

            for name in ("mlflow", "alembic"):
                logging.getLogger(name).setLevel(logging.ERROR)
            self._client = MlflowClient(tracking_uri=self.identity.uri)
        return self._client


def _has_ended(journal: Path, offset: int) -> bool:
    """Whether the last that these first bytes say of a start or an end is an end."""
    if not journal.exists():
        return False
    with open(journal, "rb") as file:
        events = [event["event"] for event in readable_events(file.read(offset).splitlines())]
    return [event for event in events if event in ("start", "end")][-1:] == ["end"]


def sync(run_dir: Path) -> int:
    """Delivers what an earlier delivery could not; returns the number of journal bytes that arrived."""
    _limit_retries()
    with sole_writer(run_dir / "tracking"):
        delivery = Delivery(run_dir)
        before = delivery.offset
        delivery.deliver()
        if not delivery.ended and not _is_held(run_dir):  # it died, and so did its deliverer
            delivery.say("FAILED")
        return delivery.offset - before


def _is_held(run_dir: Path) -> bool:
    """Whether a trainer is at work there, see run.py."""
    try:
        with sole_writer(run_dir):
            return False
    except UserError:
        return True


def deliver_while_training(run_dir: Path, trainer: IO[bytes], *, close_timeout_s: float) -> int:
    """The deliverer's whole life: until the trainer closes its end of the pipe, then until all has arrived or time is up."""
    _limit_retries()
    with sole_writer(run_dir / "tracking", wait=True):  # for the deliverer of a trainer that was killed just now
        return _deliver_until_closed(Delivery(run_dir), trainer, close_timeout_s=close_timeout_s)


def _deliver_until_closed(delivery: Delivery, trainer: IO[bytes], *, close_timeout_s: float) -> int:
    wait_s, closed_at_s, said = POLL_S, None, ""
    while True:
        if closed_at_s is not None:
            time.sleep(min(wait_s, 4.0))
        elif select.select([trainer], [], [], wait_s)[0]:  # end of file: the trainer is done, or dead
            closed_at_s, wait_s = time.monotonic(), POLL_S
        try:
            delivery.deliver()
            if not delivery.ended:
                # also where nothing is new: the one before may have said FAILED, after this trainer had started
                delivery.say("RUNNING" if closed_at_s is None else "FAILED")
            if closed_at_s is not None:
                return 0
            wait_s, said = POLL_S, ""
        except Exception as error:  # noqa: BLE001
            # whatever the store raises, the journal keeps the events, and the next round tries again
            fault = f"{type(error).__name__}: {error}"
            if fault != said:  # an outage of a day is one line
                print(f"{time.strftime('%F %T')} {fault}", file=sys.stderr, flush=True)
            said = fault
            wait_s = min(60.0, wait_s * 2)
        if closed_at_s is not None and time.monotonic() - closed_at_s > close_timeout_s:
            return 1


def _limit_retries() -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")


def _main() -> int:
    os.nice(10)  # training comes first
    for number in SIGNALS:  # SLURM sends a stop to every process of the step; this one goes on until the pipe closes
        signal.signal(number, signal.SIG_IGN)
    run_dir = Path(sys.argv[1])
    log = open(run_dir / "tracking" / "delivery.log", "a", encoding="utf-8")
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    return deliver_while_training(run_dir, sys.stdin.buffer, close_timeout_s=float(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(_main())
