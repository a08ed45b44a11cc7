"""The verbs of `data_prep`: their options, what they print and their exit codes. What they do is in modules of their own, imported
when a verb runs, so that help and mistakes cost nothing.

Every verb sets `run` (options -> exit code) and `after_a_stop`, what is said after an interruption or a failing disk.
"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAULTY, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def add_verbs(verbs: "Verbs") -> None:
    """Where every verb is registered, in the order of the help."""
    from data_prep.commands import building, checking, choosing

    building.add_verbs(verbs)
    checking.add_verbs(verbs)
    choosing.add_verbs(verbs)
