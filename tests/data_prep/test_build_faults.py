"""A build is interrupted between two steps on the file system, or the disk is full, the target is
read-only, or the source vanishes. No partial file is taken for complete, and the same command
resumes to the same bytes.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from data_prep.cli import main
from data_prep.manifest import PARTS, load_manifest
from tests.data_prep.samples import build, files_of, fork, forked, write_classes, write_files
from tests.data_prep.stock import index, sample, write_stock
from tests.errors import printed_errors
from tests.soak import soaked

STEPS = ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir")
"""A build's steps on the file system, except writing temporary files."""
CUT_OFF = 77


APART = 4


def moments(salt: int) -> range:
    """Return every fourth step; four salts cover all steps."""
    return range(1 + salt % APART, 200, APART)


def cut_off_at(step: int, command: Callable[[], int]) -> int:
    """Run a command in its own process, which exits without clean-up before its `step`th step.
    Return the exit code."""
    pid = fork()
    if pid == 0:
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
        os._exit(command())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Case(NamedTuple):
    """A command that is interrupted, and its inputs."""

    prepare: Callable[[Path, Path], object]
    """Writes the files that exist before the command, for (source, out)."""
    command: Callable[[Path, Path], int]
    code: int
    least: int
    """Minimum number of the command's steps."""


CUT = ("samples_per_shard=3", "max_reject_fraction=1")


def nothing(_: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)


def parts(source: Path, out: Path) -> None:
    """Above the reject fraction a merge fails even if nothing is left to do: dependent jobs must
    not start."""
    assert build(source, out, "samples_per_shard=3", "--task=0/1") == 0


def touched_parts(source: Path, out: Path) -> None:
    assert build(source, out, *CUT, "--task=0/1") == 0
    for path in source.rglob("*.jpg"):
        os.utime(path, ns=(1, 1))


def stock(source: Path, out: Path) -> None:
    nothing(source, out)
    os.utime(write_stock(source / "0.tar", [sample(1)]), ns=(1, 1))


CASES = {
    "build": Case(nothing, lambda source, out: build(source, out, *CUT), 0, 40),
    "listing": Case(touched_parts, lambda source, out: build(source, out, *CUT), 0, 40),
    "task": Case(nothing, lambda source, out: build(source, out, *CUT, "--task=0/1"), 0, 20),
    "merge": Case(parts, lambda _, out: main(["merge", str(out), "--workers", "1"]), 1, 20),
    "index": Case(stock, lambda source, out: index(out, source / "0.tar"), 0, 20),
}


@pytest.mark.processes
@soaked
@pytest.mark.parametrize("name", CASES)
def test_a_command_cut_off_between_two_steps_goes_on_to_the_same_bytes(
    tmp_path: Path, name: str, salt: int
) -> None:
    case = CASES[name]

    def begun(place: str) -> tuple[Path, Path]:
        source = write_classes(tmp_path / place / "source", {"ant": 2, "bee": 2})
        write_files(source, {"ant/zero.jpg": b""})
        out = tmp_path / place / "animals"
        case.prepare(source, out)
        return source, out

    def written(out: Path) -> dict[str, bytes]:
        """Return the files; tasks leave temporary names for the merge."""
        names = {each: data for each, data in files_of(out).items() if ".tmp-" not in each}
        return {each: b"" if each.startswith(PARTS) else data for each, data in names.items()}

    source, out = begun("whole")
    assert case.command(source, out) == case.code
    whole, num_cut = written(out), 0
    for step in moments(salt):
        source, out = begun("cut")
        code = cut_off_at(step, partial(case.command, source, out))
        if code == CUT_OFF:
            num_cut += 1
            if (out / "manifest.json").exists():
                load_manifest(out)  # complete
            if step % 5 == salt % 5:  # sometimes it is interrupted twice
                again = cut_off_at(step + 2, partial(case.command, source, out))
                assert again in (CUT_OFF, case.code)
        for _ in range(2):
            assert case.command(source, out) == case.code
            assert written(out) == whole
        shutil.rmtree(tmp_path / "cut")
        if code != CUT_OFF:
            assert code == case.code
            break
    assert num_cut > case.least / APART


def test_a_limit_that_was_raised_for_a_finished_dataset_counts_for_a_merge_too(
    tmp_path: Path,
) -> None:
    source = write_files(write_classes(tmp_path / "source", {"ant": 2}), {"ant/zero.jpg": b""})
    out = tmp_path / "out"
    assert build(source, out) == 1
    assert main(["merge", str(out)]) == 1
    assert build(source, out, "max_reject_fraction=0.5") == 0
    assert main(["merge", str(out)]) == 0


