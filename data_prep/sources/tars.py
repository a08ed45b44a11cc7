"""Lists the members of a plain tar by reading its headers alone, one after the other.

The standard library's reader takes a damaged header in mid-archive for the end of the archive, and keeps every member in
memory. Here a tar that does not end in a zero block is an error, and nothing is kept. Understood: USTAR, GNU long names, pax
paths and sizes. A tar within a tar is a range of the outer file, so nothing is ever unpacked.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 512
_REGULAR, _LONG_NAME, _PAX = (b"0", b"\0", b"7"), b"L", b"x"
_SKIPPED = b"5gK"  # folders, global pax headers, long link names
_MAX_HEADER_BYTES = 1 << 20
_PAX_RECORD = re.compile(rb"(\d{1,7}) ")


class TarError(ValueError):
    """A tar that is cut or damaged; the text says where."""


class Member(NamedTuple):
    name: str
    offset: int
    """Of its data, from the beginning of the file that holds the tar."""
    num_bytes: int


def members(path: Path, *, start: int = 0, num_bytes: int | None = None) -> Iterator[Member]:
    """The regular files of the tar at `start` of `path`, in file order."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end = start + num_bytes if num_bytes is not None else os.fstat(descriptor).st_size
        yield from _walk(descriptor, start, end)
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


def _walk(descriptor: int, start: int, end: int) -> Iterator[Member]:
    offset, name, size = start, None, None
    while True:
        block = os.pread(descriptor, BLOCK, offset)
        if len(block) < BLOCK or offset + BLOCK > end:
            raise TarError(f"is cut at byte {offset - start:,}: no end-of-archive mark")
        if block.count(0) == BLOCK:
            return
        kind, stored = _checked(block, offset - start)
        num_bytes = size if size is not None and kind in _REGULAR else stored
        data = offset + BLOCK
        if data + num_bytes > end:
            raise TarError(f"is cut: the member at byte {offset - start:,} needs {num_bytes:,} bytes")
        offset = data + -(-num_bytes // BLOCK) * BLOCK
        if kind in (_LONG_NAME, _PAX):
            if num_bytes > _MAX_HEADER_BYTES:
                raise TarError(f"has a header of {num_bytes:,} bytes at byte {data - BLOCK - start:,}")
            body = read_member(descriptor, data, num_bytes)
            if kind == _LONG_NAME:
                name = _text(body)
            else:
                name, size = _pax(body, name, size)
            continue
        if kind in _REGULAR:
            yield Member(name if name is not None else _name(block), data, num_bytes)
        elif kind not in _SKIPPED:
            raise TarError(
                f"holds {_name(block)!r}, which is a link or device (type {kind!r}); repack it with plain files only"
            )
        if kind not in b"gK":
            name, size = None, None


def _checked(block: bytes, offset: int) -> tuple[bytes, int]:
    """Type and size of a header whose checksum is right."""
    if len(block) < BLOCK:
        raise TarError(f"is cut at byte {offset:,}")
    checksum = _number(block[148:156])
    if checksum != sum(block) - sum(block[148:156]) + 8 * 32:
        raise TarError(f"is damaged at byte {offset:,}: no valid header there")
    size = _number(block[124:136])
    if size is None:
        raise TarError(f"is damaged at byte {offset:,}: a header without a size")
    return block[156:157], size


def _number(field: bytes) -> int | None:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return None


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(body: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """`name` and `size` as the pax records of `body` change them."""
    place = 0
    while place < len(body) and body[place] != 0:
        match = _PAX_RECORD.match(body, place)
        length = int(match[1]) if match else 0
        record = body[match.end() : place + length - 1] if match else b""
        if not match or length <= match.end() - place or place + length > len(body) or b"=" not in record:
            raise TarError("has a damaged pax header")
        key, _, value = record.partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            if not value.isdigit():
                raise TarError("has a pax header with a wrong size")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise TarError("holds a sparse file; repack it without --sparse")
        place += length
    return name, size
