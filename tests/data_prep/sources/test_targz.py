"""An archive is decompressed up to a limit and not a byte further, whatever its headers claim."""

import gzip
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from data_prep.archives import gzipped
from data_prep.archives.gzipped import read_members
from data_prep.sources import SourceError

CLAIMED = 1 << 27


def with_long_header(kind: bytes) -> bytes:
    """A tar whose first header says that its own body (a pax record, a long name) is of 128 MiB."""
    header = tarfile.TarInfo("header")
    header.type, header.size = kind, CLAIMED
    return header.tobuf(tarfile.USTAR_FORMAT) + bytes(CLAIMED)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_what_a_header_claims_is_counted_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(with_long_header(kind), 1))
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(gzipped, "MAX_BYTES", 1 << 20)
    tracemalloc.start()
    with pytest.raises(SourceError, match=r"bomb\.tar\.gz (unpacks to more than 1,048,576 bytes|is cut or damaged .*134,217,728)"):
        read_members(path, {"header"})
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_the_limit_is_above_what_is_published() -> None:
    assert 200_000_000 < gzipped.MAX_BYTES <= 1 << 28
