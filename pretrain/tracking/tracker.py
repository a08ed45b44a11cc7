"""The trainer's side of tracking: what is worth knowing goes into the run's journal, and no call waits for a disk or a network.

    RUN/tracking/identity.json      who the run is, in any store
    RUN/tracking/journal.jsonl      see journal.py
    RUN/tracking/pictures/          what was drawn
    RUN/tracking/delivered.json     see delivery.py, which runs in a process of its own and carries the journal to MLflow
    RUN/tracking/delivery.log       what went wrong on the way

The deliverer lives as long as the pipe to it is open. When that closes without an `end` event, the trainer has died: FAILED. One
that dies itself (killed, its disk full for a while) is started again with the next event, at most once a minute.
"""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from PIL import Image

from data_prep.images.sheet import save_sheet
from data_prep.publish import workspace_of, write_json
from data_prep.settings import Settings
from pretrain.checkpoints.card import CONFIG
from pretrain.ranks.launch import describe
from pretrain.tracking.journal import Journal, image_name
from pretrain.tracking.system_metrics import EVERY_S

Status = Literal["FINISHED", "FAILED", "KILLED"]

IDENTITY = Path("tracking") / "identity.json"
RESTART_S = 60.0
"""How long after its start a deliverer that has died is started again."""
STUCK_S = 10.0
"""How much longer than its own time limit a deliverer may take before it is ended."""
DRAWING_S = 10.0
"""How long the end of a run waits for its last pictures, and for a disk that does not take its last lines."""


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
        """The parent is the run in `parent_dir`, else whoever has `parent_key`. A child that is given no store goes to that
        of its parent, or nobody would see it there."""
        known = RunIdentity.known(run_dir)
        if known is not None:
            return known
        parent = RunIdentity.known(parent_dir) if parent_dir else None
        store = uri or os.environ.get("MLFLOW_TRACKING_URI") or (parent.uri if parent else None)
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
        """That of a run that has been begun."""
        path = run_dir / IDENTITY
        return RunIdentity.model_validate_json(path.read_text()) if path.exists() else None


