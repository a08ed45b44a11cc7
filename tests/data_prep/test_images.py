"""`images` turns every usable image into upright RGB of the requested size, as an independent
computation does. All other bytes give a Rejection with the right reason.
"""

import io
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile

from data_prep.cli import main
from data_prep.images import ImageSpec, Rejection, convert, decode, decode_square, resize
from data_prep.images.channels import ChannelSums
from tests.data_prep.samples import encoded, picture, png_chunk, webp, write_files

Pixels = NDArray[np.uint8]


def spec(**changes: object) -> ImageSpec:
    return ImageSpec.model_validate({"image_size": 16, "draft": False} | changes)


def pixels_of(data: bytes) -> Pixels:
    return np.asarray(decode(data)[0])


# ---- orientation


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda pixels: pixels),
        (2, np.fliplr),
        (3, lambda stored: np.rot90(stored, 2)),
        (4, np.flipud),
        (5, lambda stored: stored.transpose(1, 0, 2)),
        (6, lambda stored: np.rot90(stored, -1)),
        (7, lambda stored: np.rot90(stored, 2).transpose(1, 0, 2)),
        (8, np.rot90),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_the_exif_orientation_is_applied(
    kind: str, orientation: int, upright: Callable[[Pixels], Pixels]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = encoded(picture(seed=3), kind, exif=exif)
    original = (
        picture(seed=3) if kind != "JPEG" else Image.open(io.BytesIO(encoded(picture(seed=3))))
    )
    as_stored = np.asarray(original)
    np.testing.assert_array_equal(pixels_of(stored), upright(as_stored))


def test_metadata_is_dropped_from_what_is_written() -> None:
    exif = Image.Exif()
    exif[0x010E] = "somebody's holiday"
    stored = encoded(picture(seed=3), exif=exif)
    assert b"holiday" in stored
    assert b"holiday" not in convert(stored, spec(encoding="jpeg")).data


# ---- color


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 255), (0, 0, 0)),
        ("RGBA", (255, 0, 0, 51), (255, 204, 204)),  # one fifth of red over white
        ("LA", (0, 51), (204, 204, 204)),
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_other_modes_become_rgb_with_transparency_over_white(
    mode: str, color: int | tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    stored = encoded(Image.new(mode, (4, 3), color), "PNG")
    np.testing.assert_array_equal(pixels_of(stored), np.full((3, 4, 3), expected, np.uint8))


# ---- size


def bicubic_weights(
    size_in: int, size_out: int, start: float, length: float
) -> NDArray[np.float64]:
    """Return weights of shape (size_out, size_in): Keys' cubic (a = -1/2), stretched by the ratio
    for shrinking."""
    ratio = length / size_out
    stretch = max(ratio, 1.0)
    centers = start + (np.arange(size_out) + 0.5) * ratio
    x = np.abs((np.arange(size_in) + 0.5 - centers[:, None]) / stretch)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    normalized: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return normalized


@pytest.mark.parametrize(
    ("width", "height", "size", "box"),
    [
        (60, 40, 16, (10.0, 0.0, 40.0, 40.0)),  # shrinks by 2.5
        (41, 64, 24, (0.0, 11.5, 41.0, 41.0)),  # a box at half a pixel
        (20, 12, 32, (4.0, 0.0, 12.0, 12.0)),  # grows
    ],
)
def test_the_central_square_is_resampled_bicubically_with_antialiasing(
    width: int, height: int, size: int, box: tuple[float, float, float, float]
) -> None:
    image = picture(seed=5, width=width, height=height)
    left, top, box_width, box_height = box
    across = bicubic_weights(width, size, left, box_width)
    down = bicubic_weights(height, size, top, box_height)
    once = np.einsum("ow,hwc->hoc", across, np.asarray(image, np.float64)).round().clip(0, 255)
    expected = np.einsum("oh,hwc->owc", down, once).round().clip(0, 255)
    found = np.asarray(resize(image, size=size, crop="center", interpolation="bicubic"), np.float64)
    assert found.shape == (size, size, 3)
    assert np.abs(found - expected).max() <= 1


def test_a_picture_of_the_asked_for_size_is_not_touched_and_such_a_central_square_is_cut_out_exactly() -> (
    None
):
    for width, height in ((16, 16), (48, 16)):
        image, left = picture(seed=7, width=width, height=height), (width - 16) // 2
        written = convert(encoded(image, "PNG"), spec())
        assert (
            written.data == b"P6\n16 16\n255\n" + np.asarray(image)[:, left : left + 16].tobytes()
        )
        assert written.extension == "ppm"


def test_squash_keeps_the_whole_picture() -> None:
    image = Image.new("RGB", (60, 20))
    image.paste((255, 0, 0), (0, 0, 20, 20))
    image.paste((0, 0, 255), (40, 0, 60, 20))
    squashed, cut = (
        np.asarray(resize(image, size=18, crop=crop, interpolation="bicubic"))
        for crop in ("squash", "center")
    )
    np.testing.assert_array_equal(squashed[:, 1], np.broadcast_to((255, 0, 0), (18, 3)))
    np.testing.assert_array_equal(squashed[:, 16], np.broadcast_to((0, 0, 255), (18, 3)))
    assert cut[:, 2:-2].max() == 0


def area(pixels: Pixels, width: int, height: int) -> Pixels:
    return np.asarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA))


