"""Reads the files of a small .tar.gz into memory, and its checksum at the end of the stream.

Nothing is ever unpacked to disk, so it does not matter what paths or links an archive holds: files go by the last part of their
name. Invariant: no more than `MAX_BYTES` are decompressed, whatever an archive claims: they are counted before tarfile sees them,
which reads the body of a header (pax, long names) in one go.
"""

import gzip
import io
import tarfile
from collections.abc import Container
from pathlib import Path, PurePosixPath

from data_prep.sources.base import SourceError
from data_prep.sources.guard import refusing

MAX_BYTES = 1 << 28


class _Counted(io.BufferedIOBase):
    """A stream of which at most `MAX_BYTES` can be read."""

    def __init__(self, stream: io.BufferedIOBase, path: Path):
        self._stream, self._path = stream, path
        self._left = MAX_BYTES

    def read(self, size: int | None = -1) -> bytes:
        num_bytes = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        data = self._stream.read(num_bytes)
        self._left -= len(data)
        if self._left < 0:
            raise SourceError(f"source.path: {self._path} unpacks to more than {MAX_BYTES:,} bytes; download it again")
        return data


def read_members(path: Path, wanted: Container[str]) -> dict[str, bytes]:
    """The content of every regular file of `path` whose name is `wanted`."""
    found: dict[str, bytes] = {}
    with refusing(path), gzip.open(path) as unpacked:
        stream = _Counted(unpacked, path)
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if not member.isreg() or name not in wanted:
                    continue
                if name in found:
                    raise SourceError(f"source.path: {path} holds {name} twice; download it again")
                body = archive.extractfile(member)
                assert body is not None, name
                found[name] = body.read()
        while stream.read(1 << 20):  # the checksum of a gzip stream stands at its end
            pass
    return found
