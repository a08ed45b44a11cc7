import signal  # before any slow import

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until interrupts.py handles it

import sys

from data_prep.interrupts import interruptible

main = interruptible("wide-mlps", "cluster.cli")
OF_SUBMIT = {"submit": "cluster.queue_jobs", "check": "cluster.check"}
"""Command of the script cluster/submit -> its module."""

if __name__ == "__main__":
    if module := OF_SUBMIT.get("".join(sys.argv[1:2])):
        sys.exit(interruptible("cluster/submit", module)(sys.argv[2:]))
    sys.exit(main())
