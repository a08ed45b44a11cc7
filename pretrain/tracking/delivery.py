"""Deliver event logs to MLflow, in processes that training never waits for.

    RUN/tracking/delivered.json     the position of a run's delivery (`Position`)
    RUN/tracking/delivery.log       faults of the delivery

1. Each trainer starts a delivery process. The process ends when the trainer has closed the pipe and
   the run is delivered, or at a time limit.
2. One such process at a time holds the lock of the queue (queue.py), imports mlflow and delivers
   all runs in the queue. When it ends, another one takes over. If the queue has runs on disks of
   other nodes, the process releases the lock every few seconds.
3. Events that could not be delivered stay in the event log. The next delivery process of the same
   database, or `pretrain sync RUN`, sends these events.

The event log is synced before its events are sent. If a power cut loses delivered bytes, the log is
shorter or has other bytes at that position. Then the log is sent again from its beginning.

Delivery is idempotent: metrics and images carry the times of the event log. If the database has
lost the run, the complete log is sent again. Files are sent later, so they delay no metric. A run
whose trainer has ended and whose log has no end is FINISHED if it has a result.json, otherwise
FAILED.
"""

import hashlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data_prep import console
from data_prep.errors import UserError
from data_prep.publish import Busy, sole_writer, write_json
from pretrain.checkpoints.run import RESULT
from pretrain.ranks.preemption import SIGNALS
from pretrain.ranks.starts import is_at_work
from pretrain.tracking.queue import Queue
from pretrain.tracking.sinks import Sinks
from pretrain.tracking.tracker import DELIVERY_LOG, JOURNAL, RunIdentity, readable_events

if TYPE_CHECKING:
    from pretrain.tracking.store import Store

POLL_S = 1.0
_RETRY_S = 4.0
"""Seconds before the delivery of a failed run is tried again."""
_TURN_S = 10.0
"""Seconds that this process holds the lock if the queue has runs that it cannot see."""
_SYNC_LIMIT_S = 180.0
"""Seconds that `sync` waits while another process has the lock and no event of the run arrives."""
_BATCH_EVENTS = 200
_FILES = ("artifact", "image", "version")
_TAIL_BYTES = 4096
"""Number of the last delivered bytes that are hashed. Each line contains its time, so no other line
has the same hash."""


@dataclass
class Position:
    """Position of a run's delivery, as stored in RUN/tracking/delivered.json."""

    run_id: str | None = None
    offset: int = 0
    """Number of delivered bytes of the event log."""
    tail_sha256: str = ""
    """Hash of the last delivered bytes."""
    owed: list[dict[str, Any]] = field(default_factory=list)
    """Events whose files have not been sent."""
    has_ended: bool = False
    """True if the delivered bytes contain the end of the run."""
    status: str = ""

    @staticmethod
    def path(run_dir: Path) -> Path:
        return run_dir / "tracking" / "delivered.json"

    @staticmethod
    def read(run_dir: Path) -> "Position":
        path = Position.path(run_dir)
        return Position(**json.loads(path.read_text())) if path.exists() else Position()

    def is_complete(self, run_dir: Path) -> bool:
        """Return True if all events and the final status are delivered. An incomplete last line is
        ignored."""
        with open(run_dir / JOURNAL, "rb") as journal:
            has_news = bool(_complete_lines(journal, self.offset))
        return not has_news and not self.owed and self.status not in ("", "RUNNING")


