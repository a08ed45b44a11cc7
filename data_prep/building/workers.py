"""The workers of a build: as many processes as asked for, and none outlives the process that started them. A single worker is a
thread of this process, which spares small builds the start of another one.

Without the watch below, workers of a builder that is killed would finish what is queued, into the files of the builder that
takes its place, and then wait for ever.
"""

import os
import threading
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.forkserver import ensure_running
from multiprocessing.sharedctypes import Synchronized
from typing import ClassVar

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["data_prep.building.build"])
"""Imported once, by the process that workers are forked from."""


class Tally:
    """Counts, across processes, what workers have done since it was last asked."""

    _mine: ClassVar["Synchronized[int] | None"] = None

    def __init__(self) -> None:
        self.counter: Synchronized[int] = _CONTEXT.Value("q", 0)
        self._taken = 0

    def taken(self) -> int:
        total = self.counter.value
        new, self._taken = total - self._taken, total
        return new

    @classmethod
    def add(cls, count: int) -> None:
        """Called by a worker; does nothing where nobody counts."""
        if cls._mine is not None:
            with cls._mine.get_lock():
                cls._mine.value += count

    @classmethod
    def connect(cls, counter: "Synchronized[int] | None") -> None:
        cls._mine = counter


def warm_up() -> None:
    """Starts the process that workers are forked from, which then imports what they need while this one does the same."""
    ensure_running()


def worker_pool(num_workers: int, *, tally: Tally | None = None) -> Executor:
    counter = tally.counter if tally is not None else None
    if num_workers <= 1:
        return ThreadPoolExecutor(1, initializer=Tally.connect, initargs=(counter,))
    return ProcessPoolExecutor(num_workers, mp_context=_CONTEXT, initializer=_begin, initargs=(counter,))


def _begin(counter: "Synchronized[int] | None") -> None:
    Tally.connect(counter)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
