"""Checks that all archive readers use: a file exists, is intact, has its published hash, is
unchanged.

Parsers raise many kinds of exceptions on damaged files. These checks turn each into a
`SourceError`, so no damaged archive causes a traceback.
"""

import errno
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from gzip import GzipFile
from io import BufferedReader
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
"""Values of errno for faults of the machine, not of the archive. The same command may succeed
later."""


class SourceError(UserError):
    """An archive that is missing, damaged, changed or not in its published layout."""


def damaged(
    place: str | Path, problem: str, fix: str = "download it again", *, field: str = "source.path"
) -> SourceError:
    return SourceError(field, f"{place} {problem}", fix, code="damaged")


@contextmanager
def report_damage(
    place: str | Path, *, fix: str = "download it again", field: str = "source.path"
) -> Iterator[None]:
    """Turn exceptions that a damaged file causes into a SourceError that names `place`."""
    try:
        yield
    except (SourceError, MemoryError):
        raise
    except FileNotFoundError:
        raise SourceError(field, f"{place} does not exist", fix, code="missing-path") from None
    except Exception as error:
        # damaged data raises zlib.error, struct.error, OverflowError, EOFError and others
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        detail = " ".join(str(error).split())[:120] or type(error).__name__
        raise damaged(place, f"is damaged ({detail})", fix, field=field) from None


def stamp_of(paths: Sequence[Path]) -> str:
    """Return sizes and modification times of the files as text for `changed_since`."""
    stamps = []
    for path in paths:
        with report_damage(path):
            status = path.stat()
            stamps.append(f"{status.st_size}-{status.st_mtime_ns}")
    return " ".join(stamps)


def changed_since(paths: Sequence[Path], stamp: str) -> list[str]:
    """Return the files whose size or modification time differs from `stamp`."""
    before = stamp.split()
    assert len(before) == len(paths), (stamp, paths)
    return [
        str(path)
        for path, then in zip(paths, before, strict=True)
        if not path.exists() or stamp_of([path]) != then
    ]


def check_unchanged(place: str, stamp: str, paths: Sequence[Path]) -> None:
    if stamp_of(paths) != stamp:
        raise changed(place)


def changed(place: str) -> SourceError:
    return SourceError(
        "source",
        f"{place} has changed since its files were listed",
        "keep the source unchanged (copy it with cp -p or rsync -a), then build again. For array "
        "tasks, first run data_prep build CONFIG --plan",
        code="changed",
    )


def check_md5(path: Path, published: str | Mapping[str, str]) -> None:
    """Raise SourceError unless the file's MD5 is a published one. `published`: an MD5, or {file
    name: MD5}."""
    with report_damage(path), open(path, "rb") as file:
        found = md5_of(file)
    sums = {path.name: published} if isinstance(published, str) else published
    if found not in sums.values():
        expected = sums.get(path.name) or ", ".join(f"{md5} ({name})" for name, md5 in sums.items())
        raise wrong_sum(str(path), found, expected)


def md5_of(file: BufferedReader | GzipFile) -> str:
    return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def wrong_sum(place: str, found: str, expected: str) -> SourceError:
    return damaged(
        place,
        f"has the MD5 {found}, but {expected} is published",
        "download it again, or set source.md5=off if it is another version",
    )
