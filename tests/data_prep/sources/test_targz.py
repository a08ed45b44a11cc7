"""An archive is decompressed up to a limit and not a byte further, whatever its headers claim."""

import gzip
import tarfile
from pathlib import Path

import pytest

from data_prep.sources import SourceError, targz
from data_prep.sources.targz import read_members

CLAIMED = 1 << 27


def with_long_header(kind: bytes) -> bytes:
    """A tar whose first header says that its own body (a pax record, a long name) is of 128 MiB."""
    header = tarfile.TarInfo("header")
    header.type, header.size = kind, CLAIMED
    return header.tobuf(tarfile.USTAR_FORMAT) + bytes(CLAIMED)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_what_a_header_claims_is_counted_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(with_long_header(kind), 1))
    assert path.stat().st_size < 1 << 20
    taken: list[int] = []
    read = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        data = read(self, size)
        taken.append(len(data))
        return data

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    monkeypatch.setattr(targz, "MAX_BYTES", 1 << 20)
    with pytest.raises(SourceError, match=r"bomb\.tar\.gz unpacks to more than 1,048,576 bytes; download it again"):
        read_members(path, {"header"})
    assert sum(taken) == (1 << 20) + 1


def test_one_large_read_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(b"")
    monkeypatch.setattr(targz, "MAX_BYTES", 1000)
    with open("/dev/zero", "rb") as endless:
        stream = targz._Counted(endless, path)
        assert len(stream.read(1000)) == 1000
        with pytest.raises(SourceError, match="unpacks to more than 1,000 bytes"):
            stream.read(1 << 50)


def test_the_limit_is_above_what_is_published() -> None:
    assert 200_000_000 < targz.MAX_BYTES <= 1 << 28
