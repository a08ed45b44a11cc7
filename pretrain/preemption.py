"""Stopping is a flag. The handlers only raise it; the trainer reads it at a step boundary, where all ranks agree, and then saves.

SIGTERM and SIGUSR2 come from SLURM (preemption, time limit), SIGINT from Ctrl-C. A second Ctrl-C ends the process at once.
"""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    def __init__(self) -> None:
        self.raised_by: str | None = None

    def install(self) -> "StopFlag":
        for number in SIGNALS:
            signal.signal(number, self._raise)
        return self

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        if self.raised_by == "SIGINT" and number == signal.SIGINT:
            os._exit(130)
        self.raised_by = signal.Signals(number).name
