"""Bytes -> one RGB picture, at full size or, where the caller allows it, at a half, a quarter or an
eighth of it.

EXIF policy: the orientation tag (of EXIF; of XMP where EXIF has none) says how the picture stands;
all other metadata is dropped. Metadata that cannot be read leaves the picture as it is stored. Of
several frames or pages the first is taken. The true format counts, never the file's name. The size
is read off the header, and judged, before anything is decoded. simplejpeg and imagecodecs decode
JPEG (jpeg.py); imagecodecs decodes WebP (webp.py) and compressed TIFF (tiff.py). Pillow decodes
PNG, PPM, GIF, BMP and uncompressed TIFF, and reads the headers of JPEG and TIFF. Pillow-SIMD 12.1,
which takes Pillow's place on x86-64, lacks the fixes of Pillow 12.2 to 13.0; therefore
`check_tiles` lists and bounds what a file can make it decode.
"""

import contextlib
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, TypeVar

import PIL
import simplejpeg
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import MAX_TEXT_CHUNK

from data_prep.images.colour import rawmode_of, to_rgb
from data_prep.images.jpeg import (
    Frame,
    decode_jpeg,
    decode_rare_jpeg,
    draft_scale,
    ends_in_header,
    plain_frame,
)
from data_prep.images.rejection import Rejection, rejecting
from data_prep.images.tiff import is_compressed, unpack_tiff
from data_prep.images.webp import WEBP, WebpHeader, decode_webp

T = TypeVar("T")

MAX_PIXELS: Final = 178_956_970
"""Of a picture as its header says: Pillow's own limit for a decompression bomb, which no budget
exceeds."""
PIXEL_BUDGET: Final = 64_000_000
"""Of what is decoded of one picture, unless `max_pixels` says otherwise: up to 1 GB of memory, at 4
bytes a pixel and copies."""
EXTENSIONS: Final = {
    "JPEG": "jpg",
    "PNG": "png",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "PPM": "ppm",
}
"""The formats that Pillow opens. Some of its other formats take any bytes for an image (TGA) or
start programs (EPS)."""
PILLOW_DECODERS: Final = frozenset(("raw", "zip", "gif", "bmp_rle", "ppm", "ppm_plain"))
"""The decoders of Pillow that a file may start: they are those of PNG, PPM, GIF, BMP and
uncompressed TIFF, never that of JPEG."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG_TEXTS = (b"iCCP", b"tEXt", b"zTXt", b"iTXt")
_PNG_TURNING = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0\0")


def decoder_version() -> str:
    """What the pixels depend on besides the bytes."""
    libjpeg = features.version("libjpeg_turbo") or features.version("jpg")
    others = (
        f"imagecodecs {version('imagecodecs')} (WebP and TIFF), opencv-python-headless"
        f" {version('opencv-python-headless')} (area)"
    )
    return (
        f"Pillow {PIL.__version__}, libjpeg {libjpeg}, simplejpeg {simplejpeg.__version__} (JPEG),"
        f" {others}"
    )


@dataclass(frozen=True)
class Picture:
    """A decoded picture as it is stored; `upright` turns it (or what has been made of it)."""

    pixels: Image.Image
    """RGB, or RGBX where that spares a copy; `upright` makes RGB of it."""
    extent: tuple[float, float]
    """Width and height in pixels of `pixels`; a draft's last pixel of a row or column may lie over
    the edge in part."""
    orientation: int
    extension: str

    @classmethod
    def of(cls, image: Image.Image, *, extension: str = "") -> "Picture":
        """Of one that PIL has opened; raises `Rejection` where its mode has no right RGB."""
        rawmode = rawmode_of(image)
        image.load()
        return cls(to_rgb(image, rawmode=rawmode), image.size, _orientation(image), extension)

    def upright(self, image: Image.Image) -> Image.Image:
        """`image`, as RGB."""
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        turn = _TURNS.get(self.orientation)
        return rgb if turn is None else rgb.transpose(turn)


def read_picture(
    data: bytes, *, smallest_side: int | None = None, max_pixels: int = MAX_PIXELS
) -> Picture:
    """Raises `Rejection`. `smallest_side` allows a draft, and says to how many pixels the shorter
    side will be resized; `max_pixels` is the budget of what is decoded then."""
    frame = plain_frame(data)
    if frame is not None:
        return _jpeg(data, frame, smallest_side=smallest_side, max_pixels=max_pixels, orientation=1)
    with (
        without_warnings()
    ):  # what Pillow warns of is a rejection below, or metadata that is dropped
        return _despite_text(
            lambda data: _read(data, smallest_side=smallest_side, max_pixels=max_pixels), data
        )


def size_of(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height as the header says; nothing is decoded. Raises `Rejection`."""
    frame = plain_frame(data)
    if frame is not None:
        width, height, _ = frame
    elif WEBP.match(data):
        width, height = WebpHeader.of(data).size
    else:
        with without_warnings():
            width, height = _despite_text(_open, data).size
    _check_size(width, height, max_pixels=max_pixels)
    return width, height


