"""Properties of `ChannelSums`: exact sums over any number of pictures, whatever their order and however they fill the strip."""

import numpy as np
import pytest
from PIL import Image

from data_prep.images import channels
from data_prep.images.channels import ChannelSums


@pytest.mark.parametrize(("size", "num_pictures"), [(16, 3), (16, 40), (70, 2)])  # the latter two fill more than one strip
def test_the_sums_are_those_of_all_pixels_in_any_order(monkeypatch: pytest.MonkeyPatch, size: int, num_pictures: int) -> None:
    monkeypatch.setattr(channels, "STRIP_PIXELS", 1 << 12)
    pixels = np.random.default_rng(size).integers(0, 256, (num_pictures, size, size, 3), dtype=np.uint8)
    pixels[0] = 255
    forward, backward = ChannelSums(), ChannelSums()
    for number in range(num_pictures):
        forward.add(Image.fromarray(pixels[number]))
        backward.add(Image.fromarray(pixels[-1 - number]))
    as_integers = pixels.reshape(-1, 3).astype(object)  # Python's own integers: they cannot overflow
    for found in (forward, backward):
        sums, square_sums = (tuple(numbers.sum(axis=0)) for numbers in (as_integers, as_integers**2))
        assert found.totals == (sums, square_sums, num_pictures * size * size)


def test_reading_the_sums_does_not_end_the_counting_and_pictures_of_another_size_may_follow() -> None:
    sums = ChannelSums()
    assert sums.totals == ((0, 0, 0), (0, 0, 0), 0)
    num_pixels = 0
    for size in (8, 16, 8):
        sums.add(Image.new("RGB", (size, size), (1, 0, 255)))
        num_pixels += size * size
        assert sums.totals == ((num_pixels, 0, 255 * num_pixels), (num_pixels, 0, 255 * 255 * num_pixels), num_pixels)
