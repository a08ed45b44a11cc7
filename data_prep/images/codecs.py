"""Decode WebP, AVIF and JPEG XL images with imagecodecs: the same decoders on every machine.

This module reads the headers, so sizes are known before decoding:

- WebP: a RIFF file of chunks. Extended files (VP8X) contain the size of the canvas, other
  files the size of their only frame (VP8 is lossy, VP8L lossless).
- AVIF: boxes of one image. Sequences (brand avis) are not read, because imagecodecs 2026.3 writes
  beyond its buffer for their first frame.
- JPEG XL: a codestream, or boxes that contain it. libjxl turns the image upright.
"""

import re
from typing import NamedTuple

import numpy as np
from PIL import Image

from data_prep.images.rejection import Rejection

_WEBP = re.compile(rb"RIFF....WEBP", re.DOTALL)
_AVIF = re.compile(rb"\0\0..ftyp(?!avis)(?:.{4}){0,15}?avif", re.DOTALL)
_JXL = re.compile(rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n", re.DOTALL)
_METADATA = {b"EXIF": "exif", b"XMP ": "xmp"}
_EXTENT = re.compile(rb"\0\0\0\x14ispe.{4}(.{4})(.{4})", re.DOTALL)
_BITS = re.compile(rb"pixi.{5}(.)", re.DOTALL)
_QUARTERS = re.compile(rb"\0\0\0\x09irot(.)", re.DOTALL)
_MIRROR = re.compile(rb"\0\0\0\x09imir(.)", re.DOTALL)
_ORIENTATIONS = {None: (1, 8, 3, 6), 0: (4, 5, 2, 7), 1: (2, 7, 4, 5)}
"""Mirror axis (or None) -> EXIF orientations for 0 to 3 counterclockwise quarter turns."""
_RATIOS = ((1, 1), (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
"""Ratios of width to height in a JPEG XL header; the first is not used."""


class Header(NamedTuple):
    extension: str
    size: tuple[int, int]
    metadata: dict[str, bytes]
    """Metadata under PIL's names, exif and xmp."""
    bits: int = 8

    @classmethod
    def of(cls, data: bytes) -> "Header | None":
        """Read the header; return None for other formats; raise Rejection if it is damaged."""
        header = None
        if _WEBP.match(data):
            header = _webp(data)
        elif _AVIF.match(data):
            header = _avif(data)
        elif _JXL.match(data):
            header = Header("jxl", _jxl_size(data), {})
        if header is not None and 0 in header.size:
            raise Rejection("not_an_image", f"a {header.extension} file that contains no image")
        return header


def decode_coded(data: bytes, header: Header) -> Image.Image:
    """Decode the first frame without turning it. Raise Rejection or the decoder's error if it is
    damaged."""
    import imagecodecs

    try:
        match header.extension:
            case "webp":
                pixels_HWC = imagecodecs.webp_decode(data)
            case "avif":
                pixels_HWC = imagecodecs.avif_decode(data, numthreads=1)
            case _:
                pixels_HWC = imagecodecs.jpegxl_decode(data, index=0, numthreads=1)
    except RuntimeError:
        np.empty((*header.size, 16), np.uint8)  # MemoryError if memory is the cause
        raise
    if sorted(pixels_HWC.shape[:2]) != sorted(header.size):
        raise Rejection(
            "damaged", f"{pixels_HWC.shape[1::-1]} pixels, not {header.size} as in the header"
        )
    if pixels_HWC.dtype == np.uint16 and header.bits > 8:
        pixels_HWC = (pixels_HWC >> (header.bits - 8)).astype(np.uint8)
    if pixels_HWC.dtype != np.uint8:
        problem = f"{header.extension} with {pixels_HWC.dtype} pixels; convert it to 8 bits"
        raise Rejection("unsupported", problem)
    image = Image.fromarray(pixels_HWC)
    image.info.update(header.metadata)
    return image


def _webp(data: bytes) -> Header:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise Rejection("truncated", f"only {len(data):,} of {end:,} bytes")
    size, at = None, 12
    metadata: dict[str, bytes] = {}
    while at + 8 <= end:
        name, start = data[at : at + 4], at + 8
        at = start + int.from_bytes(data[at + 4 : start], "little")
        size = size or _webp_size(name, data[start : start + 10])
        if name in _METADATA:
            metadata.setdefault(_METADATA[name], data[start:at])
        at += at % 2
    return Header("webp", size or (0, 0), metadata)


def _webp_size(name: bytes, body: bytes) -> tuple[int, int] | None:
    if name == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if name == b"VP8L":  # signature byte, then 14 bits for each side
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if name == b"VP8 ":  # tag and start code, then 14 bits and 2 bits of scale per side
        return (
            int.from_bytes(body[6:8], "little") & 0x3FFF,
            int.from_bytes(body[8:10], "little") & 0x3FFF,
        )
    return None


def _avif(data: bytes) -> Header:
    """Read the properties of the largest image. Thumbnails and tiles are smaller."""
    extents = [(int.from_bytes(w), int.from_bytes(h)) for w, h in _EXTENT.findall(data)]
    bits, quarters, mirror = (each.search(data) for each in (_BITS, _QUARTERS, _MIRROR))
    exif = Image.Exif()
    axis = mirror and mirror[1][0] & 1
    exif[0x0112] = _ORIENTATIONS[axis][quarters[1][0] & 3 if quarters else 0]
    size = max(extents, key=lambda extent: extent[0] * extent[1], default=(0, 0))
    return Header("avif", size, {"exif": exif.tobytes()}, bits[1][0] if bits else 8)


def _jxl_size(data: bytes) -> tuple[int, int]:
    stream = data
    if data[0] == 0:
        at, stream = 12, b""
        while at + 8 <= len(data) and not stream:
            name, num_bytes = data[at + 4 : at + 8], int.from_bytes(data[at : at + 4])
            stream = {b"jxlc": data[at + 8 :], b"jxlp": data[at + 12 :]}.get(name, b"")
            at += num_bytes or len(data)
    if len(stream) < 12:
        raise Rejection("truncated", f"the file ends in its header, after {len(data):,} bytes")
    bits = int.from_bytes(stream[2:12], "little")

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & (1 << count) - 1, bits >> count
        return value

    is_small = take(1)

    def side() -> int:
        return 8 * (1 + take(5)) if is_small else 1 + take((9, 13, 18, 30)[take(2)])

    height, ratio = side(), take(3)
    return side() if ratio == 0 else height * _RATIOS[ratio][0] // _RATIOS[ratio][1], height
