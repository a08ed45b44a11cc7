"""Plain tars: their members (`members`, `walk`), gathered by key (`runs`), read (`read_member`),
written (`TarWriter`).

Reading goes by the headers alone, one after the other, whatever delivers the bytes. The standard
library's reader takes a damaged header in mid-archive for the end of the archive, and keeps every
member in memory. Here a tar that does not end in a zero block is an error, and nothing is kept.
Understood: USTAR, GNU long names, pax paths and sizes. A tar within a tar is a range of the outer
file, so nothing is ever unpacked.

Writing stands in for `tarfile`, too, whose objects cost more per member than packing a small
picture does (23 us against 2.6), and whose headers are not the same in every Python release.
Invariants: owner 0, mode 0644, time 0, no links, no extensions; the archive is the same, byte for
byte, as what tarfile of Python 3.11 writes as USTAR; `sha256` and `num_bytes` are of all that `add`
and `finish` were given, written or still held back.
"""

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

BLOCK: Final = 512
_REGULAR = (b"0", b"\0", b"7")
_FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX = b"5", b"L", b"K", (b"x", b"X"), b"g"
_EXTENDED = (_LONG_NAME, _LONG_LINK, _GLOBAL_PAX, *_PAX)
_MAX_HEADER_BYTES, _SKIPPED_BYTES = 1 << 20, 1 << 20
_PAX_RECORD = re.compile(rb"(\d{1,7}) ")
_OCTAL = re.compile(rb" *([0-7]*) *")
_MAX_DIGITS = 20
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")

Read = Callable[[int, int], bytes]
"""(offset, number of bytes) -> those bytes, fewer where the tar ends. A walk asks for them in
ascending order."""


class TarError(ValueError):
    """A tar that is cut or damaged; the text names the place, and the fix if it is not to get the
    tar again."""

    def __init__(self, problem: str, *, fix: str = ""):
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.fix = fix

    def or_fix(self, fix: str) -> str:
        """Return the text with exactly one fix: its own, or else `fix`."""
        return str(self) if self.fix else f"{self}; {fix}"


class Member(NamedTuple):
    name: str
    offset: int
    """Of its data, from the beginning of the file that holds the tar."""
    num_bytes: int


# ---- reading
# --------------------------------------------------------------------------------------------------


