"""Opens and locks the files of a cache directory, and says what is wrong with its disk. Which files these are, is nothing to it."""

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from data_prep.settings import UserError


class CacheError(UserError):
    """A cache directory that cannot serve; the text names it and the remedy."""


def raise_file_limit() -> None:
    """As far as this user may: a held shard is an open file, of which the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_file(path: Path, flags: int) -> FileIO:
    """Never through a link; it ends at exec, but a fork shares it and its lock."""
    mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "rb+"
    return FileIO(os.open(path, flags | os.O_NOFOLLOW, 0o600), mode)


def try_lock(file: FileIO, *, exclusive: bool) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def let_go(file: FileIO) -> None:
    """Unlocks, which closing alone does not do while a fork of this process has the file, too."""
    if not file.closed:
        fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def stands(file: FileIO, path: Path) -> bool:
    """Whether the open file is still what the path names: it may have been removed before we had its lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def allocate(file: FileIO, num_bytes: int) -> None:
    """The file takes up its room on disk from now on; whatever it held is gone."""
    os.ftruncate(file.fileno(), 0)
    if num_bytes:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(file.fileno(), num_bytes)


def private_directory(path: Path) -> None:
    """Makes the directory, or refuses one in which others could have put, or could change, what we are about to trust."""
    with plain_errors(path):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise CacheError(f"{path}: is no directory; name another as data.cache_dir") from None
        status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(f"{path}: is a link, which others may turn; name the directory itself as data.cache_dir")
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"{path}: belongs to user {status.st_uid}, not to you ({os.geteuid()}), so what it holds cannot be trusted; "
            "name a directory of your own as data.cache_dir"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{path}: others may write there, so what it holds cannot be trusted; empty it and chmod 700 it, "
            "or name another as data.cache_dir"
        )


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """What the disk of `path` refuses, in one line with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "its disk is full; free some of it, lower data.cache_gb, or name another data.cache_dir"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            remedy = "cannot be written to; name another directory as data.cache_dir"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "needs more shards at a time than files may be open; raise ulimit -n, or set data.shuffle=block"
        else:
            raise
        raise CacheError(f"{path}: {remedy} ({os.strerror(error.errno)})") from None
