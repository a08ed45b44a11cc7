"""Decode WebP images with the libwebp in imagecodecs: the same decoder on every machine.

The header is read here for size and orientation: RIFF, length, WEBP, chunks. The size is of the
canvas in an extended file (VP8X), otherwise of the one frame (VP8 is lossy, VP8L lossless).
"""

import re
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

from data_prep.images.rejection import Rejection

WEBP: Final = re.compile(rb"RIFF....WEBP", re.DOTALL)
_METADATA: Final = {b"EXIF": "exif", b"XMP ": "xmp"}


class WebpHeader(NamedTuple):
    size: tuple[int, int]
    metadata: dict[str, bytes]
    """By PIL's names, exif and xmp."""

    @classmethod
    def of(cls, data: bytes) -> "WebpHeader":
        """Read the header; raises Rejection."""
        end = 8 + int.from_bytes(data[4:8], "little")
        if end > len(data):
            raise Rejection("truncated", f"{len(data):,} bytes of {end:,}")
        size, at = None, 12
        metadata: dict[str, bytes] = {}
        while at + 8 <= end:
            name, start = data[at : at + 4], at + 8
            at = start + int.from_bytes(data[at + 4 : start], "little")
            size = size or _size(name, data[start : start + 10])
            if name in _METADATA:
                metadata.setdefault(_METADATA[name], data[start:at])
            at += at % 2
        if size is None or 0 in size:
            raise Rejection("not_an_image", "a WebP without a frame")
        return cls(size, metadata)


def decode_webp(data: bytes, header: WebpHeader) -> Image.Image:
    """Return an RGB or RGBA image; of an animation, its first frame."""
    import imagecodecs

    try:
        pixels_HWC = imagecodecs.webp_decode(data)
    except imagecodecs.WebpError:
        np.empty((*header.size, 16), np.uint8)  # MemoryError: libwebp does not report this cause
        raise Rejection("damaged", "libwebp cannot decode it") from None
    if pixels_HWC.shape[1::-1] != header.size:
        raise Rejection("damaged", f"{header.size} in the header, {pixels_HWC.shape} decoded")
    image = Image.fromarray(pixels_HWC)
    image.info.update(header.metadata)
    return image


def _size(name: bytes, body: bytes) -> tuple[int, int] | None:
    """Return the size in a chunk, if it has one."""
    if name == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if name == b"VP8L":  # after a byte of signature, 14 bits each
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if name == b"VP8 ":  # after the frame's tag and start code, 14 bits each and two of scale
        return (
            int.from_bytes(body[6:8], "little") & 0x3FFF,
            int.from_bytes(body[8:10], "little") & 0x3FFF,
        )
    return None
