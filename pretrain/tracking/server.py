"""`pretrain serve FOLDER`: MLflow's page of the runs in a folder.

1. It asks for the turn of the database (queue.py) and keeps it: no deliverer writes to the file.
2. It starts `mlflow server` on the database, in its own process group, and waits until the server
   answers. The server prints into `mlflow.db.log`.
3. It delivers the event logs of all runs in the queue, from whatever node, through the server.
4. At a signal the server ends, then the turn: the deliverers of the runs continue.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from data_prep.errors import UserError
from pretrain.ranks.launch import describe, end_with_parent
from pretrain.tracking.delivery import Deliveries
from pretrain.tracking.queue import SQLITE, Queue
from pretrain.tracking.store import Store, files_of, open_database, runs_page

READY_S = 180.0
"""A server needs half a minute, on a busy node more."""
ENDING_S = 15.0


class _Stopped(Exception):  # noqa: N818
    pass


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (as `signal` calls it)
    _heed(signal.SIG_IGN)  # a job that is cancelled is told by SLURM and by its script
    raise _Stopped


def _heed(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, handler)


def serve(folder: Path, *, host: str, port: int) -> None:
    """Serve until a signal; raises UserError if the server ends by itself."""
    database = (folder / "mlflow.db").absolute()
    log, address = database.with_name("mlflow.db.log"), f"http://{host}:{port}"
    queue = Queue(f"{SQLITE}{database}", folder)
    with ExitStack() as stack:
        stack.enter_context(queue.request(wait=True))
        stack.enter_context(queue.turn(wait=True))
        open_database(database)
        server = _start(database, log=log, host=host, port=port)
        try:
            _heed(_stop)
            began_s = time.monotonic()
            while not _answers(address) and server.poll() is None:
                if time.monotonic() - began_s > READY_S:
                    break
                time.sleep(0.5)
            else:
                if server.poll() is None:
                    print(
                        f"{folder}: {runs_page(address)} shows the runs; Ctrl-C ends the server",
                        flush=True,
                    )
            deliveries = Deliveries(queue, Store(f"{SQLITE}{database}", served_at=address))
            while server.poll() is None and _answers(address):
                deliveries.deliver()
                time.sleep(1.0)
            end = "no answer" if server.poll() is None else describe(server.returncode)
            raise UserError(
                address,
                f"mlflow server ended ({end}; see {log})",
                "run the same command again, or choose another --port",
                code="unreachable",
            )
        except _Stopped:
            print(f"{folder}: no longer served; runs write to {database} again", flush=True)
        finally:
            _heed(signal.SIG_IGN)
            _end(server)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=60):
            return True
    except (OSError, ValueError):
        return False


def _start(database: Path, *, log: Path, host: str, port: int) -> subprocess.Popen[bytes]:
    options = {
        "--backend-store-uri": f"{SQLITE}{database}",
        "--artifacts-destination": files_of(database).as_uri(),
        "--host": host,
        "--port": str(port),
        "--workers": "1",  # more would be as many writers
        "--allowed-hosts": ",".join(f"{name}:{port}" for name in (host, "localhost", "127.0.0.1")),
    }
    words = [word for pair in options.items() for word in pair]
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words],
            start_new_session=True,
            stdout=file,
            stderr=file,
            preexec_fn=end_with_parent,  # noqa: PLW1509 (no threads run yet)
        )


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server with all its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(ENDING_S)
