"""Writes a USTAR archive whose bytes are a function of its members' names and data alone.

It stands in for `tarfile`, whose objects cost more per member than packing a small picture does, and whose headers are not the
same in every Python release (the device fields have changed). Invariants: owner 0, mode 0644, time 0, no links, no extensions;
the archive is the same, byte for byte, as what tarfile of Python 3.11 writes as USTAR; `sha256` and `num_bytes` always speak of
what `add` and `finish` were given, written or still held back.
"""

import hashlib
from typing import IO, Final

BLOCK_BYTES: Final = 512
RECORD_BYTES: Final = 20 * BLOCK_BYTES
"""The length of an archive is a multiple of this, as it was on tape, and as every tar program writes it."""
MAX_NAME_BYTES: Final = 100
MAX_PREFIX_BYTES: Final = 155
MAX_MEMBER_BYTES: Final = 8**11 - 1
"""8 GiB less one byte: what eleven octal digits hold. Larger sizes need extensions that not every reader knows."""
HELD_BYTES: Final = 1 << 20
"""Small members are hashed and written in pieces of at least this size."""

_BEFORE_SIZE: Final = b"0000644\0" + b"0000000\0" * 2
_BEFORE_PREFIX: Final = b"0" + bytes(100) + b"ustar\x0000" + bytes(80)
_CONSTANT_SUM: Final = sum(_BEFORE_SIZE) + sum(b"00000000000\0") + 8 * ord(" ") + sum(_BEFORE_PREFIX)
"""What the constant fields add to a header's checksum, which counts its own field as spaces."""


class TarWriter:
    def __init__(self, file: IO[bytes]):
        self._file, self._digest = file, hashlib.sha256()
        self._held: list[bytes] = []
        self._num_held = 0
        self.num_bytes = 0

    def add(self, name: str, data: bytes) -> int:
        """Appends one member and returns where its data starts."""
        start = self.num_bytes + BLOCK_BYTES
        padding = -len(data) % BLOCK_BYTES
        self._held += (header(name, len(data)), data, bytes(padding))
        self._count(BLOCK_BYTES + len(data) + padding)
        return start

    def finish(self) -> None:
        """Ends the archive with two empty blocks, filled up to a whole record; nothing may be added afterwards."""
        end = 2 * BLOCK_BYTES
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
        raise ValueError(f"{name}: {num_bytes:,} bytes; a member of a shard may have {MAX_MEMBER_BYTES:,} at most")
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
    """(prefix, base) of a name, which the reader joins by a slash; the shortest prefix that leaves a short enough base."""
    encoded = name.encode("utf-8", "surrogateescape")
    if not encoded or b"\0" in encoded:
        raise ValueError(f"{name!r} cannot name a member of a shard")
    if len(encoded) <= MAX_NAME_BYTES:
        return b"", encoded
    slash = encoded.find(b"/", len(encoded) - MAX_NAME_BYTES - 1)
    if slash < 0 or slash > MAX_PREFIX_BYTES or slash == len(encoded) - 1:
        raise ValueError(
            f"{name!r} is too long for a member of a shard: {len(encoded)} bytes, where {MAX_NAME_BYTES} fit, or "
            f"{MAX_PREFIX_BYTES} + {MAX_NAME_BYTES} where a slash stands between them"
        )
    return encoded[:slash], encoded[slash + 1 :]
