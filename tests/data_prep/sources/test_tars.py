"""The header reader agrees with Python's `tarfile` on every valid tar, and reports the place of
damage."""

import gzip
import io
import shutil
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from data_prep.archives import gzipped
from data_prep.sources import SourceError
from data_prep.tar import Member, TarError, members, read_member
from tests.data_prep.samples import tar_of

BLOCK = 512
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
SHORT = {
    "a.jpg": b"1" * 700,
    "folder/b.cls": b"7",
    "empty": b"",
    "just/a/block": b"2" * 512,
    "dé/ü.jpg": b"3" * 513,
}
LONG = {"n" * 100: b"4", "d" * 90 + "/" + "n" * 90: b"5" * 1000}
LONGER = {"x/" * 150 + "end.jpg": b"6" * 20, "ü" * 200: b"7", "\udcff\udcfe.jpg": b"8"}


def packed(files: dict[str, bytes], kind: str) -> bytes:
    return tar_of(files, kind=FORMATS[kind], folder="a folder", owner="größer")


def header(name: str, size: int, kind: bytes, **facts: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    info.pax_headers = facts
    return info.tobuf(tarfile.GNU_FORMAT)


def filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def pax(*records: bytes) -> bytes:
    """Return an extended header of the given records."""
    body = b"".join(records)
    return header("pax", len(body), b"x") + filled(body)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def by_tarfile(path: Path) -> list[Member]:
    with tarfile.open(path, mode="r:") as archive:
        return [Member(info.name, info.offset_data, info.size) for info in archive if info.isreg()]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read_as_tarfile_reads_it(tmp_path: Path, kind: str) -> None:
    files = SHORT | (LONG if kind == "ustar" else LONG | LONGER)
    path = written(tmp_path / "t.tar", packed(files, kind))
    found = list(members(path))
    assert [member.name for member in found] == list(files)
    assert found == by_tarfile(path)
    with open(path, "rb") as file:
        data = {
            member.name: read_member(file.fileno(), member.offset, member.num_bytes)
            for member in found
        }
    assert data == files


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar command here")
@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_the_tar_command_writes_is_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in" / "folder"
    folder.mkdir(parents=True)
    files = {
        "folder/a.jpg": b"1" * 700,
        "folder/empty.cls": b"",
        "folder/" + "b" * 60 + ".jpg": b"2" * 512,
    }
    for name, data in files.items():
        (tmp_path / "in" / name).write_bytes(data)
    path = tmp_path / "t.tar"
    subprocess.run(
        ["tar", f"--format={kind}", "-cf", path, "-C", tmp_path / "in", "folder"], check=True
    )
    found = list(members(path))
    assert {member.name: member.num_bytes for member in found} == {
        name: len(data) for name, data in files.items()
    }
    assert found == by_tarfile(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_tar_within_a_tar_is_a_range_of_the_outer_file(tmp_path: Path, kind: str) -> None:
    inner = packed(SHORT, kind)
    outer = written(
        tmp_path / "outer.tar", packed({"before": b"0" * 100, "in.tar": inner, "after": b"9"}, kind)
    )
    place = next(member for member in members(outer) if member.name == "in.tar")
    found = list(members(outer, start=place.offset, num_bytes=place.num_bytes))
    alone = by_tarfile(written(tmp_path / "inner.tar", inner))
    assert found == [member._replace(offset=member.offset + place.offset) for member in alone]
    with pytest.raises(TarError, match="is cut"):
        list(members(outer, start=place.offset, num_bytes=place.num_bytes - 2 * BLOCK * 20))


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_member_beyond_8_gib_and_what_follows_it_are_found(tmp_path: Path, kind: str) -> None:
    num_bytes, path = 9 << 30, tmp_path / "large.tar"
    info = tarfile.TarInfo("large")
    info.size = num_bytes
    head = info.tobuf(FORMATS[kind])
    with open(path, "wb") as file:
        file.write(head)
        file.seek(num_bytes, io.SEEK_CUR)  # a hole, which takes no disk space
        file.write(header("small", 3, b"0") + filled(b"abc") + bytes(2 * BLOCK))
    large, small = (
        Member("large", len(head), num_bytes),
        Member("small", len(head) + num_bytes + BLOCK, 3),
    )
    assert list(members(path)) == [large, small] == by_tarfile(path)


def test_the_pax_records_of_a_member_count_for_it_alone(tmp_path: Path) -> None:
    content = (
        pax(b"18 path=new/n\xc3\xa4me\n", b"10 size=3\n")
        + header("old", 0, b"0")
        + filled(b"abc")
        + header("next", 2, b"0")
        + filled(b"de")
        + pax(b"10 path=p\n", b"8 path=\n", b"8 size=\n")
        + header("kept", 1, b"7")
        + filled(b"f")
        + bytes(BLOCK)
    )
    found = list(members(written(tmp_path / "t.tar", content)))
    assert [(member.name, member.num_bytes) for member in found] == [
        ("new/näme", 3),
        ("next", 2),
        ("kept", 1),
    ]
    assert [content[place : place + size] for _, place, size in found] == [b"abc", b"de", b"f"]


def with_checksum(block: bytes, *, signed: bool = False) -> bytes:
    plain = block[:148] + b" " * 8 + block[156:]
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in plain)
    return block[:148] + b"%06o\0 " % total + block[156:]


def with_size(field: bytes) -> bytes:
    block = header("a", 0, b"0")
    return with_checksum(block[:124] + field.ljust(12, b"\0") + block[136:])


def test_a_checksum_of_signed_bytes_is_one_too(tmp_path: Path) -> None:
    block = header("ü", 0, b"0")
    path = written(tmp_path / "t.tar", with_checksum(block, signed=True) + bytes(BLOCK))
    assert list(members(path)) == [Member("ü", BLOCK, 0)] == by_tarfile(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is cut at byte 0: it has no end-of-archive mark"),
        (b"short", "is cut at byte 0"),
        (b"<html>" * 200, "is damaged at byte 0: this is no valid header"),
        (header("a", 3, b"0") + filled(b"abc"), "is cut at byte 1,024: it has no end-of-archive mark"),
        (header("a", 600, b"0") + filled(b"abc"), "is cut: the member at byte 0 needs 600 bytes"),
        (with_size(b"-0000001000") + bytes(BLOCK), "is damaged at byte 0: its header has no size"),
        (with_size(b"-1") + bytes(BLOCK), "is damaged at byte 0: its header has no size"),
        (with_size(b"1_0") + bytes(BLOCK), "is damaged at byte 0: its header has no size"),
        (with_size(b"\xff" * 12) + bytes(BLOCK), "is damaged at byte 0: its header has no size"),
        (with_size(b"\x80" + b"\xff" * 11) + bytes(BLOCK), "is cut: the member at byte 0 needs 309,485,009,821,345,068,"),
        (header("a", 0, b"2") + bytes(BLOCK), "contains 'a', which is a link or device (type b'2'); pack it again"),
        (header("a", 2 << 20, b"x") + bytes(5 << 20), "is damaged at byte 0: a header has 2,097,152 bytes"),
        (pax(b"what is this\n") + header("a", 0, b"0") + bytes(BLOCK), "has a damaged pax header at byte 0"),
        (pax(b"99 path=a\n") + header("a", 0, b"0") + bytes(BLOCK), "has a damaged pax header at byte 0"),
        (pax(b"0 path=a\n") + header("a", 0, b"0") + bytes(BLOCK), "has a damaged pax header at byte 0"),
        (pax(b"10 size=x\n") + header("a", 0, b"0") + bytes(BLOCK), "has a pax header with a wrong size at byte 0"),
        (pax(b"5010 size=" + b"9" * 4999 + b"\n") + bytes(BLOCK), "has a pax header with a wrong size at byte 0"),
        (pax(b"22 GNU.sparse.major=1\n") + bytes(BLOCK), "contains a sparse file; pack it again without --sparse"),
        (pax(b"10 path=p\n") + bytes(2 * BLOCK), "ends at byte 1,024, after an extended header without a member"),
        (header("g", 10, b"g") + filled(b"10 size=3\n") + bytes(BLOCK), "gives all members one name or size, in a global"),
    ],
)  # fmt: skip
def test_damage_is_one_line_that_says_where(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(TarError) as caught:
        list(members(written(tmp_path / "t.tar", content)))
    assert str(caught.value).startswith(words)


def test_a_global_header_that_says_nothing_of_members_is_passed_over(tmp_path: Path) -> None:
    """`git archive` writes one."""
    content = (
        header("g", 14, b"g")
        + filled(b"14 comment=ab\n")
        + header("a", 1, b"0")
        + filled(b"x")
        + bytes(BLOCK)
    )
    assert list(members(written(tmp_path / "t.tar", content))) == [Member("a", 3 * BLOCK, 1)]


# ---- compressed ones


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_what_a_header_claims_is_counted_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    """Decompression stops at a limit: for a pax record, a long name, and a file of 32 MiB."""
    path = written(
        tmp_path / "bomb.tar.gz", gzip.compress(header("header", 1 << 25, kind) + bytes(1 << 25), 1)
    )
    assert (
        path.stat().st_size < 1 << 18 and 200_000_000 < gzipped.MAX_BYTES <= 1 << 28
    )  # larger than any published file
    monkeypatch.setattr(gzipped, "MAX_BYTES", 1 << 20)
    tracemalloc.start()
    with pytest.raises(
        SourceError,
        match=(r"bomb\.tar\.gz (unpacks to more than 1,048,576 bytes|is damaged .*33,554,432)"),
    ):
        gzipped.read_members(path, {"header"})
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
