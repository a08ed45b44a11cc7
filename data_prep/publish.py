"""Files that appear whole or not at all.

The protocol, for a file and for a directory alike:

1. write under a temporary name in the same parent (so that the rename cannot cross file systems);
2. fsync what was written;
3. rename over the final name;
4. fsync the parent, so that the rename itself survives a power cut.

A crash before 3 leaves only a temporary name, which the next writer of the same name removes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data_prep.settings import UserError

TEMPORARY_PREFIX = ".tmp-"
HASHED_BYTES = 4 << 20
"""How much of a file is read at once, to be hashed."""


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file object; its bytes stand at `path` only if the block ends without an exception."""
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A fresh directory to fill; it stands at `path` (replacing an older one) only if the block ends well."""
    temporary, replaced = (path.with_name(f"{TEMPORARY_PREFIX}{kind}{path.name}") for kind in ("", "replaced-"))
    if replaced.exists() and not path.exists():  # a crash between the two renames below
        os.rename(replaced, path)
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            sync(file)
        sync(temporary)
        if path.exists():
            os.rename(path, replaced)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


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


def remove_leftovers(*places: Path) -> None:
    """What killed writers have left in these directories under temporary names; the caller is sure that none is at work."""
    for place in places:
        for leftover in place.glob(TEMPORARY_PREFIX + "*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def sha256_of(path: Path, *, gets_on: Callable[[], None] | None = None) -> str:
    """`gets_on` is called after each piece, for those who watch whether anything happens."""
    with open(path, "rb", buffering=0) as file:
        if gets_on is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, piece = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
        while count := file.readinto(piece):
            digest.update(piece[:count])
            gets_on()
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
        raise UserError(f"{directory}: cannot be made, for a file is in its place; name another directory") from None


class Busy(UserError):  # noqa: N818
    """Another process holds the place now: nobody's mistake, and later the same command may do."""


@contextmanager
def sole_writer(directory: Path, *, wait: bool = False, notice: str = "") -> Iterator[None]:
    """Holds `directory` against a second writer; the kernel lets go of the lock however this process ends.

    `notice` is said before a wait.
    """
    make_directory(directory)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise Busy(
                    f"{directory}: another process is writing here; wait for it, or choose another directory"
                ) from None
            if notice:
                print(notice, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{directory}: its file system has no locks ({error.strerror}); work on another, or ask for a mount with flock"
            ) from None
        yield
