"""Bringing what is written to the disk. It lies in memory first, and all at once at the end would take any time, with no word of
headway: so whoever writes a large file flushes it every now and then. No torch here."""

import os

from pretrain.headway import HEADWAY

FLUSHED_BYTES = 256 << 20
"""Written to disk at once: at 1 MB/s still in half of hang_timeout_s."""


def flush(descriptor: int) -> None:
    """Waits until the disk has it, without Python's lock."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has but the latter
    HEADWAY.touch()
