"""Exit codes of data_prep, pretrain, finetune, analysis and wide-mlps. docs/cluster.md describes
how a SLURM job handles each.

    | code | name        | meaning                                                                |
    |------|-------------|------------------------------------------------------------------------|
    | 0    | OK          | finished; or stopped by a signal after a save, outside a SLURM job     |
    | 1    | FAILED      | failed, or found faults (`verify`); another attempt may succeed        |
    | 2    | BAD_INPUT   | settings, weights or data are not valid; another attempt fails too     |
    | 75   | BUSY        | another process holds the run or dataset; try again later              |
    | 130  | INTERRUPTED | Ctrl-C; or stopped by a signal after a save, in a SLURM job            |
"""

import argparse
import sys

from data_prep.errors import UserError
from data_prep.limits import error_of_system, is_fixable
from data_prep.publish import Busy

OK, FAILED, BAD_INPUT, BUSY = 0, 1, 2, 75

_WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def run_command(program: str, options: argparse.Namespace, *, rank: int = 0) -> int:
    """Run `options.run` and return the exit code. An error that the user can fix is printed in one
    line; a bug keeps its traceback. Rank 0 prints all its errors. Other ranks print only errors of
    files and locks and, after the start (`options.started`), errors that are not `of_all_ranks`."""
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        is_started = getattr(options, "started", False)
        is_expected = (
            error.errno is None or is_fixable(error)
            if isinstance(error, OSError)
            else isinstance(error, UserError)
        )
        if is_started and not is_expected:
            raise
        of_all_ranks = isinstance(error, UserError) and error.of_all_ranks
        is_alone = isinstance(error, OSError | Busy) or (is_started and not of_all_ranks)
        if rank == 0 or is_alone:
            name = program if rank == 0 else f"{program}, rank {rank}"
            print(f"{name}: {message_of(error)}", file=sys.stderr)
        return exit_code_of(error, is_started=is_started)


def exit_code_of(error: ValueError | OSError, *, is_started: bool = False) -> int:
    """Return the exit code for an error. `is_started`: all checks have passed, so another attempt
    may succeed."""
    if isinstance(error, Busy):
        return BUSY
    if isinstance(error, OSError):
        return BAD_INPUT if isinstance(error, _WRONG_PATH) and not is_started else FAILED
    kind = error if isinstance(error, UserError) else UserError
    return FAILED if kind.is_passing or (is_started and not kind.is_final) else BAD_INPUT


def message_of(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, UserError):
        error = error_of_system(error)
    return error.with_codes() if isinstance(error, UserError) else str(error)
