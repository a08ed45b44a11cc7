"""Tracking in the trainer: events go into the run's event log, and no call waits for a disk or a
network.

    RUN/tracking/identity.json      identity of the run in every tracking database
    RUN/tracking/journal.jsonl      the event log, one event a line
    RUN/tracking/pictures/          images

1. A delivery process (delivery.py) runs until the trainer closes the pipe to it and all events have
   arrived. If the process dies, it is restarted after a minute.
2. Lines are written in the order of the calls from all threads. If the disk accepts no lines (full,
   read-only, lost), they wait in memory. A write that stopped within a line continues at that byte,
   so only the last line can be incomplete.
3. Each attempt continues in a copy of the file without the incomplete last line of a killed
   attempt.

Events are start (params, tags, datasets), params (and tags), metrics, artifact, image, version, and
end.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from PIL import Image
from pydantic import ValidationError

from data_prep.clients import without_secrets
from data_prep.errors import UserError
from data_prep.images.sheet import save_sheet
from data_prep.limits import cause_of
from data_prep.publish import atomic_file, write_json
from data_prep.settings import Settings
from pretrain.checkpoints.card import CONFIG
from pretrain.config import OF_SERVER, TrackingSettings
from pretrain.ranks.launch import describe
from pretrain.ranks.preemption import SIGNALS
from pretrain.tracking.node import EVERY_S

Status = Literal["FINISHED", "FAILED", "KILLED"]

IDENTITY = Path("tracking") / "identity.json"
JOURNAL = Path("tracking") / "journal.jsonl"
DELIVERY_LOG = Path("tracking") / "delivery.log"
RESTART_S = 60.0
"""Seconds before a failed delivery process is restarted."""
STUCK_S = 10.0
"""Seconds by which a delivery process may exceed its own time limit before it is killed."""
DRAWING_S = 10.0
"""Limit in seconds for the last images and the last lines at the end of a run."""
SYNC_S = 10.0
"""Seconds that a checkpoint waits if the disk does not accept lines of the log."""
JOURNAL_RETRY_S = 1.0
"""Seconds between a failed write and the next try."""


class RunIdentity(Settings):
    """Identity of a run in every database, written once into the run directory."""

    run_key: str
    name: str
    experiment: str
    uri: str
    parent_key: str | None = None

    @staticmethod
    def of(
        run_dir: Path,
        *,
        experiment: str,
        uri: str | None,
        parent_key: str | None = None,
        parent_dir: Path | None = None,
    ) -> "RunIdentity":
        """Return the identity of a run, and create it if it is missing. The parent is the run in
        `parent_dir`, otherwise the run with `parent_key`. Without `uri` and MLFLOW_TRACKING_URI,
        the run uses the database of `parent_dir`."""
        known = RunIdentity.known(run_dir)
        if known is not None:
            return known
        parent = RunIdentity.known(parent_dir) if parent_dir else None
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        named = without_secrets(server, field="MLFLOW_TRACKING_URI", remedy=OF_SERVER)
        store = uri or named or (parent.uri if parent else None)
        identity = RunIdentity(
            run_key=uuid4().hex,
            name=run_dir.name,
            experiment=experiment,
            uri=store or f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}",
            parent_key=parent.run_key if parent else parent_key,
        )
        (run_dir / "tracking").mkdir(parents=True, exist_ok=True)
        write_json(run_dir / IDENTITY, identity.model_dump(mode="json"))
        return identity

    @staticmethod
    def known(run_dir: Path) -> "RunIdentity | None":
        """Return the identity of a run, or None if the run has not begun."""
        return RunIdentity.read(run_dir) if (run_dir / IDENTITY).exists() else None

    @staticmethod
    def read(run_dir: Path) -> "RunIdentity":
        path = run_dir / IDENTITY
        try:
            return RunIdentity.model_validate_json(path.read_bytes())
        except ValidationError:
            fix = "restore or remove it; without the file, tracking shows a new run"
            raise UserError(str(path), "the file is damaged", fix, code="damaged") from None


class Tracker:
    """The tracking of a run, for all threads. If `run_dir` is None, calls do nothing. If
    `settings.enabled` is false, there is only the event log."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        params: dict[str, Any],
        tags: dict[str, str],
        datasets: tuple[dict[str, str], ...] = (),
        close_timeout_s: float = 20.0,
        settings: TrackingSettings = TrackingSettings(),  # noqa: B008 (frozen)
    ):
        self._journal: Journal | None = None
        self._deliverer: _Deliverer | None = None
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._threads = list[threading.Thread]()
        if run_dir is None:
            return
        self.run_dir = run_dir
        self._journal = Journal(run_dir / JOURNAL)
        self._append({"event": "start", "params": params, "tags": tags, "datasets": [*datasets]})
        if settings.enabled:
            self._deliverer = _Deliverer(run_dir, close_timeout_s, settings.sinks)

    def params(self, values: dict[str, Any], *, tags: Mapping[str, str] | None = None) -> None:
        """Log parameters that became known after the start. A tag may change later."""
        self._append({"event": "params", "params": values, "tags": dict(tags or {})})

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        """Log metrics, unless the log has them for this or a later step: a resumed run repeats
        steps."""
        with self._lock:
            fresh = {name: value for name, value in values.items() if self._is_new(name, step)}
            if fresh:
                self._append({"event": "metrics", "step": step, "values": fresh})

    def system(self, values: dict[str, float], *, node: str | None = None) -> None:
        """Log the metrics of a node under MLflow's names. The step is the number of the sample."""
        prefix = f"system/{node}/" if node else "system/"
        named = {prefix + name: value for name, value in values.items()}
        with self._lock:
            if self._journal is not None and named:
                last = max(self._journal.last_steps.get(name, -1) for name in named)
                self.metrics(named, step=last + 1)

    def sample_system(
        self, sample: Callable[[], dict[str, float]], *, node: str | None = None
    ) -> None:
        """Log the metrics of this node every few seconds, until the end."""

        def keep_sampling() -> None:
            while not self._closing.wait(EVERY_S):
                self.system(sample(), node=node)

        if self._journal is not None:
            self._start(keep_sampling)

    def artifact(self, path: Path, *, folder: str = "") -> None:
        self._append({"event": "artifact", "path": str(path.resolve()), "folder": folder})

    def picture(self, key: str, draw: Callable[[], Image.Image], *, step: int) -> None:
        """Draw an image in the background, unless the log has it for this step."""
        with self._lock:
            if self._deliverer is None or not self._is_new(image_name(key), step):
                return

        def draw_and_report() -> None:
            path = self.run_dir / "tracking" / "pictures" / f"{key}-{step:08d}.png"
            try:
                save_sheet(draw(), path)
            except (OSError, UserError) as error:
                problem = f"cannot be written ({error}). Training continues without the image"
                print(f"tracking: {path}: {problem}", file=sys.stderr)
            else:
                place = str(path.resolve())
                self._append({"event": "image", "path": place, "key": key, "step": step})

        self._start(draw_and_report)

    def version(
        self,
        model: str,
        *,
        checkpoint: Path,
        weights_sha256: str,
        parent_key: str,
        tags: dict[str, str],
    ) -> None:
        """Register a checkpoint as a version of the model, with its results as tags."""
        event: dict[str, Any] = {"event": "version", "model": model}
        event["weights_sha256"] = weights_sha256
        place = {
            "path": str((checkpoint / CONFIG).resolve()),
            "checkpoint": str(checkpoint.resolve()),
        }
        self._append(event | place | {"parent_key": parent_key, "tags": tags})

    def sync(self) -> None:
        """Write the event log to disk before a checkpoint is published: a resume logs only the
        steps after that checkpoint."""
        journal = self._journal
        if journal is not None:
            journal.sync(timeout_s=SYNC_S)

    def close(self, status: Status) -> None:
        """Log the end of the run, and wait a limited time for the delivery."""
        self._closing.set()
        for thread in self._threads:
            thread.join(DRAWING_S)
        self._append({"event": "end", "status": status})
        with self._lock:
            journal, self._journal = self._journal, None
        if journal is None:
            return
        if not journal.close(timeout_s=DRAWING_S):
            print(
                f"tracking: {journal.path}: the last lines could not be written and are lost",
                file=sys.stderr,
            )
        if self._deliverer is not None and (end := self._deliverer.close()) != "":
            print(
                f"tracking: MLflow has not received all events (the delivery ended with {end}; see"
                f" {self._deliverer.log}). Send them later: pretrain sync {self.run_dir}",
                file=sys.stderr,
            )

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._journal is not None:
                self._journal.append(event)

    def _is_new(self, name: str, step: int) -> bool:
        """Record the step and return True if it is later than all logged steps of `name`. The
        caller must hold the lock."""
        if self._journal is None or step <= self._journal.last_steps.get(name, -1):
            return False
        self._journal.last_steps[name] = step
        return True

    def _start(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=work, name="tracking", daemon=True))
            self._threads[-1].start()


