import signal  # before anything is read that takes time

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback; in a moment interrupts.py heeds it

import sys

from data_prep.interrupts import interruptible

main = interruptible("wide-mlps", "cluster.cli")

if __name__ == "__main__":
    if sys.argv[1:2] in (["submit"], ["check"]):  # which the script cluster/submit starts
        sys.exit(interruptible("cluster/submit", f"cluster.{sys.argv[1]}")(sys.argv[2:]))
    sys.exit(main())
