"""`pretrain ui FOLDER`: serve MLflow's page of the runs in a folder.

1. Start `mlflow server` on the database and wait until it is ready. The server prints into
   `mlflow.db.log`.
2. Deliver the event logs of all runs in the queue, unless another delivery process does.
3. A signal ends the server.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from data_prep.errors import UserError
from pretrain.ranks.launch import describe, end_with_parent
from pretrain.tracking.delivery import Deliveries
from pretrain.tracking.queue import SQLITE, Queue
from pretrain.tracking.store import Store, files_of, open_database, runs_page

READY_S = 180.0
"""Seconds that the server may take to start."""
ENDING_S = 15.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class _Stopped(BaseException):
    """A signal has arrived. No `except Exception` catches it."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    for number in STOPS:  # a canceled job gets several signals
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


def serve(folder: Path, *, host: str, port: int) -> None:
    """Serve until a signal arrives. Raise UserError if the server ends by itself."""
    database = (folder / "mlflow.db").absolute()
    log, address = database.with_name("mlflow.db.log"), f"http://{host}:{port}"
    queue = Queue(f"{SQLITE}{database}", folder)
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = f"{direct},{host}"  # a proxy does not reach this machine's addresses
    open_database(database)
    server = _start(database, log=log, host=host, port=port)
    try:
        for number in STOPS:
            signal.signal(number, _stop)
        began_s = time.monotonic()
        while not _answers(address) and server.poll() is None:
            if time.monotonic() - began_s > READY_S:
                break
            time.sleep(0.5)
        else:
            if server.poll() is None:
                page = runs_page(address)
                print(f"{folder}: {page} shows the runs; Ctrl-C ends the server", flush=True)
        with closing(Deliveries(queue, partial(Store, f"{SQLITE}{database}"))) as deliveries:
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
        print(f"{folder}: the server has ended", flush=True)
    finally:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, ending)
            with suppress(subprocess.TimeoutExpired):
                server.wait(ENDING_S)


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
        "--workers": "1",  # SQLite allows one writer
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
