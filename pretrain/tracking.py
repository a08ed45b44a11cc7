"""MLflow, at arm's length: the only file that imports mlflow, and training never waits for it.

The first rank appends every event to a journal in the run directory. A separate process delivers the journal to the MLflow store:
its imports, retries and stalls cost training nothing, and a dead server costs nothing but time, because what was not delivered
stays in the journal and goes out when the run is resumed or `pretrain sync RUN_DIR` is called.

    RUN/tracking/journal.jsonl      one event a line: start, metrics, artifact, end
    RUN/tracking/delivered.json     run id and how many bytes of the journal have arrived
    RUN/tracking/delivery.log       what went wrong on the way

Delivery is idempotent: metrics carry the journal's times, so a batch that is sent twice stands once. A run that is resumed goes on
in the same MLflow run, and steps that the journal already has are not written again. When the trainer dies without an `end` event
(the pipe to it closes), the deliverer says FAILED in its place.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from uuid import uuid4

from data_prep.publish import sole_writer, write_json
from data_prep.settings import Settings
from pretrain.preemption import SIGNALS

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["FINISHED", "FAILED", "KILLED"]

RUN_KEY_TAG = "wide_mlps.run_key"
POLL_S = 1.0
STUCK_S = 10.0
"""How much longer than its own time limit a deliverer may take before it is ended."""
_BATCH_EVENTS = 200


class RunIdentity(Settings):
    """Who a run is, in any store: written once into the run directory."""

    run_key: str
    name: str
    experiment: str
    uri: str
    parent_key: str | None = None

    @staticmethod
    def of(run_dir: Path, *, experiment: str, uri: str | None, parent_key: str | None = None) -> "RunIdentity":
        path = run_dir / "tracking" / "identity.json"
        if path.exists():
            return RunIdentity.model_validate_json(path.read_text())
        store = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        identity = RunIdentity(
            run_key=uuid4().hex, name=run_dir.name, experiment=experiment, uri=store, parent_key=parent_key
        )
        write_json(path, identity.model_dump(mode="json"))
        return identity


class Tracker:
    """The trainer's side. Without a run directory (other ranks, tracking off) every call is a no-op."""

    def __init__(
        self, run_dir: Path | None, *, params: dict[str, Any], tags: dict[str, str], close_timeout_s: float = 20.0
    ):
        self._journal: IO[str] | None = None
        if run_dir is None:
            return
        self.run_dir, self._close_timeout_s = run_dir, close_timeout_s
        path = run_dir / "tracking" / "journal.jsonl"
        self._last_steps = _mend(path)
        self._journal = open(path, "a", encoding="utf-8")
        self._write({"event": "start", "params": params, "tags": tags})
        self._deliverer = subprocess.Popen(
            [sys.executable, "-m", "pretrain.tracking", str(run_dir), str(close_timeout_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the trainer's business; it closes the pipe when it is done
            env={name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")},
        )

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        """Values that the journal has for this step already (a resumed run walks it again) are left out."""
        if self._journal is None:
            return
        fresh = {name: value for name, value in values.items() if step > self._last_steps.get(name, -1)}
        self._last_steps.update(dict.fromkeys(fresh, step))
        if fresh:
            self._write({"event": "metrics", "step": step, "values": fresh})

    def artifact(self, path: Path, *, folder: str = "") -> None:
        if self._journal is not None:
            self._write({"event": "artifact", "path": str(path.resolve()), "folder": folder})

    def close(self, status: Status) -> None:
        """Says how the run ended and gives delivery a while to finish."""
        if self._journal is None:
            return
        self._write({"event": "end", "status": status})
        self._journal.close()
        self._journal = None
        assert self._deliverer.stdin is not None
        self._deliverer.stdin.close()
        try:
            code = self._deliverer.wait(self._close_timeout_s + STUCK_S)
        except subprocess.TimeoutExpired:
            self._deliverer.kill()  # stuck in the store's client; what it has not confirmed stays in the journal
            code = self._deliverer.wait()
        if code != 0:
            log = self.run_dir / "tracking" / "delivery.log"
            print(
                f"tracking: MLflow has not got everything yet ({log}); later: pretrain sync {self.run_dir}",
                file=sys.stderr,
            )

    def _write(self, event: dict[str, Any]) -> None:
        assert self._journal is not None
        self._journal.write(json.dumps(event | {"time_ms": int(time.time() * 1000)}) + "\n")
        self._journal.flush()


def _mend(path: Path) -> dict[str, int]:
    """The last step of each metric in a journal left by an earlier start; a line cut by a kill is removed."""
    if not path.exists():
        return {}
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    with open(path, "r+b") as file:
        file.truncate(len(whole))
    last: dict[str, int] = {}
    for event in readable_events(whole.splitlines()):
        if event["event"] == "metrics":
            last.update(dict.fromkeys(event["values"], event["step"]))
    return last


def readable_events(lines: list[bytes]) -> list[dict[str, Any]]:
    """The events of the journal's lines; one that a crash of the machine has garbled is worth a word, not the run."""
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            print(f"tracking: a damaged line of the journal is left out: {line[:60]!r}", file=sys.stderr)
    return events


# ---- delivery: everything below runs in a process of its own -------------------------------------------------------


class Delivery:
    """Carries the journal of one run to its store, from where the last delivery stopped."""

    def __init__(self, run_dir: Path):
        self.directory = run_dir / "tracking"
        self.identity = RunIdentity.model_validate_json((self.directory / "identity.json").read_text())
        self._position_path = self.directory / "delivered.json"
        position = json.loads(self._position_path.read_text()) if self._position_path.exists() else {}
        self.run_id: str | None = position.get("run_id")
        self.offset: int = position.get("offset", 0)
        self.ended = False
        self._client: MlflowClient | None = None

    def pending(self) -> bool:
        return self.offset < (self.directory / "journal.jsonl").stat().st_size

    def deliver(self) -> None:
        """Sends all complete lines; raises what the store raises, having kept what arrived."""
        with open(self.directory / "journal.jsonl", "rb") as journal:
            journal.seek(self.offset)
            while True:
                lines = [line for line in (journal.readline() for _ in range(_BATCH_EVENTS)) if line.endswith(b"\n")]
                if not lines:
                    return
                self._send(readable_events(lines))
                self.offset += sum(len(line) for line in lines)
                write_json(self._position_path, {"run_id": self.run_id, "offset": self.offset})
                journal.seek(self.offset)

    def end(self, status: Status) -> None:
        if self.run_id is not None:
            self._store().set_terminated(self.run_id, status)

    def go_on(self) -> None:
        if self.run_id is not None:
            self._store().update_run(self.run_id, "RUNNING")
            self.ended = False

    def _send(self, events: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics, status = [], None
        for event in events:
            match event["event"]:
                case "start":
                    self._open_run()
                    known = self._store().get_run(self.run_id).data.params
                    params = [
                        Param(name, str(value)[:6000]) for name, value in event["params"].items() if name not in known
                    ]
                    tags = [RunTag(name, value) for name, value in event["tags"].items()]
                    self._store().log_batch(self.run_id, params=params, tags=tags)
                    status = "RUNNING"
                case "metrics":
                    metrics += [
                        Metric(name, value, event["time_ms"], event["step"]) for name, value in event["values"].items()
                    ]
                case "artifact":
                    if Path(event["path"]).exists():
                        self._store().log_artifact(self.run_id, event["path"], event["folder"] or None)
                case "end":
                    status = event["status"]
        for start in range(0, len(metrics), 1000):
            self._store().log_batch(self.run_id, metrics=metrics[start : start + 1000])
        if status == "RUNNING":
            self.go_on()
        elif status is not None:
            self._store().set_terminated(self.run_id, status)
            self.ended = True

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


def sync(run_dir: Path) -> int:
    """Delivers what an earlier delivery could not; returns the number of journal bytes that arrived."""
    _limit_retries()
    with sole_writer(run_dir / "tracking"):
        delivery = Delivery(run_dir)
        before = delivery.offset
        delivery.deliver()
        return delivery.offset - before


def deliver_while_training(run_dir: Path, trainer: IO[bytes], *, close_timeout_s: float) -> int:
    """The deliverer's whole life: until the trainer closes its end of the pipe, then until all has arrived or time is up."""
    _limit_retries()
    with sole_writer(run_dir / "tracking", wait=True):  # for the deliverer of a trainer that was killed just now
        return _deliver_until_closed(Delivery(run_dir), trainer, close_timeout_s=close_timeout_s)


def _deliver_until_closed(delivery: Delivery, trainer: IO[bytes], *, close_timeout_s: float) -> int:
    wait_s, closed_at_s, announced = POLL_S, None, False
    while True:
        ready, _, _ = select.select([trainer], [], [], 0.2 if closed_at_s else wait_s)
        if ready and closed_at_s is None:  # end of file: the trainer is done, or dead
            closed_at_s = time.monotonic()
        try:
            delivery.deliver()
            if not announced and not delivery.ended:
                delivery.go_on()  # the one before may have said FAILED, after this trainer had started
            wait_s, announced = POLL_S, True
        except Exception as error:  # noqa: BLE001
            # whatever the store raises, the journal keeps the events, and the next round tries again
            print(f"{time.strftime('%F %T')} {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            wait_s = min(60.0, wait_s * 2)
        if closed_at_s is not None:
            if not delivery.pending():
                if not delivery.ended:
                    delivery.end("FAILED")
                return 0
            if time.monotonic() - closed_at_s > close_timeout_s:
                return 1


def _limit_retries() -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")


def _main() -> int:
    for number in SIGNALS:  # SLURM sends a stop to every process of the step; this one goes on until the pipe closes
        signal.signal(number, signal.SIG_IGN)
    run_dir = Path(sys.argv[1])
    log = open(run_dir / "tracking" / "delivery.log", "a", encoding="utf-8")
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    return deliver_while_training(run_dir, sys.stdin.buffer, close_timeout_s=float(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(_main())
