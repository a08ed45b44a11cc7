"""Picture files below a folder: listed with size and time of change, and read only if they are still the ones that were listed.

What is no plain file (a pipe, a link to nothing) is listed, too, and rejected with its reason when it is read. What begins with a
dot is not there. A link to a folder is followed, unless it leads to a folder that it lies in.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from data_prep.building.inventory import Entry
from data_prep.images.rejection import Rejection
from data_prep.sources.base import SourceError

NOT_A_FILE = -1
"""The size that is listed for what cannot be read."""
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


def list_files(root: Path) -> list[tuple[str, int, int]]:
    """(path below `root`, time of change in ns, bytes) of every file, as `Entries.of` takes them."""
    return list(_walk(str(root), "", frozenset()))


def read_file(root: Path, entry: Entry) -> bytes:
    """The file of an entry of `list_files`, whose container is a folder below `root`."""
    if entry.num_bytes == NOT_A_FILE:
        raise Rejection("not_a_file", "a link to nothing, a pipe or a device")
    # unbuffered, and no Path: half the time of read_bytes() on small files
    with open(f"{root}/{entry.locator}", "rb", buffering=0) as file:
        data = file.read()
        changed_ns = os.fstat(file.fileno()).st_mtime_ns
    if len(data) != entry.num_bytes or changed_ns != entry.offset:
        raise SourceError(
            f"{entry.locator}: {len(data):,} bytes, {entry.num_bytes:,} when it was listed, or changed since; the source must "
            "stay as it is while it is read (and copies of it must keep their times: cp -p, rsync -a); run the command again"
        )
    return data


def loose_pictures(folder: Path) -> list[str]:
    """Picture files right in `folder`, where only folders belong."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if not entry.name.startswith(".") and not entry.is_dir()]
    return sorted(name for name in names if name.lower().endswith(PICTURE_ENDINGS))


def _walk(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    status = os.stat(folder)  # noqa: PTH116 (this walk is over strings)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, f"{prefix}{entry.name}/", above | {identity})
            continue
        try:
            file = entry.stat()
        except FileNotFoundError:  # a link to nothing
            yield f"{prefix}{entry.name}", 0, NOT_A_FILE
            continue
        plain = stat.S_ISREG(file.st_mode)
        yield f"{prefix}{entry.name}", file.st_mtime_ns if plain else 0, file.st_size if plain else NOT_A_FILE
