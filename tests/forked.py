"""Processes that start with torch and deepspeed imported: forks of one server, which saves each
rank of a test eight seconds.

xdist's processes are forks of its first process (`fork_workers`), and share the server, which has
no threads when it forks. A child has its own process group, and the given environment and streams.
It runs a function by name: `pretrain.cli:main`, or a case of tests/ranks.py.
"""

import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any, ClassVar
from unittest.mock import patch

import psutil
from execnet import gateway_io

PRELOADED = [
    "pretrain.engine.deepspeed",
    "pretrain.loop.train",
    "safetensors.torch",
    "torch._dynamo.aot_compile",  # used by torch's optimizers
    "tests.preloaded",
    "pytest",
]
"""Modules that training, its first step and test modules import."""
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(PRELOADED)
"""A separate server: the server of multiprocessing has the imports of its first user, for example
data_prep's workers."""


def share() -> None:
    """Start the server for this process and its forks. It can import the tests from any working
    directory."""
    repository = str(Path(__file__).parent.parent)
    with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=repository):
        _SERVER.ensure_running()
    _SERVER.ensure_running = lambda: None  # type: ignore[method-assign]


def begin(
    target: str, *arguments: Any, environment: Mapping[str, str], output: Path
) -> ForkServerProcess:
    """Start `target`, MODULE:FUNCTION, in a fork. The function returns the exit code."""
    words = (target, arguments, dict(environment), str(output), str(Path.cwd()))
    process = ForkServerProcess(target=_run, args=words, daemon=True)  # ends with a failed test
    share()
    with patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
        process.start()
    return process


class Worker(gateway_io.Popen2IOMaster):
    """An xdist process for execnet: a fork of this process. A crashed one is replaced by a new
    Python as usual."""

    FORKED: ClassVar[list[tuple[int, IO[bytes], IO[bytes]]]] = []

    def __init__(self, words: list[str], execmodel: Any):
        if not self.FORKED:
            super().__init__(words, execmodel)
            return
        pid, *streams = self.FORKED.pop(0)
        gateway_io.Popen2IO.__init__(self, *streams, execmodel)
        self.popen = psutil.Process(pid)


def fork_workers(count: int) -> None:
    """Fork all workers at once, before this process has threads."""
    gateway_io.Popen2IOMaster = Worker  # type: ignore[misc]
    gc.freeze()  # existing objects are neither searched for garbage nor copied
    for _ in range(count):
        (stdin, to_worker), (from_worker, stdout) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid != 0:
            Worker.FORKED.append((pid, open(to_worker, "wb"), open(from_worker, "rb")))
            os.close(stdin)
            os.close(stdout)
            continue
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        others = [stream.fileno() for _, *streams in Worker.FORKED for stream in streams]
        for end in (stdin, to_worker, from_worker, stdout, *others):
            os.close(end)
        sys.stdin, sys.stdout, sys.stderr = (
            open(0, closefd=False),
            open(1, "w", closefd=False),
            open(2, "w", closefd=False),
        )
        try:
            exec(gateway_io.popen_bootstrapline, {})
        finally:
            os._exit(0)


def _run(
    target: str, arguments: list[Any], environment: dict[str, str], output: str, directory: str
) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    stream = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = (
        open(1, "w", buffering=1, closefd=False),
        open(2, "w", buffering=1, closefd=False),
    )
    sys.stdin = open(os.devnull)
    module, _, name = target.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(*arguments))


def environments(num_ranks: int, **more: str) -> list[dict[str, str]]:
    """Return the environment of each of `num_ranks` local ranks, as from a launcher."""
    from pretrain.ranks.world import free_port

    shared = dict(os.environ) | {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def wait(
    processes: Iterable[ForkServerProcess], *, timeout_s: float, grace_s: float = 20
) -> list[int | None]:
    """Return the exit codes. None: killed at the time limit, or `grace_s` after another process
    failed."""
    processes, deadline_s = list(processes), time.monotonic() + timeout_s
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline_s:
        if any(process.exitcode for process in processes):
            deadline_s = min(deadline_s, time.monotonic() + grace_s)
            grace_s = timeout_s
        time.sleep(0.01)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def new_output() -> Path:
    descriptor, name = tempfile.mkstemp(suffix=".log")
    os.close(descriptor)
    return Path(name)
