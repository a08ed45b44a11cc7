import signal  # before anything is read that takes time

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until interrupts.py handles it

import sys

from data_prep.interrupts import interruptible

main = interruptible("analysis", "analysis.cli")

if __name__ == "__main__":
    sys.exit(main())