def _read(data: bytes, *, smallest_side: int | None, max_pixels: int) -> Picture:
    if WEBP.match(data):
        header = WebpHeader.of(data)
        _check_size(*header.size, max_pixels=max_pixels)
        with rejecting("damaged"):
            return Picture.of(decode_webp(data, header), extension="webp")
    image = _open(data)
    if image.format == "JPEG":
        frame = Frame(image.width, image.height, image.layers)
        return _jpeg(
            data,
            frame,
            smallest_side=smallest_side,
            max_pixels=max_pixels,
            orientation=_orientation(image),
        )
    _check_size(*image.size, max_pixels=max_pixels)
    with rejecting("damaged"):
        if is_compressed(image):
            unpack_tiff(data, image)
        check_tiles(image)
        return Picture.of(image, extension=EXTENSIONS[image.format or ""])


def _jpeg(
    data: bytes, frame: Frame, *, smallest_side: int | None, max_pixels: int, orientation: int
) -> Picture:
    width, height, _ = frame
    _check_size(width, height)
    scale = draft_scale(width, height, smallest_side)
    _check_size(-(-width // scale), -(-height // scale), max_pixels=max_pixels)
    pixels = decode_jpeg(data, frame, scale=scale)
    if pixels is None:
        _check_size(width, height, max_pixels=max_pixels)
        pixels, scale = decode_rare_jpeg(data, frame), 1
    return Picture(
        pixels if pixels.mode == "RGBX" else to_rgb(pixels),
        (width / scale, height / scale),
        orientation,
        "jpg",
    )


def check_tiles(image: Image.Image) -> None:
    """Reject an image that would start another decoder of Pillow, or whose pixels are placed far
    outside of it: Pillow checks the places, but before 12.2 its sums overflow."""
    side = max(image.size)
    for codec, extents, *_ in image.tile:
        if codec not in PILLOW_DECODERS:
            raise Rejection(
                "unsupported", f"{image.format} with the codec {codec}; convert it to PNG"
            )
        left, top, right, bottom = extents or (0, 0, side, side)
        if not (0 <= left <= right <= side and 0 <= top <= bottom <= side):
            raise Rejection(
                "damaged", f"pixels at {extents} of an image of {image.width} x {image.height}"
            )


def _check_size(width: int, height: int, *, max_pixels: int = MAX_PIXELS) -> None:
    if width * height > MAX_PIXELS:
        raise Rejection(
            "too_many_pixels",
            f"{width} x {height}; {MAX_PIXELS:,} pixels are the most; make it smaller",
        )
    if width * height > max_pixels:
        raise Rejection(
            "too_many_pixels",
            f"{width} x {height}; make it smaller, or raise max_pixels ({max_pixels})",
        )


def _despite_text(read: Callable[[bytes], T], data: bytes) -> T:
    """What `read` makes of a picture; where its text or colour profile is longer than Pillow allows
    (1 MiB), of it without them."""
    try:
        return read(data)
    except Rejection as rejection:
        if "MAX_TEXT" not in rejection.detail:
            raise
    return read(_without_text(data))


def _without_text(data: bytes) -> bytes:
    """A PNG without its texts, but for one that may say how it stands. Nothing is unpacked for it:
    compressed ones go."""
    kept, at = [data[:8]], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        name, text = data[at + 4 : at + 8], data[at + 8 : end - 4]
        if name not in _PNG_TEXTS or (
            len(text) <= MAX_TEXT_CHUNK and text.startswith(_PNG_TURNING)
        ):
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def _open(data: bytes) -> Image.Image:
    if not data:
        raise Rejection("empty", "zero bytes")
    is_jpeg = data[:2] == b"\xff\xd8"
    if is_jpeg and ends_in_header(data):
        raise Rejection("truncated", f"{len(data):,} bytes of a JPEG's header")
    with rejecting("not_an_image"):
        if is_jpeg:
            return JpegImageFile(
                io.BytesIO(data)
            )  # never an MPO: a good picture with a bad index of further ones is good
        try:
            image = Image.open(io.BytesIO(data), formats=tuple(EXTENSIONS))
        except Image.UnidentifiedImageError:
            unknown = f"no format that is read here begins with {data[:16]!r}"
            raise Rejection(
                "not_an_image",
                unknown if data[4:8] != b"ftyp" else "HEIC, AVIF and videos are not read",
            ) from None
        return image


def _orientation(image: Image.Image) -> int:
    """1 to 8; of a loaded picture, because a PNG may hold its metadata behind the pixels."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1  # the common case, without what Pillow would build to find it out
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 (as above: damaged metadata makes Pillow raise anything)
        return 1
    return value if value in _TURNS else 1


# ---- Python's warnings held back, by any number of threads at once
# ----------------------------------------------------
#
# `warnings.catch_warnings` changes the filters of the whole process and puts back those that it
# found: of two threads whose blocks overlap, the later one to leave puts back the filters of the
# other's block, and every warning of the process is lost from then on.

_lock = threading.Lock()
_inside = 0
_filters = contextlib.ExitStack()


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """The first thread to enter changes the filters, the last one to leave puts them back."""
    global _inside  # noqa: PLW0603 (the filters that it counts for are the process's, too)
    with _lock:
        _inside += 1
        if _inside == 1:
            _filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _filters.close()
