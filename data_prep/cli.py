"""Command line of the ground floor: `data_prep VERB ...`; the verbs are registered in `data_prep.commands`.

What it needs is imported where Ctrl-C is caught: loading takes long enough on a network disk to lose patience.
"""

import sys


def main(arguments: list[str] | None = None) -> int:
    try:
        from data_prep.commands.line import run

        return run(arguments)
    except KeyboardInterrupt:
        print("data_prep: interrupted before anything was done", file=sys.stderr)
        return 130
