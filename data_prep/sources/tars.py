"""Lists the members of a plain tar by reading its headers alone, one after the other.

The standard library's reader takes a damaged header in mid-archive for the end of the archive, and keeps every member in
memory. Here a tar that does not end in a zero block is an error, and nothing is kept. Understood: USTAR, GNU long names, pax
paths and sizes. A tar within a tar is a range of the outer file, so nothing is ever unpacked.
"""

import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX = b"5", b"L", b"K", (b"x", b"X"), b"g"
_EXTENDED = (_LONG_NAME, _LONG_LINK, _GLOBAL_PAX, *_PAX)
_MAX_HEADER_BYTES, _SKIPPED_BYTES = 1 << 20, 1 << 20
_PAX_RECORD = re.compile(rb"(\d{1,7}) ")
_OCTAL = re.compile(rb" *([0-7]*) *")
_MAX_DIGITS = 20


class TarError(ValueError):
    """A tar that is cut or damaged; the text says where."""


class Member(NamedTuple):
    name: str
    offset: int
    """Of its data, from the beginning of the file that holds the tar."""
    num_bytes: int


def members(
    path: Path,
    *,
    start: int = 0,
    num_bytes: int | None = None,
    ignore_zeros: bool = False,
    goes_on: Callable[[int], None] | None = None,
) -> Iterator[Member]:
    """The regular files of the tar at `start` of `path`, in file order.

    With `ignore_zeros` also those behind its end mark, where another tar was appended with cat; without it, `goes_on` is called
    with the place of what stands there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end = start + num_bytes if num_bytes is not None else os.fstat(descriptor).st_size
        at: int | None = start
        while at is not None:
            mark = yield from _walk(descriptor, at, end, beginning=start)
            at = _next_block(descriptor, mark, end) if ignore_zeros or goes_on else None
            if at is not None and not ignore_zeros and goes_on:
                return goes_on(at - start)
    finally:
        os.close(descriptor)


def read_member(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """The data of a member; cut short where the file is."""
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def read_checked(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """The data of a member, if a header for just that many bytes still stands before it."""
    block_and_data = read_member(descriptor, offset - BLOCK, BLOCK + num_bytes)
    _, size = _checked(block_and_data[:BLOCK], offset - BLOCK)
    if size != num_bytes or len(block_and_data) != BLOCK + num_bytes:
        raise TarError(f"has changed at byte {offset:,}")
    return block_and_data[BLOCK:]


class _Announced:
    """What extended headers say of the member that follows them."""

    def __init__(self) -> None:
        self.any = False
        self.name: str | None = None
        self.size: int | None = None

    def take(self, kind: bytes, body: bytes, *, place: int) -> None:
        self.any = True
        if kind == _LONG_NAME:
            self.name = _text(body)
        elif kind in _PAX:
            self.name, self.size = _pax(body, self.name, self.size, place=place)
        elif kind == _GLOBAL_PAX and _pax(body, None, None, place=place) != (None, None):
            raise TarError(f"gives all members one name or size, in a global header at byte {place:,}; repack it")


def _next_block(descriptor: int, offset: int, end: int) -> int | None:
    """Where from `offset` on the first block lies that is not all zeros."""
    while offset < end:
        data = os.pread(descriptor, min(_SKIPPED_BYTES, end - offset), offset)
        if not data:
            return None
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            return offset + zeros // BLOCK * BLOCK
        offset += len(data)
    return None


def _walk(descriptor: int, offset: int, end: int, *, beginning: int) -> Generator[Member, None, int]:
    """Returns where the end mark is. Errors count from the beginning."""
    announced = _Announced()
    while True:
        here = offset - beginning
        block = os.pread(descriptor, BLOCK, offset)
        if len(block) < BLOCK or offset + BLOCK > end:
            raise TarError(f"is cut at byte {here:,}: no end-of-archive mark")
        if block.count(0) == BLOCK:
            if announced.any:
                raise TarError(f"ends at byte {here:,}, after an extended header whose member is not there")
            return offset
        kind, num_bytes = _checked(block, here)
        if kind == b"\0" and _name(block).endswith("/"):
            kind = _FOLDER  # as tars of before 1988 have it
        if kind in _REGULAR and announced.size is not None:
            num_bytes = announced.size
        elif kind == _FOLDER:
            num_bytes = 0  # whatever it says: POSIX lets it tell the room set aside, and no data follows
        data = offset + BLOCK
        if data + num_bytes > end:
            raise TarError(f"is cut: the member at byte {here:,} needs {num_bytes:,} bytes")
        offset = data + -(-num_bytes // BLOCK) * BLOCK
        if kind in _EXTENDED:
            if num_bytes > _MAX_HEADER_BYTES:
                raise TarError(f"has a header of {num_bytes:,} bytes at byte {here:,}")
            announced.take(kind, read_member(descriptor, data, num_bytes), place=here)
            continue
        if kind in _REGULAR:
            yield Member(announced.name if announced.name is not None else _name(block), data, num_bytes)
        elif kind != _FOLDER:
            raise TarError(
                f"holds {_name(block)!r}, which is a link or device (type {kind!r}); repack it with plain files only"
            )
        announced = _Announced()


def _checked(block: bytes, offset: int) -> tuple[bytes, int]:
    """Type and size of a header whose checksum is right."""
    if len(block) < BLOCK:
        raise TarError(f"is cut at byte {offset:,}")
    checksum = _number(block[148:156])
    expected = sum(block) - sum(block[148:156]) + 8 * 32
    if checksum != expected and checksum != expected - _signed_excess(block):
        raise TarError(f"is damaged at byte {offset:,}: no valid header there")
    size = _number(block[124:136])
    if size is None:
        raise TarError(f"is damaged at byte {offset:,}: a header without a size")
    return block[156:157], size


def _signed_excess(block: bytes) -> int:
    """What the sum of the header is too large by, for tars of old that add up signed bytes."""
    return 256 * sum(byte > 127 for byte in block[:148] + block[156:])


def _number(field: bytes) -> int | None:
    """Never negative: a size below zero would lead the walk backwards, for ever."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field.split(b"\0", 1)[0])
    return int(match[1] or b"0", 8) if match else None


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(body: bytes, name: str | None, size: int | None, *, place: int) -> tuple[str | None, int | None]:
    """`name` and `size` as the pax records of `body` change them; an empty value takes back what was said before."""
    at = 0
    while at < len(body) and body[at] != 0:
        match = _PAX_RECORD.match(body, at)
        length = int(match[1]) if match else 0
        record = body[match.end() : at + length - 1] if match else b""
        if not match or length <= match.end() - at or at + length > len(body) or b"=" not in record:
            raise TarError(f"has a damaged pax header at byte {place:,}")
        key, _, value = record.partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape") or None
        elif key == b"size":
            if value and not (value.isdigit() and len(value) <= _MAX_DIGITS):
                raise TarError(f"has a pax header with a wrong size at byte {place:,}")
            size = int(value) if value else None
        elif key.startswith(b"GNU.sparse"):
            raise TarError("holds a sparse file; repack it without --sparse")
        at += length
    return name, size
