"""Worker processes of every verb: as many as asked for, and none outlives the process that started
them. A single worker is a thread of this process, which spares small builds the start of another
one.

Without the watch below, workers of a builder that is killed would finish what is queued, into the
files of the builder that takes its place, and then wait for ever.

No lock and no queue is shared with a worker, for one that dies while it holds either blocks all
others for ever (issue 17: a build whose worker was killed inside the counter's lock): each has a
pipe of its own to a thread of this process, and a slot of its own to count in.
"""

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from typing import Any, ClassVar, TypeVar

from data_prep.progress import progress

J = TypeVar("J")
T = TypeVar("T")

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["data_prep.build.build"])
"""Imported once, by the process that workers are forked from."""
_one_at_a_time = threading.Lock()
"""Starts and joins: each polls all children, whose exit codes can be read once."""


class Tally:
    """Counts, across processes, what workers have done since it was last asked."""

    _mine: ClassVar[tuple[MutableSequence[int], int] | None] = None

    def __init__(self, slots: MutableSequence[int]):
        self._slots = slots
        """One for each worker, which alone writes it."""
        self._taken = 0

    def taken(self) -> int:
        total = sum(self._slots)
        new, self._taken = total - self._taken, total
        return new

    def connect_here(self) -> None:
        """What this thread adds is counted by it."""
        self.connect(self._slots, 0)

    @classmethod
    def add(cls, count: int) -> None:
        """Called by a worker; does nothing where nobody counts."""
        if cls._mine is not None:
            slots, number = cls._mine
            slots[number] += count

    @classmethod
    def connect(cls, slots: MutableSequence[int], number: int) -> None:
        cls._mine = slots, number


class Pool(ThreadPoolExecutor):
    def __init__(self, slots: MutableSequence[int], **how: Any):
        super().__init__(**how)
        self.tally = Tally(slots)


def worker_pool(num_workers: int) -> Pool:
    if num_workers <= 1:
        slots = [0]
        return Pool(slots, max_workers=1, initializer=Tally.connect, initargs=(slots, 0))
    start_server()
    return _Processes(num_workers, _CONTEXT.RawArray("q", num_workers))


