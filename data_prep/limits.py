"""Errors of the operating system (a full disk, no permission, a limit of the shell) as errors for
users."""

import errno
import resource

from data_prep.errors import Code, UserError

_LIMITS = {
    errno.EMFILE: ("ulimit -n", resource.RLIMIT_NOFILE, 1),
    errno.EFBIG: ("ulimit -f", resource.RLIMIT_FSIZE, 1024),
}
"""Error number -> (shell command that shows the limit, the limit in `resource`, divisor to get the
number that the command shows)."""
_FIXES: dict[int, tuple[Code, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("no-space", "free some space")),
    **dict.fromkeys((errno.EACCES, errno.EPERM), ("unreadable", "change its permissions")),
    errno.EROFS: ("unreadable", "choose a disk that you can write to"),
    errno.ENOENT: ("missing-path", "correct the path"),
    errno.EEXIST: ("exists", "choose another path"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        ("unreadable", "correct the path"),
    ),
}


def limit_remedy(error: BaseException) -> str | None:
    """Return a fix if a limit of the shell is the cause, for example "raise `ulimit -n`, which is
    64"."""
    if not isinstance(error, OSError) or error.errno not in _LIMITS:
        return None
    command, limit, unit = _LIMITS[error.errno]
    value, _ = resource.getrlimit(limit)
    if value == resource.RLIM_INFINITY:
        return None
    return f"raise `{command}`, which is {value // unit}"


def is_fixable(error: OSError) -> bool:
    """Return True if a full disk, a permission or a limit is the cause."""
    code, _ = _FIXES.get(error.errno or 0, (None, ""))
    return code in ("no-space", "unreadable") or limit_remedy(error) is not None


def error_of_system(error: OSError) -> UserError:
    """Return a UserError for the same error, with a field, a fix and a code."""
    code, fix = _FIXES.get(error.errno or 0, ("unreadable", "remove the cause"))
    if remedy := limit_remedy(error):
        code, fix = "no-space", remedy
    field = "system" if error.filename is None else str(error.filename)
    problem = error.strerror or str(error) or type(error).__name__
    return UserError(field, problem, f"{fix}, then run the same command again", code=code)


def cause_of(error: OSError) -> str:
    """Return the error's text, with the fix if a limit is the cause."""
    words, remedy = error.strerror or str(error), limit_remedy(error)
    return f"{words}; {remedy}" if remedy else words