def members(
    path: Path, *, start: int = 0, num_bytes: int | None = None, ignore_zeros: bool = False
) -> Generator[Member, None, int | None]:
    """The regular files of the tar at `start` of `path`, in file order.

    With `ignore_zeros` also those behind its end mark, where another tar was appended with cat;
    without it, the place of what follows it is returned.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end = start + num_bytes if num_bytes is not None else os.fstat(descriptor).st_size
        at: int | None = start
        while at is not None:
            mark = yield from walk(
                lambda offset, count: read_member(descriptor, offset, count),
                at,
                end,
                beginning=start,
            )
            at = _next_block(descriptor, mark, end)
            if at is not None and not ignore_zeros:
                return at - start
    finally:
        os.close(descriptor)
    return None


def walk(
    read: Read,
    offset: int = 0,
    end: int | None = None,
    *,
    beginning: int = 0,
    refuse_links: bool = True,
) -> Generator[Member, None, int]:
    """The regular files of the tar that starts at `offset`; returns where its end mark is. Errors
    count from the beginning.

    Links and devices are passed over where they are not refused.
    """
    name, size, is_announced = (
        None,
        None,
        False,
    )  # as extended headers announce the member that follows them
    while True:
        here = offset - beginning
        block = read(offset, BLOCK)
        if len(block) < BLOCK or (end is not None and offset + BLOCK > end):
            raise TarError(f"is cut at byte {here:,}: no end-of-archive mark")
        if block.count(0) == BLOCK:
            if is_announced:
                raise TarError(
                    f"ends at byte {here:,}, after an extended header whose member is not there"
                )
            return offset
        kind, num_bytes = _checked(block, here)
        if kind == b"\0" and _name(block).endswith("/"):
            kind = _FOLDER  # as tars of before 1988 have it
        if kind in _REGULAR and size is not None:
            num_bytes = size
        elif kind == _FOLDER:
            # whatever the header gives: in POSIX it is the room set aside, and no data follows
            num_bytes = 0
        data = offset + BLOCK
        if end is not None and data + num_bytes > end:
            raise TarError(f"is cut: the member at byte {here:,} needs {num_bytes:,} bytes")
        offset = data + -(-num_bytes // BLOCK) * BLOCK
        if kind in _EXTENDED:
            if num_bytes > _MAX_HEADER_BYTES:
                raise TarError(f"has a header of {num_bytes:,} bytes at byte {here:,}")
            name, size = _announced(kind, read(data, num_bytes), name, size, place=here)
            is_announced = True
            continue
        if kind in _REGULAR:
            yield Member(_name(block) if name is None else name, data, num_bytes)
        elif kind != _FOLDER and refuse_links:
            problem = f"holds {_name(block)!r}, which is a link or device (type {kind!r})"
            raise TarError(
                problem,
                fix="pack it again with plain files only, for example with tar --dereference",
            )
        name, size, is_announced = None, None, False


def read_member(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """The data of a member; cut short where the file is."""
    data = b""
    while len(data) < num_bytes and (
        more := os.pread(descriptor, num_bytes - len(data), offset + len(data))
    ):
        data += more
    return data


def read_checked(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """The data of a member, if a header for just that many bytes still comes before it."""
    block_and_data = read_member(descriptor, offset - BLOCK, BLOCK + num_bytes)
    _, size = _checked(block_and_data[:BLOCK], offset - BLOCK)
    if size != num_bytes or len(block_and_data) != BLOCK + num_bytes:
        raise TarError(f"has changed at byte {offset:,}")
    return block_and_data[BLOCK:]


class Run(NamedTuple):
    """Consecutive members of one key."""

    key: str
    members: list[tuple[str, Member]]
    """With what follows the key in their names: jpg, cls."""


def runs(found: Iterable[Member]) -> Iterator[Run]:
    """By webdataset's rule. A member whose name has no key is a run by itself, whose key is empty,
    and ends no other run."""
    run: Run | None = None
    for member in found:
        key, suffix = key_of(member.name)
        if not key:
            yield Run("", [("", member)])
            continue
        if run is not None and key != run.key:
            yield run
            run = None
        run = run or Run(key, [])
        run.members.append((suffix, member))
    if run is not None:
        yield run


def key_of(name: str) -> tuple[str, str]:
    """The key is all up to the first dot of the last part of the name; both are empty where there
    is none."""
    match = _KEY.match(name)
    return (match[1], match[2]) if match else ("", "")


def header_name(block: bytes) -> str:
    """The name in a header, which must be a valid one."""
    _checked(block, 0)
    return _name(block)


def _announced(
    kind: bytes, body: bytes, name: str | None, size: int | None, *, place: int
) -> tuple[str | None, int | None]:
    """`name` and `size` of the next member, as an extended header changes them."""
    if kind == _LONG_NAME:
        return _text(body), size
    if kind in _PAX:
        return _pax(body, name, size, place=place)
    if kind == _GLOBAL_PAX and _pax(body, None, None, place=place) != (None, None):
        raise TarError(
            f"gives all members one name or size, in a global header at byte {place:,}",
            fix="pack it again",
        )
    return name, size


def _next_block(descriptor: int, offset: int, end: int) -> int | None:
    """Where from `offset` on the first block lies that is not all zeros."""
    while offset < end and (
        data := os.pread(descriptor, min(_SKIPPED_BYTES, end - offset), offset)
    ):
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            return offset + zeros // BLOCK * BLOCK
        offset += len(data)
    return None


def _checked(block: bytes, offset: int) -> tuple[bytes, int]:
    """Type and size of a header whose checksum is right."""
    if len(block) < BLOCK:
        raise TarError(f"is cut at byte {offset:,}")
    checksum = _number(block[148:156])
    expected = sum(block) - sum(block[148:156]) + 8 * 32
    # tars of old add up signed bytes
    if checksum != expected and checksum != expected - 256 * sum(
        byte > 127 for byte in block[:148] + block[156:]
    ):
        raise TarError(f"is damaged at byte {offset:,}: no valid header there")
    size = _number(block[124:136])
    if size is None:
        raise TarError(f"is damaged at byte {offset:,}: a header without a size")
    return block[156:157], size


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


def _pax(
    body: bytes, name: str | None, size: int | None, *, place: int
) -> tuple[str | None, int | None]:
    """`name` and `size` as the pax records of `body` change them; an empty value cancels an earlier
    one."""
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
            raise TarError("holds a sparse file", fix="pack it again without --sparse")
        at += length
    return name, size


# ---- writing
# --------------------------------------------------------------------------------------------------

RECORD_BYTES: Final = 20 * BLOCK
"""The length of an archive is a multiple of this, as it was on tape, and as every tar program
writes it."""
MAX_NAME_BYTES: Final = 100
MAX_PREFIX_BYTES: Final = 155
MAX_MEMBER_BYTES: Final = 8**11 - 1
"""8 GiB less one byte: what eleven octal digits hold. Larger sizes need extensions that not every
reader knows."""
HELD_BYTES: Final = 1 << 20
"""Small members are hashed and written in pieces of at least this size."""

_BEFORE_SIZE: Final = b"0000644\0" + b"0000000\0" * 2
_BEFORE_PREFIX: Final = b"0" + bytes(100) + b"ustar\x0000" + bytes(80)
_CONSTANT_SUM: Final = (
    sum(_BEFORE_SIZE) + sum(b"00000000000\0") + 8 * ord(" ") + sum(_BEFORE_PREFIX)
)
"""What the constant fields add to a header's checksum, which counts its own field as spaces."""


