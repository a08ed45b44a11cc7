"""Worker processes of every command: a pool on forkserver that is replaced once if a worker dies.

A single worker is this thread, so a small build starts no process. Workers end with the process
that started them, however it ends: otherwise the workers of a killed build would write into the
files of the build that takes its place.
"""

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from typing import Any, ClassVar, TypeVar

from data_prep.errors import UserError
from data_prep.progress import progress

J = TypeVar("J")
T = TypeVar("T")

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["data_prep.build.build"])
"""Imported once, by the process that workers are forked from."""


class Tally:
    """Counts what workers have done. Each worker adds to a slot of its own, so none waits for a
    lock that a dead worker holds."""

    _own: ClassVar[tuple[MutableSequence[int], int] | None] = None

    @classmethod
    def add(cls, count: int) -> None:
        """Count in a worker; do nothing in a process that nobody counts."""
        if cls._own is not None:
            slots, number = cls._own
            slots[number] += count

    @classmethod
    def connect(cls, slots: MutableSequence[int], number: int) -> None:
        cls._own = slots, number


class Pool:
    """Workers. A context manager: an error inside the block ends them at once."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._is_second = False
        self._counted = 0
        self._slots: MutableSequence[int] = [0]
        self._executor = self._start() if num_workers > 1 else None

    def _start(self) -> ProcessPoolExecutor:
        start_server()
        self._slots = _CONTEXT.RawArray("q", self._num_workers)
        ignores_interrupts = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        facts = (self._slots, _CONTEXT.Value("i", 0), ignores_interrupts)
        return ProcessPoolExecutor(self._num_workers, _CONTEXT, _begin, facts)

    @property
    def has_processes(self) -> bool:
        return self._executor is not None

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._executor is not None:
            return self._executor.submit(function, *arguments)
        future = Future[T]()
        Tally.connect(self._slots, 0)
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 (as a worker does)
            future.set_exception(error)
        return future

    def replace(self) -> None:
        """Start new workers after one has died; a second death is an error."""
        fix = "give more memory, or set fewer workers; what is finished is kept"
        problem = "a worker process died, most likely because memory ran out"
        if self._is_second:
            raise UserError("num_workers", f"{problem}, again", fix, code="no-space") from None
        print(f"data_prep: {problem}; its work is done again", file=sys.stderr, flush=True)
        self._is_second, self._counted = True, self.num_counted()
        self._executor = self._start()

    def num_counted(self) -> int:
        """Return how much the workers have counted so far (`Tally.add`)."""
        return self._counted + sum(self._slots)

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


def worker_pool(num_workers: int) -> Pool:
    return Pool(num_workers)


def start_server() -> None:
    """Start the process that workers are forked from, unless it runs. It imports what they need
    while this process continues, and ends with this process."""
    # Ctrl-C, which that process receives too, is blocked in it: during its imports it would print a
    # traceback. The tracker is started first, because its start unblocks signals.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ensure_running()
    except OSError as error:
        if str(error) != "AF_UNIX path too long":
            raise
        problem = f"the folder of temporary files has a long name ({os.environ.get('TMPDIR')})"
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
    total: int | None = None,
    jobs_are: str = "shards",
    num_workers: int = 1,
    pool: Pool | None = None,
) -> Iterator[T]:
    """Yield what `function` makes of every job, in their order; workers receive it pickled.

    After the first error no job begins. If a worker dies, new workers do the jobs that are not
    finished. The progress line shows what the workers have counted, up to `total`; without a total
    it shows jobs.
    """
    with ExitStack() as stack:
        pool = pool or stack.enter_context(Pool(min(num_workers, len(jobs))))
        line = stack.enter_context(
            progress(title, total=len(jobs) if total is None else total, unit=unit)
        )
        before = pool.num_counted()

        def report(num_done: int) -> None:
            num_counted = pool.num_counted() - before
            if total is None:
                note = f"{num_counted:,} images" if num_counted else ""
                line.advance(num_done - line.done, note=note)
            else:
                note = f"{num_done}/{len(jobs)} {jobs_are}"
                line.advance(min(num_counted, total) - line.done, note=note)

        if not pool.has_processes:
            for number, job in enumerate(jobs):
                report(number)
                yield pool.submit(function, job).result()
            report(len(jobs))
            return
        waiting = deque((job, pool.submit(function, job)) for job in jobs)
        while waiting:
            try:
                while not wait([waiting[0][1]], timeout=0.5).done:
                    report(len(jobs) - len(waiting))
                    for _, future in waiting:
                        if future.done():
                            future.result()  # raises the error of a later job
                result = waiting[0][1].result()
            except BrokenProcessPool:
                pool.replace()
                waiting = deque(
                    (job, future if _has_result(future) else pool.submit(function, job))
                    for job, future in waiting
                )
                continue
            waiting.popleft()  # all results together may not fit in memory
            report(len(jobs) - len(waiting))
            yield result


def _has_result(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _begin(slots: MutableSequence[int], num_begun: Any, ignores_interrupts: bool) -> None:
    """Prepare a worker process."""
    # Ctrl-C ends a worker without a traceback, except in the background of a shell
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignores_interrupts else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with num_begun.get_lock():
        number, num_begun.value = num_begun.value, num_begun.value + 1
    Tally.connect(slots, number)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
