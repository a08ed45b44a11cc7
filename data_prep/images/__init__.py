"""Pure functions from bytes to bytes: decode, convert to RGB, resize, turn upright, encode.

An unusable image raises Rejection. Downscaling is antialiased with PIL's bicubic or bilinear
filter, or OpenCV's INTER_AREA, which FFCV used for the images of the public checkpoints.

Drafts (JPEGs decoded at reduced size, `ImageSpec.draft`) save a quarter of the time for a JPEG of
400 pixels. In tests, drafts of photographs differ from full decoding by at most 1 level (of 255)
in the mean and 6 at any pixel. White noise differs by at most 3 in the mean, and stripes or
checkerboards of full contrast, a few pixels wide, by 10. Set draft=false for such textures.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from data_prep.errors import UserError
from data_prep.images.decoding import MAX_PIXELS, PIXEL_BUDGET, Picture, read_picture, size_of
from data_prep.images.jpeg import decode_plain_into, encode_jpeg
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

_PIL_FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "box": Image.Resampling.BOX,
}


class ImageSpec(Settings):
    """The stored images of a dataset."""

    image_size: int = Field(64, ge=8, le=1024)
    """Width and height of the stored images in pixels (encoding=keep: of the images as readers
    decode them)."""
    crop: CropPolicy = "center"
    """Crop before resizing. center: the central square; both ends of the longer side are lost.
    squash: the complete image, resized to a square. longer_side: shrink until the longer side is
    `image_size` (never enlarge), then crop as center, as FFCV did for the public checkpoints. full:
    squash, and store the original shape in the JPEG (needs encoding=jpeg). Random crops then use
    the complete image, as in timm; without random crops, the model gets the central square."""
    interpolation: Filter = "bicubic"
    """Filter for resizing. area is OpenCV's INTER_AREA, as in FFCV; it is slower, because JPEGs are
    always decoded at full size."""
    encoding: Encoding = "raw"
    """File format. raw: binary PPM, the fastest to read. jpeg: encode as JPEG. keep: check the
    input and store its bytes. Transparent pixels become white; with keep, they become white when
    the image is read."""
    jpeg_quality: int = Field(95, ge=1, le=100)
    """JPEG quality on libjpeg's scale."""
    draft: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size before resizing, which is faster."""
    max_pixels: int = Field(PIXEL_BUDGET, ge=1, le=MAX_PIXELS)
    """Largest number of pixels of an input; larger images are rejected. If a JPEG is decoded at
    reduced size, its decoded pixels are limited, unless encoding=keep. Each pixel takes up to 16
    bytes of memory."""

    @model_validator(mode="after")
    def _shape_is_stored(self) -> Self:
        if self.crop == "full" and self.encoding != "jpeg":
            problem = f"full needs encoding=jpeg, not {self.encoding}"
            raise UserError("crop", problem, "set encoding=jpeg, or crop=center", code="conflict")
        return self


@dataclass(frozen=True)
class EncodedImage:
    """An image to store. Its `pixels` are for channel statistics."""

    data: bytes
    extension: str
    pixels: Image.Image


def convert(data: bytes, spec: ImageSpec) -> EncodedImage:
    """Return the image as it is stored in a dataset; raise Rejection if it cannot be used."""
    if spec.encoding == "keep":
        size_of(data, max_pixels=spec.max_pixels)  # because readers decode at full size
    may_draft = spec.draft and spec.interpolation != "area"
    picture = read_picture(
        data, smallest_side=spec.image_size if may_draft else None, max_pixels=spec.max_pixels
    )
    small = square(picture, spec)
    if spec.encoding == "keep":
        return EncodedImage(data, picture.extension, small)
    if spec.encoding == "raw":
        return EncodedImage(ppm_header(*small.size) + small.tobytes(), "ppm", small)
    aspect = picture.aspect if spec.crop == "full" else 1.0
    return EncodedImage(encode_jpeg(small, quality=spec.jpeg_quality, aspect=aspect), "jpg", small)


def square(picture: Picture | Image.Image, spec: ImageSpec) -> Image.Image:
    """Return the square image that `build` stores. Raise Rejection if an image that PIL has opened
    cannot be converted to RGB."""
    picture = picture if isinstance(picture, Picture) else Picture.of(picture)
    sizes = spec.image_size, spec.crop, spec.interpolation
    if spec.interpolation == "area":  # turn before the crop: OpenCV needs integer pixels
        return resize(picture.upright(picture.pixels), *sizes)
    # resize before turning: the central square is the same, with fewer pixels to turn
    return picture.upright(resize(picture.pixels, *sizes, extent=picture.extent))


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, str]:
    """Return the complete upright RGB image, and the file extension of its true format."""
    picture = read_picture(data, max_pixels=max_pixels)
    return picture.upright(picture.pixels), picture.extension


def decode_square(
    data: bytes, out_HW3: NDArray[np.uint8], *, crop: CropPolicy, interpolation: Filter
) -> None:
    """Decode an image into a square array, as training does. Raise Rejection if it cannot be
    used."""
    if decode_plain_into(data, out_HW3):
        return
    picture, _ = decode(data)
    out_HW3[:] = np.asarray(resize(picture, len(out_HW3), crop, interpolation))


def resize(
    image: Image.Image,
    size: int,
    crop: CropPolicy,
    interpolation: Filter,
    *,
    extent: tuple[float, float] | None = None,
) -> Image.Image:
    """Return a square of `size` pixels; see `ImageSpec.crop`. `extent`: exact width and height of
    the content of `image`, if they are not integers (JPEGs decoded at reduced size)."""
    width, height = extent or image.size
    if image.size == (size, size) == (width, height):
        return image
    if crop == "longer_side" and max(width, height) > size:
        ratio = size / max(width, height)
        shrunk = max(1, int(ratio * width)), max(1, int(ratio * height))  # truncate, as FFCV
        image = _resampled(image, shrunk, (0.0, 0.0, width, height), interpolation)
        width, height = shrunk
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    is_complete = crop in ("squash", "full")
    box = (0.0, 0.0, width, height) if is_complete else (left, top, left + side, top + side)
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
    cv2, pixels = _opencv(), np.asarray(image)[top:bottom, left:right]
    return Image.fromarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))


@cache
def _opencv() -> ModuleType:
    """Import OpenCV only when it is needed: its import takes as long as all other imports of a
    build."""
    import cv2

    cv2.setNumThreads(1)
    return cv2


def ppm_header(width: int, height: int) -> bytes:
    return b"P6\n%d %d\n255\n" % (width, height)


def ppm(pixels_HW3: NDArray[np.uint8]) -> bytes:
    height, width, _ = pixels_HW3.shape
    return ppm_header(width, height) + pixels_HW3.tobytes()


def pgm(pixels_HW: NDArray[np.uint8]) -> bytes:
    height, width = pixels_HW.shape
    return b"P5\n%d %d\n255\n" % (width, height) + pixels_HW.tobytes()