class TarWriter:
    def __init__(self, file: IO[bytes]):
        self._file, self._digest = file, hashlib.sha256()
        self._held: list[bytes] = []
        self._num_held = 0
        self.num_bytes = 0

    def add(self, name: str, data: bytes) -> int:
        """Appends one member and returns where its data starts."""
        start = self.num_bytes + BLOCK
        padding = -len(data) % BLOCK
        self._held += (header(name, len(data)), data, bytes(padding))
        self._count(BLOCK + len(data) + padding)
        return start

    def finish(self) -> None:
        """Ends the archive with two empty blocks, filled up to a whole record; nothing may be added
        afterwards."""
        end = 2 * BLOCK
        end += -(self.num_bytes + end) % RECORD_BYTES
        self._held.append(bytes(end))
        self._count(end)
        self._write()

    @property
    def sha256(self) -> str:
        self._write()
        return self._digest.hexdigest()

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._num_held += num_bytes
        if self._num_held >= HELD_BYTES:
            self._write()

    def _write(self) -> None:
        if not self._held:
            return  # the file may be closed by now
        block = b"".join(self._held)
        self._digest.update(block)
        self._file.write(block)
        self._held, self._num_held = [], 0


def header(name: str, num_bytes: int) -> bytes:
    """The 512 bytes before a member's data."""
    if num_bytes > MAX_MEMBER_BYTES:
        raise ValueError(
            f"{name}: {num_bytes:,} bytes; a member of a shard may have {MAX_MEMBER_BYTES:,} at"
            " most"
        )
    prefix, base = _split(name)
    size = b"%011o" % num_bytes
    checksum = _CONSTANT_SUM + sum(size) + sum(base) + sum(prefix)
    return b"".join(
        (
            base.ljust(MAX_NAME_BYTES, b"\0"),
            _BEFORE_SIZE,
            size,
            b"\x0000000000000\0",  # the end of the size, then the time
            b"%06o\0 " % checksum,
            _BEFORE_PREFIX,
            prefix.ljust(MAX_PREFIX_BYTES + 12, b"\0"),
        )
    )


def _split(name: str) -> tuple[bytes, bytes]:
    """(prefix, base) of a name, which the reader joins by a slash; the shortest prefix that leaves
    a short enough base."""
    encoded = name.encode("utf-8", "surrogateescape")
    if not encoded or b"\0" in encoded:
        raise ValueError(f"{name!r} cannot name a member of a shard")
    if len(encoded) <= MAX_NAME_BYTES:
        return b"", encoded
    slash = encoded.find(b"/", len(encoded) - MAX_NAME_BYTES - 1)
    if slash < 0 or slash > MAX_PREFIX_BYTES or slash == len(encoded) - 1:
        raise ValueError(
            f"{name!r} is too long for a member of a shard: {len(encoded)} bytes, where"
            f" {MAX_NAME_BYTES} fit, or {MAX_PREFIX_BYTES} + {MAX_NAME_BYTES} where a slash stands"
            " between them"
        )
    return encoded[:slash], encoded[slash + 1 :]
