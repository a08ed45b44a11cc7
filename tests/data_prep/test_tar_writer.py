"""`TarWriter` writes the bytes of tarfile's USTAR, reports correct offsets and hashes, and names
its limits."""

import hashlib
import io
import tarfile

import numpy as np
import pytest

from data_prep import tar
from data_prep.tar import BLOCK, MAX_MEMBER_BYTES, TarWriter, header
from tests.data_prep.samples import tar_of

Members = list[tuple[str, bytes]]


def by_us(members: Members) -> tuple[bytes, TarWriter, list[int]]:
    buffer = io.BytesIO()
    writer = TarWriter(buffer)
    offsets = [writer.add(name, data) for name, data in members]
    writer.finish()
    return buffer.getvalue(), writer, offsets


NAMES = [
    "a",
    "train-000001-000123.ppm",
    "ünïcode/日本.jpg",
    "\udcff broken utf-8",
    "n" * 99,
    "n" * 100,
    "é" * 50,  # 100 bytes
    "dir/" + "n" * 97,  # 101 bytes
    "d" * 155 + "/" + "n" * 100,  # the longest possible name
    "a/b/c/"
    + "d" * 40
    + "/"
    + "e" * 60
    + "/"
    + "f" * 30,  # several places to split: the first is used
    "d" * 60 + "/" + "日" * 33,  # split by bytes, not by characters
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_one_member_is_as_tarfile_writes_it(name: str) -> None:
    for num_bytes in (0, 1, 511, 512, 513, 10_000):
        members = [(name, bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256))]
        assert by_us(members)[0] == tar_of(members, kind=tarfile.USTAR_FORMAT)


def test_random_archives_are_as_tarfile_writes_them_with_true_offsets_and_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(0)
    num_members = 0
    for held_bytes in (1, 5_000, 1 << 20):
        monkeypatch.setattr(tar, "HELD_BYTES", held_bytes)
        for count in (0, 1, 7, 8, 60):  # around the filling of a record, and beyond
            members = []
            for number in range(count):
                depth = int(generator.integers(1, 5))
                name = (
                    "/".join("x" * int(generator.integers(1, 45)) for _ in range(depth))
                    + f"-{number}"
                )
                members.append((name, generator.bytes(int(generator.integers(0, 3000)))))
            written, writer, offsets = by_us(members)
            assert written == tar_of(members, kind=tarfile.USTAR_FORMAT)
            assert writer.sha256 == hashlib.sha256(written).hexdigest()
            assert writer.num_bytes == len(written)
            assert [
                written[at : at + len(data)] for at, (_, data) in zip(offsets, members, strict=True)
            ] == [data for _, data in members]
            num_members += count
    assert num_members == 3 * 76


@pytest.mark.parametrize("num_bytes", [0, 1, 8**10 - 1, 8**10, 2**32, MAX_MEMBER_BYTES])
def test_headers_of_large_members_are_as_tarfile_has_them(num_bytes: int) -> None:
    info = tarfile.TarInfo("key.jpg")
    info.size = num_bytes
    assert header("key.jpg", num_bytes) == info.tobuf(tarfile.USTAR_FORMAT)
    assert len(header("key.jpg", num_bytes)) == BLOCK


@pytest.mark.parametrize(
    ("name", "num_bytes", "message"),
    [
        ("key.jpg", MAX_MEMBER_BYTES + 1, "key.jpg: 8,589,934,592 bytes"),
        ("n" * 101, 0, "too long"),
        ("d" * 156 + "/" + "n" * 99, 0, "too long"),
        ("d/" + "n" * 101, 0, "too long"),
        ("d" * 100 + "/", 0, "too long"),
        ("", 0, "not valid as a file name"),
        ("a\0b", 0, "not valid as a file name"),
    ],
)
def test_what_ustar_cannot_hold_is_refused_by_name(name: str, num_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        header(name, num_bytes)