class Tracker:
    """Without a run directory (other ranks, tracking off) every call is a no-op. Any thread may call."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        params: dict[str, Any],
        tags: dict[str, str],
        datasets: tuple[dict[str, str], ...] = (),
        close_timeout_s: float = 20.0,
    ):
        self._journal: Journal | None = None
        self._lock, self._closing, self._threads = threading.RLock(), threading.Event(), list[threading.Thread]()
        if run_dir is None:
            return
        self.run_dir, self._close_timeout_s = run_dir, close_timeout_s
        self._log, self._has_told = run_dir / "tracking" / "delivery.log", False
        self._journal = Journal(run_dir / "tracking" / "journal.jsonl")
        self._journal.append({"event": "start", "params": params, "tags": tags, "datasets": list(datasets)})
        self._started_s = time.monotonic()
        self._deliverer, self._log_start = self._new_deliverer()

    def params(self, values: dict[str, Any]) -> None:
        """What became known after the start."""
        self._say({"event": "params", "params": values})

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        """Values that the journal has for this step already (a resumed run walks it again) are left out."""
        with self._lock:
            fresh = {name: value for name, value in values.items() if self._is_new(name, step)}
            if fresh:
                self._say({"event": "metrics", "step": step, "values": fresh})

    def system(self, values: dict[str, float], *, node: str | None = None) -> None:
        """A node's figures under the names by which MLflow knows them; their step is their number."""
        prefix = f"system/{node}/" if node else "system/"
        named = {prefix + name: value for name, value in values.items()}
        with self._lock:
            if self._journal is not None and named:
                self.metrics(named, step=1 + max(self._journal.last_steps.get(name, -1) for name in named))

    def sample_system(self, sample: Callable[[], dict[str, float]], *, node: str | None = None) -> None:
        """Tells this node's figures every few seconds, until the end."""
        if self._journal is None:
            return

        def keep_telling() -> None:
            while not self._closing.wait(EVERY_S):
                self.system(sample(), node=node)

        self._start(keep_telling)

    def artifact(self, path: Path, *, folder: str = "") -> None:
        self._say({"event": "artifact", "path": str(path.resolve()), "folder": folder})

    def picture(self, key: str, draw: Callable[[], Image.Image], *, step: int) -> None:
        """Drawn by a thread while training goes on; a picture of this step that the journal has already is left out."""
        with self._lock:
            if not self._is_new(image_name(key), step):
                return

        def draw_and_tell() -> None:
            path = self.run_dir / "tracking" / "pictures" / f"{key.replace('/', '-')}-{step:08d}.png"
            try:
                save_sheet(draw(), path)
            except OSError as error:
                print(f"tracking: {path} cannot be written ({error.strerror}); it is left out", file=sys.stderr)
            else:
                self._say({"event": "image", "path": str(path.resolve()), "key": key, "step": step})

        self._start(draw_and_tell)

    def version(
        self, model: str, *, checkpoint: Path, weights_sha256: str, parent_key: str, tags: dict[str, str]
    ) -> None:
        """What has been found out about a checkpoint: it becomes a version of the registered model of that name."""
        event = {"model": model, "path": str((checkpoint / CONFIG).resolve()), "checkpoint": str(checkpoint.resolve())}
        self._say(
            {"event": "version", "weights_sha256": weights_sha256, "parent_key": parent_key, "tags": tags} | event
        )

    def close(self, status: Status) -> None:
        """Says how the run ended and gives delivery a while to finish."""
        self._closing.set()
        self._join()
        self._say({"event": "end", "status": status})
        self._join()  # a deliverer may be starting again
        with self._lock:
            journal, self._journal = self._journal, None
        if journal is None:
            return
        if not journal.close(timeout_s=DRAWING_S):
            print(f"tracking: {journal.path} could not take its last lines; they are lost", file=sys.stderr)
        assert self._deliverer.stdin is not None
        self._deliverer.stdin.close()
        try:
            end = describe(code := self._deliverer.wait(self._close_timeout_s + STUCK_S))
        except subprocess.TimeoutExpired:
            self._deliverer.kill()  # stuck in the store's client; what it has not confirmed stays in the journal
            code, end = self._deliverer.wait(), "no answer of the store"
        if code != 0:
            reason = "; ".join([f"delivery ended with {end}", *_last_lines(self._log, since=self._log_start)])
            print(
                f"tracking: MLflow has not got everything yet ({self._log}: {reason}); later: pretrain sync {self.run_dir}",
                file=sys.stderr,
            )

    def _say(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._journal is None:
                return
            self._journal.append(event)
            if time.monotonic() - self._started_s >= RESTART_S and self._deliverer.poll() is not None:
                self._started_s = math.inf  # nobody starts a second one meanwhile
                self._start(self._deliver_again)

    def _new_deliverer(self) -> tuple[subprocess.Popen[bytes], int]:
        """And where its words begin in its log."""
        log_start = self._log.stat().st_size if self._log.exists() else 0
        workspace = [str(found)] if (found := workspace_of(self.run_dir)) else []
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pretrain.tracking.delivery",
                str(self.run_dir),
                str(self._close_timeout_s),
                *workspace,
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the trainer's business; it closes the pipe when it is done
            env={name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")},
        ), log_start

    def _deliver_again(self) -> None:
        """In a thread: training does not wait for the disk that a program is read from."""
        dead = self._deliverer
        if not self._has_told:
            self._has_told = True
            how = f"has ended ({describe(dead.poll())}; see {self._log}) and is started again, at most once a minute"
            print(f"tracking: what delivers to MLflow {how}", file=sys.stderr)
        with suppress(OSError):  # a machine that can start nothing now may do so in a minute
            self._deliverer, self._log_start = self._new_deliverer()
            assert dead.stdin is not None
            dead.stdin.close()
        self._started_s = time.monotonic()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(DRAWING_S)

    def _is_new(self, name: str, step: int) -> bool:
        """Whether the journal has no later or equal step of it; it has from now on. The caller holds the lock."""
        if self._journal is None or step <= self._journal.last_steps.get(name, -1):
            return False
        self._journal.last_steps[name] = step
        return True

    def _start(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=work, name="tracking", daemon=True))
            self._threads[-1].start()


def _last_lines(log: Path, *, since: int) -> list[str]:
    try:
        return log.read_bytes()[since:].decode(errors="replace").split("\n")[-3:-1]
    except OSError:
        return []