@pytest.mark.parametrize("damage", [b"\xff", b'{"path": "ant/zero.jpg"}'])
def test_a_damaged_list_of_rejects_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    source = write_files(write_classes(tmp_path / "source", {"ant": 2}), {"ant/zero.jpg": b""})
    out = tmp_path / "out"
    assert build(source, out) == 1
    (out / "rejected.jsonl").write_bytes(damage)
    capsys.readouterr()
    assert build(source, out, "max_reject_fraction=1") == 2
    assert printed_errors(capsys.readouterr().err) == [(str(out / "rejected.jsonl"), "damaged")]


# ---- the owner of a directory

THEIRS = ("parts/thesis.txt", "rejected.jsonl", ".tmp-draft", "train-000000.tar", "notes.md")


def commands(tmp_path: Path, out: Path) -> dict[str, Callable[[], int]]:
    """Return the commands that write a dataset into a named directory."""
    source = write_classes(tmp_path / "source", {"ant": 3})
    shards = write_stock(tmp_path / "stock" / "0.tar", [sample(1)])
    drawn = [
        "build",
        "--source=synthetic",
        f"--out={tmp_path / 'drawn'}",
        f"source.images_dir={out}",
        "num_workers=1",
    ]
    return {
        "build": lambda: build(source, out),
        "task": lambda: build(source, out, "--task=0/1"),
        "index": lambda: index(out, shards),
        "drawing": lambda: main([*drawn, "source.num_classes=2", "source.num_train_per_class=1"]),
    }


@pytest.mark.parametrize("name", ["build", "task", "index", "drawing"])
def test_what_somebody_keeps_in_the_directory_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "out"
    command = commands(tmp_path, out)[name]
    for theirs in THEIRS:
        write_files(out, {theirs: b"mine"})
        before = files_of(out)
        assert command() == 2, theirs
        assert theirs.partition("/")[0] in capsys.readouterr().err
        assert files_of(out) == before
        shutil.rmtree(out)
    write_files(out, {".lock": b""})
    assert command() == 0
    if name == "drawing":
        return
    write_files(out, {"parts/thesis.txt": b"mine"})  # although the directory is ours
    before = files_of(out)
    assert command() == 0
    assert files_of(out) == before


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 300 kB."""
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
            "No space left on device; finished work is kept; the same command resumes"
        )
        or "No space left on device" in said.splitlines()[-1]
    )
    assert "Traceback" not in said
    assert not (tiny_disk / "animals" / "manifest.json").exists()
    assert list((tiny_disk / "animals").glob("*.tar"))  # finished shards are kept
    out = tmp_path / "roomy" / "animals"
    shutil.copytree(tiny_disk / "animals", out)
    assert build(source, out, *cut) == 0
    assert build(source, tmp_path / "whole" / "animals", *cut) == 0
    assert files_of(out) == files_of(tmp_path / "whole" / "animals")


@pytest.mark.processes
def test_a_target_gone_read_only_is_one_line_and_nothing_is_damaged(
    tmp_path: Path, tiny_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 3})
    words = [
        "build",
        "source.kind=folder",
        f"source.path={source}",
        f"out={tiny_disk / 'animals'}",
        "image_size=16",
    ]
    with forked(tmp_path / "log", *words) as child:  # which releases the disk
        assert child.ended_well()
    before = files_of(tiny_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for out in (tiny_disk / "animals", tiny_disk / "others"):
        assert build(source, out) == 1
        said = capfd.readouterr().err
        assert "Read-only file system" in said
        assert said.count("\n") == 1
    assert files_of(tiny_disk) == before


def test_a_source_that_vanishes_is_one_line_and_the_build_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "source", {"ant": 4, "bee": 4})
    out = tmp_path / "out" / "animals"
    assert build(source, tmp_path / "whole" / "animals", "samples_per_shard=3") == 0

    from data_prep.build import workplan

    real = workplan.prepare

    def prepare(*words: Any, **named: Any) -> Any:
        work = real(*words, **named)
        source.rename(tmp_path / "gone")  # as if its disk is unmounted
        return work

    monkeypatch.setattr("data_prep.build.build.prepare", prepare)
    assert build(source, out, "samples_per_shard=3") == 2
    ((_, code),) = printed_errors(capfd.readouterr().err)
    assert code == "missing-path"
    assert not (out / "manifest.json").exists()
    monkeypatch.undo()
    assert build(source, out, "samples_per_shard=3") == 2  # the source is missing
    (tmp_path / "gone").rename(source)
    assert build(source, out, "samples_per_shard=3") == 0
    assert files_of(out) == files_of(tmp_path / "whole" / "animals")
