"""The trainer's side of tracking: events go into the run's event log, and no call waits for a disk
or a network.

    RUN/tracking/identity.json      identity of the run in every tracking database
    RUN/tracking/journal.jsonl      the event log, one event a line
    RUN/tracking/pictures/          images
    RUN/tracking/delivered.json     position of the delivery, which runs in its own process
    RUN/tracking/delivery.log       faults of the delivery

1. A deliverer (delivery.py) runs until the trainer closes the pipe and all events have arrived. If
   it dies, it is started again after a minute.
2. Lines are written in the order in which the calls came, from all threads. If the disk takes no
   lines (full, read-only, gone), they wait in memory. A write that stopped within a line continues
   at that byte, so only the last line can be incomplete.
3. Each start continues in a copy of the file without the incomplete last line of a killed start. An
   earlier start that wakes up appends to a file that has no name any more.

The events: start (params, tags, datasets), params (and tags), metrics, artifact, image, version,
end. Each has its time, so a repeated delivery changes nothing.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
RESTART_S = 60.0
"""Pause before a deliverer that has died is started again."""
STUCK_S = 10.0
"""How much longer than its own time limit a deliverer may take before it is ended."""
DRAWING_S = 10.0
"""How long the end of a run waits for its last pictures, and for a disk that does not take its last
lines."""

SYNC_S = 10.0
"""How long a checkpoint waits for lines of the journal that the disk does not take."""
JOURNAL_RETRY_S, JOURNAL_WARN_AGAIN_S = 1.0, 600.0
"""How often a disk that takes no lines is tried again, and how often that is reported."""


class RunIdentity(Settings):
    """Who a run is, in any store: written once into the run directory."""

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
        """The parent is the run in `parent_dir`, else whoever has `parent_key`. A child that is
        given no store goes to that of its parent, or nobody would see it there."""
        known = RunIdentity.known(run_dir)
        if known is not None:
            return known
        parent = RunIdentity.known(parent_dir) if parent_dir else None
        named = without_secrets(
            os.environ.get("MLFLOW_TRACKING_URI", ""), field="MLFLOW_TRACKING_URI", remedy=OF_SERVER
        )
        store = uri or named or (parent.uri if parent else None)
        identity = RunIdentity(
            run_key=uuid4().hex,
            name=run_dir.name,
            experiment=experiment,
            uri=store or f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}",
            parent_key=parent.run_key if parent else parent_key,
        )
        path = run_dir / IDENTITY
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, identity.model_dump(mode="json"))
        return identity

    @staticmethod
    def known(run_dir: Path) -> "RunIdentity | None":
        """Return the identity of a run; None if the run has not begun."""
        return RunIdentity.read(run_dir) if (run_dir / IDENTITY).exists() else None

    @staticmethod
    def read(run_dir: Path) -> "RunIdentity":
        path = run_dir / IDENTITY
        try:
            return RunIdentity.model_validate_json(path.read_bytes())
        except ValidationError:
            raise UserError(
                str(path),
                "the file is damaged",
                "restore or remove it; without it, tracking shows the run as a new one",
                code="damaged",
            ) from None


class Tracker:
    """Without a run directory (other ranks) every call is a no-op. Any thread may call. Where
    tracking is not enabled the journal is all: no deliverer, and no pictures."""

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
            words = [str(run_dir), str(close_timeout_s), ",".join(settings.sinks)]
            self._deliverer = _Deliverer(run_dir, words, close_timeout_s=close_timeout_s)

    def params(self, values: dict[str, Any], *, tags: Mapping[str, str] | None = None) -> None:
        """What became known after the start; a tag may change later."""
        self._append({"event": "params", "params": values, "tags": dict(tags or {})})

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        """Values that the journal has for this step already (a resumed run walks it again) are left
        out."""
        with self._lock:
            fresh = {name: value for name, value in values.items() if self._is_new(name, step)}
            if fresh:
                self._append({"event": "metrics", "step": step, "values": fresh})

    def system(self, values: dict[str, float], *, node: str | None = None) -> None:
        """A node's figures under the names by which MLflow knows them; their step is their
        number."""
        prefix = f"system/{node}/" if node else "system/"
        named = {prefix + name: value for name, value in values.items()}
        with self._lock:
            if self._journal is not None and named:
                self.metrics(
                    named, step=1 + max(self._journal.last_steps.get(name, -1) for name in named)
                )

    def sample_system(
        self, sample: Callable[[], dict[str, float]], *, node: str | None = None
    ) -> None:
        """Logs this node's figures every few seconds, until the end."""
        if self._journal is None:
            return

        def keep_reporting() -> None:
            while not self._closing.wait(EVERY_S):
                self.system(sample(), node=node)

        self._start(keep_reporting)

    def artifact(self, path: Path, *, folder: str = "") -> None:
        self._append({"event": "artifact", "path": str(path.resolve()), "folder": folder})

    def picture(self, key: str, draw: Callable[[], Image.Image], *, step: int) -> None:
        """Drawn by a thread while training goes on; a picture of this step that the journal has
        already is left out."""
        with self._lock:
            if self._deliverer is None or not self._is_new(image_name(key), step):
                return

        def draw_and_report() -> None:
            path = self.run_dir / "tracking" / "pictures" / f"{key}-{step:08d}.png"
            try:
                save_sheet(draw(), path)
            except (OSError, UserError) as error:
                print(
                    f"tracking: {path}: cannot be written ({error}). Training continues without it",
                    file=sys.stderr,
                )
            else:
                self._append(
                    {"event": "image", "path": str(path.resolve()), "key": key, "step": step}
                )

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
        """What has been found out about a checkpoint: it becomes a version of the registered model
        of that name."""
        event = {
            "model": model,
            "path": str((checkpoint / CONFIG).resolve()),
            "checkpoint": str(checkpoint.resolve()),
        }
        self._append(
            {
                "event": "version",
                "weights_sha256": weights_sha256,
                "parent_key": parent_key,
                "tags": tags,
            }
            | event
        )

    def sync(self) -> None:
        """Bring the journal to disk, before a checkpoint is published: a resume logs only the steps
        after that checkpoint."""
        journal = self._journal
        if journal is not None:
            journal.sync(timeout_s=SYNC_S)

    def close(self, status: Status) -> None:
        """Logs how the run ended, and gives delivery a while to finish."""
        self._closing.set()
        self._join()
        self._append({"event": "end", "status": status})
        with self._lock:
            journal, self._journal = self._journal, None
        if journal is None:
            return
        if not journal.close(timeout_s=DRAWING_S):
            print(
                f"tracking: {journal.path} could not take its last lines; they are lost",
                file=sys.stderr,
            )
        if self._deliverer is not None and (end := self._deliverer.close()) != "":
            print(
                f"tracking: MLflow has not received everything yet (the deliverer ended with {end};"
                f" see {self._deliverer.log}); later: pretrain sync {self.run_dir}",
                file=sys.stderr,
            )

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._journal is not None:
                self._journal.append(event)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(DRAWING_S)

    def _is_new(self, name: str, step: int) -> bool:
        """Whether the journal has no later or equal step of it; it has from now on. The caller
        holds the lock."""
        if self._journal is None or step <= self._journal.last_steps.get(name, -1):
            return False
        self._journal.last_steps[name] = step
        return True

    def _start(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=work, name="tracking", daemon=True))
            self._threads[-1].start()


