"""Bytes -> one RGB picture, at full size or, where the caller allows it, at a half, a quarter or an eighth of it.

EXIF policy: the orientation tag (of EXIF; of XMP where EXIF has none) says how the picture stands; all other metadata is dropped.
Metadata that cannot be read leaves the picture as it is stored. Of several frames or pages the first is taken.
The true format counts, never the file's name. The size is read off the header, and judged, before anything is decoded.
"""

import io
from dataclasses import dataclass
from typing import Final

import PIL
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile

from data_prep.images.colour import rawmode_of, to_rgb
from data_prep.images.jpeg import decode_plain, draft_scale
from data_prep.images.quiet import without_warnings
from data_prep.images.rejection import Rejection, rejecting

MAX_PIXELS = 178_956_970
"""Pixel cap (Pillow's own limit for a decompression bomb)."""
EXTENSIONS: Final = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "PPM": "ppm",
}
"""The formats that are read. Of the others that Pillow knows some take any bytes for a picture (TGA) or start programs (EPS)."""

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
_REMEDY = "apt-get install {package} (or the like), then rm -rf .venv and make"


def decoder_version() -> str:
    """What the pixels depend on besides the bytes."""
    return f"Pillow {PIL.__version__}, libjpeg {features.version('libjpeg_turbo') or features.version('jpg')}"


@dataclass(frozen=True)
class Picture:
    """A decoded picture as it is stored; `upright` turns it (or what has been made of it)."""

    pixels: Image.Image
    """RGB, or RGBX where that spares a copy; `upright` makes RGB of it."""
    extent: tuple[float, float]
    """Width and height in pixels of `pixels`; a draft's last pixel of a row or column may lie over the edge in part."""
    orientation: int
    extension: str

    def upright(self, image: Image.Image) -> Image.Image:
        """`image`, as RGB."""
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        turn = _TURNS.get(self.orientation)
        return rgb if turn is None else rgb.transpose(turn)


def read_picture(data: bytes, *, smallest_side: int | None = None) -> Picture:
    """Raises `Rejection`. `smallest_side` allows a draft, and says to how many pixels the shorter side will be resized."""
    if not data:
        raise Rejection("empty", "zero bytes")
    plain = decode_plain(data, smallest_side=smallest_side, max_pixels=MAX_PIXELS)
    if plain is not None:
        return Picture(plain.pixels, (plain.width / plain.scale, plain.height / plain.scale), 1, "jpg")
    with without_warnings():  # what Pillow warns of is a rejection below, or metadata that is dropped
        image = _open(data)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise Rejection("too_many_pixels", f"{width} x {height}")
        with rejecting("truncated"):
            scale = _draft(image, smallest_side)
            rawmode = rawmode_of(image)
            image.load()
            orientation = _orientation(image)
            rgb = to_rgb(image, rawmode=rawmode)
        extent = rgb.size if scale == 1 else (width / scale, height / scale)
        return Picture(rgb, extent, orientation, EXTENSIONS[image.format or ""])


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height as the header says; nothing is decoded. Raises `Rejection`."""
    if not data:
        raise Rejection("empty", "zero bytes")
    with without_warnings():
        width, height = _open(data).size
    if width * height > MAX_PIXELS:
        raise Rejection("too_many_pixels", f"{width} x {height}")
    return width, height


def _open(data: bytes) -> Image.Image:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and not features.check("webp"):
        raise Rejection("missing_codec", "PIL was built without WebP: " + _REMEDY.format(package="libwebp-dev"))
    with rejecting("not_an_image"):
        if data[:2] == b"\xff\xd8":
            return JpegImageFile(
                io.BytesIO(data)
            )  # never an MPO: a good picture with a bad index of further ones is good
        try:
            image = Image.open(io.BytesIO(data), formats=tuple(EXTENSIONS))
        except Image.UnidentifiedImageError:
            raise Rejection("not_an_image", f"no format that is read here begins with {data[:16]!r}") from None
        if any(tile[0] == "libtiff" for tile in getattr(image, "tile", ())) and not features.check("libtiff"):
            detail = "PIL was built without what a compressed TIFF needs: " + _REMEDY.format(package="libtiff-dev")
            raise Rejection("missing_codec", detail)
        return image


def _draft(image: Image.Image, smallest_side: int | None) -> int:
    """Sets a JPEG up for the draft that is allowed; its scale."""
    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return 1
    width, height = image.size
    scale = draft_scale(width, height, smallest_side)
    if scale > 1:
        image.draft(None, (width // scale, height // scale))
        assert image.width == -(-width // scale), (image.size, width, height, scale)
    return scale


def _orientation(image: Image.Image) -> int:
    """1 to 8; of a loaded picture, because a PNG may hold its metadata behind the pixels."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1  # the common case, without what Pillow would build to find it out
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 (as above: damaged metadata makes Pillow raise anything)
        return 1
    return value if value in _TURNS else 1
