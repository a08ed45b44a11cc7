"""Files that appear whole or not at all.

The protocol, for a file and for a directory alike:

1. write under a temporary name in the same parent (so that the rename cannot cross file systems);
2. fsync what was written;
3. rename over the final name;
4. fsync the parent, so that the rename itself survives a power cut.

A crash before 3 leaves only a temporary name, which the next writer of the same name takes over. A
writer locks its temporary name, so a second writer at the same time takes a numbered one, and the
last to end is published. After a crash, a numbered name stays until `remove_leftovers`.
"""

import errno
import fcntl
import hashlib
import itertools
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
from typing import IO, Any, NamedTuple

from data_prep.errors import UserError

TEMPORARY_PREFIX = ".tmp-"
REPLACED = "replaced-"
"""After the prefix: a directory that another is about to take the place of."""
HASHED_BYTES = 4 << 20
"""How much of a file is read at once, to be hashed."""


def _temporary_of(path: Path, kind: str = "") -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{kind}{path.name}")


def _name(error: BaseException, path: Path) -> None:
    """A full disk does not say which it is."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


class _Claim(NamedTuple):
    """Names that no other living writer of the same target uses."""

    temporary: Path
    replaced: Path
    lock: Path
    descriptor: int
    """Holds the lock."""


def _claim(path: Path, *, is_directory: bool = False) -> _Claim:
    """A file is its own lock. The lock of a directory is next to it, and its writer removes it."""
    for number in itertools.count(1):
        kind = f"{number}-" if number > 1 else ""
        temporary = _temporary_of(path, kind)
        lock = _temporary_of(path, f"{kind}lock-") if is_directory else temporary
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                break
            except OSError:
                pass  # no locks on this file system
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    return _Claim(temporary, _temporary_of(path, kind + REPLACED), lock, descriptor)
            os.close(
                descriptor
            )  # its writer has published or removed it between our open and our lock
    raise AssertionError


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file object; its bytes stand at `path` only if the block ends without an
    exception."""
    temporary, *_, descriptor = _claim(path)
    with os.fdopen(descriptor, "wb") as file:  # closed last, for it holds the lock
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            _name(error, path)
            raise
    sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A fresh directory to fill; it stands at `path` (replacing an older one) only if the block
    ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced, lock, descriptor = _claim(path, is_directory=True)
    try:
        if replaced.exists() and not path.exists():  # a crash between the two renames below
            _rename_directory(replaced, path)
        for leftover in (temporary, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for file in sorted(temporary.rglob("*")):
                sync(file)
            sync(temporary)
            _put_in_place(temporary, path, replaced)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            _name(error, path)
            raise
        sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _put_in_place(temporary: Path, path: Path, replaced: Path) -> None:
    is_done = False
    while not is_done:
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(path, replaced)
        is_done = _rename_directory(temporary, path)


def _rename_directory(directory: Path, path: Path) -> bool:
    """Return False if another writer's directory has appeared at `path` meanwhile."""
    try:
        os.rename(directory, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def withdraw(path: Path) -> None:
    """Takes away a file or a directory, whole; what a crash leaves has a temporary name."""
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
    """The one spelling of a JSON value that hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def hash_of_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """The value with its own hash beside it, so that whoever reads it can tell whether it is as it
    was written."""
    return value | {"hash": hash_of_json(value)}


def unsealed(value: Any) -> dict[str, Any]:
    """What `sealed` was given; ValueError where it is something else."""
    content = (
        {key: held for key, held in value.items() if key != "hash"}
        if isinstance(value, dict)
        else {}
    )
    if not content or value.get("hash") != hash_of_json(content):
        raise ValueError("its content is not what its own hash says")
    return content


def remove_leftovers(*places: Path) -> None:
    """What killed writers have left in these directories under temporary names; the caller is sure
    that none is at work."""
    for place in places:
        for leftover in place.glob(TEMPORARY_PREFIX + "*"):
            _remove(leftover)


def sha256_of(path: Path, *, after_each_piece: Callable[[], None] | None = None) -> str:
    """`after_each_piece` is called for those who watch whether anything happens."""
    with open(path, "rb", buffering=0) as file:
        if after_each_piece is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, piece = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
        while count := file.readinto(piece):
            digest.update(piece[:count])
            after_each_piece()
        return digest.hexdigest()


def sync(path: Path) -> None:
    """What the file holds, or which names the directory has, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{directory}: cannot be made, for a file is in its place; name another directory"
        ) from None


@dataclass(frozen=True)
class Holder:
    """Who holds a directory: what its lock file says."""

    node: str = field(
        default_factory=lambda: os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    )
    pid: int = field(default_factory=os.getpid)
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    """SLURM's number, if it is within a job."""
    cluster: str = field(default_factory=lambda: os.environ.get("SLURM_CLUSTER_NAME", ""))
    """Whose number that is: several clusters may share a file system."""
    restart: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    since: str = field(default_factory=lambda: time.strftime("%F %T"))

    def __str__(self) -> str:
        job = f", job {self.job}, start {self.restart + 1}" if self.job else ""
        return f"process {self.pid} on {self.node}{job}, since {self.since}"


class Busy(UserError):  # noqa: N818
    """Another process holds the place now. The same command may succeed later."""


LOCK = ".lock"


@contextmanager
def sole_writer(directory: Path, *, wait: bool = False, notice: str = "") -> Iterator[None]:
    """Holds `directory` against a second writer, and records who holds it; the kernel frees it
    however this process ends.

    `notice` is printed before a wait; by default a line that names the holder.
    """
    make_directory(directory)
    with open(directory / LOCK, "a+") as file:
        _hold(file, directory, wait=wait, notice=notice)
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


@contextmanager
def sole_maker(path: Path) -> Iterator[None]:
    """Wait for other makers of the directory `path`. Its lock is next to it, and the end of the
    block removes it."""
    make_directory(path.parent)
    lock, is_ours = _temporary_of(path, "making-"), False
    while not is_ours:
        with open(lock, "a+") as file:
            _hold(file, path, wait=True)
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(
                    os.fstat(file.fileno()), lock.stat()
                )  # not one that its maker has just removed
            if is_ours:
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)


def _hold(file: IO[str], place: Path, *, wait: bool, notice: str = "") -> None:
    """Lock the file, and record its holder in it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            known = f" ({holder})" if (holder := _holder_in(file)) else ""
            raise Busy(
                f"{place}: another process is writing here{known}; wait for it, or choose another"
                " directory"
            ) from None
        whom = _holder_in(file) or "another process"
        print(
            notice or f"{place}: waiting for {whom}, which holds it; if that hangs, end it",
            file=sys.stderr,
            flush=True,
        )
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise _no_locks(place, error) from None
    with suppress(OSError):  # whoever needs the disk reports that it is full
        file.truncate(0)
        file.write(json.dumps(asdict(Holder())))
        file.flush()


def is_held(directory: Path) -> tuple[bool, Holder | None]:
    """Whether a process writes there now, and which, if it has recorded that by now."""
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
    return UserError(
        f"{directory}: its file system has no locks ({error.strerror}); work on another, or ask for"
        " a mount with flock"
    )


def _holder_in(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None