class _Deliverer(threading.Thread):
    """The delivery process, and the thread that starts it and restarts it after a crash."""

    def __init__(self, run_dir: Path, close_timeout_s: float, sinks: Sequence[str]):
        super().__init__(name="tracking", daemon=True)
        self.log = run_dir / DELIVERY_LOG
        self._words = [str(run_dir), str(close_timeout_s), ",".join(sinks)]
        self._close_timeout_s = close_timeout_s
        self._read_end, self._write_end = os.pipe()  # the processes get the same read end
        self._closing = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def close(self) -> str:
        """Tell the delivery process that the trainer has ended, and wait for the process. Return
        the reason if it failed, or "" if all data arrived."""
        self._closing.set()
        os.close(self._write_end)
        self.join(self._close_timeout_s + STUCK_S)
        process = self.process
        if process is not None and self.is_alive():
            process.kill()  # it hangs in the client of the database
            self.join(STUCK_S)
            return "no reply from the database"
        os.close(self._read_end)
        if process is None:
            return "no start"
        return describe(process.returncode) if process.returncode != 0 else ""

    def run(self) -> None:
        # SLURM signals every process of a job step; the process inherits this mask
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        without = ("RANK", "LOCAL_RANK")
        environment = {name: text for name, text in os.environ.items() if name not in without}
        has_warned = False
        while True:
            with suppress(OSError):  # a machine that cannot start a process may do so in a minute
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "pretrain.tracking.delivery", *self._words],
                    stdin=self._read_end,
                    start_new_session=True,  # Ctrl-C is for the trainer, which closes the pipe
                    env=environment,
                )
                self.process.wait()
            if self._closing.is_set():
                return
            if not has_warned and self.process is not None and self.process.returncode != 0:
                has_warned = True
                print(
                    "tracking: the process that sends metrics to MLflow failed"
                    f" ({describe(self.process.returncode)}; see {self.log}). It is restarted at"
                    " most once a minute, and no metric is lost",
                    file=sys.stderr,
                )
            if self._closing.wait(RESTART_S):
                return


