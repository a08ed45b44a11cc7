"""Carries a run's journal to the MLflow store, in a process of its own.

Its imports, retries and stalls cost training nothing, and a dead server costs nothing but time:
what was not delivered stays in the journal and goes out when the server is back, when the run is
resumed, or when `pretrain sync RUN_DIR` is called.

    RUN/tracking/delivered.json     the run's id in the store, how many bytes of the journal have arrived, the hash of the last of
                                    these bytes, and which files are owed

The journal is synced before its events are sent. If it still returns from a power cut without the
bytes that were delivered (it is shorter, or other bytes are in their place), it is sent again from
its beginning.

Delivery is idempotent: metrics and pictures carry the journal's times, so what is sent twice stands
once, and the run is found by its key. A run that is resumed goes on in the same MLflow run; where
the store has lost that, all of the journal is sent again. Files are sent after the figures and are
owed until they arrive: a store for files that is out of order holds up no figure. The status is the
journal's. If the journal has no end and the trainer is gone, a run with a result.json is FINISHED,
any other FAILED.
"""  # noqa: E501 (a table)

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from data_prep import console
from data_prep.errors import UserError
from data_prep.publish import (
    Busy,
    Superseded,
    check_not_superseded,
    sole_writer,
    use_workspace,
    write_json,
)
from pretrain.checkpoints.run import RESULT
from pretrain.ranks.preemption import SIGNALS
from pretrain.ranks.starts import is_at_work
from pretrain.tracking.sinks import Sinks
from pretrain.tracking.tracker import RunIdentity, Status, readable_events

POLL_S = 1.0
_BATCH_EVENTS = 200
_ATTEMPTS = 3
_FILES = ("artifact", "image", "version")
_TAIL_BYTES = 4096
"""How many of the last delivered bytes are hashed. Each line has its time, so no other line has the
same hash."""