class Delivery:
    """Delivery of one run's event log, from the last delivered position on."""

    def __init__(self, run_dir: Path, store: "Store"):
        self.run_dir, self.store = run_dir, store
        self.identity = RunIdentity.read(run_dir)
        self.position = Position.read(run_dir)
        self._is_checked = False

    def deliver(self) -> None:
        """Send all complete lines, the status and the files. On an error of the database, store the
        position after the delivered bytes and raise the error."""
        with open(self.run_dir / JOURNAL, "rb") as journal:
            self._check_position(journal)
            while lines := _complete_lines(journal, self.position.offset):
                os.fsync(journal.fileno())
                self._send(readable_events(lines))
                self.position.offset += sum(map(len, lines))
                self.position.tail_sha256 = _tail_hash(journal, self.position.offset)
                self._save()
        if not self.position.has_ended:
            is_finished = (self.run_dir / RESULT).exists()
            without_end = "FINISHED" if is_finished else "FAILED"
            self._set_status("RUNNING" if is_at_work(self.run_dir) else without_end)
        while self.position.owed:
            self._send_file(self.position.owed[0])
            del self.position.owed[0]
            self._save()

    def _check_position(self, journal: IO[bytes]) -> None:
        """Start again at the beginning of the log if the database has lost the run, or the disk has
        lost delivered bytes."""
        if self._is_checked:
            return
        known = self.position
        if known.run_id is not None and not self.store.has_run(known.run_id):
            self.position = Position()
        elif _tail_hash(journal, known.offset) != (known.tail_sha256 or _tail_hash(journal, 0)):
            self.position = Position(run_id=known.run_id, owed=known.owed, status=known.status)
        self._is_checked = True

    def _save(self) -> None:
        write_json(Position.path(self.run_dir), asdict(self.position))

    def _run_id(self) -> str:
        if self.position.run_id is None:
            self.position.run_id = self.store.open_run(self.identity)
            self.position.status = "RUNNING"
        return self.position.run_id

    def _set_status(self, status: str) -> None:
        run_id = self._run_id()
        if self.position.status != status:
            self.store.adopt(run_id, self.identity)  # the parent may have arrived since
            self.store.set_status(run_id, status)
            self.position.status = status
            self._save()

    def _send(self, events: list[dict[str, Any]]) -> None:
        run_id, status = self._run_id(), None
        for event in events:
            if event["event"] in ("start", "params"):
                self.store.log_params(run_id, event["params"], event.get("tags", {}))
            if event["event"] == "start":
                self.store.log_datasets(run_id, event.get("datasets", []))
            if event["event"] in ("start", "end"):
                status = event.get("status", "RUNNING")
        self.store.log_metrics(run_id, [each for each in events if each["event"] == "metrics"])
        if status is not None:
            self._set_status(status)
            self.position.has_ended = status != "RUNNING"
        owed = self.position.owed
        owed += [each for each in events if each["event"] in _FILES and each not in owed]
        # files do not wait for the model registry
        owed.sort(key=lambda event: event["event"] == "version")

    def _send_file(self, event: dict[str, Any]) -> None:
        path = Path(event["path"])
        if path.exists() and event["event"] == "version":
            self.store.register(self._run_id(), event)
        elif path.exists():
            self.store.log_file(self._run_id(), path, folder=event.get("folder", "pictures"))


def _complete_lines(journal: IO[bytes], offset: int) -> list[bytes]:
    journal.seek(offset)
    lines = [journal.readline() for _ in range(_BATCH_EVENTS)]
    return [line for line in lines if line.endswith(b"\n")]


def _tail_hash(journal: IO[bytes], offset: int) -> str:
    start = max(0, offset - _TAIL_BYTES)
    journal.seek(start)
    return hashlib.sha256(journal.read(offset - start)).hexdigest()


class Deliveries:
    """Deliveries of all runs in a queue, while this process has the lock."""

    def __init__(self, queue: Queue, opener: Callable[[], "Store"]):
        self._queue, self._opener = queue, opener
        self._store: Store | None = None
        self._turn: ExitStack | None = None
        self._turn_end_s = 0.0
        self._deliveries = dict[str, Delivery]()
        self._faults = dict[str, tuple[str, float]]()
        """Last error of each run, and its time."""

    def close(self) -> None:
        """Release the lock, so that another process may deliver."""
        self._deliveries.clear()
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def deliver(self) -> None:
        """Deliver the new events of all runs, unless another process has the lock. Write errors to
        the run's delivery.log, and try a failed run again after a pause."""
        if self._turn is None:
            with suppress(Busy), ExitStack() as stack:
                stack.enter_context(sole_writer(self._queue.directory))
                self._store = self._store or self._opener()
                self._turn_end_s = time.monotonic() + _TURN_S
                self._turn = stack.pop_all()
        if self._turn is None or self._store is None:
            return
        has_unseen = False
        for key, run_dir in self._queue.runs().items():
            _, fault_s = self._faults.get(key, ("", -_RETRY_S))
            if not (run_dir / JOURNAL).exists():
                has_unseen = True  # the run was removed, or is on a disk of another node
            elif time.monotonic() - fault_s >= _RETRY_S:
                self._deliver(key, run_dir, self._store)
        if has_unseen and time.monotonic() >= self._turn_end_s:
            self.close()  # another process takes the turn before the next round

    def _deliver(self, key: str, run_dir: Path, store: "Store") -> None:
        try:
            delivery = self._deliveries.get(key)
            if delivery is None or delivery.run_dir != run_dir:
                delivery = self._deliveries[key] = Delivery(run_dir, store)
            delivery.deliver()
            self._faults.pop(key, None)
            if delivery.position.is_complete(run_dir):
                self._queue.remove(key)
                del self._deliveries[key]
        except Exception as error:  # noqa: BLE001
            # the event log keeps the events, and a later round tries again
            fault, (last, _) = store.fault_of(error), self._faults.get(key, ("", 0.0))
            self._faults[key] = fault, time.monotonic()
            if fault != last:  # write one line for a long outage
                with suppress(OSError), open(run_dir / DELIVERY_LOG, "a") as log:
                    print(f"{time.strftime('%F %T')} {fault}", file=log)