def test_longer_side_and_area_are_what_ffcv_did_for_the_public_checkpoints() -> None:
    """Computed independently: shrink the longer side to 64 (truncated), never enlarge, crop the
    center (truncated), resize to 64 px."""
    wide, high, small = (
        np.asarray(picture(seed=3, width=w, height=h)) for w, h in ((160, 100), (67, 101), (50, 31))
    )
    expected = (
        area(area(wide, 64, 40)[:, 12:52], 64, 64),
        area(area(high, 42, 64)[11:53], 64, 64),
        area(small[:, 9:40], 64, 64),
        np.asarray(picture(seed=4, width=32, height=32)).repeat(2, axis=0).repeat(2, axis=1),
    )
    cifar = np.asarray(picture(seed=4, width=32, height=32))
    for pixels, square in zip((wide, high, small, cifar), expected, strict=True):
        how = spec(image_size=64, crop="longer_side", interpolation="area", draft=True)
        written = convert(encoded(Image.fromarray(pixels), "PNG"), how)
        np.testing.assert_array_equal(pixels_of(written.data), square)
        read = np.empty((64, 64, 3), np.uint8)
        decode_square(
            encoded(Image.fromarray(pixels), "PNG"), read, crop="longer_side", interpolation="area"
        )
        np.testing.assert_array_equal(read, square)


def test_area_takes_no_draft_and_crops_the_picture_as_it_stands() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = encoded(picture(seed=3, width=515, height=400), exif=exif)
    upright = pixels_of(stored)
    made = convert(stored, spec(interpolation="area", draft=True))
    np.testing.assert_array_equal(pixels_of(made.data), area(upright[57:457], 16, 16))


def test_longer_side_holds_for_the_other_filters_and_for_a_hair() -> None:
    image = picture(seed=3, width=160, height=100)
    shrunk = image.resize((64, 40), Image.Resampling.BILINEAR)
    expected = shrunk.resize((64, 64), Image.Resampling.BILINEAR, box=(12, 0, 52, 40))
    found = resize(image, size=64, crop="longer_side", interpolation="bilinear")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert resize(
        picture(seed=3, width=900, height=2), size=64, crop="longer_side", interpolation="area"
    ).size == (64, 64)


# ---- encodings


def test_jpeg_encoding_is_close_to_the_resized_picture_and_better_at_higher_quality() -> None:
    stored = encoded(picture(seed=8, width=64, height=64), "PNG")
    raw = pixels_of(convert(stored, spec(image_size=32)).data).astype(int)
    errors = {}
    for quality in (20, 95):
        written = convert(stored, spec(image_size=32, encoding="jpeg", jpeg_quality=quality))
        assert (written.extension, written.data[:2]) == ("jpg", b"\xff\xd8")
        errors[quality] = np.abs(pixels_of(written.data) - raw).mean()
    assert errors[95] < 2 < errors[20]


@pytest.mark.parametrize(
    ("kind", "extension"),
    [
        ("JPEG", "jpg"),
        ("PNG", "png"),
        ("GIF", "gif"),
        ("BMP", "bmp"),
        ("TIFF", "tif"),
        ("PPM", "ppm"),
        ("MPO", "jpg"),
    ],
)
def test_keep_returns_the_input_with_the_extension_of_its_true_format(
    kind: str, extension: str
) -> None:
    stored = encoded(picture(seed=9), kind)
    written = convert(stored, spec(encoding="keep"))
    assert (written.data, written.extension) == (stored, extension)


# ---- rejections


