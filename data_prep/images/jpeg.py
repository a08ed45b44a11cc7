"""Decode JPEGs with libjpeg-turbo, whose warnings count as damage.

Pillow needs a third more time and hides libjpeg's warnings. libjpeg-turbo decodes directly into
PIL's four bytes per pixel. Numbers of rejected files in tests of 800 images, from baseline to
progressive CMYK (in parentheses: rejected by Pillow):

- 20 bytes scrambled: 544 (60)
- one bit flipped: 174 (9)
- truncated: all (all)
- harmless changes (4,800 images): none

A JPEG that ends before its end marker is `truncated`, or `no_end_marker` if no pixels are missing.
Any other fault of the pixels is `damaged`, with the decoder's message. Examples are a bad Huffman
code, an unsupported or misplaced marker in a scan, and stray bytes within or after entropy-coded
data. Stray bytes between header segments, 0x00 or 0xFF before the end, variants of the Adobe and
JFIF segments, and all metadata are harmless. A decoder reports only its first warning. If that
warning is harmless, its cause is removed and the JPEG is decoded again. imagecodecs decodes JPEGs
of rare subsampling without warnings, so `check_markers` checks them.

A JPEG of `crop=full` stores its original shape as a pixel density in its first segment.

Drafts: a JPEG may be decoded at 1/2, 1/4 or 1/8 if both sides stay at least `DRAFT_MARGINS` times
the final size. `images/__init__.py` states the effect.
"""

import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from data_prep.images.rejection import Rejection

DRAFT_MARGINS = {8: 6, 4: 4, 2: 2}
"""Smallest ratio of the decoded size to the final size, for 1/2, 1/4 and 1/8. 1/4 and 1/8 save
little more time than 1/2 and alias fine stripes more, so they need larger margins."""

_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN = 0xD8, 0xD9, 0xDA
_APP0, _APP1, _APP14, _COMMENT = 0xE0, 0xE1, 0xEE, 0xFE
_END = b"\xff\xd9"
_RESTARTS = range(0xD0, 0xD8)
_PROGRESSIVE = 0xC2
_FRAMES = frozenset((0xC0, 0xC1, _PROGRESSIVE))
"""Frame markers of baseline, extended and progressive JPEGs. Other frames are arithmetic, lossless
or hierarchical."""
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, _APP0, *range(0xE2, 0xF0), _COMMENT))
"""Markers of tables, restart interval, application data and comments. libjpeg reads these itself if
necessary."""
_METADATA = frozenset((*range(_APP0, 0xF0), _COMMENT)) - {_APP0, _APP14}
_CHANNELS = (1, 3)
_DENSITY_AT = 14
_MAX_DENSITY = 32_767
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_EXTRANEOUS = re.compile(r"([0-9]+) extraneous bytes before marker 0x([0-9a-f]{2})")
_OF_THE_HEADER = (
    "bad ICC marker",
    "JFIF revision",
    "Adobe color transform",
    "Invalid SOS parameters",
)
_UNKNOWN_SUBSAMPLING = "Could not determine subsampling"


class Frame(NamedTuple):
    """Size and number of channels in a JPEG's header."""

    width: int
    height: int
    num_channels: int


def draft_scale(width: int, height: int, smallest_side: int | None) -> int:
    """Return the largest divisor of the size (8, 4 or 2) that `DRAFT_MARGINS` permits, or 1."""
    if smallest_side is not None:
        for scale, margin in DRAFT_MARGINS.items():
            if min(width, height) >= scale * margin * smallest_side:
                return scale
    return 1