class Journal:
    """The event log, and the thread that appends to it."""

    def __init__(self, path: Path):
        self.path = path
        found = path.read_bytes() if path.exists() else b""
        lines = found[: found.rfind(b"\n") + 1]
        with atomic_file(path) as file:
            file.write(lines)
            file.flush()
            self._descriptor = os.dup(file.fileno())
        self.last_steps: dict[str, int] = {}
        """Last step of each metric and image."""
        for event in readable_events(lines.splitlines()):
            if event["event"] == "metrics":
                self.last_steps.update(dict.fromkeys(event["values"], event["step"]))
            elif event["event"] == "image":
                self.last_steps[image_name(event["key"])] = event["step"]
        self._waiting = bytearray()
        self._changed, self._closing = threading.Condition(), False
        self._writer = threading.Thread(target=self._write_lines, name="journal", daemon=True)
        self._writer.start()
        atexit.register(self.close, timeout_s=2.0)  # for a process that ends without `close`

    def append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event | {"time_ms": int(time.time() * 1000)}).encode() + b"\n"
        with self._changed:
            self._waiting += line
            self._changed.notify_all()

    def sync(self, *, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all lines are written, then sync the file."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
        with suppress(OSError):
            os.fsync(self._descriptor)

    def close(self, *, timeout_s: float) -> bool:
        """Close the log. Return True if all lines are in the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(timeout_s)
        atexit.unregister(self.close)
        with self._changed:
            return not self._waiting

    def _write_lines(self) -> None:
        has_warned = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                lines = bytes(self._waiting)
            try:
                num_written = os.write(self._descriptor, lines)  # the next pass writes the rest
            except OSError as error:
                if not has_warned:
                    has_warned = True
                    problem = f"cannot be written ({cause_of(error)})"
                    fix = "Training continues, and the lines wait in memory"
                    print(f"tracking: {self.path} {problem}. {fix}", file=sys.stderr)
                time.sleep(JOURNAL_RETRY_S)
                continue
            with self._changed:
                del self._waiting[:num_written]
                self._changed.notify_all()
            if has_warned and num_written == len(lines):
                has_warned = False
                print(
                    f"tracking: {self.path} can be written again; nothing was lost", file=sys.stderr
                )
        os.close(self._descriptor)


def readable_events(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the events of the lines. Skip a line that a crash of the machine damaged."""
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            print(f"tracking: skipped a damaged line of the log: {line[:60]!r}", file=sys.stderr)
    return events


def image_name(key: str) -> str:
    """Return the key of an image in `last_steps`, which also has metrics."""
    return f"image:{key}"
