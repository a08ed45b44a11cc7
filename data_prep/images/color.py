"""Turn every pixel mode that Pillow opens into RGB of 8 bits, or reject the image.

Transparent pixels are laid over white. Deeper samples are reduced to their high 8 bits. CMYK is
converted without a color profile. Integers of 32 bits and floats are rejected, because their files
do not define white.
"""

import numpy as np
from PIL import Image

from data_prep.images.rejection import Rejection

_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_WHITE_IS_ZERO = 258, 262, 0
_LAYERED = ("RGBA", "LA", "PA", "RGBa", "La")
MODES = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBX", *_LAYERED)
"""Pillow's pixel modes that can be converted to RGB."""


def rawmode_of(image: Image.Image) -> str:
    """Return Pillow's raw mode of an image that is opened but not loaded: how the file packs its
    pixels."""
    tiles = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def to_rgb(image: Image.Image, *, rawmode: str = "") -> Image.Image:
    """Return the image as RGB. `rawmode`: result of `rawmode_of` before the loading."""
    mode, transparent = image.mode, image.info.get("transparency")
    if mode == "RGB" and transparent is None:
        return image
    if mode.startswith("I;16") or (mode == "I" and image.format == "PPM"):  # PGM of 16 bits
        values = np.asarray(image).astype(np.uint32)
        tags = getattr(image, "tag_v2", {})
        gray = (values >> max(tags.get(_TIFF_BITS, (16,))) - 8).clip(0, 255)
        if tags.get(_TIFF_PHOTOMETRIC) == _TIFF_WHITE_IS_ZERO:  # Pillow inverts 8 bits only
            gray = 255 - gray
        if isinstance(transparent, int):
            gray[values == transparent] = 255
        return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    if mode not in MODES:
        raise unknown_levels(image)
    if mode in _LAYERED or (transparent is not None and mode in ("RGB", "L", "1", "P")):
        if transparent is not None and mode in ("RGB", "L"):
            image = image.copy()  # the caller may need the original
            image.info["transparency"] = _in_8_bits(transparent, rawmode)
        layered = image.convert("LA").convert("RGBA") if mode == "La" else image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def unknown_levels(image: Image.Image) -> Rejection:
    problem = f"pixel mode {image.mode} ({image.format}): its levels of black and white are unknown"
    return Rejection("unsupported", problem)


def _in_8_bits(color: int | tuple[int, ...], rawmode: str) -> int | tuple[int, ...]:
    """Return a transparent color with 8 bits per channel, as in Pillow's pixels. PNGs store the
    color in the bit depth of the image."""
    if isinstance(color, tuple):
        return tuple(part >> 8 for part in color) if rawmode.endswith("16B") else color
    return color * {"L;2": 85, "L;4": 17}.get(rawmode, 1)
