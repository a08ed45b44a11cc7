"""What the command line says: numbers that can mean nothing are refused before anything is read;
what goes wrong with the machine is one line with what to do first.
"""

import errno
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.manifest import Shard
from tests.conftest import Command
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, write_classes

LEAST = "{!r} will not do; give a whole number from {} up"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "nowhere", "--workers", "0"], LEAST.format("0", 1)),
        (["stats", "nowhere", "--workers", "-2"], LEAST.format("-2", 1)),
        (["dedup", "nowhere", "--workers", "two"], LEAST.format("two", 1)),
        (["show", "nowhere", "--count", "0"], LEAST.format("0", 1)),
        (["show", "nowhere", "--seed", "-1"], LEAST.format("-1", 0)),
        (["show", "nowhere", "--shard", "-1"], LEAST.format("-1", 0)),
        (["subset", "nowhere", "--out", "out", "--count", "0"], LEAST.format("0", 1)),
        (["subset", "nowhere", "--out", "out", "--per-class", "0"], LEAST.format("0", 1)),
        (
            ["subset", "nowhere", "--out", "out", "--count", "3", "--seed", "-1"],
            LEAST.format("-1", 0),
        ),
        (["dedup", "nowhere", "--near", "6", "--exact"], "not allowed with argument --near"),
    ],
)
def test_what_an_option_cannot_be_is_refused_first(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = next(word for word in reversed(words) if word.startswith("--"))
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"data_prep {words[0]}: {option}: {message}\n"


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["build", "--sauce", "folder"])
    assert (
        "data_prep build: --sauce: no such option; did you mean --source?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/d"),
            "'/d'; name a disk that can be written to first: what is",
        ),
        (
            OSError(errno.EACCES, "Permission denied", "/d"),
            "'/d'; get the right to write or read there first: what is",
        ),
        (
            OSError(errno.EIO, "Input/output error", "/d"),
            "'/d'; what is finished is kept, the same command goes on",
        ),
    ],
)
def test_the_same_command_goes_on_only_after_what_is_in_its_way_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, error: OSError, words: str
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("data_prep.build.build.build", fail)
    refused(build(write_classes(tmp_path / "in", {"ant": 1}), tmp_path / "out"), words, code=1)


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_named(
    tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    write_classes(tmp_path / "in", {"ant": 1})
    words = (
        "data_prep",
        "build",
        "--source",
        "folder",
        "--out",
        "out",
        "source.path=in",
        "num_workers=2",
    )
    done = command(*words, TMPDIR=str(folder))
    assert done.returncode == 1 and f"({folder}); set TMPDIR to a shorter one" in done.stderr
    assert (
        command(*words, "num_workers=1", TMPDIR=str(folder)).returncode == 0
    )  # no sockets: no other process is needed


def test_no_path_has_a_zero_byte() -> None:
    fields = {
        "name": "a",
        "num_samples": 1,
        "num_bytes": 1,
        "sha256": "",
        "index_sha256": "",
        "paths_sha256": "",
    }
    with pytest.raises(ValueError, match="is no path"):
        Shard.model_validate({**fields, "file": "a\0.tar"})
