"""A flag that stops a run. Signal handlers only set the flag. The trainer reads the flag between
steps, when all ranks agree, and then saves.

SIGTERM and SIGUSR2 come from SLURM (preemption, time limit), SIGHUP from a closed terminal, SIGINT
from Ctrl-C. At the first Ctrl-C, data_prep/interrupts.py prints a message and lets the second one
end the process.

A wait that may never end (for data of a lost server) calls `result` inside `waiting`. A single rank
gives up such a wait at once, because it is between steps. If there are several ranks, others may be
within the step, so no rank can give up by itself. `stuck_wait_s` then reports the length of the
wait, and the watchdog ends all ranks.
"""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import TypeVar

from data_prep.interrupts import answer_interrupt, keep

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
LAST_WRITE_S = 30.0
"""Seconds that a run waits for an unfinished checkpoint before it ends early. The launcher waits
longer."""
_LOOK_S = 0.2


def heeded_signals() -> list[signal.Signals]:
    """Return the signals that stop this process: SIGNALS, without SIGHUP under nohup."""
    return [
        each
        for each in SIGNALS
        if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN
    ]


class Interrupted(Exception):  # noqa: N818
    """Training must stop, so a wait was given up."""


@contextmanager
def entered(place: AbstractContextManager[T]) -> Iterator[T | None]:
    """Enter the context and yield its value. If entering raises Interrupted, yield None, so that
    the caller can first tell the other ranks."""
    with ExitStack() as until_end:
        value = None
        with suppress(Interrupted):
            value = until_end.enter_context(place)
        yield value


class StopFlag:
    def __init__(self) -> None:
        self.raised_by: str | None = None
        self.is_alone = False
        """True if the run has one rank."""
        self._waits_since_s: float | None = None
        self._raised_at_s = 0.0

    def install(self) -> "StopFlag":
        """Install this flag and return it. If a flag is installed already, return that flag,
        because it may have seen signals."""
        installed = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(installed, StopFlag):
            return installed
        keep("the run ends after loading; there is nothing to save yet")
        for number in heeded_signals():
            signal.signal(number, self._raise)
        # our launcher blocks them, so no earlier signal is lost
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waits_since_s = time.monotonic()
        try:
            self._heed()
            yield
        finally:
            self._waits_since_s = None

    def stuck_wait_s(self) -> float:
        """Return the seconds that this process has waited since the stop request. Return 0 if it
        does not wait, or without a request."""
        return 0.0 if self._waits_since_s is None else self.ignored_s(self._waits_since_s)

    def ignored_s(self, since_s: float) -> float:
        """Return the seconds since the later of the stop request and `since_s`; 0 without a
        request."""
        return 0.0 if self.raised_by is None else time.monotonic() - max(since_s, self._raised_at_s)

    def result(self, future: "Future[T]") -> T:
        """Wait for the future's result, and check the flag between short waits. If the signal
        handler raised an exception instead, the future could stay locked."""
        while not future.done():
            self._heed()
            try:
                return future.result(timeout=_LOOK_S)
            except TimeoutError:  # from this wait; the future's own error is raised below
                continue
        return future.result()

    def _heed(self) -> None:
        if self.is_alone and self.raised_by is not None and self._waits_since_s is not None:
            raise Interrupted

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            answer_interrupt()
        if self.raised_by is None:
            self._raised_at_s = time.monotonic()
        self.raised_by = signal.Signals(number).name