class _Deliverer:
    """The process that delivers, and the thread that starts it again if it dies: training does not
    wait for the disk that a program is read from."""

    def __init__(self, run_dir: Path, words: list[str], *, close_timeout_s: float):
        self.log = run_dir / "tracking" / "delivery.log"
        self._words, self._close_timeout_s = words, close_timeout_s
        self._read_end, self._write_end = os.pipe()  # the processes get the same read end
        self._closing = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="tracking", daemon=True)
        self._thread.start()

    def close(self) -> str:
        """Tell the deliverer that the trainer has ended, and wait for it. Returns how the process
        ended; an empty text if everything has arrived."""
        self._closing.set()
        os.close(self._write_end)
        self._thread.join(self._close_timeout_s + STUCK_S)
        process = self.process
        if process is not None and self._thread.is_alive():
            process.kill()  # it is stuck in the client of the database
            self._thread.join(STUCK_S)
            return "no answer of the database"
        os.close(self._read_end)
        if process is None:
            return "no start"
        return describe(process.returncode) if process.returncode != 0 else ""

    def _keep_running(self) -> None:
        # SLURM sends a stop to every process of the step; the process inherits this mask
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        without = ("RANK", "LOCAL_RANK")
        environment = {name: text for name, text in os.environ.items() if name not in without}
        has_warned = False
        while True:
            with suppress(OSError):  # a machine that can start nothing now may do so in a minute
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
                    f"tracking: the deliverer has ended ({describe(self.process.returncode)}; see"
                    f" {self.log}) and is started again, at most once a minute",
                    file=sys.stderr,
                )
            if self._closing.wait(RESTART_S):
                return


