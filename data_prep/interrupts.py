"""Ctrl-C, alike in every verb of every program. Nothing heavy here: it is what a program imports first.

1. The first is answered at once, by a thread, since the main one may be within a library for long (an import, a large product). The
   answer says what is kept and what a second one does. Ranks leave it to who has started them (`ANSWERED`).
2. In the main thread it raises KeyboardInterrupt, or does what a training has put in its place (preemption.py).
3. What has nothing to save is ended after a moment, whatever it is waiting for: a library's thread, a store, a picture.
4. The second ends the process at once. All that is published appears whole, so what is there then is whole.
"""

import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

INTERRUPTED = 130
ENDS_WITHIN_S = 1.2
ANSWERED = "WIDE_MLPS_CTRL_C_ANSWERED"
"""Set for processes whose starter answers Ctrl-C: to `ends`, or to `saves` where they let it wait until they can save."""


def keep(words: str, *, ends_within_s: float | None = ENDS_WITHIN_S) -> None:
    """What Ctrl-C is answered with from now on, and how long the end may take then; None: as long as saving takes."""
    if (current := _Interrupts.current) is not None:
        current.words, current.ends_within_s = words, ends_within_s


def leave_answer() -> None:
    """This process answers in its own way from now on, and so does the second Ctrl-C."""
    if (current := _Interrupts.current) is not None:
        current.is_left = True


def interruptible(program: str) -> Callable[..., int]:
    """The `main` of PROGRAM.cli, which is imported when Ctrl-C is heeded already."""

    def main(arguments: list[str] | None = None) -> int:
        is_heeded = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        if _Interrupts.current is not None or not is_heeded:  # in the background of a shell nobody means this process
            return int(importlib.import_module(f"{program}.cli").main(arguments))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _Interrupts.current = interrupts = _Interrupts(program)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask - {signal.SIGINT} if os.environ.get(ANSWERED) == "ends" else mask)
            code = int(importlib.import_module(f"{program}.cli").main(arguments))
        except BaseException as error:
            # a library may have made another error of the interrupt
            if not isinstance(error, KeyboardInterrupt) and (not interrupts.has_come or interrupts.ends_within_s is None):
                raise
            code = INTERRUPTED
        finally:
            _Interrupts.current = None
            interrupts.end()
        if interrupts.has_come:
            sys.stdout.flush()
            os._exit(code)  # no thread is waited for
        return code

    return main


class _Interrupts:
    current: ClassVar["_Interrupts | None"] = None

    def __init__(self, program: str):
        self.program, self.words = program, "nothing is saved"
        self.ends_within_s: float | None = ENDS_WITHIN_S
        self.is_silent = ANSWERED in os.environ or (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") != "0"
        self.has_come = self.is_left = False
        self._num_raised, self._hook = 0, sys.unraisablehook
        sys.unraisablehook = self._report
        self._incoming, self._outgoing = os.pipe()
        os.set_blocking(self._outgoing, False)
        self._handler = signal.signal(signal.SIGINT, self._interrupt)
        self._descriptor = signal.set_wakeup_fd(self._outgoing, warn_on_full_buffer=False)
        # it inherits that all signals are blocked: they go to the main thread
        self._thread = threading.Thread(target=self._answer, name="ctrl-c", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """What has come is answered."""
        os.write(self._outgoing, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._descriptor)
        sys.unraisablehook = self._hook
        if not self.has_come and signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, self._handler)
        os.close(self._incoming)
        os.close(self._outgoing)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._num_raised += 1
        if self._num_raised > 1:
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    def _report(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """What is raised in a destructor goes no further: an interrupt there is no news, and the end comes all the same."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._hook(unraisable)

    def _answer(self) -> None:
        wait_s: float | None = None
        while select.select([self._incoming], [], [], wait_s)[0]:
            for number in os.read(self._incoming, 64):
                if number == 0:
                    return
                if number != signal.SIGINT or self.is_left:
                    continue
                if self.has_come:
                    os._exit(INTERRUPTED)
                self.has_come, wait_s = True, self.ends_within_s
                if not self.is_silent:
                    os.write(2, f"\n{self.program}: stopping; {self.words}; Ctrl-C again ends it at once\n".encode())
        os._exit(INTERRUPTED)
