"""The short way for the common JPEG: 8 bits, grey or three channels, nothing that could turn it; straight to libjpeg-turbo.

Pillow's way from bytes to pixels costs, besides libjpeg's work, a third of it again in Python: plugins, tables, buffers. Here
the header is read just far enough to know the size, libjpeg-turbo decodes into the four bytes a pixel that PIL computes with, and
PIL takes that memory as it is. Invariant: this way returns what the long way would return, pixel for pixel, or None; whatever is
unusual, or wrong, is left to the long way, which alone knows how to word a rejection. (A test compares both ways.)

Drafts: a JPEG may be decoded at 1/2, 1/4 or 1/8 (libjpeg scales within its inverse cosine transform), as long as either side
stays at least `DRAFT_MARGINS` times what is asked for. See `images/__init__.py` for what that does to a resized picture.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

DRAFT_MARGINS: Final = {8: 6, 4: 4, 2: 2}
"""1/4 and 1/8 save little more than 1/2 does, and alias fine stripes more: they wait until there is size to spare."""

_START_OF_SCAN, _APP1 = 0xDA, 0xE1
_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))
"""Baseline, extended, progressive; the other frames are arithmetic, lossless or hierarchical."""
_SKIPPED: Final = frozenset((0xC4, 0xDB, 0xDD, 0xE0, *range(0xE2, 0xF0), 0xFE))
"""Tables, restart interval, application data and comments: libjpeg reads those that matter."""
_CHANNELS: Final = (1, 3)


@dataclass(frozen=True)
class PlainJpeg:
    pixels: Image.Image
    """In PIL's mode RGBX: RGB with a byte of padding."""
    width: int
    height: int
    scale: int


def draft_scale(width: int, height: int, smallest_side: int | None) -> int:
    """The coarsest draft that keeps its margin; 1 where there is none."""
    if smallest_side is not None:
        for scale, margin in DRAFT_MARGINS.items():
            if min(width, height) >= scale * margin * smallest_side:
                return scale
    return 1


def decode_plain(data: bytes, *, smallest_side: int | None, max_pixels: int) -> PlainJpeg | None:
    """None says: go the long way."""
    frame = _frame(data)
    if frame is None:
        return None
    width, height, num_channels = frame
    if num_channels not in _CHANNELS or not 0 < width * height <= max_pixels:
        return None
    scale = draft_scale(width, height, smallest_side)
    height_then, width_then = -(-height // scale), -(-width // scale)
    try:
        pixels_HW4 = simplejpeg.decode_jpeg(data, "RGBX", min_height=height_then, min_width=width_then)
    except ValueError:  # damaged, or cut
        return None
    if pixels_HW4.shape[:2] != (height_then, width_then):
        return None
    pixels = Image.frombuffer("RGBX", (width_then, height_then), pixels_HW4, "raw", "RGBX", 0, 1)
    return PlainJpeg(pixels, width, height, scale)


def decode_plain_into(data: bytes, out_HW3: NDArray[np.uint8]) -> bool:
    """Whether `data` was a plain JPEG of exactly that size, and now stands in `out_HW3`; if not, go the long way."""
    frame = _frame(data)
    height, width, _ = out_HW3.shape
    if frame is None or frame[:2] != (width, height) or frame[2] not in _CHANNELS:
        return False
    try:
        simplejpeg.decode_jpeg(data, "RGB", buffer=out_HW3)
    except ValueError:
        return False
    return True


def _frame(data: bytes) -> tuple[int, int, int] | None:
    """(width, height, channels) of a header in which nothing is unusual."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    frame, at, end = None, 2, len(data) - 12
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _START_OF_SCAN:
            return frame
        if marker in _FRAMES:
            if frame is not None or data[at + 4] != 8:
                return None
            size = data[at + 5 : at + 10]
            frame = (size[2] << 8 | size[3], size[0] << 8 | size[1], size[4])
        elif marker not in _SKIPPED:
            return None
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None
