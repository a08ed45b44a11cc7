"""Pixels as the bytes of a lossless picture file: binary PPM, or PGM for grey ones."""

import numpy as np
from numpy.typing import NDArray


def ppm(pixels_HWC: NDArray[np.uint8]) -> bytes:
    height, width, channels = pixels_HWC.shape
    assert channels == 3, pixels_HWC.shape
    return b"P6\n%d %d\n255\n" % (width, height) + pixels_HWC.tobytes()


def pgm(pixels_HW: NDArray[np.uint8]) -> bytes:
    height, width = pixels_HW.shape
    return b"P5\n%d %d\n255\n" % (width, height) + pixels_HW.tobytes()