def start_server() -> None:
    """Start the process that workers are forked from, unless it runs. It imports what they need
    while this process goes on, and ends with this process."""
    # Ctrl-C, which reaches it, too, is blocked there: while it imports it would show a traceback.
    # Here it waits a moment.
    # which that process starts otherwise, and which lets signals through again
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ensure_running()
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
    """What `function`, in workers, makes of every job, in their order; it is pickled. After the
    first failure no job begins; those at work are waited for.

    A single worker that is not given is this thread: Ctrl-C need not wait for its job.
    The line of progress counts what workers have added to the tally, up to `total`; without one, it
    counts jobs.
    """
    num_images = 0
    with ExitStack() as stack:
        is_here = pool is None and min(num_workers, len(jobs)) <= 1
        pool = pool or stack.enter_context(worker_pool(min(num_workers, len(jobs))))
        line = stack.enter_context(
            progress(title, total=len(jobs) if total is None else total, unit=unit)
        )

        def report(num_done: int) -> None:
            nonlocal num_images
            num_images += pool.tally.taken()
            if total is None:
                line.advance(
                    num_done - line.done, note=f"{num_images:,} images" if num_images else ""
                )
            else:
                line.advance(num_images - line.done, note=f"{num_done}/{len(jobs)} {jobs_are}")

        if is_here:
            pool.tally.connect_here()
            for number, job in enumerate(jobs):
                report(number)
                yield function(job)
            report(len(jobs))
            return
        futures = deque(pool.submit(function, job) for job in jobs)
        try:
            for number in range(len(jobs)):
                while not wait([futures[0]], timeout=0.5).done:
                    report(number)
                    for each in futures:
                        if each.done():
                            each.result()  # raises what a later job has failed of
                report(number + 1)
                yield (
                    futures.popleft().result()
                )  # which is not kept: all of them need not fit in memory
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Processes(Pool):
    """As many threads, each of which hands its job to a worker process and waits for what comes
    back."""

    def __init__(self, num_workers: int, slots: MutableSequence[int]):
        super().__init__(slots, max_workers=num_workers)
        self._workers = [_Worker(slots, number) for number in range(num_workers)]
        self._idle = self._workers.copy()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(self._hand_over, fn, args, kwargs)

    def _hand_over(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        worker = self._idle.pop()
        try:
            result: T = worker.run(function, args, kwargs)
            return result
        finally:
            self._idle.append(worker)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            for worker in self._workers:
                worker.dismiss()
            for worker in self._workers:
                worker.join()


class _Worker:
    """One process, which is started when there is work, and once more when it dies at it."""

    def __init__(self, slots: MutableSequence[int], number: int):
        self._slots, self._number = slots, number
        self._process: ForkServerProcess | None = None
        self._pipe: Connection[Any, Any] | None = None

    def run(self, *job: Any) -> Any:
        counted = self._slots[self._number]
        for is_second in (False, True):
            pipe = self._pipe or self._start()
            try:
                pipe.send(job)
                is_well, result = pipe.recv()
            except (EOFError, OSError):  # nothing, or half an answer
                fate, remedy = self._fate()
                self._slots[self._number] = counted
                if is_second:
                    raise BrokenExecutor(
                        f"{fate}, like the one before it at the same work; {remedy}"
                    ) from None
                print(f"data_prep: {fate}; its work is done again", file=sys.stderr, flush=True)
            else:
                if is_well:
                    return result
                raise result
        raise AssertionError

    def dismiss(self) -> None:
        """Lets the process end, once it has nothing more to do."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def join(self) -> int:
        """Waits until the process has ended; returns its exit code."""
        if self._process is None:
            return 0
        with _one_at_a_time:
            self._process.join()
        return self._process.exitcode or 0

    def _start(self) -> "Connection[Any, Any]":
        self._pipe, theirs = _CONTEXT.Pipe()
        with theirs, _one_at_a_time:
            ignores_interrupts = (
                signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            )  # in the background of a shell
            words = (theirs, self._slots, self._number, ignores_interrupts)
            process = _CONTEXT.Process(target=_work, args=words, daemon=True)
            process.start()
            self._process = process
        return self._pipe

    def _fate(self) -> tuple[str, str]:
        """What the process has died of, and what may help."""
        self.dismiss()
        code = self.join()
        assert self._process is not None
        who = f"worker {self._process.pid}"
        if code == -signal.SIGKILL:
            return (
                f"{who} was killed (signal 9), most likely for want of memory",
                "give more memory, or take fewer workers",
            )
        if code < 0:
            how = (
                f"{who} died of signal {-code} ({signal.strsignal(-code)}), most likely a library's"
                " crash"
            )
            return how, "leave out what it was at, or mend the installation"
        return f"{who} ended with exit code {code}", "read its output above"


def _work(
    pipe: "Connection[Any, Any]", slots: MutableSequence[int], number: int, ignores_interrupts: bool
) -> None:
    """What a worker does until nobody holds the other end of its pipe."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for those at work; others learn of the end from the parent
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # To the builder it is a daemon, whose end need not be waited for; but what reads a source here
    # may start processes.
    current_process().daemon = False
    Tally.connect(slots, number)
    threading.Thread(target=_watch_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            function, args, kwargs = pipe.recv()
            outcome: tuple[bool, Any]
            try:
                signal.signal(
                    signal.SIGINT,
                    signal.SIG_IGN if ignores_interrupts else signal.default_int_handler,
                )
                outcome = True, function(*args, **kwargs)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            except BaseException as error:  # noqa: BLE001
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                error.add_note(traceback.format_exc())  # its traceback stays here
                outcome = False, error
            pipe.send(outcome)


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
