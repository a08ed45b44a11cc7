"""Limits of the shell (`ulimit`) that are the cause of an error of the system."""

import errno
import resource

_LIMITS = {
    errno.EMFILE: ("ulimit -n", resource.RLIMIT_NOFILE, 1),
    errno.EFBIG: ("ulimit -f", resource.RLIMIT_FSIZE, 1024),
}
"""Error -> command of the shell, limit, unit of the command's number in bash."""


def limit_remedy(error: BaseException) -> str | None:
    """Return what to do if a limit is the cause: "raise `ulimit -n`, which is 64"."""
    if not isinstance(error, OSError) or error.errno not in _LIMITS:
        return None
    command, limit, unit = _LIMITS[error.errno]
    value, _ = resource.getrlimit(limit)
    return (
        None if value == resource.RLIM_INFINITY else f"raise `{command}`, which is {value // unit}"
    )


def cause_of(error: OSError) -> str:
    """Return the error's words, and the remedy if a limit is the cause."""
    words, remedy = error.strerror or str(error), limit_remedy(error)
    return f"{words}; {remedy}" if remedy else words
