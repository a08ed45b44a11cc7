"""Bringing what is written to the disk. It lies in memory first, and all at once at the end would take any time, with no word of
progress: so whoever writes a large file flushes it every now and then. No torch here."""

import os

from pretrain.ranks.hangs import PROGRESS

FLUSHED_BYTES = 256 << 20
"""Written to disk at once: at 1 MB/s still in half of hang_timeout_s."""


def flush(descriptor: int) -> None:
    """Waits until the disk has it, without Python's lock."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has but the latter
    PROGRESS.touch()


class Flusher:
    """Of one file, whenever so much more has been written to it."""

    def __init__(self, every_bytes: int):
        self._every_bytes, self._in_memory = every_bytes, 0

    def wrote(self, num_bytes: int, descriptor: int) -> None:
        self._in_memory += num_bytes
        if self._in_memory >= self._every_bytes:
            flush(descriptor)
            self._in_memory = 0
