"""Command line of the ground floor: `data_prep VERB ...`; the verbs are registered in
`data_prep.commands`. Whatever goes wrong with a verb is one line and an exit code.
"""

import errno
import io
import sys
import tempfile
from concurrent.futures import BrokenExecutor

from data_prep.commands import add_verbs
from data_prep.errors import UserError
from data_prep.exit_codes import FAILED, exit_code_of, message_of
from data_prep.explain import program
from data_prep.interrupts import keep
from data_prep.limits import limit_remedy

FIRST = {
    errno.EROFS: "name a disk that can be written to",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get the right to write or read there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG), "correct that path"
    ),
}
"""What must be done before the same command can go on."""


def main(arguments: list[str] | None = None) -> int:
    parser = program(
        "data_prep",
        description="Image archives in, verified WebDataset shards out.",
        add_verbs=add_verbs,
    )
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as stderr: no name stops what only talks of it
    keep(
        options.after_a_stop
        # workers that are in the middle of a large file end when they see that nobody is there any
        # more
    )
    try:
        return int(options.run(options))
    except UserError as error:
        print(f"data_prep: {message_of(error)}", file=sys.stderr)
        return exit_code_of(error)
    except (OSError, BrokenExecutor) as error:
        print(
            f"data_prep: {str(error).rstrip('.')}; {_what_next(error, options.after_a_stop)}",
            file=sys.stderr,
        )
        return FAILED


def _what_next(error: Exception, after_a_stop: str) -> str:
    if str(error) == "AF_UNIX path too long":
        return (
            f"the folder of temporary files is ({tempfile.gettempdir()}); set TMPDIR to a shorter"
            " one, such as /tmp"
        )
    first = limit_remedy(error) or (
        FIRST.get(error.errno or 0) if isinstance(error, OSError) else None
    )
    return f"{first} first: {after_a_stop}" if first else after_a_stop
