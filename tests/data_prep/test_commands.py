"""Mistakes on the command line and faults of the machine are one-line errors."""

import errno
import os
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.manifest import Shard
from tests.conftest import Command
from tests.data_prep.conftest import Refused
from tests.data_prep.samples import build, write_classes
from tests.errors import printed_errors


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("verify nowhere --workers 0", "--workers"),
        ("stats nowhere --workers -2", "--workers"),
        ("dedup nowhere --workers two", "--workers"),
        ("preview nowhere --count 0", "--count"),
        ("preview nowhere --seed -1", "--seed"),
        ("preview nowhere --shard -1", "--shard"),
        ("subset nowhere --out out --count 0", "--count"),
        ("subset nowhere --out out --per-class 0", "--per-class"),
        ("subset nowhere --out out --count 3 --seed -1", "--seed"),
        ("dedup nowhere --max-hamming 6 --exact", "--exact"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_an_error_before_anything_is_read(
    words: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert printed_errors(capsys.readouterr().err) == [(option, "bad-value")]


def test_an_unknown_option_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["build", "--sauce", "folder"])
    found = capsys.readouterr().err
    assert printed_errors(found) == [("--sauce", "unknown-key")] and "--source" in found


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EROFS, "[unreadable]"), (errno.EACCES, "[unreadable]"), (errno.EIO, "/d")],
)
def test_an_error_of_the_disk_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, number: int, code: str
) -> None:
    def fail(_: object) -> None:
        raise OSError(number, os.strerror(number), "/d")

    monkeypatch.setattr("data_prep.build.build.build", fail)
    refused(build(write_classes(tmp_path / "in", {"ant": 1}), tmp_path / "out"), code, code=1)


@pytest.mark.processes
def test_a_temporary_folder_that_is_too_long_for_a_socket_is_named(
    tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    write_classes(tmp_path / "in", {"ant": 1})
    words = ("data_prep", "build", "--source", "folder", "--out", "out", "source.path=in")
    done = command(*words, "num_workers=2", TMPDIR=str(folder))
    assert printed_errors(done.stderr) == [("TMPDIR", "unsupported")]
    # one worker runs in this process and needs no socket
    assert command(*words, "num_workers=1", TMPDIR=str(folder)).returncode == 0


def test_no_path_has_a_zero_byte() -> None:
    fields = {
        "name": "a",
        "num_samples": 1,
        "num_bytes": 1,
        "sha256": "",
        "index_sha256": "",
        "paths_sha256": "",
    }
    with pytest.raises(ValueError, match="file"):
        Shard.model_validate({**fields, "file": "a\0.tar"})