def deliver_while_training(
    run_dir: Path, pipe: IO[bytes], *, close_timeout_s: float, sinks: Sequence[str] = ()
) -> int:
    """Deliver until the trainer has closed the pipe and the run is delivered (return 0), or until
    the time limit (return 1)."""
    identity = RunIdentity.read(run_dir)
    queue = Queue(identity.uri, run_dir)
    others: Sinks | None = None
    ended_s: float | None = None
    with ExitStack() as stack:
        deliveries = Deliveries(queue, partial(open_store, identity.uri))
        stack.enter_context(closing(deliveries))
        while True:
            queue.add(identity.run_key, run_dir)
            if sinks and others is None:
                with suppress(Busy):
                    stack.enter_context(sole_writer(run_dir / "tracking"))
                    others = stack.enter_context(closing(Sinks(run_dir, sinks)))
            if others is not None:
                others.write()
            deliveries.deliver()
            if ended_s is None:
                if select.select([pipe], [], [], POLL_S)[0]:
                    ended_s = time.monotonic()
                continue
            if Position.read(run_dir).is_complete(run_dir):
                queue.remove(identity.run_key)
                return 0
            if time.monotonic() - ended_s >= close_timeout_s:
                return 1
            time.sleep(POLL_S)


def open_store(uri: str) -> "Store":
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    from pretrain.tracking.store import Store  # imports mlflow, for seconds

    return Store(uri)


def sync(run_dir: Path) -> int:
    """Deliver the remaining events. Return the number of delivered bytes of the event log. Raise
    UserError if another process has the lock and delivers nothing of this run for some minutes."""
    identity, before = RunIdentity.read(run_dir), Position.read(run_dir).offset
    queue = Queue(identity.uri, run_dir)
    queue.add(identity.run_key, run_dir)
    end = (run_dir / JOURNAL).read_bytes().rfind(b"\n") + 1  # a running training may write more
    last, last_s = Position.read(run_dir), time.monotonic()
    while True:
        try:
            with sole_writer(queue.directory):
                _deliver_one(run_dir, identity)
            break
        except Busy as error:
            busy = error
        position = Position.read(run_dir)
        has_arrived = position.offset >= end and is_at_work(run_dir)
        if has_arrived or position.is_complete(run_dir):
            break  # another process has delivered the run
        if position != last:
            last, last_s = position, time.monotonic()
        if time.monotonic() - last_s >= _SYNC_LIMIT_S:
            raise _no_delivery(run_dir, busy)
        time.sleep(POLL_S)
    if Position.read(run_dir).is_complete(run_dir):
        queue.remove(identity.run_key)
    return max(0, Position.read(run_dir).offset - before)


def _no_delivery(run_dir: Path, busy: Busy) -> UserError:
    log = run_dir / DELIVERY_LOG
    faults = log.read_text().splitlines() if log.exists() else []
    fault = f"; the last fault was: {faults[-1]}" if faults else ""
    return UserError(
        busy.field,
        f"{busy.problem}, and no event of {run_dir} arrived for {_SYNC_LIMIT_S:.0f} s{fault}",
        f"run the same command again later: pretrain sync {run_dir}",
        code="busy",
    )


def _deliver_one(run_dir: Path, identity: RunIdentity) -> None:
    store = open_store(identity.uri)
    try:
        Delivery(run_dir, store).deliver()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            identity.uri,
            f"the tracking database does not accept the events ({store.fault_of(error)})",
            f"run the same command again later: pretrain sync {run_dir}",
            code="unreachable",
        ) from error


def write_sinks(run_dir: Path, *names: str) -> int:
    """Write the complete event log for other tools. Return the number of its events."""
    with sole_writer(run_dir / "tracking"), closing(Sinks(run_dir, names)) as sinks:
        return sinks.write()


def _main() -> int:
    """Deliver a run. The arguments are the run directory, the time limit after the trainer's end,
    and the sinks."""
    os.nice(10)  # training comes first
    for number in SIGNALS:  # SLURM signals every process of a job step; the pipe ends this process
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the trainer has blocked them
    run_dir, flags = Path(sys.argv[1]), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        log = os.open(run_dir / DELIVERY_LOG, flags, 0o666)
    except OSError:
        log = os.open(os.devnull, flags)  # the event log uses the same disk, and reports the fault
    os.dup2(log, 1)
    os.dup2(log, 2)
    console.install()
    sinks = [name for name in sys.argv[3].split(",") if name]
    try:
        return deliver_while_training(
            run_dir, sys.stdin.buffer, close_timeout_s=float(sys.argv[2]), sinks=sinks
        )
    except (OSError, UserError) as error:
        print(f"{time.strftime('%F %T')} {error}. This delivery process has ended", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_main())
