"""Every error code is printed and used by the programs, and documented next to its name."""

from pathlib import Path

import pytest

from data_prep.errors import CODES, Code, UserError
from tests.errors import printed_errors
from tests.ranks import REPOSITORY

PACKAGES = ("data_prep", "pretrain", "finetune", "analysis", "cluster")


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_printed_and_read_back(code: Code) -> None:
    others = [UserError("other", "it is wrong", "correct it", code=code)]
    error = UserError(
        "train.lr", "it is negative", "choose a number above 0", code=code, others=others
    )
    printed = "\n".join(f"pretrain: {line}" for line in error.with_codes().splitlines())
    assert printed_errors(printed) == [("train.lr", code), ("other", code)]
    assert printed.startswith("pretrain: train.lr: it is negative. Choose a number above 0. [")


def test_every_code_is_used() -> None:
    files = [path for name in PACKAGES for path in Path(REPOSITORY, name).rglob("*.py")]
    text = "\n".join(path.read_text() for path in files if path.name != "errors.py")
    assert [code for code in CODES if f'"{code}"' not in text] == []