class Delivery:
    """Carries the journal of one run to its store, from where the last delivery stopped."""

    def __init__(self, run_dir: Path):
        from pretrain.tracking.store import (
            Store,
        )  # and mlflow, for seconds, in which a deliverer already ignores signals

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        self.directory = run_dir / "tracking"
        self.identity = RunIdentity.model_validate_json(
            (self.directory / "identity.json").read_text()
        )
        self._position_path, self._journal_path = (
            self.directory / "delivered.json",
            self.directory / "journal.jsonl",
        )
        position = (
            json.loads(self._position_path.read_text()) if self._position_path.exists() else {}
        )
        self.run_id: str | None = position.get("run_id")
        self.offset: int = position.get("offset", 0)
        self.ended = False
        """Whether the journal, as far as it has arrived, holds the end of the run."""
        self._tail = b""
        """The last bytes that were delivered."""
        if self._journal_path.exists():
            with open(self._journal_path, "rb") as journal:
                delivered = journal.read(self.offset)
            if len(delivered) < self.offset or position.get(
                "tail_sha256", _sha256(delivered)
            ) != _sha256(delivered):
                self.offset, delivered = 0, b""
            kinds = [event["event"] for event in readable_events(delivered.splitlines())]
            self.ended = [kind for kind in kinds if kind in ("start", "end")][-1:] == ["end"]
            self._tail = delivered[-_TAIL_BYTES:]
        self.num_bytes_sent = 0
        """Of the journal, by this delivery."""
        self._owed: list[dict[str, Any]] = position.get("owed", [])
        self._status: str | None = None
        """The status that this delivery has given the run."""
        self.store = Store(self.identity.uri)
        self._is_known = self.run_id is None
        """Whether the store has the run, as far as has been asked."""

    def deliver(self, *, wait: bool = False) -> None:
        """Sends all complete lines; raises what the store raises, having kept what arrived, and
        `Busy` while another process writes to the store, unless it is to `wait` for that one."""
        if self._has_news():
            with self.store.lease(wait=wait):
                self._deliver()

    def _has_news(self) -> bool:
        if not self._journal_path.exists():
            return False
        return (
            not self._is_known
            or bool(self._owed)
            or self._journal_path.stat().st_size > self.offset
        )

    def _deliver(self) -> None:
        if not self._is_known:
            if not self.store.has_run(self.run_id or ""):  # the store was made anew
                self.run_id, self.offset, self.ended, self._owed, self._status = (
                    None,
                    0,
                    False,
                    [],
                    None,
                )
                self._tail = b""
                self._keep_position()
            self._is_known = True
        with open(self._journal_path, "rb") as journal:
            journal.seek(self.offset)
            while True:
                lines = [
                    line
                    for line in (journal.readline() for _ in range(_BATCH_EVENTS))
                    if line.endswith(b"\n")
                ]
                if not lines:
                    break
                os.fsync(journal.fileno())
                # after the reading: what was written before the fence is in the next journal, too
                check_not_superseded(self.directory)
                events = readable_events(lines)
                self._send(events)
                self._owed += [
                    event
                    for event in events
                    if event["event"] in _FILES and event not in self._owed
                ]
                self._owed.sort(
                    key=lambda event: event["event"] == "version"
                )  # a registry in trouble holds up no file
                num_bytes = sum(len(line) for line in lines)
                self._tail = (self._tail + b"".join(lines))[-_TAIL_BYTES:]
                self.offset += num_bytes
                self.num_bytes_sent += num_bytes
                self._keep_position()
                journal.seek(self.offset)
        while self._owed:
            self._send_file(self._owed[0], self._opened())
            del self._owed[0]
            self._keep_position()

    def set_status(self, status: Status | str, *, wait: bool = False) -> None:
        if self.run_id is not None and self._status != status:
            with self.store.lease(wait=wait):
                check_not_superseded(self.directory)
                self.store.adopt(
                    self.run_id, self.identity
                )  # the parent may have been delivered meanwhile
                self.store.set_status(self.run_id, status)
                self._status = status

    def _keep_position(self) -> None:
        position = {
            "run_id": self.run_id,
            "offset": self.offset,
            "tail_sha256": _sha256(self._tail),
            "owed": self._owed,
        }
        write_json(self._position_path, position)

    def _send(self, events: list[dict[str, Any]]) -> None:
        status = None
        for event in events:
            match event["event"]:
                case "start":
                    run_id = self._opened()
                    self.store.log_params(run_id, event["params"], event["tags"])
                    self.store.log_datasets(run_id, event.get("datasets", []))
                    status = "RUNNING"
                case "params":
                    self.store.log_params(self._opened(), event["params"], event.get("tags", {}))
                case "end":
                    status = event["status"]
        metrics = [event for event in events if event["event"] == "metrics"]
        if metrics:
            self.store.log_metrics(self._opened(), metrics)
        if status is not None:
            self.set_status(status)
            self.ended = status != "RUNNING"

    def _opened(self) -> str:
        """The run's id, known from before, found in the store, or new."""
        if self.run_id is None:
            self.run_id = self.store.open_run(
                self.identity, check=partial(check_not_superseded, self.directory)
            )
        return self.run_id

    def _send_file(self, event: dict[str, Any], run_id: str) -> None:
        """One that is gone by now (the run's folder was tidied) is owed no longer."""
        if not Path(event["path"]).exists():
            return
        match event["event"]:
            case "version":
                self.store.register(run_id, event)
            case _:
                self.store.log_file(
                    run_id, Path(event["path"]), folder=event.get("folder", "pictures")
                )


def _sha256(delivered: bytes) -> str:
    return hashlib.sha256(delivered[-_TAIL_BYTES:]).hexdigest()


def _status_without_end(run_dir: Path) -> Status:
    """Return the status of a run whose trainer is gone and whose journal has no end."""
    return "FINISHED" if (run_dir / RESULT).exists() else "FAILED"


def sync(run_dir: Path) -> int:
    """Delivers what an earlier delivery could not; returns the number of journal bytes that
    arrived."""
    with sole_writer(run_dir / "tracking"):
        delivery, attempt = Delivery(run_dir), 1
        while True:
            try:
                delivery.deliver(wait=True)
                if not delivery.ended and not is_at_work(
                    run_dir
                ):  # it died, and so did its deliverer
                    delivery.set_status(_status_without_end(run_dir), wait=True)
                return delivery.num_bytes_sent
            except UserError:
                raise
            except Exception as error:
                if type(error).__module__ == "builtins" and not isinstance(error, OSError):
                    raise  # not of the store: a mistake of ours
                if attempt == _ATTEMPTS or isinstance(error, OSError):
                    fault = delivery.store.fault_of(error)
                    raise UserError(
                        f"{run_dir}: the store does not take it ({fault}); sync again later"
                    ) from error
            time.sleep(POLL_S)  # two that write at once may be in each other's way
            attempt += 1


