"""Files and directories appear complete or not at all, however the writer ends. A directory has one
writer at a time."""

import errno
import fcntl
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.publish import (
    atomic_directory,
    atomic_file,
    canonical_json,
    is_held,
    remove_leftovers,
    sha256_of,
    sole_writer,
    write_atomic,
    write_json,
)
from tests.data_prep.samples import fork
from tests.errors import fails


class PlugPulledError(Exception):
    """Any error while a file is being written."""


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_file_keeps_its_old_content_when_the_block_raises(
    tmp_path: Path, old: bytes | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    with pytest.raises(PlugPulledError), atomic_file(path) as file:
        file.write(b"new")
        raise PlugPulledError
    assert names(tmp_path) == ([] if old is None else ["file"])
    assert old is None or path.read_bytes() == old


def test_a_file_is_replaced_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("old", [False, True])
def test_a_directory_keeps_its_old_content_when_the_block_raises(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "folder"
    if old:
        path.mkdir()
        (path / "old").write_bytes(b"old")
    with pytest.raises(PlugPulledError), atomic_directory(path) as temporary:
        (temporary / "new").write_bytes(b"new")
        raise PlugPulledError
    assert names(tmp_path) == (["folder", "folder/old"] if old else [])


def test_a_full_disk_says_where(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with (
        pytest.raises(OSError, match="No space left") as caught,
        atomic_directory(path) as temporary,
    ):
        (temporary / "new").symlink_to("/dev/full")
        (temporary / "new").write_bytes(b"new")
    assert caught.value.filename == str(path)
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/shard.tar'"),
        atomic_file(tmp_path / "shard.tar"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_bytes(b"old")
    with atomic_directory(path) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "new").write_bytes(b"new")
        assert names(path) == ["old"]
    assert names(tmp_path) == ["folder", "folder/inner", "folder/inner/new"]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_killed_writer_leaves_only_a_temporary_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"

    def publish(then: Callable[[], object] = lambda: None) -> None:
        if kind == "file":
            with atomic_file(path) as file:
                file.write(b"new")
                file.flush()
                then()
        else:
            with atomic_directory(path) as temporary:
                (temporary / "new").write_bytes(b"new")
                then()

    assert exit_code_of(lambda: publish(lambda: os._exit(9))) == 9
    left = names(tmp_path)
    assert left and all(name.startswith(".tmp-") for name in left)
    publish()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == (["thing"] if kind == "file" else ["thing", "thing/new"])


def exit_code_of(action: Callable[[], object]) -> int:
    """Call `action` in its own process. Return the exit code."""
    pid = fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 1 << 18
    write_atomic(path, b"0" * size)
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for letter in b"123456789" * 2:
        write_atomic(path, bytes([letter]) * size)
    stop.set()
    reader.join()
    assert len(seen) >= 2
    assert seen <= {bytes([letter]) * size for letter in b"0123456789"}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path, kind: str) -> None:
    path, size, num_writers = tmp_path / "thing", 1 << 16, 6

    def write(letter: bytes) -> None:
        for _ in range(40):
            if kind == "file":
                with atomic_file(path) as file:
                    for _ in range(4):
                        file.write(letter * (size // 4))
                        file.flush()
            else:
                with atomic_directory(path) as temporary:
                    for name in "ab":
                        (temporary / name).write_bytes(letter * size)
        os._exit(0)

    children = []
    for letter in range(num_writers):
        if (pid := fork()) == 0:
            try:
                write(b"%d" % letter)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [
        0
    ] * num_writers
    files = [path] if kind == "file" else [path / name for name in "ab"]
    assert len({file.read_bytes() for file in files}) == 1 and len(set(files[0].read_bytes())) == 1
    assert files[0].stat().st_size == size
    assert names(tmp_path) == (["thing"] if kind == "file" else ["thing", "thing/a", "thing/b"])


def test_a_directory_has_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    with sole_writer(folder):
        with fails("busy", str(folder)), sole_writer(folder):
            pass
        with sole_writer(tmp_path / "other"):
            pass
    with open(folder / ".lock") as shared:  # another process locks it without its name
        fcntl.flock(shared, fcntl.LOCK_SH)
        with fails("busy", str(folder)), sole_writer(folder):
            pass
    with sole_writer(folder):
        pass


def test_who_waits_for_a_directory_names_once_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, has_printed = list[str](), threading.Event()
    monkeypatch.setattr(
        "builtins.print", lambda line, **_: (printed.append(line), has_printed.set())
    )

    def enter() -> None:
        with sole_writer(tmp_path, wait=True):
            pass

    waiting = threading.Thread(target=enter)
    with sole_writer(tmp_path):
        waiting.start()
        assert has_printed.wait(60)
    waiting.join()
    (line,) = printed
    assert line.startswith(f"{tmp_path}: waiting for process {os.getpid()} on ") and line.endswith(
        "If it hangs, end it"
    )


@pytest.mark.processes
def test_a_writer_that_raises_or_dies_lets_go_of_its_directory(tmp_path: Path) -> None:
    with pytest.raises(PlugPulledError), sole_writer(tmp_path):
        raise PlugPulledError

    def die_in_it() -> None:
        with sole_writer(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of(die_in_it) == -signal.SIGKILL
    with sole_writer(tmp_path):  # no other process and no second call gets the lock
        assert exit_code_of(lambda: os._exit(7 if is_held(tmp_path)[0] else 0)) == 7
    assert not is_held(tmp_path)[0]
    with sole_writer(tmp_path):
        pass


def test_one_value_has_one_spelling_to_hash(tmp_path: Path) -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2.5,null]}'
    write_json(tmp_path / "value.json", {"b": 1, "a": 2})
    assert (tmp_path / "value.json").read_bytes() == b'{\n "a": 2,\n "b": 1\n}\n'
    assert (
        sha256_of(tmp_path / "value.json")
        == hashlib.sha256(b'{\n "a": 2,\n "b": 1\n}\n').hexdigest()
    )
