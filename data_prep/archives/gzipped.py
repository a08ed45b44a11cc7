"""Read or unpack single files of a .tar.gz, selected by file name without folders.

`read_members` reads files of a small archive into memory. `unpack_members` writes files of a large
archive into a folder. Both verify the checksum at the end of the stream, and fail if the content is
larger than a limit.
"""

import gzip
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath

from data_prep.archives.guard import damaged, report_damage
from data_prep.publish import atomic_directory
from data_prep.tar import walk

MAX_BYTES = 1 << 28
_PIECE_BYTES = 1 << 22


def read_members(path: Path, wanted: Container[str]) -> dict[str, bytes]:
    """Return the content of every regular file of the archive whose name is in `wanted`."""
    members = _members(path, wanted, max_bytes=MAX_BYTES)
    return {name: b"".join(pieces) for name, pieces in members}


def unpack_members(path: Path, wanted: Container[str], folder: Path, *, max_bytes: int) -> None:
    """Write the files whose names are in `wanted` into `folder`. The folder appears only when all
    of its files are complete."""
    with atomic_directory(folder) as temporary:
        for name, pieces in _members(path, wanted, max_bytes=max_bytes):
            with open(temporary / name, "wb") as file:
                file.writelines(pieces)


def unpacked_bytes(path: Path) -> int:
    """Return the unpacked size in the gzip trailer, modulo 4 GiB."""
    with report_damage(path), open(path, "rb") as file:
        file.seek(-4, 2)
        return int.from_bytes(file.read(4), "little")


def _members(
    path: Path, wanted: Container[str], *, max_bytes: int
) -> Iterator[tuple[str, Iterator[bytes]]]:
    with report_damage(path), gzip.open(path) as stream:

        def read(offset: int, num_bytes: int) -> bytes:
            if offset + num_bytes > max_bytes:
                raise damaged(path, f"unpacks to more than {max_bytes:,} bytes")
            with report_damage(path):
                stream.seek(offset)  # never backwards
                return stream.read(num_bytes)

        seen = set[str]()
        for member in walk(read, refuse_links=False):
            name, end = PurePosixPath(member.name).name, member.offset + member.num_bytes
            if name not in wanted:
                continue
            if name in seen:
                raise damaged(path, f"has {name} twice")
            seen.add(name)
            starts = range(member.offset, end, _PIECE_BYTES)
            yield name, (read(start, min(_PIECE_BYTES, end - start)) for start in starts)
        while read(stream.tell(), 1 << 20):  # the checksum is at the end of the stream
            pass
