"""`Rejection`: the error for an input that cannot become a sample. Faults of the machine are other
errors.

The text of a rejection depends only on the input's bytes, so rejected.jsonl is the same in every
run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from data_prep.errors import UserError

MAX_DETAIL_CHARACTERS = 200
MAX_FILE_BYTES = 1 << 30
"""Largest image file. Larger files are rejected without being read."""
_EARLY_END = re.compile("truncated|not enough image data|NEED_MORE_INPUT", re.IGNORECASE)


class Rejection(Exception):  # noqa: N818 (a rejection is an expected outcome, not an error)
    """An input that cannot become a sample. commands/building.py has a fix for each `reason`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def check_file_size(num_bytes: int) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise Rejection("too_large", f"{num_bytes:,} bytes")


@contextmanager
def naming(picture: str) -> Iterator[None]:
    """Turn a MemoryError into an error that names the image."""
    try:
        yield
    except MemoryError:
        fix = "lower max_pixels or num_workers, or give the process more memory"
        raise UserError(picture, "memory ran out during decoding", fix, code="no-space") from None


@contextmanager
def rejecting(reason: str) -> Iterator[None]:
    """Turn exceptions that the input's bytes cause into a Rejection."""
    try:
        yield
    except (Rejection, MemoryError, ImportError):
        raise  # missing memory and libraries are faults of the machine
    except Image.DecompressionBombError as error:
        raise Rejection("too_many_pixels", _words(error)) from None
    except Exception as error:  # noqa: BLE001
        if isinstance(error, OSError) and "out of memory" in str(error):  # Pillow's words
            raise MemoryError from None
        # damage makes Pillow raise any exception (struct.error, TypeError)
        words = _words(error)
        raise Rejection("truncated" if _EARLY_END.search(words) else reason, words) from None


def _words(error: Exception) -> str:
    """Return the error's message without memory addresses, and with its type if that is unusual."""
    message = re.sub(r"<[^<>]* at 0x[0-9a-f]+>|0x[0-9a-f]{6,}", "", str(error)).strip()
    known = (
        isinstance(error, (OSError, SyntaxError, ValueError, Image.DecompressionBombError))
        and message
    )
    return (message if known else f"{type(error).__name__}: {message}")[:MAX_DETAIL_CHARACTERS]
