"""Pure bytes -> bytes: decode, to RGB, resize, stand upright, encode; a picture that cannot be used
is a typed rejection.

Downscaling is antialiased: PIL's bicubic or bilinear with support scaled to the ratio, or OpenCV's
INTER_AREA, with which FFCV made the pictures of the public checkpoints. `decoding.py` and
`colour.py` define what formats, modes and metadata become.

Drafts (`ImageSpec.draft`) save a quarter of the time of a JPEG of 400 pixels. What they cost, held
by tests, in levels of 255 against the picture of a full decode: photographs (made of noise with
their spectrum) a mean of at most 1, and nowhere more than 6; white noise a mean of 3; stripes and
checkerboards of full contrast, a few pixels wide, a mean of 10 at the very margin, where the full
decode shows a moire of its own. Who trains on such textures sets draft=false.
"""

import io
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from data_prep.images.decoding import MAX_PIXELS, PIXEL_BUDGET, Picture, read_picture, size_of
from data_prep.images.jpeg import decode_plain_into
from data_prep.images.rejection import Rejection, naming
from data_prep.manifest import CropPolicy, Encoding, Filter
from data_prep.settings import Settings

__all__ = [
    "MAX_PIXELS",
    "EncodedImage",
    "ImageSpec",
    "Rejection",
    "convert",
    "decode",
    "naming",
    "size_of",
    "square",
]

_PIL_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class ImageSpec(Settings):
    """What `build` makes of every picture."""

    image_size: int = Field(64, ge=8, le=1024)
    """Width and height of the stored pictures, in pixels."""
    crop: CropPolicy = "center"
    """center: the central square, resized; both ends of the longer side are lost. squash: the
    complete image, resized to a square.
    longer_side: shrunk until the longer side is `image_size` (never enlarged), then as center, as
    FFCV did for the public checkpoints."""
    interpolation: Filter = "bicubic"
    """area: OpenCV's INTER_AREA, as FFCV has it; it takes no drafts."""
    encoding: Encoding = "raw"
    """raw: binary PPM, gathered at memory speed; jpeg: re-encoded; keep: the input's own bytes,
    checked. Transparent pixels become white; with keep, when the image is read."""
    jpeg_quality: int = Field(95, ge=1, le=100)
    """Of encoding=jpeg, as libjpeg counts it."""
    draft: bool = True
    """Large JPEGs are decoded at 1/2, 1/4 or 1/8 before they are resized: faster, and within a
    tolerance."""
    max_pixels: int = Field(PIXEL_BUDGET, ge=1, le=MAX_PIXELS)
    """A picture of more is rejected; of a draft its own pixels count, unless encoding=keep. Up to
    16 bytes of memory for each."""


@dataclass(frozen=True)
class EncodedImage:
    """One written picture: the bytes, their file extension, and the pixels that the statistics are
    taken of."""

    data: bytes
    extension: str
    pixels: Image.Image


def convert(data: bytes, spec: ImageSpec) -> EncodedImage:
    """The sample that `data` becomes; raises `Rejection`."""
    if spec.encoding == "keep":
        size_of(data, max_pixels=spec.max_pixels)  # whoever reads it decodes it whole
    may_draft = spec.draft and spec.interpolation != "area"
    picture = read_picture(
        data, smallest_side=spec.image_size if may_draft else None, max_pixels=spec.max_pixels
    )
    small = square(picture, spec)
    if spec.encoding == "keep":
        return EncodedImage(data, picture.extension, small)
    if spec.encoding == "raw":
        return EncodedImage(ppm_header(*small.size) + small.tobytes(), "ppm", small)
    return EncodedImage(encode_jpeg(small, quality=spec.jpeg_quality), "jpg", small)


def square(picture: Picture | Image.Image, spec: ImageSpec) -> Image.Image:
    """The pixels that are stored of it; of one that PIL has opened, too. Raises `Rejection`."""
    picture = picture if isinstance(picture, Picture) else Picture.of(picture)
    how: dict[str, Any] = {
        "size": spec.image_size,
        "crop": spec.crop,
        "interpolation": spec.interpolation,
    }
    if spec.interpolation == "area":  # OpenCV knows whole pixels only: turned before it is cropped
        return resize(picture.upright(picture.pixels), **how)
    # resized first, then turned: the square in the centre is the same, and there is less to turn
    return picture.upright(resize(picture.pixels, **how, extent=picture.extent))


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, str]:
    """The whole upright RGB picture and the extension that its true format (not its file name)
    calls for."""
    picture = read_picture(data, max_pixels=max_pixels)
    return picture.upright(picture.pixels), picture.extension


def decode_square(
    data: bytes, out_HW3: NDArray[np.uint8], *, crop: CropPolicy, interpolation: Filter
) -> None:
    """Puts the picture, made a square of that size, into `out_HW3`: how training sees it. Raises
    `Rejection`."""
    if decode_plain_into(data, out_HW3):
        return
    picture, _ = decode(data)
    out_HW3[:] = np.asarray(
        resize(picture, size=len(out_HW3), crop=crop, interpolation=interpolation)
    )


def resize(
    image: Image.Image,
    *,
    size: int,
    crop: CropPolicy,
    interpolation: Filter,
    extent: tuple[float, float] | None = None,
) -> Image.Image:
    """A square of `size` pixels: the central square of the picture; all of it squashed; or the
    central square of the picture once its longer side has been shrunk to `size` (never enlarged),
    which is FFCV's way. `extent` is its width and height, where they are not whole pixels of
    `image`."""
    width, height = extent or image.size
    if image.size == (size, size) == (width, height):
        return image
    if crop == "longer_side" and max(width, height) > size:
        ratio = size / max(width, height)
        shrunk = (
            max(1, int(ratio * width)),
            max(1, int(ratio * height)),
        )  # cut, not rounded, as FFCV does it
        image = _resampled(image, shrunk, (0.0, 0.0, width, height), interpolation)
        width, height = shrunk
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (0.0, 0.0, width, height) if crop == "squash" else (left, top, left + side, top + side)
    return _resampled(image, (size, size), box, interpolation)


def _resampled(
    image: Image.Image,
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    interpolation: Filter,
) -> Image.Image:
    if interpolation != "area":
        return image.resize(size, _PIL_FILTERS[interpolation], box=box)
    left, top, right, bottom = map(int, box)
    cv2 = _opencv()
    return Image.fromarray(
        cv2.resize(np.asarray(image)[top:bottom, left:right], size, interpolation=cv2.INTER_AREA)
    )


@cache
def _opencv() -> ModuleType:
    """Return OpenCV, imported at its first use: it takes as long as all other modules of a build
    together."""
    import cv2

    cv2.setNumThreads(1)
    return cv2


def ppm_header(width: int, height: int) -> bytes:
    """Of a binary PPM: its length depends on the size alone."""
    return b"P6\n%d %d\n255\n" % (width, height)


def ppm(pixels_HW3: NDArray[np.uint8]) -> bytes:
    height, width, _ = pixels_HW3.shape
    return ppm_header(width, height) + pixels_HW3.tobytes()


def pgm(pixels_HW: NDArray[np.uint8]) -> bytes:
    height, width = pixels_HW.shape
    return b"P5\n%d %d\n255\n" % (width, height) + pixels_HW.tobytes()


def encode_jpeg(image: Image.Image, *, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()
