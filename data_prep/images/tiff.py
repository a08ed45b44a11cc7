"""Decode TIFF images with the libtiff in imagecodecs: the same decoder on every machine.

Pillow reads the header, which defines the samples. libtiff unpacks the samples.
"""

from operator import add

import numpy as np
from PIL import Image
from PIL import TiffImagePlugin as Tiff
from PIL.TiffImagePlugin import TiffImageFile

from data_prep.images.color import MODES, unknown_levels
from data_prep.images.rejection import Rejection

_JPEG, _WHITE_IS_ZERO, _CMYK, _YCBCR, _SEPARATE = 7, 0, 5, 6, 2
"""Values of TIFF tags: a compression, photometric interpretations, and a planar configuration."""
_GRAY = ("1", "L", "I;16", "I;16B")


def decode_tiff(data: bytes, image: TiffImageFile) -> Image.Image:
    """Decode the first page without turning it; Pillow has read its header. Raise Rejection, or
    libtiff's own error."""
    import imagecodecs

    tags, mode = image.tag_v2, "L" if image.mode in _GRAY else image.mode
    for offsets, lengths in (
        (Tiff.STRIPOFFSETS, Tiff.STRIPBYTECOUNTS),
        (Tiff.TILEOFFSETS, Tiff.TILEBYTECOUNTS),
    ):
        for end in map(add, tags.get(offsets, ()), tags.get(lengths, ())):
            if end > len(data):  # libtiff would leave holes in some images
                raise Rejection("truncated", f"only {len(data):,} of {end:,} bytes")
    size, photometric = (tags[Tiff.IMAGEWIDTH], tags[Tiff.IMAGELENGTH]), tags[262]
    count, bits = tags.get(Tiff.SAMPLESPERPIXEL, 1), max(tags.get(Tiff.BITSPERSAMPLE, (1,)))
    if tags.get(Tiff.COMPRESSION) == _JPEG or photometric in (_CMYK, _YCBCR):
        if count not in (1, 3, 4):
            problem = f"a TIFF of JPEGs with {count} channels; convert it to JPEG or PNG"
            raise Rejection("unsupported", problem)
        # libtiff makes gray or RGB of these; it fails if this buffer does not have libtiff's size
        rgba = np.zeros((size[1], size[0], 4), np.uint8)
        rgb = np.atleast_3d(imagecodecs.tiff_decode(data, out=rgba))
        if rgb.shape[1::-1] != size:
            raise Rejection("damaged", f"{rgb.shape[1::-1]} pixels, not {size} as in the header")
        orientation = tags.get(274, 1)  # libtiff applies their flips, but no transposition
        rgb = rgb[:, ::-1] if orientation in (2, 3, 6, 7) else rgb
        rgb = rgb[::-1] if orientation in (3, 4, 7, 8) else rgb
        mode = {1: "L", 3: "RGB"}.get(rgb.shape[2], "RGBa")
        return Image.frombytes(mode, size, rgb.tobytes())
    if mode not in MODES:
        raise unknown_levels(image)
    # this array limits the memory, even if another page of the file is larger
    kind = bool if bits == 1 else np.uint8 if bits <= 8 else np.uint16
    is_separate = count > 1 and tags.get(Tiff.PLANAR_CONFIGURATION) == _SEPARATE
    shape = [size[1], size[0], count] if count > 1 else [size[1], size[0]]
    samples = np.zeros(np.roll(shape, is_separate), kind)
    imagecodecs.tiff_decode(data, out=samples)
    samples = np.moveaxis(samples, 0, -1) if is_separate else samples
    if bits > 8:
        samples = samples >> (bits - 8)
    levels = samples.astype(np.uint8) * (1 if mode == "P" or bits >= 8 else 255 // (2**bits - 1))
    if count > 1:
        levels = levels[..., : Image.getmodebands(mode)]
    if mode == "L" and photometric == _WHITE_IS_ZERO:
        levels = 255 - levels
    pixels = Image.frombytes(mode, size, np.ascontiguousarray(levels, np.uint8).tobytes())
    if mode == "P" and image.palette is not None:
        pixels.putpalette(image.palette)
    return pixels
