"""Stopping is a flag. The handlers only raise it; the trainer reads it at a step boundary, where
all ranks agree, and then saves.

SIGTERM and SIGUSR2 come from SLURM (preemption, time limit), SIGHUP from a terminal that is closed,
SIGINT from Ctrl-C: what it is answered, and what a second one does, stands in
data_prep/interrupts.py.

A wait that may never end (for data of a server that is gone) is done within `waiting`, by `result`.
A single rank gives it up at once, and is then still at its step boundary. With several ranks the
others may be within the step, so none can give up by itself: `stuck_wait_s` reports how long it has
waited since then, and the heartbeat ends them all.
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
"""How long a run that ends early, or with an error, waits for the checkpoint that is being written.
Our launcher waits longer."""
_LOOK_S = 0.2


def heeded_signals() -> list[signal.Signals]:
    """Return those that stop this process. Under nohup a closed terminal does not."""
    return [
        each
        for each in SIGNALS
        if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN
    ]


class Interrupted(Exception):  # noqa: N818
    """A wait was given up, because training is to stop."""


@contextmanager
def entered(place: AbstractContextManager[T]) -> Iterator[T | None]:
    """Within the place; or without it, where the way in was interrupted: the other ranks, which did
    not wait there, must learn of it before anything else."""
    with ExitStack() as until_end:
        value = None
        with suppress(Interrupted):
            value = until_end.enter_context(place)
        yield value


class StopFlag:
    def __init__(self) -> None:
        self.raised_by: str | None = None
        self.is_alone = False
        """World size 1."""
        self._waits_since_s: float | None = None
        self._raised_at_s = 0.0

    def install(self) -> "StopFlag":
        """The flag of this process: the one that is installed already, as what it has seen counts,
        or else this one."""
        installed = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(installed, StopFlag):
            return installed
        keep("it ends as soon as all is loaded, nothing is to be saved yet")
        for number in heeded_signals():
            signal.signal(number, self._raise)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, SIGNALS
        )  # our launcher blocks them, so that none is lost before this
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
        """How long a wait has lasted since training is to stop; 0 if it is not."""
        return 0.0 if self._waits_since_s is None else self.ignored_s(self._waits_since_s)

    def ignored_s(self, since_s: float) -> float:
        """How long it has been since then that training is to stop; 0 if it is not."""
        return 0.0 if self.raised_by is None else time.monotonic() - max(since_s, self._raised_at_s)

    def result(self, future: "Future[T]") -> T:
        """What it comes to. The flag is looked at between short waits: a handler that raised could
        leave the future's lock held."""
        while not future.done():
            self._heed()
            try:
                return future.result(timeout=_LOOK_S)
            except TimeoutError:  # ours, or the future's own, which is raised below
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
