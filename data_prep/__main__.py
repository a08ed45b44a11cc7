import signal  # before any slow import

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until interrupts.py handles it

import os
import sys
from contextlib import suppress

from data_prep.errors import UserError
from data_prep.interrupts import interruptible

_run = interruptible("data_prep", "data_prep.cli")


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if (
        words[:1] == ["build"]
        and len(os.sched_getaffinity(0)) > 1
        and not {"-h", "--help", "num_workers=1"}.intersection(words)
    ):
        from data_prep.workers import start_server

        with suppress(OSError, UserError):  # the build meets the error again and reports it
            start_server()  # workers and this process import at the same time
    return _run(arguments)


if __name__ == "__main__":
    sys.exit(main())
