"""Image files below a folder: list them with size and modification time, and read them if they are
unchanged.

Pipes and broken links are listed, too, and rejected when they are read. A pipe or broken link next
to class or split folders is an error. Hidden files are ignored. A link to a folder is followed,
unless the folder contains the link.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.archives.guard import OF_THE_MACHINE, SourceError, changed
from data_prep.archives.inventory import Container, Entry
from data_prep.images.rejection import Rejection
from data_prep.manifest import PICTURES

Row = tuple[str, int, int]
"""Path relative to the listed folder, modification time in ns, and size in bytes."""
NOWHERE, NOT_PLAIN, NO_IMAGE = -1, -2, -3
"""Values that replace the size of broken links, of pipes and devices, and of files that are not
images."""
_WHY = {NOWHERE: "a link to nowhere", NOT_PLAIN: "a pipe or a device"}
_UPWARD = "a link to a folder that contains it"
ENDINGS = (*PICTURES, ".heic", ".heif", ".jp2")
"""File name endings of images. Unsupported formats are included, so that such files are rejected
with a reason, not skipped."""
_FIRST_BYTES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM....\0\0\0\0|II\*\0|MM\0\*|RIFF....WEBP|P[1-6]\s+[0-9#]|....ftyp(?:avi[fs]|hei[cfx]|mif1)|"
    rb"\0\0\0\x0c(?:JXL|jP)|\xff\x0a",
    re.DOTALL,
)
"""Magic bytes of image formats, to recognize images whose names have no ending of `ENDINGS`."""


def walk_files(root: Path) -> Iterator[Row]:
    """Yield every file below `root`, sorted within each folder."""
    yield from _walk(str(root), "", _above(root))


def walk_images(root: Path) -> Iterator[Row]:
    """Yield every file below `root`. A file without the ending or magic bytes of an image gets the
    size NO_IMAGE."""
    for row in walk_files(root):
        name, _, num_bytes = row
        # checks the ending first: a Path for each file would double the time
        is_input = num_bytes < 0 or name.lower().endswith(ENDINGS) or is_image(root / name)
        yield row if is_input else (name, 0, NO_IMAGE)


def read_file(root: Path, entry: Entry) -> bytes:
    """Return the content of a listed file. Raise Rejection for a link or pipe, and SourceError if
    the file has changed."""
    if entry.num_bytes in _WHY:
        raise Rejection("not_a_file", _WHY[entry.num_bytes])
    # unbuffered and without a Path: half the time of read_bytes() on small files
    with open(f"{root}/{entry.locator}", "rb", buffering=0) as file:
        data = file.read()
        changed_ns = _changed_ns(os.fstat(file.fileno()))
    if len(data) != entry.num_bytes or changed_ns != entry.offset:
        raise changed(entry.locator)
    return data


def changed_in_folder(
    container: Container, listed: Iterable[Entry], now: Iterable[Row]
) -> list[str]:
    """Return the files of a folder that were added, removed or changed since the listing."""
    before = {(entry.name, entry.offset, entry.num_bytes) for entry in listed}
    try:
        changes = before ^ set(now)
    except FileNotFoundError:
        changes = before
    names = {name for name, _, num_bytes in changes if num_bytes != NO_IMAGE}
    return sorted(f"{container.path}/{name}".lstrip("/") for name in names)


def only_folders(place: Path, *, fix: str = "move them into folders") -> list[str]:
    """Return the folders in `place`. Raise SourceError if `place` also contains image files."""
    folders, files = folders_and_files(place)
    refuse_loose_images(place, files, of="class", fix=fix)
    return folders


def refuse_loose_images(
    place: Path, files: Iterable[str], *, of: str, fix: str = "move them into folders"
) -> None:
    loose = [name for name in files if is_image(place / name)]
    if loose:
        raise SourceError(
            "source.path",
            f"{len(loose):,} images are in {place}, not in a {of} folder ({', '.join(loose[:3])})",
            fix,
            code="unknown-format",
        )


def folders_and_files(place: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the files in `place`. Raise SourceError for any other
    entry, such as a broken link, because it may be a class or a split. A link to a containing
    folder is an error, too: a link `all -> .` once made a class that repeated every image (issue
    17)."""
    above = _above(place)
    kinds = {entry.name: kind_of(entry, above) for entry in _visible(place)}
    odd = [f"{name}: {kind}" for name, kind in kinds.items() if kind not in ("folder", "file")]
    if odd:
        raise SourceError(
            "source.path",
            f"{len(odd):,} entries of {place} are neither folders nor files ({', '.join(odd[:3])})",
            "fix or remove them: each may be a missing class or split",
            code="unknown-format",
        )
    names = {kind: [name for name in kinds if kinds[name] == kind] for kind in ("folder", "file")}
    return names["folder"], names["file"]


def kind_of(
    path: "Path | os.DirEntry[str]", above: frozenset[tuple[int, int]] = frozenset()
) -> str:
    """Return "folder", "file", or a description of any other entry. `above`: identities (device,
    inode) of the containing folders."""
    status = _status(path)
    if status is None:
        return _WHY[NOWHERE]
    if not stat.S_ISDIR(status.st_mode):
        return "file" if stat.S_ISREG(status.st_mode) else _WHY[NOT_PLAIN]
    return _UPWARD if _identity(status) in above else "folder"


def is_image(path: Path) -> bool:
    if path.name.lower().endswith(ENDINGS):
        return True
    with open(path, "rb", buffering=0) as file:
        return _FIRST_BYTES.match(file.read(32)) is not None


def _above(folder: Path) -> frozenset[tuple[int, int]]:
    """Return (device, inode) of the folder and all its parents, before and after resolving
    links."""
    folders = {folder, *folder.absolute().parents, *folder.resolve().parents}
    return frozenset(_identity(path.stat()) for path in folders)


def _walk(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[Row]:
    for entry in _visible(folder):
        status = _status(entry)
        if status is None:
            yield f"{prefix}{entry.name}", 0, NOWHERE
        elif stat.S_ISDIR(status.st_mode):
            identity = _identity(status)
            if identity not in above:
                yield from _walk(entry.path, f"{prefix}{entry.name}/", above | {identity})
        elif stat.S_ISREG(status.st_mode):
            yield f"{prefix}{entry.name}", _changed_ns(status), status.st_size
        else:
            yield f"{prefix}{entry.name}", 0, NOT_PLAIN


def _visible(folder: str | Path) -> "list[os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def _status(path: "Path | os.DirEntry[str]") -> os.stat_result | None:
    """Return os.stat of a path (links are followed), or None for a broken, circular or forbidden
    link."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in OF_THE_MACHINE:
            raise
        return None


def _changed_ns(status: os.stat_result) -> int:
    """Return the modification time in ns, limited to 64 bits (the year 2262)."""
    return min(status.st_mtime_ns, (1 << 63) - 1)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