def decode_jpeg(data: bytes, frame: Frame, *, scale: int) -> Image.Image | None:
    """Decode a JPEG to PIL's mode RGBX or CMYK. Return None if TurboJPEG does not support it; raise
    Rejection if it is damaged."""
    height, width = -(-frame.height // scale), -(-frame.width // scale)
    mode = "CMYK" if frame.num_channels == 4 else "RGBX"
    pixels_HW4 = _decoded(
        data, frame.num_channels, colorspace=mode, min_height=height, min_width=width
    )
    return (
        None
        if pixels_HW4 is None
        else _image_of(pixels_HW4, frame, size=(width, height), mode=mode)
    )


def decode_rare_jpeg(data: bytes, frame: Frame) -> Image.Image:
    """Decode a JPEG with a subsampling that TurboJPEG does not support, at full size. Raise
    `Rejection` if it is damaged."""
    import imagecodecs

    check_markers(data)
    try:
        pixels_HWC = np.atleast_3d(imagecodecs.jpeg8_decode(data))
    except imagecodecs.Jpeg8Error as error:
        if "Insufficient memory" in str(error):
            raise MemoryError(str(error)) from None
        raise Rejection("damaged", str(error)) from None
    return _image_of(
        pixels_HWC, frame, size=frame[:2], mode={1: "L", 3: "RGB"}.get(frame.num_channels, "CMYK")
    )


def _image_of(
    pixels_HWC: NDArray[np.uint8], frame: Frame, *, size: tuple[int, int], mode: str
) -> Image.Image:
    if pixels_HWC.shape != (*size[::-1], len(mode)):
        raise Rejection(
            "damaged", f"{pixels_HWC.shape[1::-1]} pixels, not {frame[:2]} as in the header"
        )
    # files contain CMYK as Adobe writes it, inverted
    raw_mode = "CMYK;I" if mode == "CMYK" else mode
    return Image.frombuffer(mode, size, pixels_HWC, "raw", raw_mode, 0, 1)


def decode_plain_into(data: bytes, out_HW3: NDArray[np.uint8]) -> bool:
    """Decode a plain JPEG (see `plain_frame`) of the size of `out_HW3`. Return False for any other
    or damaged image."""
    frame = plain_frame(data)
    height, width, _ = out_HW3.shape
    if frame is None or frame[:2] != (width, height):
        return False
    try:
        simplejpeg.decode_jpeg(data, "RGB", buffer=out_HW3)
    except ValueError:
        return False
    return True


def plain_frame(data: bytes) -> Frame | None:
    """Return the frame if the header is plain: 8 bits, one or three channels, no EXIF or XMP; else
    None."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    frame, at, end = None, 2, len(data) - 12
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _START_OF_SCAN:
            return frame if frame is not None and frame.num_channels in _CHANNELS else None
        if marker in _FRAMES:
            if frame is not None or data[at + 4] != 8:
                return None
            size = data[at + 5 : at + 10]
            frame = Frame(size[2] << 8 | size[3], size[0] << 8 | size[1], size[4])
        elif marker not in _SKIPPED:
            return None
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def encode_jpeg(image: Image.Image, *, quality: int, aspect: float) -> bytes:
    """Encode an image; `aspect` is its width / height before it was squashed."""
    buffer, options = io.BytesIO(), dict[str, Any]()
    if aspect != 1.0:
        # dots per inch: fewer across for a wide image that was squashed
        across, down = min(1.0, 1 / aspect), min(1.0, aspect)
        options["dpi"] = max(1, _MAX_DENSITY * across), max(1, _MAX_DENSITY * down)
    image.save(buffer, "JPEG", quality=quality, subsampling=0, **options)
    return buffer.getvalue()


def aspects_of(content: NDArray[np.uint8], starts_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the original width / height of JPEGs, as `encode_jpeg` has stored it. `starts_B`:
    positions of the JPEGs in `content`."""
    bytes_B4 = content[starts_B[:, None] + np.arange(_DENSITY_AT, _DENSITY_AT + 4)]
    across_B, down_B = bytes_B4.view(">u2").astype(np.float64).T
    return np.asarray(down_B / np.maximum(across_B, 1))


def check_markers(data: bytes) -> None:
    """Raise Rejection for misplaced markers or a missing end marker, which imagecodecs accepts
    silently."""
    num_restarts, is_scan = 0, False
    for marker, _, _ in _segments(data):
        if marker == _END_OF_IMAGE:
            return
        if marker in _RESTARTS:
            if not is_scan or marker != _RESTARTS[num_restarts % 8]:
                raise Rejection("damaged", f"marker 0x{marker:02x} is misplaced")
            num_restarts += 1
        else:
            num_restarts, is_scan = 0, marker == _START_OF_SCAN
    raise Rejection("damaged" if _has_end(data) else "truncated", "Premature end of JPEG file")


def _decoded(
    data: bytes, num_channels: int, *, is_tidied: bool = False, **options: Any
) -> NDArray[np.uint8] | None:
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, **options))
    except ValueError as error:
        words = str(error)
    if "Insufficient memory" in words:
        raise MemoryError(words)
    if _UNKNOWN_SUBSAMPLING in words:
        return None
    extraneous = _EXTRANEOUS.search(words)
    if (
        extraneous is not None
        and int(extraneous[2], 16) == _END_OF_IMAGE
        and _is_padded(data, int(extraneous[1]))
    ):
        # the first warning was at the last marker, so it is the only one
        return _decoded(data, num_channels, is_tidied=True, **options | {"strict": False})
    if not is_tidied and (
        extraneous is not None or any(known in words for known in _OF_THE_HEADER)
    ):
        return _decoded(_tidied(data, num_channels), num_channels, is_tidied=True, **options)
    if _has_end(data):
        raise Rejection("damaged", words)
    if _is_one_scan(data, num_channels) and not data.endswith(
        b"\0"
    ):  # zeros: reserved space of an unfinished download
        try:
            _decoded(data + _END, num_channels, is_tidied=is_tidied, **options)
        except Rejection:
            pass
        else:
            raise Rejection(
                "no_end_marker", "all pixels are present, but the end marker FF D9 is missing"
            )
    raise Rejection("truncated", "Premature end of JPEG file")


