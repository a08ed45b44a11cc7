"""Compressed TIFFs, by the libtiff in imagecodecs' wheel: the same decoder on every machine,
whatever PIL was built with.

Pillow reads the directory, and makes the picture of the samples, as it does with those that are not
compressed. In between libtiff unpacks them. It is given the directory that Pillow has read, so that
what it unpacks is what was judged.
"""

import io
from operator import add
from typing import Final

import numpy as np
from PIL import Image, ImageFile
from PIL import TiffImagePlugin as Tiff
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from data_prep.images.rejection import Rejection

_PACKING: Final = (
    *range(256, 260),
    262,
    266,
    273,
    *range(277, 280),
    284,
    292,
    293,
    317,
    *range(322, 326),
    338,
    339,
    347,
    530,
    532,
)
"""The tags that say how the samples are packed."""
_JPEG, _RGB, _CMYK, _YCBCR, _SEPARATE = 7, 2, 5, 6, 2
"""Values of tags: a compression, photometric interpretations, a planar configuration."""


def is_compressed(image: Image.Image) -> bool:
    return isinstance(image, TiffImageFile) and any(tile[0] == "libtiff" for tile in image.tile)


def unpack_tiff(data: bytes, image: Image.Image) -> None:
    """`image`, which PIL has opened, then loads as if `data` were not compressed. Raises what
    libtiff complains of."""
    import imagecodecs

    assert isinstance(image, TiffImageFile)
    tags = image.tag_v2
    for offsets, lengths in (
        (Tiff.STRIPOFFSETS, Tiff.STRIPBYTECOUNTS),
        (Tiff.TILEOFFSETS, Tiff.TILEBYTECOUNTS),
    ):
        for end in map(add, tags.get(offsets, ()), tags.get(lengths, ())):
            if end > len(data):  # libtiff leaves holes in some pictures
                raise Rejection("truncated", f"{len(data):,} bytes of {end:,}")
    directory = _directory(data, tags)
    _, (_, _, width, height), _, (rawmode, *_) = image.tile[0]
    bits, count = max(directory[Tiff.BITSPERSAMPLE]), directory.get(Tiff.SAMPLESPERPIXEL, 1)
    is_separate = count > 1 and directory.get(Tiff.PLANAR_CONFIGURATION) == _SEPARATE
    if (
        tags[Tiff.COMPRESSION] == _JPEG or tags.get(Tiff.PHOTOMETRIC_INTERPRETATION) == _YCBCR
    ):  # libtiff makes RGB of it
        if count not in (1, 3, 4):  # of others it makes wrong ones
            raise Rejection(
                "unsupported", f"a TIFF of JPEGs with {count} channels; convert it to JPEG or PNG"
            )
        samples = imagecodecs.tiff_decode(_behind(directory, data)).reshape(height, width, -1)
        rawmode = "RGB" if samples.shape[2] == 3 else rawmode
    else:
        shape = [height, directory[Tiff.IMAGEWIDTH], count]
        kind = {1: "u", 2: "i", 3: "f"}[max(directory.get(Tiff.SAMPLEFORMAT, (1,)))]
        # zeros: a damaged strip may end early
        samples = np.zeros(np.roll(shape, is_separate), bool if bits == 1 else f"{kind}{bits // 8}")
        imagecodecs.tiff_decode(
            _behind(directory, data), out=samples if count > 1 else samples[..., 0]
        )
    if is_separate:
        samples = np.moveaxis(samples, 0, -1)
    if bits == 1:
        samples = np.packbits(samples, axis=1)
    image.tile = [ImageFile._Tile("raw", image.tile[0][1], len(data), (rawmode, 0, 1))]
    image.fp, image.use_load_libtiff = (
        io.BytesIO(data + samples.tobytes()),
        False,
    )  # metadata are read there, too


def _directory(data: bytes, tags: ImageFileDirectory_v2) -> ImageFileDirectory_v2:
    """What libtiff has to know, in the byte order of `data`."""
    directory = ImageFileDirectory_v2(prefix=data[:2])
    directory[Tiff.BITSPERSAMPLE] = (1,)
    for tag in _PACKING:
        if tag in tags and not (
            tag == Tiff.EXTRASAMPLES and tags[Tiff.COMPRESSION] == _JPEG
        ):  # colours would be darkened by them
            directory.tagtype[tag] = tags.tagtype[tag]
            directory[tag] = tags[tag]
    bits = max(directory[Tiff.BITSPERSAMPLE])
    if bits not in (1, 8, 16, 32):  # imagecodecs unpacks no others: their bytes
        directory[Tiff.BITSPERSAMPLE] = (8,)
        for tag in (Tiff.IMAGEWIDTH, Tiff.TILEWIDTH):
            if tag in tags:
                directory[tag] = -(-tags[tag] * bits // 8)
    if (
        tags.get(Tiff.PHOTOMETRIC_INTERPRETATION) == _CMYK
    ):  # imagecodecs would have libtiff make RGB of it: Pillow does that later
        directory[Tiff.PHOTOMETRIC_INTERPRETATION] = _RGB
    return directory


def _behind(directory: ImageFileDirectory_v2, data: bytes) -> bytes:
    """A classic TIFF of `directory` and then `data`, in which what the directory names has moved by
    its length."""
    length: int = 8 + len(directory.tobytes(8))
    if Tiff.TILEOFFSETS in directory:  # those of strips Pillow moves itself
        directory[Tiff.TILEOFFSETS] = tuple(
            offset + length for offset in directory[Tiff.TILEOFFSETS]
        )
    start = b"II*\0\x08\0\0\0" if data[:2] == b"II" else b"MM\0*\0\0\0\x08"
    return b"".join((start, directory.tobytes(8), data))
