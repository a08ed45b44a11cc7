"""Bytes -> one RGB picture, at full size or, where the caller allows it, at a half, a quarter or an eighth of it.

EXIF policy: the orientation tag (of EXIF; of XMP where EXIF has none) says how the picture stands; all other metadata is dropped.
Metadata that cannot be read leaves the picture as it is stored. Of several frames or pages the first is taken.
The true format counts, never the file's name. The size is read off the header, and judged, before anything is decoded.

Drafts: a JPEG may be decoded at 1/2, 1/4 or 1/8 (libjpeg scales within its inverse cosine transform), as long as either side
stays at least `DRAFT_MARGIN` times what is asked for. See `images.py` for what that does to a resized picture.
"""

import io
import warnings
from dataclasses import dataclass
from typing import Final

from PIL import Image, features

from data_prep.colour import rawmode_of, to_rgb
from data_prep.rejection import Rejection, rejecting

MAX_PIXELS = 178_956_970
"""Pixel cap (Pillow's own limit for a decompression bomb)."""
DRAFT_MARGIN: Final = 2
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


@dataclass(frozen=True)
class Picture:
    """A decoded picture as it is stored; `upright` turns it (or what has been made of it)."""

    rgb: Image.Image
    extent: tuple[float, float]
    """Width and height in pixels of `rgb`; a draft's last pixel of a row or column may lie over the edge in part."""
    orientation: int
    extension: str

    def upright(self, image: Image.Image) -> Image.Image:
        turn = _TURNS.get(self.orientation)
        return image if turn is None else image.transpose(turn)


def read_picture(data: bytes, *, smallest_side: int | None = None) -> Picture:
    """Raises `Rejection`. `smallest_side` allows a draft, and says to how many pixels the shorter side will be resized."""
    if not data:
        raise Rejection("empty", "zero bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow warns of is a rejection below, or metadata that is dropped
        image = _open(data)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise Rejection("too_many_pixels", f"{width} x {height}")
        with rejecting("truncated"):
            scale = 1 if smallest_side is None else _draft(image, smallest_side)
            rawmode = rawmode_of(image)
            image.load()
            orientation = _orientation(image)
            rgb = to_rgb(image, rawmode=rawmode)
        # MPO, a JPEG of several pictures, is not in the table
        return Picture(rgb, (width / scale, height / scale), orientation, EXTENSIONS.get(image.format or "", "jpg"))


def _open(data: bytes) -> Image.Image:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and not features.check("webp"):
        raise Rejection("missing_codec", "PIL was built without WebP: " + _REMEDY.format(package="libwebp-dev"))
    with rejecting("not_an_image"):
        try:
            image = Image.open(io.BytesIO(data), formats=tuple(EXTENSIONS))
        except Image.UnidentifiedImageError:
            raise Rejection("not_an_image", f"no format that is read here begins with {data[:16]!r}") from None
        if any(tile[0] == "libtiff" for tile in getattr(image, "tile", ())) and not features.check("libtiff"):
            detail = "PIL was built without what a compressed TIFF needs: " + _REMEDY.format(package="libtiff-dev")
            raise Rejection("missing_codec", detail)
        return image


def _draft(image: Image.Image, smallest_side: int) -> int:
    """Sets a JPEG up for the coarsest draft that keeps the margin; the scale, 1 where there is none."""
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        for scale in (8, 4, 2):
            if min(image.size) >= scale * DRAFT_MARGIN * smallest_side:
                width, height = image.size
                image.draft(None, (width // scale, height // scale))
                assert image.width == -(-width // scale), (image.size, width, height, scale)
                return scale
    return 1


def _orientation(image: Image.Image) -> int:
    """1 to 8; of a loaded picture, because a PNG may hold its metadata behind the pixels."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1  # the common case, without what Pillow would build to find it out
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 (as above: damaged metadata makes Pillow raise anything)
        return 1
    return value if value in _TURNS else 1
