"""Processes that begin with torch and deepspeed imported: forked from one server, which saves each rank of a test eight seconds.

pytest's processes share the server of the one that starts them (`share`); without one, the first who needs it starts it. The server
has no thread when it forks. A child has a process group of its own, the environment and the streams that it is given, and runs a
function of a module, by name: `pretrain.cli:main`, or a case of tests/ranks.py.
"""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

PRELOADED = [
    "pretrain.engine.deepspeed",
    "pretrain.loop.train",
    "safetensors.torch",
    "torch._dynamo.aot_compile",  # of torch's own optimizers
    "tests.preloaded",
    "pytest",
]
"""What a training imports, what its first step would import besides, and what the module of a test imports."""
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(PRELOADED)
"""Not the one of multiprocessing: that has imported what the first who used it asked for, such as the workers of data_prep."""
_SHARED = "TESTS_FORK_SERVER"


def share() -> None:
    """Starts the server; it ends with this process, and those who inherit its environment use it."""
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        _SERVER.ensure_running()
    os.environ[_SHARED] = _SERVER._forkserver_address  # type: ignore[attr-defined]


def _connect(fds: list[int]) -> tuple[int, int]:
    server: Any = _SERVER
    if server._forkserver_pid is None and _SHARED in os.environ:
        server._forkserver_address, server._forkserver_alive_fd = os.environ[_SHARED], os.open(os.devnull, os.O_WRONLY)
        server.ensure_running = lambda: None
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # what the server imports with, if this call starts it
        found: tuple[int, int] = server.connect_to_new_process(fds)
    return found


def begin(target: str, *arguments: Any, environment: Mapping[str, str], output: Path) -> ForkServerProcess:
    """`target` is MODULE:FUNCTION; what the function returns is the exit code."""
    words = (target, arguments, dict(environment), str(output), str(Path.cwd()))
    process = ForkServerProcess(target=_run, args=words, daemon=True)  # a test that fails must not leave it behind
    with patch.object(forkserver, "connect_to_new_process", _connect):
        process.start()
    return process


def _run(target: str, arguments: list[Any], environment: dict[str, str], output: str, directory: str) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    stream = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    sys.stdin = open(os.devnull)
    module, _, name = target.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(*arguments))


def environments(num_ranks: int, **more: str) -> list[dict[str, str]]:
    """What a launcher gives to each of so many local ranks."""
    from pretrain.ranks.world import free_port

    shared = dict(os.environ) | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def wait(processes: Iterable[ForkServerProcess], *, timeout_s: float, grace_s: float = 20) -> list[int | None]:
    """Exit codes; None for one that had to be killed: at the time limit, or `grace_s` after another had failed."""
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
