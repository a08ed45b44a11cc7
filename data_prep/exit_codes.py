"""Exit codes of data_prep, pretrain, finetune, analysis and wide-mlps; docs/cluster.md says what a
SLURM job does with each.

| code | name        | meaning                                                                              |
|------|-------------|--------------------------------------------------------------------------------------|
| 0    | OK          | finished; outside SLURM jobs also a run that a signal stopped after it had saved     |
| 1    | FAILED      | failed, or found faults (`verify`); another attempt may succeed                      |
| 2    | BAD_INPUT   | settings, weights or data are not valid; another attempt would fail in the same way  |
| 75   | BUSY        | another process holds the run or dataset; try again later                            |
| 130  | INTERRUPTED | Ctrl-C; in a SLURM job a run that a signal stopped after it had saved                |
"""  # noqa: E501 (a table)

from data_prep.errors import UserError
from data_prep.interrupts import INTERRUPTED
from data_prep.limits import limit_remedy
from data_prep.publish import Busy

OK, FAILED, BAD_INPUT, BUSY = 0, 1, 2, 75
__all__ = ["BAD_INPUT", "BUSY", "FAILED", "INTERRUPTED", "OK", "exit_code_of", "message_of"]


_WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def exit_code_of(error: ValueError | OSError, *, is_started: bool = False) -> int:
    """Return the exit code for an error. `is_started`: after all checks, when another attempt may
    succeed."""
    if isinstance(error, Busy):
        return BUSY
    if isinstance(error, OSError):
        return BAD_INPUT if isinstance(error, _WRONG_PATH) and not is_started else FAILED
    return (
        FAILED
        if is_started and not (isinstance(error, UserError) and error.is_final)
        else BAD_INPUT
    )


def message_of(error: Exception) -> str:
    """Return the error as programs print it: with its code, or with the fix if a limit of the shell
    is its cause."""
    if isinstance(error, UserError):
        return error.with_codes()
    remedy = limit_remedy(error)
    return f"{error}; {remedy}" if remedy else str(error)