def png_header(width: int, height: int) -> bytes:
    """Return a well-formed PNG header of any size without pixels."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", size)
        + png_chunk(b"IDAT", b"")
        + png_chunk(b"IEND", b"")
    )


SMALL_JPEG = encoded(Image.new("RGB", (16, 16)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (
            b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
            "not_an_image: HEIC, AVIF sequences and videos are not supported",
        ),
        (
            b"<html>404 Not Found</html>",
            "not_an_image: a format that begins with b'<html>404 Not Fo' is not supported",
        ),
        (bytes(1000), "not_an_image"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "not_an_image",
        ),  # Pillow would start a program
        (encoded(picture(seed=1), "TGA"), "not_an_image"),  # a format without a signature
        (encoded(picture(seed=1))[:-200], "truncated"),
        (png_header(20_000, 20_000), "too_many_pixels"),
        (png_header(13_378, 13_378), "too_many_pixels"),  # 178,970,884 pixels
        (b"P6 65500 65500 255\n", "too_many_pixels"),
        (
            SMALL_JPEG.replace(b"\x08\0\x10\0\x10", b"\x08\xff\xdc\xff\xdc", 1),
            "too_many_pixels: 65500 x 65500",
        ),
        (png_header(100, 100), "truncated"),
        (encoded(picture(seed=1), "PNG").replace(b"IDAT", b"IDAT\0\0\0\0", 1), "damaged"),
    ],
)
def test_what_cannot_be_used_is_rejected_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(Rejection) as caught:
        decode(data)
    assert caught.value.detail and str(caught.value).startswith(reason)


@pytest.mark.parametrize(("setting", "word"), [("crop", "central"), ("encoding", "white")])
def test_explain_says_what_is_lost(
    setting: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wide image that is red at both ends and transparent in the center becomes white."""
    assert main(["explain", "build", setting]) == 0
    assert word in capsys.readouterr().out
    image = Image.new("RGBA", (40, 10), "red")
    image.paste((0, 0, 0, 0), (15, 0, 25, 10))
    small = convert(encoded(image, "PNG"), ImageSpec(image_size=10)).pixels
    assert small.getcolors() == [(100, (255, 255, 255))]


def test_the_pixel_cap_is_judged_by_the_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: ImageFile.ImageFile) -> None:
        raise AssertionError("decoded")

    hundred, more = (encoded(Image.new("RGB", (width, 10)), "PNG") for width in (10, 11))
    assert decode(hundred, max_pixels=100)[0].size == (10, 10)
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(
        Rejection, match=r"too_many_pixels: 11 x 10 exceeds max_pixels=100; shrink it"
    ):
        decode(more, max_pixels=100)
    monkeypatch.setattr("data_prep.images.decoding.MAX_PIXELS", 100)
    with pytest.raises(Rejection, match="too_many_pixels: 11 x 10 exceeds 100 pixels"):
        decode(more)


@pytest.mark.parametrize(
    ("encoding", "draft", "is_taken"),
    [("raw", True, True), ("jpeg", True, True), ("raw", False, False), ("keep", True, False)],
)
def test_the_budget_counts_the_pixels_of_a_draft_unless_the_picture_is_read_whole_again(
    encoding: str, draft: bool, is_taken: bool
) -> None:
    data = encoded(picture(seed=1, width=200, height=160))  # half size for 16 pixels: 100 x 80
    budget = spec(encoding=encoding, draft=draft, max_pixels=100 * 80)
    if is_taken:
        assert convert(data, budget).pixels.size == (16, 16)
        with pytest.raises(Rejection, match="100 x 80 exceeds"):
            convert(data, spec(encoding=encoding, draft=draft, max_pixels=100 * 80 - 1))
    else:
        with pytest.raises(Rejection, match="200 x 160 exceeds"):
            convert(data, budget)


WITHOUT_MEMORY = """
import resource, sys
from data_prep.images import decode
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    decode(data)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    for extra in range(0, 50, 5):
        resource.setrlimit(resource.RLIMIT_AS, (used + (extra << 20), -1))
        try:
            decode(data)
            print("a picture")
        except MemoryError:
            print("MemoryError")
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
"""


@pytest.mark.processes
def test_running_out_of_memory_is_no_fault_of_the_picture(tmp_path: Path) -> None:
    """Each decoder first has less memory than an image needs, then more."""
    image = Image.new("RGB", (1400, 1400), (9, 200, 3))
    files = {
        "jpeg": encoded(image, progressive=True),
        "png": encoded(image, "PNG"),
        "webp": webp(image),
    }
    write_files(tmp_path, files)
    words = [sys.executable, "-c", WITHOUT_MEMORY, *(str(tmp_path / name) for name in files)]
    freed_at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    outcomes = subprocess.run(
        words, capture_output=True, text=True, check=True, env=freed_at_once
    ).stdout.splitlines()
    assert len(outcomes) == 30
    for first in (0, 10, 20):
        assert set(outcomes[first : first + 10]) == {"MemoryError", "a picture"}, outcomes


# ---- statistics


def test_the_sums_are_those_of_all_pixels_of_any_size_and_reading_them_does_not_end_the_counting() -> (
    None
):
    numbers, found = np.random.default_rng(0), ChannelSums()
    assert found.totals == ((0, 0, 0), (0, 0, 0), 0)
    rows = np.zeros((0, 3), object)  # Python integers cannot overflow
    for size in (16, 16, 300, 300, 300, 16):  # more than one strip
        pixels = numbers.integers(0, 256, (size, size, 3), dtype=np.uint8)
        found.add(Image.fromarray(pixels))
        rows = np.concatenate([rows, pixels.reshape(-1, 3).astype(object)])
        sums, square_sums = (tuple(each.sum(axis=0)) for each in (rows, rows**2))
        assert found.totals == (sums, square_sums, len(rows))