def ends_in_header(data: bytes) -> bool:
    """Return True if the file is the beginning of a JPEG and ends before its first scan."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _START_OF_SCAN:
        is_padding = data[at + 1] == 0xFF  # any number of 0xFF may be in front of a marker
        at += 1 if is_padding else 2 + (data[at + 2] << 8 | data[at + 3])
    return at + 4 > len(data)


def _has_end(data: bytes) -> bool:
    """Return True if an end marker follows the start of the first scan. A thumbnail may have an end
    marker before the scan."""
    starts = (start for marker, start, _ in _segments(data) if marker == _START_OF_SCAN)
    return _END in data[next(starts, len(data)) :]


def _is_one_scan(data: bytes, num_channels: int) -> bool:
    """Return True if the JPEG is sequential, and its only scan has all channels."""
    found = list(_segments(data))
    scans = [start for marker, start, _ in found if marker == _START_OF_SCAN]
    return (
        len(scans) == 1
        and data[scans[0] + 4] == num_channels
        and not any(marker == _PROGRESSIVE for marker, _, _ in found)
    )


def _is_padded(data: bytes, num_bytes: int) -> bool:
    end = next(
        (start for marker, start, _ in _segments(data) if marker == _END_OF_IMAGE), len(data)
    )
    return not data[:end].rstrip(b"\xff")[-num_bytes:].strip(b"\x00\xff")


def _tidied(data: bytes, num_channels: int) -> bytes:
    """Return the JPEG without the parts of its header that cause warnings; its pixels are the
    same."""
    parts = [data[:2]]
    for marker, start, end in _segments(data):
        segment = bytearray(data[start:end])
        if segment[4:9] == b"JFIF\0" and len(segment) > 9:
            segment[9] = 1  # libjpeg warns about any other version
        elif marker == _APP14 and segment[4:9] == b"Adobe" and len(segment) > 15 and segment[15]:
            # any other transform counts as YCbCr or YCCK
            segment[15] = 1 if num_channels == 3 else 2
        if marker == _START_OF_SCAN:
            if any(part[1] == 0xC0 or part[1] == 0xC1 for part in parts):
                segment[
                    -3:
                ] = (  # the only valid values of a sequential scan; some encoders write zeros
                    b"\x00\x3f\x00"
                )
            return b"".join([*parts, segment, data[end:]])
        if marker not in _METADATA:
            parts.append(bytes(segment))
    return data


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, position, end of its segment), skipping stray bytes as libjpeg does."""
    at = 2
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        if marker != 0x01 and not _RESTARTS[0] <= marker <= _END_OF_IMAGE:
            at += int.from_bytes(data[at : at + 2])
        yield marker, found.end() - 2, at
        if marker == _END_OF_IMAGE:
            return
