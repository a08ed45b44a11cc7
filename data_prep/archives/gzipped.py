"""The files of a .tar.gz, by the last part of their names, without unpacking it to disk: so it does
not matter what paths or links an archive holds.

`read_members` reads the files of a small archive into memory, and the checksum at the end of the
stream. Invariant: no more than `MAX_BYTES` are decompressed, whatever an archive claims.

`GzippedTar` gives random access to a large one. A process reads the archive through once, which
checks its checksum and leaves an index of points from which decompression can begin. Invariant: an
index holds at most about `INDEX_BYTES`: the larger the archive (of less than 4 GiB), the farther
apart the points. Measured on 276 MB of noise like a photograph's (2 cores): 180 MB/s for the first
pass; a picture of 27 kB then takes 1.6 ms with points 0.25 MB apart, 2.7 ms with 1 MB, 4 ms with
1.6 MB (STL-10's 3.1 GB) - if the reader's buffer is small; its default of four times the distance
makes that 35 ms.
"""

import gzip
import os
from collections.abc import Container, Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

import indexed_gzip

from data_prep.archives.guard import SourceError, refusing, stamp_of
from data_prep.tar import Member, walk

MAX_BYTES = 1 << 28
INDEX_BYTES: Final = 64 << 20
_POINT_BYTES: Final = 32 << 10
_MIN_SPACING: Final = 256 << 10
_BUFFER_BYTES: Final = 32 << 10


def read_members(path: Path, wanted: Container[str]) -> dict[str, bytes]:
    """The content of every regular file of `path` whose name is `wanted`."""
    with refusing(path), gzip.open(path) as stream:

        def read(offset: int, num_bytes: int) -> bytes:
            if offset + num_bytes > MAX_BYTES:
                raise SourceError(
                    f"source.path: {path} unpacks to more than {MAX_BYTES:,} bytes; download it"
                    " again"
                )
            stream.seek(offset)  # only ever forward
            return stream.read(num_bytes)

        members = _by_last_name(path, walk(read, refuse_links=False), wanted)
        found = {name: read(member.offset, member.num_bytes) for name, member in members}
        while read(stream.tell(), 1 << 20):  # the checksum of a gzip stream stands at its end
            pass
    return found


class GzippedTar:
    def __init__(self, path: Path):
        self.path = path
        with refusing(path):
            with open(
                path, "rb"
            ) as file:  # its last bytes: the length of what it unpacks to, modulo 4 GiB
                file.seek(-4, os.SEEK_END)
                stated = int.from_bytes(file.read(4), "little")
            spacing = spacing_for(max(stated, path.stat().st_size))
            self._file: Any = indexed_gzip.IndexedGzipFile(
                str(path), spacing=spacing, buffer_size=_BUFFER_BYTES, drop_handles=False
            )
            # checks the checksum, but takes the end of a cut file for its end
            self._file.build_full_index()
            end = self._file.seek(0, os.SEEK_END)
            self.files = dict(_by_last_name(path, walk(self._read, 0, end, refuse_links=False)))

    def read(self, offset: int, num_bytes: int) -> bytes:
        with refusing(self.path):
            return self._read(offset, num_bytes)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        self._file.seek(offset)
        return bytes(self._file.read(num_bytes))


def spacing_for(num_bytes: int) -> int:
    """How far apart the points lie in an archive that unpacks to `num_bytes`."""
    return max(_MIN_SPACING, num_bytes * _POINT_BYTES // INDEX_BYTES + 1)


def open_gzipped_tar(path: Path) -> GzippedTar:
    """The archive of this process."""
    return _opened(path, stamp_of([path]))


@lru_cache(maxsize=1)
def _opened(path: Path, stamp: str) -> GzippedTar:  # noqa: ARG001 (the stamp makes a changed archive be opened anew)
    return GzippedTar(path)


def _by_last_name(
    path: Path, members: Iterable[Member], wanted: Container[str] | None = None
) -> Iterator[tuple[str, Member]]:
    seen = set()
    for member in members:
        name = PurePosixPath(member.name).name
        if wanted is None or name in wanted:
            if name in seen:
                raise SourceError(f"source.path: {path} holds {name} twice; download it again")
            seen.add(name)
            yield name, member
