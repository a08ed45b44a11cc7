"""Files and directories that appear complete or not at all, and locks of directories.

The protocol:

1. write under a temporary name in the same parent (so that the rename cannot cross file systems);
2. fsync the temporary file;
3. rename over the final name;
4. fsync the parent, so that the rename itself survives a power cut.

A crash before step 3 leaves only a temporary name, which `remove_leftovers` removes. Each writer
has its own temporary name. If several writers write one path, the last writer to end wins.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from data_prep.errors import UserError

TEMPORARY_PREFIX = ".tmp-"
REPLACED = "replaced-"
"""Follows TEMPORARY_PREFIX in the name of an old directory while a new one replaces it."""
HASHED_BYTES = 4 << 20


def _temporary_of(path: Path, kind: str) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{kind}{path.name}")


@contextmanager
def _cleaned_up(path: Path) -> Iterator[Path]:
    """Yield a new temporary path, and remove it after an error. The system's error about a full
    disk names no file, so the name of `path` is added."""
    temporary = _temporary_of(path, f"{uuid4().hex[:12]}-")
    try:
        yield temporary
    except BaseException as error:
        with suppress(OSError):
            _remove(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file; its bytes are at `path` only if the block ends without an exception."""
    with _cleaned_up(path) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill. It replaces `path` only if the block ends without an
    exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replaced = _temporary_of(path, REPLACED)
    if replaced.exists() and not path.exists():  # a crash or writer is between the renames below
        with suppress(OSError):
            os.rename(replaced, path)
    with _cleaned_up(path) as temporary:
        temporary.mkdir()
        yield temporary
        for file in sorted(temporary.rglob("*")):
            sync(file)
        sync(temporary)
        is_done = False
        while not is_done:
            shutil.rmtree(replaced, ignore_errors=True)
            try:
                with suppress(FileNotFoundError):
                    os.rename(path, replaced)
                os.rename(temporary, path)
                is_done = True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else another writer has made `path`: replace it, too
        sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def withdraw(path: Path) -> None:
    """Remove a file or a directory atomically: a crash leaves only a temporary name."""
    condemned = _temporary_of(path, "withdrawn-")
    _remove(condemned)
    os.rename(path, condemned)
    _remove(condemned)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def hash_of_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value with its own hash added, so that a reader can detect changes."""
    return value | {"hash": hash_of_json(value)}


def unsealed(value: Any) -> dict[str, Any]:
    """Undo `sealed`; raise ValueError if the hash does not match."""
    content = dict(value) if isinstance(value, dict) else {}
    if content.pop("hash", None) != hash_of_json(content):
        raise ValueError("its content does not match its own hash")
    return content


def remove_leftovers(*places: Path) -> None:
    """Remove temporary files of killed writers. The caller makes sure that no writer is active."""
    for place in places:
        for leftover in place.glob(TEMPORARY_PREFIX + "*"):
            _remove(leftover)


def sha256_of(path: Path, *, after_each_piece: Callable[[], None] | None = None) -> str:
    """Return the sha256 of a file. `after_each_piece`: called after each block, to report progress
    to a watchdog."""
    with open(path, "rb", buffering=0) as file:
        if after_each_piece is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, piece = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
        while count := file.readinto(piece):
            digest.update(piece[:count])
            after_each_piece()
        return digest.hexdigest()


def sync(path: Path) -> None:
    """Sync a file's content, or a directory's names, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        problem, fix = "the path is a file", "choose another directory"
        raise UserError(str(directory), problem, fix, code="exists") from None


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock of a directory, as recorded in the lock file."""

    node: str = field(
        default_factory=lambda: os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    )
    pid: int = field(default_factory=os.getpid)
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    cluster: str = field(default_factory=lambda: os.environ.get("SLURM_CLUSTER_NAME", ""))
    """Name of the SLURM cluster. Several clusters may share a file system."""
    restart: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    since: str = field(default_factory=lambda: time.strftime("%F %T"))

    def __str__(self) -> str:
        job = f", job {self.job}, attempt {self.restart + 1}" if self.job else ""
        return f"process {self.pid} on {self.node}{job}, since {self.since}"


class Busy(UserError):  # noqa: N818
    """Another process holds the lock of the directory. The same command may succeed later."""


LOCK = ".lock"


@contextmanager
def sole_writer(directory: Path, *, wait: bool = False, notice: str = "") -> Iterator[None]:
    """Lock the directory against other writers, and record this process as the holder. The kernel
    releases the lock when the process ends. `notice` is printed before waiting; by default it names
    the holder."""
    make_directory(directory)
    with open(directory / LOCK, "a+") as file:
        _hold(file, directory, wait=wait, notice=notice)
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _hold(file: IO[str], place: Path, *, wait: bool, notice: str = "") -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            known = f" ({holder})" if (holder := _holder_in(file)) else ""
            problem = f"another process is writing to it{known}"
            fix = "wait until the process ends, or choose another directory"
            raise Busy(str(place), problem, fix, code="busy") from None
        whom = _holder_in(file) or "another process"
        print(
            notice or f"{place}: waiting for {whom}, which holds the lock. If it hangs, end it",
            file=sys.stderr,
            flush=True,
        )
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise _no_locks(place, error) from None
    with suppress(OSError):  # the writer will report a full disk
        file.truncate(0)
        file.write(json.dumps(asdict(Holder())))
        file.flush()


def is_held(directory: Path) -> tuple[bool, Holder | None]:
    """Return True if a process holds the lock of the directory, and the holder if it is
    recorded."""
    try:
        with open(directory / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True, _holder_in(file)
            except OSError as error:
                raise _no_locks(directory, error) from None
    except FileNotFoundError:
        pass
    return False, None


def _no_locks(directory: Path, error: OSError) -> UserError:
    problem = f"its file system does not support locks ({error.strerror})"
    fix = "use another file system, or mount this one with flock"
    return UserError(str(directory), problem, fix, code="unsupported")


def _holder_in(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None
