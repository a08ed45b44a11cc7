"""Imports the program when Ctrl-C is heeded already."""

import sys

from data_prep.interrupts import interruptible

main = interruptible("data_prep")

if __name__ == "__main__":
    sys.exit(main())
