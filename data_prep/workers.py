"""Worker processes of every command: a pool on forkserver that is replaced once if a worker dies.

A single worker runs in the calling thread, so a small build starts no process. Workers end with the
process that started them. Otherwise the workers of a killed build would write into the files of the
next build.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from typing import Any, TypeVar

from data_prep.errors import UserError
from data_prep.progress import ProgressLine

J = TypeVar("J")
T = TypeVar("T")

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["data_prep.build.build"])
"""The module of the build is imported once, in the process that forks the workers."""


class Pool:
    """A pool of worker processes, as a context manager. An error inside the block ends the workers
    at once."""

    def __init__(self, num_workers: int):
        self._num_workers, self._is_second = num_workers, False
        self._executor = self._start() if num_workers > 1 else None

    def _start(self) -> ProcessPoolExecutor:
        start_server()
        return ProcessPoolExecutor(self._num_workers, _CONTEXT, _begin)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._executor is not None:
            return self._executor.submit(function, *arguments)
        future = Future[T]()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 (as a worker does)
            future.set_exception(error)
        return future

    def map(self, function: Callable[[J], T], jobs: Sequence[J]) -> Iterator[tuple[int, T]]:
        """Yield number and result of each job when it ends. After the first error, no new job
        begins. If a worker dies, new workers repeat the unfinished jobs."""
        if self._executor is None:
            for number, job in enumerate(jobs):
                yield number, function(job)
            return
        unfinished = dict(enumerate(jobs))
        while unfinished:
            try:
                futures = {
                    self._executor.submit(function, job): number
                    for number, job in unfinished.items()
                }
                for future in as_completed(futures):
                    result, number = future.result(), futures.pop(future)
                    del unfinished[number]
                    yield number, result
            except BrokenProcessPool:
                self.replace()

    def replace(self) -> None:
        """Start new workers after a worker has died. The second time, raise UserError."""
        fix = "lower num_workers (or --workers), or give the job more memory"
        problem = "a worker process died, probably because memory ran out"
        if self._is_second:
            raise UserError("num_workers", f"again, {problem}", fix, code="no-space") from None
        print(f"data_prep: {problem}; its work is repeated", file=sys.stderr, flush=True)
        self._is_second, self._executor = True, self._start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._executor is None:
            return
        if kind is not None:
            for process in active_children():
                if isinstance(process, ForkServerProcess):
                    process.terminate()
        self._executor.shutdown(cancel_futures=kind is not None)


def start_server() -> None:
    """Start the process that forks the workers, unless it runs. The new process imports the
    workers' modules while this process continues, and ends with this process."""
    # Ctrl-C reaches that process, too; during its imports it would print a traceback. The tracker
    # is started first, because its start unblocks signals.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ensure_running()
    except OSError as error:
        if str(error) != "AF_UNIX path too long":
            raise
        problem = f"the folder of temporary files has too long a name ({os.environ.get('TMPDIR')})"
        fix = "set TMPDIR to a shorter path, such as /tmp"
        raise UserError("TMPDIR", problem, fix, code="unsupported") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def sweep(
    function: Callable[[J], T],
    jobs: Sequence[J],
    *,
    title: str,
    unit: str,
    sizes: Sequence[int] | None = None,
    workers: "int | Pool" = 1,
) -> Iterator[T]:
    """Yield the result of every job, in order. `function` must be picklable. `sizes`: units that
    each job adds to the progress line (default: 1)."""
    sizes = sizes or [1] * len(jobs)
    with ExitStack() as stack:
        if isinstance(workers, int):
            workers = stack.enter_context(Pool(min(workers, len(jobs))))
        line = stack.enter_context(ProgressLine(title, total=sum(sizes), unit=unit))
        results, first = dict[int, T](), 0
        for number, result in workers.map(function, jobs):
            results[number] = result
            line.advance(sizes[number])
            while first in results:
                yield results.pop(first)
                first += 1


def _begin() -> None:
    """Prepare a worker process: Ctrl-C ends it without a traceback, except in the background of a
    shell."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
