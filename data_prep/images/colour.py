"""Every pixel mode that Pillow opens, as RGB of 8 bits; a mode without one right conversion is a
rejection.

Transparency is laid over white. Of 16 bits (12 in some TIFFs) the high 8 are kept. CMYK is
multiplied out, without a colour profile. Integers of 32 bits and floats are rejected: nothing in
the file says which value is white.
"""

import numpy as np
from PIL import Image

from data_prep.images.rejection import Rejection

_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_WHITE_IS_ZERO = 258, 262, 0
_PLAIN = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBX")
_LAYERED = ("RGBA", "LA", "PA", "RGBa", "La")


def rawmode_of(image: Image.Image) -> str:
    """How the file packs its pixels, as far as the opened, not yet loaded picture says."""
    tiles = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def to_rgb(image: Image.Image, *, rawmode: str = "") -> Image.Image:
    """`rawmode` is that of the picture before it was loaded."""
    mode, transparent = image.mode, "transparency" in image.info
    if mode == "RGB" and not transparent:
        return image
    if mode.startswith("I;16") or (
        mode == "I" and image.format == "PPM"
    ):  # a PGM's 16 bits come as 32
        return _high_bits(image)
    if mode not in _PLAIN + _LAYERED:
        raise Rejection(
            "unsupported",
            f"pixel mode {mode} ({image.format}): which values are black and white is not known",
        )
    if mode in _LAYERED or (transparent and mode in ("RGB", "L", "1", "P")):
        if transparent and mode in ("RGB", "L"):
            image = image.copy()  # others may hold it
            image.info["transparency"] = _in_8_bits(image.info["transparency"], rawmode)
        layered = image.convert("LA").convert("RGBA") if mode == "La" else image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert(
            "RGB"
        )
    return image.convert("RGB")


def _high_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.uint32)
    tags = getattr(image, "tag_v2", {})
    bits = max(tags.get(_TIFF_BITS, (16,)))
    grey = (values >> (bits - 8)).clip(0, 255)
    if (
        tags.get(_TIFF_PHOTOMETRIC) == _TIFF_WHITE_IS_ZERO
    ):  # Pillow inverts such pictures of 8 bits, not those of 16
        grey = 255 - grey
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def _in_8_bits(colour: int | tuple[int, ...], rawmode: str) -> int | tuple[int, ...]:
    """A PNG names its transparent colour in its own bits; Pillow compares it with pixels that are
    scaled to 8."""
    if isinstance(colour, tuple):
        return tuple(part >> 8 for part in colour) if rawmode.endswith("16B") else colour
    factor = {"L;2": 85, "L;4": 17}.get(rawmode, 1)
    return colour * factor
