"""Pure bytes -> bytes: decode, to RGB, resize, stand upright, encode; a picture that cannot be used is a typed rejection.

Downscaling is antialiased (bicubic with support scaled to the ratio). What formats, modes and metadata come to is said in
`decoding.py` and `colour.py`.

Drafts (`ImageSpec.draft`) save a quarter of the time of a JPEG of 400 pixels. What they cost, held by tests, in levels of 255
against the picture of a full decode: photographs (made of noise with their spectrum) a mean of at most 1, and nowhere more than 6;
white noise a mean of 3; stripes and checkerboards of full contrast, a few pixels wide, a mean of 10 at the very margin, where the
full decode shows a moire of its own. Who trains on such textures sets draft=false.
"""

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_prep.images.decoding import MAX_PIXELS, read_picture
from data_prep.images.jpeg import decode_plain_into
from data_prep.images.rejection import Reason, Rejection
from data_prep.manifest import Encoding
from data_prep.settings import Settings

__all__ = ["MAX_PIXELS", "CropPolicy", "EncodedImage", "ImageSpec", "Reason", "Rejection", "convert", "decode"]

CropPolicy = Literal["center", "squash"]


class ImageSpec(Settings):
    """What `build` makes of every picture."""

    image_size: int
    crop: CropPolicy
    encoding: Encoding
    jpeg_quality: int
    draft: bool


@dataclass(frozen=True)
class EncodedImage:
    """One written picture: the bytes, their file extension, and the pixels that the statistics are taken of."""

    data: bytes
    extension: str
    pixels: Image.Image


def convert(data: bytes, spec: ImageSpec) -> EncodedImage:
    """The sample that `data` becomes; raises `Rejection`."""
    picture = read_picture(data, smallest_side=spec.image_size if spec.draft else None)
    # resized first, then turned: the square in the centre is the same, and there is less to turn
    small = picture.upright(resize(picture.pixels, size=spec.image_size, crop=spec.crop, extent=picture.extent))
    if spec.encoding == "keep":
        return EncodedImage(data, picture.extension, small)
    if spec.encoding == "raw":
        return EncodedImage(encode_ppm(small), "ppm", small)
    return EncodedImage(encode_jpeg(small, quality=spec.jpeg_quality), "jpg", small)


def decode(data: bytes) -> tuple[Image.Image, str]:
    """The whole upright RGB picture and the extension that its true format (not its file name) calls for."""
    picture = read_picture(data)
    return picture.upright(picture.pixels), picture.extension


def decode_square(data: bytes, out_HW3: NDArray[np.uint8], *, crop: CropPolicy) -> None:
    """Puts the picture, made a square of that size, into `out_HW3`: how training sees it. Raises `Rejection`."""
    if decode_plain_into(data, out_HW3):
        return
    picture, _ = decode(data)
    out_HW3[:] = np.asarray(resize(picture, size=len(out_HW3), crop=crop))


def resize(
    image: Image.Image, *, size: int, crop: CropPolicy, extent: tuple[float, float] | None = None
) -> Image.Image:
    """A square of `size` pixels: the central square of the picture, or all of it squashed. `extent` is its width and height,
    where they are not whole pixels of `image`."""
    width, height = extent or image.size
    if image.size == (size, size) == (width, height):
        return image
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side) if crop == "center" else (0.0, 0.0, float(width), float(height))
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def encode_ppm(image: Image.Image) -> bytes:
    """Binary PPM: a header whose length depends on the size alone, then the pixels."""
    return ppm_header(*image.size) + bytes(image.tobytes())


def ppm_header(width: int, height: int) -> bytes:
    return b"P6\n%d %d\n255\n" % (width, height)


def encode_jpeg(image: Image.Image, *, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()
