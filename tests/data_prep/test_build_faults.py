"""A build that is cut off between any two of its steps on the file system, a disk that is full, a target that cannot be written,
a source that vanishes: nothing half-written is taken for whole, and the same command goes on to the same bytes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from data_prep.manifest import DatasetError, load_manifest
from tests.data_prep.samples import build, files_of, write_classes, write_files

STEPS = ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir")
"""What a build does to the file system, apart from filling temporary files."""
CUT_OFF = 77


def build_cut_off_at(step: int, source: Path, out: Path) -> int:
    """The exit code of a build, in a process of its own, that ends without any clean-up just before its `step`th step."""
    pid = os.fork()
    if pid == 0:
        import data_prep.building.workers

        data_prep.building.workers.warm_up = lambda: None  # the fork server is another process's child
        left = [step]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*words: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(CUT_OFF)
                return function(*words, **named)

            return run

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        os._exit(build(source, out, "samples_per_shard=3"))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_build_cut_off_between_any_two_steps_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 2, "bee": 2})
    write_files(source, {"ant/zero.jpg": b""})
    settings = ("samples_per_shard=3", "max_reject_share=1")
    assert build(source, tmp_path / "whole" / "animals", *settings) == 0
    whole = files_of(tmp_path / "whole")
    out = tmp_path / "cut" / "animals"
    num_cut, num_finished = 0, 0
    for step in range(1, 200):
        code = build_cut_off_at(step, source, out)
        if code == CUT_OFF:
            num_cut += 1
            with suppress(DatasetError):  # unfinished, and it says so
                num_finished += load_manifest(out).num_written == 4
            if step % 5 == 0:  # sometimes it is cut off twice
                assert build_cut_off_at(step + 2, source, out) in (CUT_OFF, 0, 1)
            assert build(source, out, *settings) == 0
        assert files_of(tmp_path / "cut") == whole
        shutil.rmtree(out)
        if code != CUT_OFF:
            break
    assert num_cut > 40
    assert num_finished > 0  # the last steps come after the manifest


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may make a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_one_line_and_the_build_goes_on_when_there_is_room(
    tmp_path: Path, tiny_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 20, "bee": 20})
    cut = ("image_size=64", "samples_per_shard=5")
    assert build(source, tiny_disk / "animals", *cut) == 1
    said = capfd.readouterr().err
    assert (
        said.splitlines()[-1].endswith(
            "No space left on device; what is finished is kept, the same command goes on from there"
        )
        or "No space left on device" in said.splitlines()[-1]
    )
    assert "Traceback" not in said
    assert not (tiny_disk / "animals" / "manifest.json").exists()
    assert list((tiny_disk / "animals").glob("*.tar"))  # what is finished is kept
    out = tmp_path / "roomy" / "animals"
    shutil.copytree(tiny_disk / "animals", out)
    assert build(source, out, *cut) == 0
    assert build(source, tmp_path / "whole" / "animals", *cut) == 0
    assert files_of(out) == files_of(tmp_path / "whole" / "animals")


def test_a_target_gone_read_only_is_one_line_and_nothing_is_damaged(
    tmp_path: Path, tiny_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 3})
    words = ["build", "source.kind=folder", f"source.path={source}", f"out={tiny_disk / 'animals'}", "image_size=16"]
    subprocess.run([sys.executable, "-m", "data_prep", *words], check=True, capture_output=True)  # lets go of the disk
    before = files_of(tiny_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for out in (tiny_disk / "animals", tiny_disk / "others"):
        assert build(source, out) == 1
        said = capfd.readouterr().err
        assert "Read-only file system" in said
        assert said.count("\n") == 1
    assert files_of(tiny_disk) == before


def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "source", {"ant": 2})
    (tmp_path / "file").write_text("not a directory")
    words = [f"source.path={source}", f"out={tmp_path / 'file' / 'out'}"]
    command = [sys.executable, "-m", "data_prep", "build", "source.kind=folder", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "cannot be made, for a file is in its place; name another directory" in ended.stderr


def test_a_source_that_vanishes_is_one_line_and_the_build_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 4, "bee": 4})
    out = tmp_path / "out" / "animals"
    assert build(source, tmp_path / "whole" / "animals", "samples_per_shard=3") == 0

    from data_prep.building import workplan

    real = workplan.prepare

    def prepare(*words: Any, **named: Any) -> Any:
        work = real(*words, **named)
        source.rename(tmp_path / "gone")  # as when its disk is unmounted
        return work

    monkeypatch.setattr("data_prep.building.build.prepare", prepare)
    assert build(source, out, "samples_per_shard=3") == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert "No such file or directory" in said
    assert said.endswith("what is finished is kept, the same command goes on from there")
    assert not (out / "manifest.json").exists()
    monkeypatch.undo()
    assert build(source, out, "samples_per_shard=3") == 2  # not there: says so
    (tmp_path / "gone").rename(source)
    assert build(source, out, "samples_per_shard=3") == 0
    assert files_of(out) == files_of(tmp_path / "whole" / "animals")