def write_sinks(run_dir: Path, *names: str) -> int:
    """All that the journal has, for other tools; the number of its events."""
    with sole_writer(run_dir / "tracking"), closing(Sinks(run_dir, names)) as sinks:
        return sinks.write()


def deliver_while_training(
    run_dir: Path, trainer: IO[bytes], *, close_timeout_s: float, sinks: Sequence[str] = ()
) -> int:
    """The deliverer's whole work: until the trainer closes its end of the pipe, then until all has
    arrived or time is up."""
    with ExitStack() as stack:
        stack.enter_context(
            sole_writer(run_dir / "tracking", wait=True)
        )  # for the deliverer of a trainer that was killed just now
        others = stack.enter_context(closing(Sinks(run_dir, sinks)))
        delivery, wait_s, closed_at_s, fault, reported = Delivery(run_dir), POLL_S, None, "", ""
        while True:
            if closed_at_s is not None:
                time.sleep(min(wait_s, 4.0))
            elif select.select([trainer], [], [], wait_s)[
                0
            ]:  # end of file: the trainer is done, or dead
                closed_at_s, wait_s = time.monotonic(), POLL_S
            try:
                others.write()
                delivery.deliver()
                if not delivery.ended:
                    # also where nothing is new: the one before may have reported FAILED, after this
                    # trainer had started
                    delivery.set_status(
                        "RUNNING" if closed_at_s is None else _status_without_end(run_dir)
                    )
                if closed_at_s is not None:
                    return 0
                wait_s, reported = POLL_S, ""
            except Superseded:
                return 0
            except Busy as error:  # the next turn is soon, and uneven, as others wait with us
                wait_s, fault = (
                    random.uniform(0.05, 0.5),
                    f"others still write to the store ({error})",
                )
            except Exception as error:  # noqa: BLE001
                # whatever the store raises, the journal keeps the events, and the next round tries
                # again
                fault = delivery.store.fault_of(error)
                if fault != reported:  # an outage of a day is one line
                    _report(fault)
                wait_s, reported = min(60.0, wait_s * 2), fault
            if closed_at_s is not None and time.monotonic() - closed_at_s > close_timeout_s:
                if fault != reported:
                    _report(fault)
                return 1


def _main() -> int:
    os.nice(10)  # training comes first
    for number in (
        SIGNALS
    ):  # SLURM sends a stop to every process of the step; this one goes on until the pipe closes
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, SIGNALS
    )  # the trainer blocks them, so that none ends this process while it imports
    run_dir, flags = Path(sys.argv[1]), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        log = os.open(run_dir / "tracking" / "delivery.log", flags, 0o666)
    except OSError:
        log = os.open(
            os.devnull, flags
        )  # the trainer's journal meets the same disk, and reports it
    os.dup2(log, 1)
    os.dup2(log, 2)
    console.install()
    try:
        return _deliver(run_dir)
    except OSError as error:
        _report(f"{error}; delivery has ended, and the trainer starts it again")
        return 1


def _report(fault: str) -> None:
    print(f"{time.strftime('%F %T')} {fault}", file=sys.stderr, flush=True)


def _deliver(run_dir: Path) -> int:
    if sys.argv[4:]:
        use_workspace(Path(sys.argv[4]), under=run_dir)
    with suppress(Superseded):
        check_not_superseded(
            run_dir
        )  # started again by a trainer that has woken up, it does not even take the lock
        sinks = [name for name in sys.argv[3].split(",") if name]
        return deliver_while_training(
            run_dir, sys.stdin.buffer, close_timeout_s=float(sys.argv[2]), sinks=sinks
        )
    return 0


if __name__ == "__main__":
    sys.exit(_main())
