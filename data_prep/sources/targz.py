"""Reads the files of a small .tar.gz into memory, and its checksum at the end of the stream.

Nothing is ever unpacked to disk, so it does not matter what paths or links an archive holds: files go by the last part of their
name. Invariant: no more than `MAX_BYTES` are taken in, whatever an archive claims.
"""

import gzip
import tarfile
from collections.abc import Container
from pathlib import Path, PurePosixPath

from data_prep.sources.base import SourceError
from data_prep.sources.guard import refusing

MAX_BYTES = 1 << 30


def read_members(path: Path, wanted: Container[str]) -> dict[str, bytes]:
    """The content of every regular file of `path` whose name is `wanted`."""
    found: dict[str, bytes] = {}
    num_bytes = 0
    with refusing(path), gzip.open(path) as stream:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:
            for member in archive:
                num_bytes += 512 + member.size
                if num_bytes > MAX_BYTES:
                    raise SourceError(
                        f"source.path: {path} unpacks to more than {MAX_BYTES:,} bytes; download it again"
                    )
                name = PurePosixPath(member.name).name
                if not member.isreg() or name not in wanted:
                    continue
                if name in found:
                    raise SourceError(f"source.path: {path} holds {name} twice; download it again")
                body = archive.extractfile(member)
                assert body is not None, name
                found[name] = body.read()
        while chunk := stream.read(1 << 20):  # the checksum of a gzip stream stands at its end
            num_bytes += len(chunk)
            if num_bytes > MAX_BYTES:
                raise SourceError(f"source.path: {path} unpacks to more than {MAX_BYTES:,} bytes; download it again")
    return found
