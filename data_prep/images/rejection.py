"""Why an input did not become a sample: the only error that making one may end in, besides those of
the machine.

A rejection's words are a function of the input's bytes: rejected.jsonl is the same in every run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from data_prep.errors import UserError

MAX_DETAIL_CHARACTERS = 200
_EARLY_END = re.compile("truncated|not enough image data", re.IGNORECASE)
"""Pillow's words for a file that ends early."""


class Rejection(Exception):  # noqa: N818 (a rejection is an expected outcome, not an error)
    """An input that cannot become a sample. What can be done for each `reason` stands in
    commands/building.py."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@contextmanager
def naming(picture: str) -> Iterator[None]:
    """Says of which picture memory ran out."""
    try:
        yield
    except MemoryError:
        raise UserError(
            f"{picture}: memory ran out while it was decoded; lower max_pixels or num_workers, or"
            " give the process more memory"
        ) from None


@contextmanager
def rejecting(reason: str) -> Iterator[None]:
    """Turns whatever goes wrong with the bytes into a rejection."""
    try:
        yield
    except (Rejection, MemoryError, ImportError):
        # running out of memory is a matter of this machine, not of the picture; so is what is not
        # installed
        raise
    except Image.DecompressionBombError as error:
        raise Rejection("too_many_pixels", _words(error)) from None
    except Exception as error:  # noqa: BLE001
        if isinstance(error, OSError) and "out of memory" in str(
            error
        ):  # as Pillow's decoders put it
            raise MemoryError from None
        # damage makes Pillow raise whatever its parsing trips over (struct.error, TypeError); one
        # file must not stop a build
        words = _words(error)
        raise Rejection("truncated" if _EARLY_END.search(words) else reason, words) from None


def _words(error: Exception) -> str:
    """The message without memory addresses; with the kind of error where the message alone would
    puzzle (KeyError: 5)."""
    message = re.sub(r"<[^<>]* at 0x[0-9a-f]+>|0x[0-9a-f]{6,}", "", str(error)).strip()
    known = (
        isinstance(error, (OSError, SyntaxError, ValueError, Image.DecompressionBombError))
        and message
    )
    return (message if known else f"{type(error).__name__}: {message}")[:MAX_DETAIL_CHARACTERS]
