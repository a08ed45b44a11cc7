"""Errors for users: each has a field, a problem, a fix and a stable code.

A program prints `PROGRAM: field: problem. Fix. [code]`. Tests match field and code, never the
sentence. A field is a setting (`train.duration`), an option (`--ranks`), or the path or URL that
the problem is about.
"""

import re
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

Code = Literal[
    "bad-syntax",  # YAML, an override or a number cannot be parsed
    "unknown-key",  # a setting or option with this name does not exist
    "unknown-name",  # a class, split, model, preset or layer with this name does not exist
    "missing-value",  # a required setting or option is not given
    "bad-value",  # a value has the wrong type or is out of range
    "conflict",  # two settings exclude each other
    "wrong-command",  # the config or path belongs to another command
    "missing-path",  # a file, folder or object does not exist
    "unreadable",  # no permission, or not a file
    "exists",  # the destination exists and would be overwritten
    "busy",  # another process holds the lock
    "changed",  # an input, config or run has changed since the work began
    "damaged",  # content is cut, corrupt or has another hash
    "unfinished",  # the dataset, run or checkpoint is not complete
    "empty",  # there is nothing to read or compute
    "unknown-format",  # the layout or file format is not recognized
    "unsupported",  # the combination, platform or feature is not supported
    "unsafe",  # content of others could run code, or write outside its folder
    "mismatch",  # weights, classes, shapes or ranks do not fit each other
    "no-space",  # disk, memory or a limit of the system is too small
    "unreachable",  # a server does not answer, or answers with an error
    "no-access",  # credentials are missing or invalid
    "missing-library",  # an optional package is not installed
    "missing-device",  # no GPU, or fewer than requested
    "too-many-faults",  # more bad samples, rejected images or skipped steps than allowed
    "not-finite",  # a loss, weight or feature is NaN or infinite
    "another-rank",  # another rank failed; its message says why
    "scheduler",  # SLURM rejected the job or does not respond
]
CODES: tuple[str, ...] = get_args(Code)


class UserError(ValueError):
    """A mistake or fault that the user can fix. `str()` is the complete message, one line per
    error.

    `others` are further errors of the same input, such as other fields of the same config.
    """

    is_final: ClassVar[bool] = False
    """True if another attempt would fail in the same way. The exit code is then 2, even after all
    checks have passed."""
    is_passing: ClassVar[bool] = False
    """True if another attempt may succeed. The exit code is then 1, even before the work starts."""
    of_all_ranks = False
    """True if every rank raises the error at the same step, so that one rank prints it for all."""

    def __init__(
        self,
        field: str,
        problem: str,
        fix: str = "",
        *,
        code: Code,
        others: Sequence["UserError"] = (),
    ) -> None:
        super().__init__(field, problem, fix)
        self.field, self.problem, self.fix, self.code = field, problem, fix, code
        self.others = tuple(others)

    def _line(self) -> str:
        problem = f"{self.field}: {self.problem}" if self.field else self.problem
        if not self.fix:
            return problem
        fix = f"{self.fix[0].upper()}{self.fix[1:].rstrip('.')}"
        return f"{problem.rstrip('.')}. {fix}{'' if fix.endswith('?') else '.'}"

    def __str__(self) -> str:
        return readable("\n".join(each._line() for each in (self, *self.others)))

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.__dict__)

    def with_codes(self) -> str:
        """Return the message as programs print it, with the code at the end of each line."""
        lines = [f"{each._line()} [{each.code}]" for each in (self, *self.others)]
        return readable("\n".join(lines))


def _restore(kind: type[UserError], attributes: dict[str, object]) -> UserError:
    error = kind.__new__(kind)
    error.__dict__.update(attributes)
    error.args = (error.field, error.problem, error.fix)
    return error


class SettingsError(UserError):
    """A mistake in a config or on the command line."""

    is_final = True


_UNDECODED = re.compile("[\udc80-\udcff]")
"""Bytes of a file name that are not UTF-8, as Python represents them (surrogates)."""


def readable(text: str) -> str:
    """Return the text with undecodable bytes as `\\xNN`, which every terminal shows."""
    return _UNDECODED.sub(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)
