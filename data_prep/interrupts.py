"""Ctrl-C in every command of every program. A program imports this module first.

1. The first Ctrl-C prints which work is kept, then raises KeyboardInterrupt in the main thread, so
   every `finally` runs. During an import it is raised in the line after the import, because C++
   code that imports (torch) would abort. Training has another handler, which sets a
   stop flag (preemption.py).
2. The second Ctrl-C ends the process at once. No file is half written, because files appear only
   when they are complete.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from data_prep import console

INTERRUPTED = 130
ANSWERED = "WIDE_MLPS_CTRL_C_ANSWERED"
"""Environment variable that launchers set if they print the message for their ranks. Value `saves`:
SIGINT waits until the rank can save. Value `ends`: SIGINT ends the rank."""


class _Answer:
    program, kept = "", "nothing is saved"


def keep(kept: str) -> None:
    """Set the text about kept work that Ctrl-C prints. "": print no message."""
    _Answer.kept = kept


def answer_interrupt() -> None:
    """Print the message of `keep`, and let a second Ctrl-C end the process. For signal handlers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    is_first_rank = (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"
    if _Answer.kept and is_first_rank and ANSWERED not in os.environ:
        words = f"stopping; {_Answer.kept}; Ctrl-C again ends the command at once"
        console.write_error(f"\n{_Answer.program}: {words}\n")


def interruptible(program: str, module: str) -> Callable[..., int]:
    """Return a function that installs the Ctrl-C handler, imports `module` and calls its `main`.
    Call the function once in a process."""

    def main(arguments: list[str] | None = None) -> int:
        console.install()
        _Answer.program = program
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:  # processes in a shell's background must ignore Ctrl-C
            signal.signal(signal.SIGINT, _interrupt)
        if os.environ.get(ANSWERED) == "ends":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            code = int(importlib.import_module(module).main(arguments))
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGINT, before)
        if code == 0 and (fault := console.lost_output()) is not None:
            print(
                f"{program}: standard output cannot be written ({fault.strerror}). Repeat the"
                " command",
                file=sys.stderr,
            )
            return 1
        return code

    return main


def _interrupt(_number: int, frame: FrameType | None) -> None:
    answer_interrupt()
    after = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            after = frame.f_back
        frame = frame.f_back
    if after is None:
        raise KeyboardInterrupt
    after.f_trace = _raise
    sys.settrace(lambda *_: None)  # Python calls `_raise` only while it traces


def _raise(*_: object) -> None:
    raise KeyboardInterrupt
