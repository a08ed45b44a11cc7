"""Numbers on the command line that can mean nothing are refused before anything is read."""

import pytest

from data_prep.__main__ import main


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["verify", "nowhere", "--workers", "0"], 1),
        (["stats", "nowhere", "--workers", "-2"], 1),
        (["dedup", "nowhere", "--workers", "two"], 1),
        (["show", "nowhere", "--count", "0"], 1),
        (["show", "nowhere", "--seed", "-1"], 0),
        (["show", "nowhere", "--shard", "-1"], 0),
        (["subset", "nowhere", "--out", "out", "--count", "0"], 1),
        (["subset", "nowhere", "--out", "out", "--per-class", "0"], 1),
        (["subset", "nowhere", "--out", "out", "--count", "3", "--seed", "-1"], 0),
    ],
)
def test_a_number_has_a_least_value(words: list[str], least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"data_prep {words[0]}: error: argument {words[-2]}: {words[-1]!r} will not do; " + (
        f"give a whole number from {least} up"
    )
