"""Runs our commands one after the other on this machine, and passes on what is meant to stop them, so that they can save.

Ctrl-C reaches the command from the terminal itself; SIGTERM and SIGUSR2 are sent on to it. A training that was told to stop saves
and exits with 0: whether it is finished, its own files say.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pretrain.ranks.preemption import SIGNALS


class Here:
    """Use within `listening`."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether anybody wants all of it to end."""
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator["Here"]:
        previous = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self, words: list[str]) -> int:
        """The exit code of `python -m WORDS`; that of a signal as shells have it."""
        if self._is_to_end():
            return 130
        print(f"$ {shlex.join(words)}", flush=True)
        self._process = subprocess.Popen([sys.executable, "-m", *words])
        if self._is_to_end():  # heard while it was being started
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _is_to_end(self) -> bool:
        return self.stopped

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.stopped = True
        if number != signal.SIGINT and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def num_gpus() -> int:
    """That this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ")
    except OSError:
        return 0
    return listed if visible is None else min(listed, len([name for name in visible.split(",") if name.strip()]))