class Journal:
    """The event log, and the thread that appends to it."""

    def __init__(self, path: Path):
        self.path = path
        found = path.read_bytes() if path.exists() else b""
        whole = found[: found.rfind(b"\n") + 1]  # a line cut by a kill is no line
        with atomic_file(path) as file:
            file.write(whole)
            file.flush()
            self._descriptor = os.dup(file.fileno())
        self.last_steps: dict[str, int] = {}
        """Of each metric and picture, from earlier starts."""
        for event in readable_events(whole.splitlines()):
            if event["event"] == "metrics":
                self.last_steps.update(dict.fromkeys(event["values"], event["step"]))
            elif event["event"] == "image":
                self.last_steps[image_name(event["key"])] = event["step"]
        self._waiting = bytearray()
        self._changed, self._closing = threading.Condition(), False
        self._warned_s: float | None = None
        """When it was last reported that the disk takes no lines; None: it does."""
        self._writer = threading.Thread(
            target=self._write_until_closed, name="journal", daemon=True
        )
        self._writer.start()
        atexit.register(
            self.close, timeout_s=2.0
        )  # a process that forgets to close has still said what it knew

    def append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event | {"time_ms": int(time.time() * 1000)}).encode() + b"\n"
        with self._changed:
            self._waiting += line
            self._changed.notify_all()

    def sync(self, *, timeout_s: float) -> None:
        """Bring all lines to disk, unless the disk refuses them or needs longer than
        `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
        with suppress(OSError):
            os.fsync(self._descriptor)

    def close(self, *, timeout_s: float) -> bool:
        """Whether all lines are in the file now."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(timeout_s)
        atexit.unregister(self.close)
        with self._changed:
            return not self._waiting

    def _write_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                lines = bytes(self._waiting)
            try:
                written = os.write(
                    self._descriptor, lines
                )  # perhaps not all of it: the rest goes next
            except OSError as error:
                if (
                    self._warned_s is None
                    or time.monotonic() - self._warned_s > JOURNAL_WARN_AGAIN_S
                ):
                    self._warned_s = time.monotonic()
                    how = (
                        f"cannot be written ({cause_of(error)}); training goes on, the lines wait"
                        " in memory"
                    )
                    print(f"tracking: {self.path} {how}", file=sys.stderr)
                time.sleep(JOURNAL_RETRY_S)
                continue
            with self._changed:
                del self._waiting[:written]
                self._changed.notify_all()
            if self._warned_s is not None and written == len(lines):
                self._warned_s = None
                print(f"tracking: {self.path} is written again, nothing was lost", file=sys.stderr)
        os.close(self._descriptor)


def readable_events(lines: list[bytes]) -> list[dict[str, Any]]:
    """The events of the journal's lines; one that a crash of the machine has garbled is worth a
    word, not the run."""
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            print(
                f"tracking: a damaged line of the journal is left out: {line[:60]!r}",
                file=sys.stderr,
            )
    return events


def image_name(key: str) -> str:
    """What a picture is called among the last steps, where metrics have their own names."""
    return f"image:{key}"
