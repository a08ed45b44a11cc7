"""What every archive reader asks of its files: that they are there, whole, as published, and as
they were when listed.

Whatever a damaged file makes a parser trip over becomes a `SourceError` here, so that no archive
ends in a traceback.
"""

import errno
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from data_prep.errors import UserError

OF_THE_MACHINE = {
    errno.EIO,
    errno.ENOSPC,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""Errors of the machine, not of the archive: the same command may succeed later."""


class SourceError(UserError):
    """An archive that is not there or not in its published layout; the text names the place and the
    remedy."""


@contextmanager
def refusing(
    place: str | Path, *, remedy: str = "download it again", field: str = "source.path"
) -> Iterator[None]:
    """Turns what parsing `place` raises into one line about it."""
    try:
        yield
    except (SourceError, MemoryError):
        raise
    except FileNotFoundError:
        raise SourceError(f"{field}: {place} is not there; {remedy}") from None
    except Exception as error:
        # parsers of damaged data raise whatever they trip over (zlib.error, struct.error,
        # OverflowError, EOFError)
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        detail = " ".join(str(error).split())[:120] or type(error).__name__
        raise SourceError(f"{field}: {place} is cut or damaged ({detail}); {remedy}") from None


def stamp_of(paths: Sequence[Path]) -> str:
    """Size and time of every file: it changes when one of them does."""
    stamps = []
    for path in paths:
        with refusing(path):
            status = path.stat()
            stamps.append(f"{status.st_size}-{status.st_mtime_ns}")
    return " ".join(stamps)


def changed_since(paths: Sequence[Path], stamp: str) -> list[str]:
    """Those of the files that are not as they were when all of them had this stamp."""
    before = stamp.split()
    assert len(before) == len(paths), (stamp, paths)
    return [
        str(path)
        for path, then in zip(paths, before, strict=True)
        if not path.exists() or stamp_of([path]) != then
    ]


def check_unchanged(place: str, stamp: str, now: str) -> None:
    """`stamp` is that of the listing."""
    if stamp != now:
        raise SourceError(
            f"{place}: the source has changed since it was listed; wait until it is complete,"
            " remove the unfinished dataset and build again"
        )


def check_md5(path: Path, published: str | Mapping[str, str]) -> None:
    """Refuses a file that is not, to the byte, the published one; or one of them, whatever it is
    called."""
    with refusing(path), open(path, "rb") as file:
        found = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
    sums = {path.name: published} if isinstance(published, str) else published
    if found not in sums.values():
        expected = sums.get(path.name) or ", ".join(f"{md5} ({name})" for name, md5 in sums.items())
        raise wrong_sum(str(path), found, expected)


def wrong_sum(place: str, found: str, expected: str) -> SourceError:
    return SourceError(
        f"source.path: {place} has the MD5 {found}, published is {expected}; download it again, or"
        " set source.md5=off if you know that it is another version"
    )
