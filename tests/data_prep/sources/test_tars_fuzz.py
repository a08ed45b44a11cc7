"""For hundreds of damaged tars the reader raises TarError, or finds the same members as `tarfile`.

Half of the damaged headers get a correct checksum, so that the damage reaches the later code.
"""

import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from data_prep.tar import Member, TarError, members
from tests.data_prep.sources.test_tars import (
    BLOCK,
    LONG,
    LONGER,
    SHORT,
    by_tarfile,
    packed,
    pax,
    with_checksum,
    written,
)
from tests.soak import soaked

HANDMADE = {
    "records": pax(b"12 path=a/b\n", b"10 size=3\n") + packed({"old": b"abc"}, "ustar")[BLOCK:]
}
VALID = {
    "ustar": packed(SHORT | LONG, "ustar"),
    "gnu": packed(SHORT | LONG | LONGER, "gnu"),
    "pax": packed(SHORT | LONG | LONGER, "pax"),
} | HANDMADE
FIELDS = [(0, 100), (124, 12), (148, 8), (156, 1), (257, 8), (345, 155)]
"""Start and length of a header's name, size, checksum, type, magic and prefix."""
VALUES = [
    b"", b"-1", b"-00000001000", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"\x80" + bytes(10) + b"\x09",
    b"77777777777", b"1_0", b"0x10", b" 12 ", b"12\0 9",
]  # fmt: skip
TYPES = [
    b"0",
    b"\0",
    b"1",
    b"2",
    b"5",
    b"7",
    b"L",
    b"K",
    b"x",
    b"g",
    b"X",
    b"S",
    b"M",
    b"Z",
    b"\xff",
]
NUM_EACH = 300


def damaged(content: bytes, numbers: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(numbers.choice([1, 1, 1, 2, 4])):
        if len(data) < 2 * BLOCK:
            break
        block = numbers.randrange(len(data) // BLOCK) * BLOCK
        start, length = numbers.choice(FIELDS)
        match numbers.randrange(8):
            case 0:
                del data[numbers.randrange(len(data)) :]
            case 1:
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
            case 2:
                del data[block : block + BLOCK]
            case 3:
                other = numbers.randrange(len(data) // BLOCK) * BLOCK
                data[block:block] = data[other : other + BLOCK]
            case 4:
                data[block + 156 : block + 157] = numbers.choice(TYPES)
            case 5:
                data[block + 124 : block + 136] = numbers.choice(VALUES).ljust(12, b"\0")
            case 6:
                data[block + start : block + start + length] = numbers.randbytes(length)
            case 7:
                place = numbers.randrange(len(data))
                data[place : place + 3] = numbers.choice([b"99 ", b"0 =", b"\n\n\n", b"7 a"])
        if numbers.random() < 0.5:
            data[block : block + BLOCK] = with_checksum(
                bytes(data[block : block + BLOCK].ljust(BLOCK, b"\0"))
            )
    return bytes(data)


@soaked
@pytest.mark.parametrize("kind", VALID)
def test_a_damaged_tar_is_an_error_or_read_as_tarfile_reads_it(
    tmp_path: Path, kind: str, salt: int
) -> None:
    numbers, path = random.Random(f"tars {kind} {salt}"), tmp_path / "t.tar"
    num_refused, num_read, num_alike = 0, 0, 0
    assert list(members(written(path, VALID[kind]))) == by_tarfile(path) != []
    for number in range(NUM_EACH):
        content = damaged(VALID[kind], numbers)
        try:
            found = list(members(written(path, content)))
        except TarError:
            num_refused += 1
            continue
        num_read += 1
        assert all(0 <= place <= place + size <= len(content) for _, place, size in found), number
        expected = by_tarfile(path)
        num_alike += found == expected
        assert places(found[: len(expected)]) == places(expected), number
        assert len(found) == len(expected) or tarfile_stops_before(content, found[len(expected)]), (
            number
        )
    assert num_refused > NUM_EACH // 5 and num_read > NUM_EACH // 5
    assert num_alike > 0.97 * num_read


def places(found: list[Member]) -> list[tuple[int, int]]:
    """Return places without names: tarfile uses the prefix of any header, and cuts long names at a
    zero."""
    return [(member.offset, member.num_bytes) for member in found]


def tarfile_stops_before(content: bytes, member: Member) -> bool:
    """True if tarfile takes a wrong owner, mode or time for the end of the archive."""
    try:
        tarfile.TarInfo.frombuf(
            content[member.offset - BLOCK : member.offset], "utf-8", "surrogateescape"
        )
    except tarfile.HeaderError:
        return True
    return False


@soaked
def test_noise_is_an_error_that_costs_no_memory(tmp_path: Path, salt: int) -> None:
    numbers, path = random.Random(3 + salt), tmp_path / "t.tar"
    for _ in range(80):
        huge = with_checksum(
            numbers.randbytes(124) + b"\x80" + numbers.randbytes(11) + numbers.randbytes(376)
        )
        tracemalloc.start()
        with pytest.raises(TarError):
            list(members(written(path, huge + numbers.randbytes(numbers.randrange(5000)))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_the_offsets_are_those_of_the_outer_file_even_in_noise(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tar", bytes(range(256)) * 3 + VALID["ustar"])
    expected = [
        Member(name, place + 768, size)
        for name, place, size in by_tarfile(written(tmp_path / "u.tar", VALID["ustar"]))
    ]
    assert list(members(path, start=768, num_bytes=len(VALID["ustar"]))) == expected
