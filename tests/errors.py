"""Match errors by field and code, never by sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from data_prep.errors import CODES, Code, UserError


@contextmanager
def fails(
    code: Code, field: str | None = None, *, kind: type[UserError] = UserError
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a `UserError` with this code, and with this field if one is given."""
    with pytest.raises(kind) as caught:
        yield caught
    errors = [(each.field, each.code) for each in (caught.value, *caught.value.others)]
    assert code in [found for _, found in errors], f"{errors}: {caught.value}"
    if field is not None:
        assert (field, code) in errors, f"{errors}: {caught.value}"


def printed_errors(output: str) -> list[tuple[str, str]]:
    """Return the (field, code) of each error in a program's output."""
    pattern = rf"^(?:(?:cluster/)?[\w-]+(?:, rank \d+)?: )?(\S+?): .*\[({'|'.join(CODES)})\]$"
    return re.findall(pattern, output, re.MULTILINE)
