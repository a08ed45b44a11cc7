"""Pure bytes -> bytes: decode, orient, to RGB, resize, encode; a picture that cannot be used is a typed rejection.

EXIF policy: the orientation tag is applied, then all metadata is dropped.
Transparency is laid over white. Downscaling is antialiased (bicubic with support scaled to the ratio).
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from data_prep.manifest import Encoding
from data_prep.settings import Settings

MAX_PIXELS = 178_956_970
"""Pixel cap, read off the header before anything is decoded (Pillow's own limit for a decompression bomb)."""

CropPolicy = Literal["center", "squash"]
Reason = Literal["empty", "not_an_image", "truncated", "too_many_pixels"]

_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm"}
"""The formats that are read. Of the others that Pillow knows some take any bytes for a picture (TGA) or start programs (EPS)."""


class Rejection(Exception):  # noqa: N818 (a rejection is an expected outcome, not an error)
    """An input that cannot become a sample."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class ImageSpec(Settings):
    """What `build` makes of every picture."""

    image_size: int
    crop: CropPolicy
    encoding: Encoding
    jpeg_quality: int


@dataclass(frozen=True)
class EncodedImage:
    """One written picture: the bytes, their file extension, and its exact channel sums."""

    data: bytes
    extension: str
    channel_sums: tuple[int, int, int]
    channel_square_sums: tuple[int, int, int]
    num_pixels: int


def convert(data: bytes, spec: ImageSpec) -> EncodedImage:
    """The sample that `data` becomes; raises `Rejection`."""
    original, extension = decode(data)
    small = resize(original, size=spec.image_size, crop=spec.crop)
    if spec.encoding == "keep":
        encoded = data
    elif spec.encoding == "raw":
        encoded, extension = encode_ppm(small), "ppm"
    else:
        encoded, extension = encode_jpeg(small, quality=spec.jpeg_quality), "jpg"
    sums, square_sums = _channel_sums(np.asarray(small))
    return EncodedImage(
        data=encoded,
        extension=extension,
        channel_sums=sums,
        channel_square_sums=square_sums,
        num_pixels=spec.image_size**2,
    )


def decode(data: bytes) -> tuple[Image.Image, str]:
    """The upright RGB picture and the extension that its true format (not its file name) calls for."""
    if not data:
        raise Rejection("empty", "zero bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow warns of is a rejection below, or metadata that is dropped
        with _rejecting("not_an_image"):
            image = Image.open(io.BytesIO(data), formats=tuple(_EXTENSIONS))
        if image.width * image.height > MAX_PIXELS:
            raise Rejection("too_many_pixels", f"{image.width} x {image.height}")
        extension = _EXTENSIONS.get(image.format or "", "jpg")  # MPO is a JPEG of several pictures
        with _rejecting("truncated"):
            return to_rgb(ImageOps.exif_transpose(image)), extension


@contextmanager
def _rejecting(reason: Reason) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise  # says something of this machine, nothing of the picture
    except Image.DecompressionBombError as error:
        raise Rejection("too_many_pixels", str(error)) from None
    except Exception as error:  # noqa: BLE001
        # damage makes Pillow raise whatever its parsing trips over (struct.error, TypeError); one file must not stop a build
        raise Rejection(reason, _clean(error)) from None


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith(("I;16", "I")):
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
    return image.convert("RGB")


def resize(image: Image.Image, *, size: int, crop: CropPolicy) -> Image.Image:
    """A square of `size` pixels: the central square of the picture, or all of it squashed."""
    if image.size == (size, size):
        return image
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (
        (left, top, left + side, top + side)
        if crop == "center"
        else (0.0, 0.0, float(image.width), float(image.height))
    )
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def encode_ppm(image: Image.Image) -> bytes:
    """Binary PPM: a header whose length depends on the size alone, then the pixels."""
    header = b"P6\n%d %d\n255\n" % image.size
    return header + bytes(image.tobytes())


def encode_jpeg(image: Image.Image, *, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def _channel_sums(pixels: NDArray[np.uint8]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Integer sums, so that the statistics do not depend on the order in which pictures are added up."""
    flat = pixels.reshape(-1, 3).astype(np.int64)
    r, g, b = flat.sum(axis=0).tolist()
    rr, gg, bb = (flat * flat).sum(axis=0).tolist()
    return (r, g, b), (rr, gg, bb)


def _clean(error: BaseException) -> str:
    """The message without memory addresses, so that rejected.jsonl is the same in every run."""
    return str(error).split("<")[0].strip() or type(error).__name__
