"""Many files side by side in one range of addresses, so that one gather reaches rows of all of them.

A range is reserved once (addresses cost nothing) and each file is mapped into its own slot of it when it is first needed. Unlike
`mmap` objects, mapped files hold no file descriptor: thousands of shards pass under the usual limit of 1,024 open files.

Invariants: what is mapped is read-only, and a write to it, or a read of a slot that is not mapped, ends the process; so the
arrays stay inside the reader that knows which slots are mapped. The range lives as long as its `FileRange`.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAP_FIXED = 0x10  # of Linux; Python's mmap has no name for it
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FileRange:
    """Slots for files of at most the given sizes."""

    def __init__(self, sizes: Sequence[int]):
        page = mmap.ALLOCATIONGRANULARITY
        slots = np.array([-(-max(size, 1) // page) * page for size in sizes], np.int64)
        ends = np.cumsum(slots)
        self.starts: NDArray[np.int64] = ends - slots
        """Where each slot begins in `content`; a multiple of the page size."""
        self._slots = slots
        num_bytes = int(ends[-1]) if len(ends) else page
        self._address = _map(None, num_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        # at the end of the process a thread may still be reading: the system takes the range back when it is over
        weakref.finalize(self, _libc.munmap, self._address, num_bytes).atexit = False
        self.buffer: Any = (ctypes.c_ubyte * num_bytes).from_address(self._address)
        self.content: NDArray[np.uint8] = np.ctypeslib.as_array(self.buffer)
        self.content.flags.writeable = False

    def map(self, number: int, path: Path, *, num_bytes: int) -> None:
        """Puts the file into its slot. Its size is the caller's to check: what lies behind its end must not be read."""
        assert num_bytes <= self._slots[number], (path, num_bytes)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _map(self._at(number), num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)

    def unmap(self, number: int) -> None:
        """Nobody may be reading from the slot."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(self._at(number), int(self._slots[number]), _NO_ACCESS, kind, -1)

    def _at(self, number: int) -> int:
        return self._address + int(self.starts[number])


def _map(address: int | None, num_bytes: int, access: int, kind: int, descriptor: int) -> int:
    found: int | None = _libc.mmap(address, num_bytes, access, kind, descriptor, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} (mapping {num_bytes:,} bytes; see ulimit -v and vm.max_map_count)")
    return found
