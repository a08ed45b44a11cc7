"""Picture files below a folder: listed with size and time of change, and read only if they are
still the ones that were listed.

What is no plain file (a pipe, a link to nowhere) is listed, too, and rejected with its reason when
it is read; where only folders belong it may stand for one of them, and is refused. What begins with
a dot is not there. A link to a folder is followed, unless it leads to a folder that it lies in.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data_prep.archives.guard import OF_THE_MACHINE, SourceError
from data_prep.archives.inventory import Container, Entry
from data_prep.images.rejection import Rejection
from data_prep.manifest import PICTURES

Row = tuple[str, int, int]
"""Path below a folder, time of change in ns, bytes: as `Entries.of` takes them."""
NOWHERE, NOT_PLAIN, NO_PICTURE = -1, -2, -3
"""The sizes that are listed for what cannot be read, and for what need not be."""
_WHY = {NOWHERE: "a link to nowhere", NOT_PLAIN: "a pipe or a device"}
_UPWARD = "a link to a folder that it lies in"
ENDINGS = (*PICTURES, ".avif", ".heic", ".heif", ".jp2", ".jxl")
"""With those of pictures that are not read here: they are rejected, not left out."""
_FIRST_BYTES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM....\0\0\0\0|II\*\0|MM\0\*|RIFF....WEBP|P[1-6]\s+[0-9#]|....ftyp(?:avi[fs]|hei[cfx]|mif1)|"
    rb"\0\0\0\x0c(?:JXL|jP)|\xff\x0a",
    re.DOTALL,
)
"""Of a picture without an ending, in every format that people download."""


def list_files(root: Path) -> list[Row]:
    """Every file."""
    return list(_walk(str(root), "", _above(root)))


def walk_pictures(root: Path) -> Iterator[Row]:
    """The same, as they are asked for; what neither ends nor begins as a picture does has the size
    NO_PICTURE."""
    for row in _walk(str(root), "", _above(root)):
        name, _, num_bytes = row
        # its ending first: a Path of each file would cost as much as the walk
        yield (
            row
            if num_bytes < 0 or name.lower().endswith(ENDINGS) or is_picture(root / name)
            else (name, 0, NO_PICTURE)
        )


def read_file(root: Path, entry: Entry) -> bytes:
    """The file of an entry of `list_files`, whose container is a folder below `root`."""
    if entry.num_bytes in _WHY:
        raise Rejection("not_a_file", _WHY[entry.num_bytes])
    # unbuffered, and no Path: half the time of read_bytes() on small files
    with open(f"{root}/{entry.locator}", "rb", buffering=0) as file:
        data = file.read()
        changed_ns = _changed_ns(os.fstat(file.fileno()))
    if len(data) != entry.num_bytes or changed_ns != entry.offset:
        raise SourceError(
            f"{entry.locator}: {len(data):,} bytes, {entry.num_bytes:,} when it was listed, or"
            " changed since; the source must stay as it is while it is read (and copies of it must"
            " keep their times: cp -p, rsync -a); run the command again"
        )
    return data


def changed_in_folder(
    root: Path,
    container: Container,
    listed: Iterable[Entry],
    *,
    walk: Callable[[Path], Iterable[Row]] = list_files,
) -> list[str]:
    """The files of a container, a folder below `root`, that are not those that `walk` listed."""
    before = {(entry.name, entry.offset, entry.num_bytes) for entry in listed}
    try:
        now = set(walk(root / container.path))
    except FileNotFoundError:
        now = set()
    return sorted(
        {
            f"{container.path}/{name}".lstrip("/")
            for name, _, num_bytes in before ^ now
            if num_bytes != NO_PICTURE
        }
    )


def only_folders(place: Path, *, of: str, remedy: str = "move them") -> list[str]:
    """The folders in `place`, where nothing else belongs that might be data."""
    folders, files = sort_out(place)
    refuse_loose(place, files, of=of, remedy=remedy)
    return folders


def refuse_loose(place: Path, files: Iterable[str], *, of: str, remedy: str = "move them") -> None:
    """Of the files in `place`, those that are pictures, which belong into folders."""
    loose = [name for name in files if is_picture(place / name)]
    if loose:
        raise SourceError(
            f"source.path: {len(loose):,} pictures lie in {place} itself, in no {of}"
            f" ({', '.join(loose[:3])}); {remedy}"
        )


def sort_out(place: Path) -> tuple[list[str], list[str]]:
    """The folders and the files right in `place`. What is neither may stand for a class or a split,
    and is refused, and so is a link to all of them (issue 17: `all -> .` was a class that held
    every picture again)."""
    above = _above(place)
    kinds = {entry.name: kind_of(entry, above) for entry in _visible(place)}
    odd = [f"{name}: {kind}" for name, kind in kinds.items() if kind not in ("folder", "file")]
    if odd:
        raise SourceError(
            f"source.path: {place} holds {len(odd):,} entries that are neither folders nor files of"
            f" its own ({', '.join(odd[:3])}); each may stand for a class or a split: mend or"
            " remove them"
        )
    folders, files = (
        [name for name, kind in kinds.items() if kind == wanted] for wanted in ("folder", "file")
    )
    return folders, files


def kind_of(
    path: "Path | os.DirEntry[str]", above: frozenset[tuple[int, int]] = frozenset()
) -> str:
    """folder, file, or what is wrong with it; `above` are the folders that it lies in."""
    status = _status(path)
    if status is None:
        return _WHY[NOWHERE]
    if not stat.S_ISDIR(status.st_mode):
        return "file" if stat.S_ISREG(status.st_mode) else _WHY[NOT_PLAIN]
    return _UPWARD if _identity(status) in above else "folder"


def is_picture(path: Path) -> bool:
    if path.name.lower().endswith(ENDINGS):
        return True
    with open(path, "rb", buffering=0) as file:
        return _FIRST_BYTES.match(file.read(32)) is not None


def _above(folder: Path) -> frozenset[tuple[int, int]]:
    """The folder and all that it lies in, by the name that it has here and by where it is."""
    return frozenset(
        map(
            _identity, map(os.stat, {folder, *folder.absolute().parents, *folder.resolve().parents})
        )
    )


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
    """What is in a folder, by name."""
    with os.scandir(folder) as found:
        return sorted(
            (entry for entry in found if not entry.name.startswith(".")),
            key=lambda entry: entry.name,
        )


def _status(path: "Path | os.DirEntry[str]") -> os.stat_result | None:
    """Of what stands at the end of all links; None where that is nothing (or a loop, or
    forbidden)."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in OF_THE_MACHINE:
            raise
        return None


def _changed_ns(status: os.stat_result) -> int:
    """As an inventory holds it: times after 2262 do not fit into 64 bits."""
    return min(status.st_mtime_ns, (1 << 63) - 1)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
