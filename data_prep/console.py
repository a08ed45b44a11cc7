"""Standard output and standard error of every program. Text that cannot be written is dropped
without an exception.

A full disk, a closed pipe (`| head`) or a killed `tee` must not end a training or other work.

1. `install` replaces `sys.stdout` and `sys.stderr` by streams that drop text if a write fails. The
   streams try to write the next text, because a disk may have space again. A closed descriptor
   becomes /dev/null.
2. Signal handlers, and threads that must not wait for a lock, call `write_error`.
3. `lost_output` returns the error that made standard output lose text. A command that a person
   started fails after such an error. A reader that closed the pipe is no error. Trainings and ranks
   have their results in files, so their exit codes do not depend on output.

This module imports only the standard library (Python 3.9 or newer), because cluster/job.py uses it
on nodes without .venv.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

_RANKS = ("RANK", "SLURM_PROCID")
"""Environment variables of processes that a launcher or SLURM has started."""


class _Descriptor(io.FileIO):
    fault: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        try:
            while left:
                count = super().write(left)
                if not count:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                left = left[count:]
        except OSError as error:
            self.fault = error
        return num_bytes


class _Output:
    descriptor: _Descriptor | None = None
    is_progress = False


def install() -> None:
    """Make stdout and stderr drop text that cannot be written. Streams that a test or a notebook
    has replaced stay."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        raw = _Descriptor(number, "wb", closefd=False)
        how: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        if stream is not None:
            stream.flush()
            how = {
                key: getattr(stream, key)
                for key in ("encoding", "errors", "line_buffering", "write_through")
            }
        if how["errors"] == "strict":  # like stderr: escape what the terminal cannot show
            how["errors"] = "backslashreplace"
        buffer: Any = raw if how.get("write_through") else io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffer, **how))
        if name == "stdout":
            _Output.descriptor = raw


def write_error(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())


def output_is_progress() -> None:
    """Declare that this process only prints progress of a training, so lost output is no
    failure."""
    _Output.is_progress = True


def lost_output() -> OSError | None:
    sys.stdout.flush()
    fault = _Output.descriptor.fault if _Output.descriptor is not None else None
    is_exempt = _Output.is_progress or any(name in os.environ for name in _RANKS)
    return None if fault is None or fault.errno == errno.EPIPE or is_exempt else fault
