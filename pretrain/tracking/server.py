"""`pretrain serve FOLDER`: MLflow's page of the runs in a folder, and the one writer of their
embedded store while it lasts.

1. The lease of the store is taken, and kept: no deliverer writes to the file any more (store.py).
2. `mlflow server` is started on it, in a process group of its own, and is waited for until it
   answers. It prints into `mlflow.db.log`.
3. Its address is left beside the store. Deliverers, on whatever node, ask that first and write
   through the server.
4. At a signal the address goes, then the server, then the lease: what deliverers could not send
   waits in their journals.

Killed at any point it leaves no lock (the kernel frees that), and at worst an address that nobody
answers at: deliverers then go back to the file.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from data_prep.errors import UserError
from data_prep.publish import sole_writer, write_atomic
from pretrain.ranks.launch import describe, end_with_parent
from pretrain.tracking.store import EmbeddedStore, runs_page

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
    """Until a signal; raises UserError where the server ends by itself."""
    store = EmbeddedStore(folder / "mlflow.db")
    with sole_writer(
        store.files,
        wait=True,
        notice=f"{store.path}: waiting for others that deliver to it, or serve it",
    ):
        store.open()
        address = f"http://{host}:{port}"
        with _server(store, host=host, port=port) as server:
            _heed(_stop)
            began_s = time.monotonic()
            try:
                while not store.answers(address):
                    if server.poll() is not None or time.monotonic() - began_s > READY_S:
                        end = (
                            describe(server.returncode)
                            if server.poll() is not None
                            else f"no answer in {READY_S:.0f} s"
                        )
                        raise UserError(
                            f"mlflow server: {end}; see {store.log}; is {host}:{port} taken? --port"
                            " takes another"
                        )
                    time.sleep(0.5)
                write_atomic(store.address, address.encode())
                print(
                    f"{folder}: {runs_page(address)} shows the runs; Ctrl-C ends the server",
                    flush=True,
                )
                raise UserError(
                    f"mlflow server: {describe(server.wait())}; see {store.log}, and run the same"
                    " command again"
                )
            except _Stopped:
                print(f"{folder}: no longer served; runs write to {store.path} again", flush=True)
            finally:
                _heed(signal.SIG_IGN)
                store.address.unlink(missing_ok=True)
                _end(server)


def _server(store: EmbeddedStore, *, host: str, port: int) -> subprocess.Popen[bytes]:
    options = {
        "--backend-store-uri": store.uri,
        "--artifacts-destination": store.files.as_uri(),
        "--host": host,
        "--port": str(port),
        "--workers": "1",  # more would be as many writers
        "--allowed-hosts": ",".join(f"{name}:{port}" for name in (host, "localhost", "127.0.0.1")),
    }
    words = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *(word for pair in options.items() for word in pair),
    ]
    with open(store.log, "wb") as log:
        return subprocess.Popen(
            words,
            start_new_session=True,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,  # noqa: PLW1509
        )  # (no threads here)


def _end(server: subprocess.Popen[bytes]) -> None:
    """With its workers and theirs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(ENDING_S)
