"""Command line of the ground floor: `data_prep VERB ...`; the verbs are registered in `data_prep.commands`."""

import argparse
import sys
from concurrent.futures import BrokenExecutor

from data_prep.commands import BAD_INPUT, FAULTY, INTERRUPTED, add_verbs
from data_prep.publish import Busy
from data_prep.settings import UserError, parse_command_line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="data_prep", description="Image archives in, verified WebDataset shards out.")
    add_verbs(parser.add_subparsers(required=True, metavar="VERB"))
    options = parse_command_line(parser, arguments)
    try:
        return int(options.run(options))
    except Busy as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return FAULTY
    except UserError as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return BAD_INPUT
    except (OSError, BrokenExecutor) as error:
        print(f"data_prep: {str(error).rstrip('.')}; {options.after_a_stop}", file=sys.stderr)
        return FAULTY
    except KeyboardInterrupt:
        print(f"data_prep: interrupted; {options.after_a_stop}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
