"""A draft's changes are within the tolerance in `images`, for photographs and the worst content,
and its square is correct. The JPEG decoder agrees with Pillow in every pixel.
"""

import io
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from data_prep.build.config import BuildSettings
from data_prep.images import ImageSpec, convert
from data_prep.images.decoding import read_picture
from data_prep.images.jpeg import plain_frame
from tests.data_prep.samples import encoded, picture

Pixels = NDArray[np.uint8]


def like_a_photograph(seed: int, *, width: int, height: int) -> Pixels:
    """Return noise whose amplitude falls with frequency, slightly faster in color than in
    brightness, as in photographs."""
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    planes = []
    for steepness, spread in ((1.3, 55), (1.6, 14), (1.6, 14)):
        phases = generator.standard_normal((*frequency.shape, 2)) @ (1, 1j)
        plane = np.fft.irfft2(phases / frequency**steepness, (height, width))
        planes.append(plane / plane.std() * spread)
    y, cb, cr = planes
    rgb = np.stack([y + 1.4 * cr, y - 0.34 * cb - 0.71 * cr, y + 1.77 * cb], axis=-1) + 125
    return rgb.clip(0, 255).astype(np.uint8)


def worst_contents(side: int) -> Iterator[Pixels]:
    across, down = np.meshgrid(np.arange(side), np.arange(side))
    yield np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    for period in (2, 3, 4, 5, 6, 7, 8, 12, 16):
        for pattern in (across * 2 // period % 2, (across * 2 // period + down * 2 // period) % 2):
            yield np.repeat((pattern * 255).astype(np.uint8)[..., None], 3, axis=2)
    distance = np.hypot(across - side / 2, down - side / 2)
    zones = 127.5 + 127.5 * np.cos(np.pi * distance**2 / side)
    yield np.repeat(zones.astype(np.uint8)[..., None], 3, axis=2)
    yield np.stack(
        [across * 255 // side, 255 - down * 255 // side, (across > down) * 255], axis=-1
    ).astype(np.uint8)


def differences(data: bytes, *, size: int, crop: str) -> Pixels:
    """Return how a draft changes the written image."""
    specs = [
        ImageSpec.model_validate({"image_size": size, "crop": crop, "draft": draft})
        for draft in (True, False)
    ]
    drafted, full = (np.asarray(convert(data, spec).pixels, np.int64) for spec in specs)
    return np.abs(drafted - full)


SIDES = [(64, 256), (64, 300), (32, 200), (32, 511), (16, 256), (16, 300), (16, 768), (16, 1000)]
"""(size, shorter side): the limit of every scale, and a larger side."""


@pytest.mark.parametrize(("size", "side"), SIDES)
def test_on_photographs_a_draft_is_less_than_a_level_off(size: int, side: int) -> None:
    for seed, crop in enumerate(("center", "squash", "center")):
        photograph = like_a_photograph(seed, width=side + 37 * seed, height=side + 11 * (2 - seed))
        options = {
            "quality": (75, 90, 98)[seed],
            "subsampling": (2, 1, 0)[seed],
            "progressive": seed == 1,
        }
        found = differences(encoded(Image.fromarray(photograph), **options), size=size, crop=crop)
        assert 0 < found.mean() <= 1 and found.max() <= 6, (seed, found.mean(), found.max())


@pytest.mark.parametrize(("size", "side"), SIDES)
def test_on_the_worst_content_a_draft_stays_within_what_is_stated(size: int, side: int) -> None:
    contents = [encoded(Image.fromarray(pixels), quality=90) for pixels in worst_contents(side)]
    means = [differences(data, size=size, crop="center").mean() for data in contents]
    assert len(means) == 21
    assert means[0] <= 3, "white noise"
    assert max(means) <= 10, means


def test_a_draft_is_taken_at_its_margin_and_never_below() -> None:
    def scale(width: int, height: int, size: int | None) -> float:
        found = read_picture(encoded(Image.new("L", (width, height))), smallest_side=size)
        scale = height / found.extent[1]
        assert found.extent == (width / scale, height / scale)
        assert found.pixels.size == (-(-width // int(scale)), -(-height // int(scale)))
        return scale

    assert [scale(900, side, 16) for side in (63, 64, 255, 256, 767, 768)] == [1, 2, 2, 4, 4, 8]
    assert [scale(side, 900, 16) for side in (63, 64, 255, 256, 767, 768)] == [1, 2, 2, 4, 4, 8]
    assert scale(1024, 1024, None) == 1
    assert BuildSettings.model_fields["draft"].default is True


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("width", "height"), [(257, 391), (391, 257), (301, 301)])
def test_the_square_of_a_draft_is_that_of_the_full_picture_however_it_is_turned(
    width: int, height: int, orientation: int
) -> None:
    """Odd sides: the last pixel of a draft is half outside, which must not move the square."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    ramps = np.stack(
        np.broadcast_arrays(*np.ogrid[0 : 255 : height * 1j, 0 : 255 : width * 1j], 128.0), axis=-1
    )
    data = encoded(
        Image.fromarray(ramps.round().astype(np.uint8)), quality=98, subsampling=0, exif=exif
    )
    assert read_picture(data, smallest_side=64).extent == (width / 2, height / 2)
    assert (
        differences(data, size=64, crop="center").max() <= 2
    )  # a shift by half a pixel of the original is twice that
    assert differences(data, size=64, crop="squash").max() <= 2


# ---- the decoder


@pytest.mark.parametrize("scale", [1, 2, 4])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options",
    [{"progressive": True}, {"subsampling": 0, "quality": 30}, {"restart_marker_rows": 1}],
)
def test_jpegs_are_what_pillow_makes_of_them(
    mode: str, options: dict[str, int], scale: int
) -> None:
    """Pillow uses libjpeg-turbo, too. It has no drafts for CMYK."""
    data = encoded(
        picture(seed=1, width=141, height=99).convert(mode),
        comment=b"\xff\xda",
        icc_profile=b"x" * 70_000,
        **options,
    )
    assert len(data) > 70_000
    assert (plain_frame(data) is None) == (mode == "CMYK")
    found = read_picture(data, smallest_side={1: None, 2: 16, 4: 6}[scale])
    assert found.extent == (141 / scale, 99 / scale)
    with Image.open(io.BytesIO(data)) as pillow:
        if mode != "CMYK":
            pillow.draft(None, (141 // scale, 99 // scale))
        expected = pillow.convert("RGB")
    if mode == "CMYK" and scale > 1:
        expected = expected.reduce(scale)
        assert (
            np.abs(
                np.asarray(found.upright(found.pixels)).astype(int) - np.asarray(expected)
            ).mean()
            < 1
        )
    else:
        assert found.upright(found.pixels).tobytes() == expected.tobytes()


def test_what_could_be_turned_or_is_none_is_looked_at_by_pillow_first() -> None:
    turned, plain = Image.Exif(), encoded(picture(seed=1))
    turned[0x0112] = 6
    unusual = {
        "turned": encoded(picture(seed=1), exif=turned),
        "cmyk": encoded(picture(seed=1).convert("CMYK")),
        "png": encoded(picture(seed=1), "PNG"),
        "header": plain[:30],
        "arithmetic": plain.replace(b"\xff\xc0\x00\x11", b"\xff\xc9\x00\x11"),
        "nothing": b"",
    }
    assert {name: plain_frame(data) for name, data in unusual.items()} == dict.fromkeys(unusual)
    assert plain_frame(plain) == (40, 30, 3)
