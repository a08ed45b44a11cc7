"""Ctrl-C, alike in every verb of every program. Nothing heavy here: it is what a program imports
first.

1. The first is answered at once, by a thread, since the main one may be within a library for long
   (an import, a large product). The answer says what is kept and what a second one does. Ranks
   leave it to who has started them (`ANSWERED`).
2. In the main thread it raises KeyboardInterrupt, or does what a training has put in its place
   (preemption.py).
3. What has nothing to save is ended after a moment, whatever it is waiting for: a library's thread,
   a store, a picture.
4. The second ends the process at once. All that is published appears whole, so what is there then
   is whole.
"""

import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from data_prep import console

INTERRUPTED = 130
ENDS_WITHIN_S = 0.8
ANSWERED = "WIDE_MLPS_CTRL_C_ANSWERED"
"""Set for processes whose starter answers Ctrl-C: to `ends`, or to `saves` where they let it wait
until they can save."""


class _Now:
    words, has_come = "nothing is saved", False
    ends_within_s: float | None = ENDS_WITHIN_S


def keep(words: str, *, ends_within_s: float | None = ENDS_WITHIN_S) -> None:
    """What Ctrl-C is answered with from now on (without words the process does it itself), and how
    long the end may then take."""
    _Now.words, _Now.ends_within_s = words, ends_within_s


def interruptible(program: str, module: str) -> Callable[..., int]:
    """The `main` of that module, which is imported when Ctrl-C is heeded already. Called once in a
    process."""

    def main(arguments: list[str] | None = None) -> int:
        console.install()
        incoming, outgoing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        thread = threading.Thread(target=_answer, args=(program, incoming), daemon=True)
        error: BaseException | None = None
        before, code = signal.getsignal(signal.SIGINT), INTERRUPTED
        # what is raised in a destructor goes no further: there it is no news
        sys.unraisablehook = lambda it: (
            None if isinstance(it.exc_value, KeyboardInterrupt) else sys.__unraisablehook__(it)
        )
        try:
            thread.start()
            signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
            if (
                before is not signal.SIG_IGN
            ):  # in the background of a shell nobody means this process
                signal.signal(signal.SIGINT, _interrupt)
            if os.environ.get(ANSWERED) == "ends":
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            code = int(importlib.import_module(module).main(arguments))
        except BaseException as raised:  # noqa: BLE001 (a library may have made another error of the interrupt)
            error = raised
        signal.signal(signal.SIGINT, before)
        os.write(outgoing, b"\0")
        thread.join()  # what has come is answered
        if (
            error is not None
            and not isinstance(error, KeyboardInterrupt)
            and not (_Now.has_come and _Now.ends_within_s)
        ):
            raise error
        if _Now.has_come:
            sys.stdout.flush()
            os._exit(code)  # no thread is waited for
        if code == 0 and (fault := console.lost_output()) is not None:
            print(
                f"{program}: standard output: cannot be written ({fault.strerror}). Repeat the"
                " command",
                file=sys.stderr,
            )
            return 1
        return code

    return main


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raises nothing within an import, where C++ would abort (torch does): the thread ends the
    process in a moment."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None or not _Now.ends_within_s:
        raise KeyboardInterrupt


def _answer(program: str, incoming: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    wait_s: float | None = None
    while select.select([incoming], [], [], wait_s)[0]:
        number = os.read(incoming, 1)[0]
        if number == 0:
            return
        if number == signal.SIGINT and _Now.words:
            if _Now.has_come:
                break
            _Now.has_come, wait_s = True, _Now.ends_within_s
            if (
                ANSWERED not in os.environ
                and (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"
            ):
                console.write_error(
                    f"\n{program}: stopping; {_Now.words}; Ctrl-C again ends it at once\n"
                )
    os._exit(INTERRUPTED)
