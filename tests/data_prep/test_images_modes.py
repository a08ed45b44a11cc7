"""Every pixel mode and special case of a format, compared with values computed by hand: converted
correctly, or rejected with a clear and constant reason.
"""

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import cv2
import imagecodecs
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, features

from data_prep.images import Rejection, decode, decoding, size_of
from data_prep.images.color import to_rgb
from data_prep.images.decoding import PILLOW_DECODERS, check_tiles
from tests.data_prep.samples import encoded, packed_tiff, picture, png_chunk, webp

Pixels = NDArray[np.uint8]
CMYK_INK = (200, 100, 50, 30)
CMYK_AS_RGB = tuple(round((255 - ink) * (255 - CMYK_INK[3]) / 255) for ink in CMYK_INK[:3])


def pixels_of(data: bytes) -> Pixels:
    return np.asarray(decode(data)[0]).astype(int)


def rejection_of(data: bytes) -> tuple[str, str]:
    with pytest.raises(Rejection) as caught:
        decode(data)
    with pytest.raises(Rejection) as again:
        decode(data)
    assert (again.value.reason, again.value.detail) == (caught.value.reason, caught.value.detail)
    assert caught.value.detail.strip()
    assert "object at" not in caught.value.detail
    return caught.value.reason, caught.value.detail


def png(
    width: int, height: int, rows: bytes, *, bits: int, color_type: int, transparent: bytes = b""
) -> bytes:
    """Return a PNG without Pillow, which writes neither 16-bit color nor 2-bit gray."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0))
    extra = png_chunk(b"tRNS", transparent) if transparent else b""
    lines = b"".join(
        b"\0" + rows[at : at + len(rows) // height]
        for at in range(0, len(rows), len(rows) // height)
    )
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + extra
        + png_chunk(b"IDAT", zlib.compress(lines))
        + png_chunk(b"IEND", b"")
    )


def tiff(
    pixels: bytes,
    *,
    bits: int,
    photometric: int,
    sample_format: int = 1,
    size: tuple[int, int] = (2, 1),
    compression: int = 1,
) -> bytes:
    """Return a little-endian TIFF of one gray strip."""
    entries = [
        (256, 4, size[0]),
        (257, 4, size[1]),
        (258, 3, bits),
        (259, 3, compression),
        (262, 3, photometric),
    ]
    entries += [
        (273, 4, 8),
        (277, 3, 1),
        (278, 4, size[1]),
        (279, 4, len(pixels)),
        (339, 3, sample_format),
    ]
    body = pixels + b"\0" * (len(pixels) % 2)
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(body))
        + body
        + struct.pack("<H", len(entries))
        + table
        + bytes(4)
    )


# ---- formats that Pillow decodes


def run_length_bmp() -> bytes:
    """Return two palette pixels in run-length encoding."""
    header = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 8, 1, 4, 0, 0, 2, 0)
    return (
        b"BM"
        + struct.pack("<IHHI", 66, 0, 0, 62)
        + header
        + bytes((0, 0, 200, 0, 7, 8, 9, 0))
        + b"\2\1\0\1"
    )


def of_a_rare_subsampling(mode: str = "CMYK", **options: object) -> bytes:
    """Return a JPEG whose subsampling TurboJPEG does not support."""
    return encoded(picture(seed=1).convert(mode), subsampling=2, **options)


FILES = {
    "jpeg": encoded(picture(seed=1)),
    "progressive": encoded(picture(seed=1), progressive=True),
    "rare": of_a_rare_subsampling(),
    "rare_progressive": of_a_rare_subsampling(progressive=True),
    "webp": webp(picture(seed=1)),
    "avif": imagecodecs.avif_encode(np.asarray(picture(seed=1)), level=100),
    "jxl": imagecodecs.jpegxl_encode(np.asarray(picture(seed=1)), lossless=True),
    "png": encoded(picture(seed=1), "PNG"),
    "gif": encoded(picture(seed=1), "GIF"),
    "bmp": encoded(picture(seed=1), "BMP"),
    "bmp_runs": run_length_bmp(),
    "tiff": encoded(picture(seed=1), "TIFF"),
    "tiff_packed": packed_tiff(picture(seed=1), zlib.compress, 8),
    "ppm": encoded(picture(seed=1), "PPM"),
    "ppm_levels": b"P5 2 1 100\n\x12\x64",
    "ppm_plain": b"P2 2 1 255\n18 255\n",
}


def test_a_file_starts_the_listed_decoders_of_pillow_only_and_no_jpeg_starts_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: dict[str, set[str]] = {}
    get = Image._getdecoder
    for kind, data in FILES.items():
        names = started.setdefault(kind, set())
        monkeypatch.setattr(
            Image,
            "_getdecoder",
            lambda mode, name, *rest, names=names: names.add(name) or get(mode, name, *rest),
        )
        decode(data)
    assert set().union(*started.values()) == PILLOW_DECODERS
    assert [
        kind
        for kind in ("jpeg", "progressive", "rare", "rare_progressive")
        if started[kind] - {"raw"}
    ] == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"codec_name": "jpeg"}, "unsupported"),
        ({"codec_name": "libtiff"}, "unsupported"),
        ({"extents": (0, 0, 41, 30)}, "damaged"),
        ({"extents": (0, -1, 40, 30)}, "damaged"),
        ({"extents": (1 << 30, 0, (1 << 31) + 40, 30)}, "damaged"),
    ],
)
def test_an_image_with_another_decoder_or_pixels_outside_of_it_is_rejected(
    changed: dict[str, object], reason: str
) -> None:
    """Pillow 12.2 checks the extents; Pillow-SIMD 12.1 does not."""
    image = Image.open(io.BytesIO(FILES["png"]))
    check_tiles(image)
    image.tile = [image.tile[0]._replace(**changed)]
    with pytest.raises(Rejection, match=reason):
        check_tiles(image)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_a_jpeg_of_a_rare_subsampling_has_the_pixels_of_pillow_and_its_size_is_bounded(
    options: dict[str, object],
) -> None:
    data = of_a_rare_subsampling(**options)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(pixels_of(data), np.asarray(image.convert("RGB")))
    with pytest.raises(Rejection, match="too_many_pixels"):
        decode(data, max_pixels=1199)


# ---- JPEG


def test_adobe_cmyk_is_not_taken_for_its_negative() -> None:
    data = encoded(Image.new("CMYK", (16, 16), CMYK_INK), quality=100, subsampling=0)
    assert b"Adobe" in data
    assert np.abs(pixels_of(data) - CMYK_AS_RGB).max() <= 2


def test_ycck_is_turned_back_into_ink() -> None:
    """Adobe's YCCK stores Y, Cb, Cr of the inverted inks, and the inverted black. Pillow cannot
    write YCCK: the test relabels a CMYK JPEG."""
    r, g, b = CMYK_INK[
        :3
    ]  # YCCK's "RGB" is the inverse of what an Adobe file stores, which is the inverse of the ink
    y = 0.299 * r + 0.587 * g + 0.114 * b
    stored = [
        round(y),
        round(128 + (b - y) / 1.772),
        round(128 + (r - y) / 1.402),
        255 - CMYK_INK[3],
    ]
    plain = encoded(
        Image.new("CMYK", (16, 16), tuple(255 - value for value in stored)),
        quality=100,
        subsampling=0,
    )
    at = plain.index(b"Adobe") + 11
    assert plain[at] == 0
    found = pixels_of(plain[:at] + b"\2" + plain[at + 1 :])
    assert np.abs(found - CMYK_AS_RGB).max() <= 3


def test_of_several_pictures_the_first_is_taken() -> None:
    first, second = (Image.new("RGB", (16, 16), color) for color in ((250, 10, 10), (10, 10, 250)))
    for kind in ("GIF", "PNG", "MPO"):
        data = encoded(first, kind, save_all=True, append_images=[second])
        with Image.open(io.BytesIO(data)) as opened:
            assert opened.n_frames == 2, kind
        assert np.abs(pixels_of(data) - (250, 10, 10)).max() <= 2, kind


def test_a_damaged_index_of_further_pictures_does_not_cost_the_first() -> None:
    data = encoded(picture(seed=1), "MPO", save_all=True, append_images=[picture(seed=2)])
    at = data.index(b"MPF\0")
    damaged = data[: at + 12] + b"\xff\xff" + data[at + 14 :]
    np.testing.assert_array_equal(pixels_of(damaged), pixels_of(data))


# ---- PNG

GRAY, COLOR = 0, 2


@pytest.mark.parametrize(
    ("bits", "color_type", "rows", "transparent", "expected"),
    [
        (16, GRAY, b"\x12\x34\xff\xff", b"", [(0x12,) * 3, (255,) * 3]),
        (16, GRAY, b"\x12\x34\x12\x35", b"\x12\x34", [(255,) * 3, (0x12,) * 3]),
        (
            16,
            COLOR,
            b"\x12\x34\x56\x78\x9a\xbc" + b"\0\xff" * 3,
            b"",
            [(0x12, 0x56, 0x9A), (0, 0, 0)],
        ),
        (
            16,
            COLOR,
            b"\x12\x34\x56\x78\x9a\xbc" + b"\0\xff" * 3,
            b"\x12\x34\x56\x78\x9a\xbc",
            [(255,) * 3, (0, 0, 0)],
        ),
        (8, COLOR, b"\x0a\x14\x1e\xc8\0\0", b"\0\x0a\0\x14\0\x1e", [(255,) * 3, (200, 0, 0)]),
        (8, GRAY, b"\x07\x08", b"\0\x07", [(255,) * 3, (8,) * 3]),
        (4, GRAY, b"\x3c", b"", [(51,) * 3, (204,) * 3]),
        (4, GRAY, b"\x3c", b"\0\x03", [(255,) * 3, (204,) * 3]),
        (2, GRAY, b"\x60", b"\0\x01", [(255,) * 3, (170,) * 3]),
        (1, GRAY, b"\x40", b"", [(0,) * 3, (255,) * 3]),
        (1, GRAY, b"\x40", b"\0\x00", [(255,) * 3, (255,) * 3]),
    ],
)
def test_pngs_of_every_depth_with_and_without_a_transparent_color(
    bits: int,
    color_type: int,
    rows: bytes,
    transparent: bytes,
    expected: list[tuple[int, int, int]],
) -> None:
    data = png(2, 1, rows, bits=bits, color_type=color_type, transparent=transparent)
    np.testing.assert_array_equal(pixels_of(data), [expected])


@pytest.mark.parametrize(
    ("kind", "transparency"), [("PNG", 0), ("PNG", b"\0\xff"), ("PNG", b"\x33"), ("GIF", 0)]
)
def test_a_palette_may_be_transparent_by_index_or_by_degrees(
    kind: str, transparency: int | bytes
) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 200])
    image.putpixel((1, 0), 1)
    first = (255, 204, 204) if transparency == b"\x33" else (255, 255, 255)
    np.testing.assert_array_equal(
        pixels_of(encoded(image, kind, transparency=transparency)), [[first, (0, 0, 200)]]
    )


@pytest.mark.parametrize(
    ("name", "body", "behind"),
    [
        (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(3 << 20)), False),
        (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(3 << 20)), True),
        (b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(bytes(3 << 20)), True),
        (b"tEXt", b"Comment\0" + b"x" * (65 << 20), False),
        (b"iCCP", b"icc\0\0" + zlib.compress(bytes(3 << 20)), False),
    ],
)
def test_a_long_text_or_profile_does_not_cost_the_picture_nor_how_it_stands(
    name: bytes, body: bytes, behind: bool
) -> None:
    xmp = b'XML:com.adobe.xmp\0\0\0\0\0<rdf:Description tiff:Orientation="6"/>'
    whole = png(2, 1, b"\x07\x08", bits=8, color_type=GRAY)
    at = len(whole) - 12 if behind else 33
    extra = png_chunk(name, body) + png_chunk(b"iTXt", xmp)
    np.testing.assert_array_equal(
        pixels_of(whole[:at] + extra + whole[at:]), [[(7,) * 3], [(8,) * 3]]
    )
    assert size_of(whole[:at] + extra + whole[at:]) == (2, 1)


def test_a_text_that_unpacks_to_much_takes_no_memory_for_it() -> None:
    chunk = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(50 << 20)))
    whole = png(2, 1, b"\x07\x08", bits=8, color_type=GRAY)
    tracemalloc.start()
    assert decode(whole[:33] + chunk + whole[33:])[0].size == (2, 1)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


# ---- TIFF, PGM


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (tiff(b"\x10\xf0", bits=8, photometric=1), (16, 240)),
        (tiff(b"\x10\xf0", bits=8, photometric=0), (239, 15)),  # white is zero
        (tiff(b"\x34\x12\xff\xff", bits=16, photometric=1), (0x12, 255)),
        (tiff(b"\x34\x12\xff\xff", bits=16, photometric=0), (255 - 0x12, 0)),
        (tiff(b"\x12\x3f\xed", bits=12, photometric=1), (0x12, 0xFE)),
        (encoded(Image.frombytes("I;16B", (2, 1), b"\x12\x34\xff\xff"), "TIFF"), (0x12, 255)),
        (b"P5 2 1 65535\n\x12\x34\xff\xff", (0x12, 255)),
        (b"P5 2 1 255\n\x12\xff", (0x12, 255)),
        (b"P2 2 1 65535\n4660 65535\n", (0x12, 255)),
    ],
)
def test_gray_of_more_than_8_bits_keeps_the_high_ones(
    data: bytes, expected: tuple[int, int]
) -> None:
    np.testing.assert_array_equal(pixels_of(data), [[(value,) * 3 for value in expected]])


@pytest.mark.parametrize(
    ("mode", "data"),
    [
        ("F", tiff(struct.pack("<2f", 0.0, 1.0), bits=32, photometric=1, sample_format=3)),
        ("I", tiff(struct.pack("<2i", 0, 1 << 20), bits=32, photometric=1, sample_format=2)),
        ("I", tiff(struct.pack("<2h", -5, 5), bits=16, photometric=1, sample_format=2)),
        ("F", b"Pf\n2 1\n-1.0\n" + struct.pack("<2f", 0.0, 1.0)),
    ],
)
def test_numbers_of_unknown_range_are_rejected_as_such(mode: str, data: bytes) -> None:
    reason, detail = rejection_of(data)
    assert reason == "unsupported"
    assert detail.startswith(f"pixel mode {mode} ")


# ---- WebP

ONE_PIXEL = bytes.fromhex("524946461a000000574542505650384c0d0000002f00000010071011118888fe0700")


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
        for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def extended(image: Image.Image, *chunks: tuple[bytes, bytes], flags: int) -> bytes:
    """Return a canvas with one frame, followed by chunks."""
    width, height = (struct.pack("<I", side - 1)[:3] for side in image.size)
    frame = webp(image)[20:]
    return riff((b"VP8X", struct.pack("<I", flags) + width + height), (b"VP8L", frame), *chunks)


def test_webps_are_read_lossless_and_lossy_over_white() -> None:
    assert decode(ONE_PIXEL)[0].size == (1, 1)
    assert decode(ONE_PIXEL)[1] == "webp"
    image = picture(seed=1, width=41, height=31)
    np.testing.assert_array_equal(pixels_of(webp(image)), np.asarray(image))
    np.testing.assert_array_equal(
        pixels_of(webp(Image.new("RGBA", (4, 4), (255, 0, 0, 51)))), [[[255, 204, 204]] * 4] * 4
    )
    _, lossy = cv2.imencode(".webp", np.asarray(image)[..., ::-1], [cv2.IMWRITE_WEBP_QUALITY, 90])
    assert bytes(lossy)[12:16] == b"VP8 "
    found = pixels_of(bytes(lossy))
    assert 0 < np.abs(found - np.asarray(image)).mean() < 4
    if features.check("webp"):  # another build of the same library
        np.testing.assert_array_equal(found, np.asarray(Image.open(io.BytesIO(bytes(lossy)))))


def test_an_animated_webp_is_its_first_frame() -> None:
    animation = cv2.Animation()
    animation.frames = [
        np.full((16, 12, 4), color, np.uint8) for color in ((10, 20, 250, 255), (250, 10, 10, 255))
    ]
    animation.durations = np.array([50, 50])
    done, data = cv2.imencodeanimation(".webp", animation, [cv2.IMWRITE_WEBP_QUALITY, 101])
    if not done:
        pytest.skip("OpenCV 4.12 does not encode animations")
    assert b"ANMF" in bytes(data)
    np.testing.assert_array_equal(
        pixels_of(bytes(data)), np.broadcast_to((250, 20, 10), (16, 12, 3))
    )


def test_a_webp_stands_as_its_metadata_says() -> None:
    image, exif = picture(seed=1, width=21, height=13), Image.Exif()
    exif[0x0112] = 6
    xmp = b'<rdf:Description tiff:Orientation="3"/>'
    for chunk, flag, turns in (
        ((b"EXIF", exif.tobytes()[6:]), 8, -1),
        ((b"XMP ", xmp), 4, 2),
        ((b"EXIF", b"?"), 8, 0),
    ):
        data = extended(image, chunk, flags=flag)
        np.testing.assert_array_equal(pixels_of(data), np.rot90(np.asarray(image), turns))


def test_a_wrong_webp_is_damaged_and_a_large_one_is_never_decoded() -> None:
    image = picture(seed=1, width=40, height=30)
    whole, canvas = webp(image), extended(image, flags=0)
    wrong = [
        whole[:20] + b"\0" + whole[21:],  # no signature
        whole[:30] + bytes(range(256)) + whole[286:],
        canvas[:24] + b"\x50" + canvas[25:],  # not the size of its frame
        riff((b"VP8L", whole[20:-200])),
    ]
    assert [rejection_of(data)[0] for data in wrong] == ["damaged"] * 4
    assert rejection_of(riff((b"EXIF", b"12")))[0] == "not_an_image"
    frame = b"\x30\1\0\x9d\x01\x2a" + struct.pack("<HH", 40 + 0x4000, 30)
    for data in (wrong[1], canvas[:60] + bytes(60) + canvas[120:], riff((b"VP8 ", frame))):
        with pytest.raises(Rejection, match="too_many_pixels: 40 x 30"):
            decode(data, max_pixels=1199)


# ---- AVIF, JPEG XL


def avif(pixels: Pixels, *properties: tuple[bytes, int]) -> bytes:
    """Return an AVIF image with additional one-byte properties (irot, imir)."""
    data = imagecodecs.avif_encode(pixels, level=100, pixelformat="444")
    for name, value in properties:
        end = data.index(b"ipma") - 4
        at = data.index(b"ipco") - 4
        number = 1 + sum(data.count(each) for each in (b"ispe", b"pixi", b"av1C", b"colr"))
        number += sum(data.count(each) for each in (b"irot", b"imir"))
        count = end + 4 + 4 + 4 + 4 + 2
        last = count + 1 + data[count]
        data = (
            data[:end]
            + struct.pack(">I4sB", 9, name, value)
            + data[end:count]
            + bytes([data[count] + 1])
            + data[count + 1 : last]
            + bytes([0x80 | number])
            + data[last:]
        )
        for box, more in ((b"meta", 10), (b"iprp", 10), (b"ipco", 9), (b"ipma", 1)):
            place = data.index(box) - 4
            longer = struct.pack(">I", int.from_bytes(data[place : place + 4]) + more)
            data = data[:place] + longer + data[place + 4 :]
        assert data.index(b"ipco") - 4 == at
        place = data.index(b"iloc") + 18  # offset of the only extent
        start = struct.pack(">I", int.from_bytes(data[place : place + 4]) + 10)
        data = data[:place] + start + data[place + 4 :]
    return bytes(data)


def jxl(pixels: Pixels, **options: bool) -> bytes:
    return bytes(imagecodecs.jpegxl_encode(pixels, lossless=True, **options))


@pytest.mark.parametrize(
    ("extension", "encode", "most"),
    [("avif", avif, 3), ("jxl", jxl, 0), ("jxl", lambda each: jxl(each, usecontainer=True), 0)],
)
def test_avif_and_jpeg_xl_have_the_pixels_of_their_image_over_white(
    extension: str, encode: Callable[[Pixels], bytes], most: int
) -> None:
    image = picture(seed=1, width=41, height=31)
    layered = image.convert("RGBA")
    layered.putalpha(picture(seed=2, width=41, height=31).convert("L"))
    for each in (image, image.convert("L"), layered, layered.convert("LA")):
        data = encode(np.asarray(each))
        assert decode(data)[1] == extension
        assert size_of(data) == each.size
        assert np.abs(pixels_of(data) - np.asarray(to_rgb(each))).max() <= most, each.mode


@pytest.mark.parametrize(
    "shape", [(300, 200), (8, 16), (64, 64), (600, 1), (1, 600), (256, 8), (90, 160), (999, 1332)]
)
def test_the_header_of_jpeg_xl_has_its_size(shape: tuple[int, int]) -> None:
    assert size_of(jxl(np.zeros(shape, np.uint8))) == shape[::-1]


@pytest.mark.parametrize("quarters", range(4))
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_an_avif_is_turned_and_then_mirrored_as_its_properties_say(
    quarters: int, axis: int | None
) -> None:
    pixels = np.asarray(picture(seed=1, width=41, height=31))
    mirror = () if axis is None else ((b"imir", axis),)
    expected = np.rot90(pixels, quarters)
    expected = expected if axis is None else np.flip(expected, axis)
    found = pixels_of(avif(pixels, (b"irot", quarters), *mirror))
    assert np.abs(found - expected).max() <= 3


def test_deep_samples_keep_their_high_bits_or_are_rejected() -> None:
    pixels = np.asarray(picture(seed=1))
    for bits in (10, 12):
        deep = imagecodecs.avif_encode(
            pixels.astype(np.uint16) << (bits - 8), level=100, bitspersample=bits
        )
        assert np.abs(pixels_of(bytes(deep)) - pixels).mean() < 2
    for levels in (pixels.astype(np.uint16) * 257, pixels.astype(np.float32) / 255):
        assert rejection_of(jxl(levels))[0] == "unsupported"


def test_a_sequence_of_avif_is_not_read_and_of_jpeg_xl_the_first_image() -> None:
    frames = np.stack([np.full((16, 12, 3), level, np.uint8) for level in (20, 250)])
    assert rejection_of(bytes(imagecodecs.avif_encode(frames)))[0] == "not_an_image"
    assert pixels_of(jxl(frames)).max() == 20


@pytest.mark.parametrize("kind", ["webp", "avif", "jxl"])
def test_a_damaged_webp_avif_or_jpeg_xl_is_rejected(kind: str) -> None:
    whole = FILES[kind]
    for length in range(12, len(whole), 3):
        assert rejection_of(whole[:length])[0] in ("truncated", "not_an_image", "damaged")
    assert rejection_of(whole[:-1])[0] == "truncated"
    with pytest.raises(Rejection, match="too_many_pixels: 40 x 30"):
        decode(whole[:-1] if kind != "webp" else whole, max_pixels=1199)
    if kind != "webp":
        assert rejection_of(whole[:-60] + b"\xff" * 60)[0] == "damaged"


# ---- compressed TIFF


def photographs() -> dict[str, Image.Image]:
    """Return an image in each TIFF mode that is supported."""
    image = picture(seed=1, width=41, height=31)
    gray = np.asarray(image.convert("L")).astype(np.uint16) * 257
    layered = image.convert("RGBA")
    layered.putalpha(picture(seed=2, width=41, height=31).convert("L"))
    modes = {mode: image.convert(mode) for mode in ("1", "L", "P", "RGB", "CMYK", "YCbCr")}
    return {**modes, "RGBA": layered, "LA": layered.convert("LA"), "I;16": Image.fromarray(gray)}


PACKERS = {"none": (1, bytes), "LZW": (5, imagecodecs.lzw_encode), "deflate": (8, zlib.compress)}


@pytest.mark.parametrize("codec", PACKERS)
@pytest.mark.parametrize("mode", [mode for mode in photographs() if mode != "YCbCr"])
def test_a_tiff_has_the_pixels_of_its_image(mode: str, codec: str) -> None:
    image, (number, pack) = photographs()[mode], PACKERS[codec]
    expected = np.asarray(to_rgb(image))
    for orientation, turns in ((1, 0), (3, 2), (6, -1), (8, 1)):
        options = {"tiffinfo": {0x0112: orientation}}
        data = packed_tiff(image, lambda strip: bytes(pack(strip)), number, **options)
        np.testing.assert_array_equal(pixels_of(data), np.rot90(expected, turns))
        for length in range(12, len(data), 211):
            assert rejection_of(data[:length])[0] in ("not_an_image", "truncated")


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize(
    ("bits", "row", "levels"),
    [
        (1, b"\xa0", (255, 0, 255)),
        (2, b"\x6c", (85, 170, 255)),
        (4, b"\x3c\xf0", (51, 204, 255)),
        (12, b"\x12\x3f\xed\x45\x60", (0x12, 0xFE, 0x45)),
    ],
)
def test_a_tiff_of_other_bits_has_their_levels(
    bits: int, row: bytes, levels: tuple[int, ...], compression: int
) -> None:
    rows = zlib.compress(row) if compression == 8 else row
    data = tiff(rows, bits=bits, photometric=1, size=(3, 1), compression=compression)
    np.testing.assert_array_equal(pixels_of(data), [[(level,) * 3 for level in levels]])


CODECS = (
    "tiff_lzw",
    "tiff_adobe_deflate",
    "tiff_deflate",
    "packbits",
    "lzma",
    "zstd",
    "webp",
    "jpeg",
    "group3",
    "group4",
    "tiff_ccitt",
)
SOME_MODES = {
    "webp": ("RGB", "RGBA"),
    "jpeg": ("L", "RGB", "YCbCr", "CMYK", "RGBA"),
    "group3": "1",
    "group4": "1",
    "tiff_ccitt": "1",
}


@pytest.mark.skipif(
    not features.check("libtiff"), reason="PIL is built without libtiff, which writes these"
)
@pytest.mark.parametrize("codec", CODECS)
def test_a_compressed_tiff_has_the_pixels_that_pillow_finds(codec: str) -> None:
    for mode, image in photographs().items():
        if mode not in SOME_MODES.get(codec, mode):
            continue
        for predictor in (
            (1, 2)
            if mode in ("L", "RGB", "I;16") and codec in ("tiff_lzw", "tiff_adobe_deflate")
            else (1,)
        ):
            try:
                data = encoded(
                    image,
                    "TIFF",
                    compression=codec,
                    tiffinfo={317: predictor} if predictor > 1 else {},
                )
            except OSError:
                pytest.skip(f"the libtiff of this PIL does not write {codec}")
            expected = np.asarray(to_rgb(Image.open(io.BytesIO(data)))).astype(int)
            assert np.abs(pixels_of(data) - expected).max() <= (codec == "jpeg"), mode


def test_a_tiff_of_jpegs_is_read_whole_or_rejected() -> None:
    gray = picture(seed=1, width=48, height=48).convert("L")
    data = packed_tiff(
        gray,
        lambda strip: encoded(Image.frombytes("L", (48, len(strip) // 48), strip), quality=95),
        7,
    )
    assert np.abs(pixels_of(data)[..., 0] - np.asarray(gray).astype(int)).mean() < 2
    for cut in (1, 100, 300):
        assert rejection_of(data[:-cut])[0] == "truncated"
    inks = picture(seed=1, width=48, height=48).convert("CMYK")
    data = packed_tiff(
        inks,
        lambda strip: imagecodecs.jpeg8_encode(
            np.frombuffer(strip, np.uint8).reshape(-1, 48, 4), level=95
        ),
        7,
    )
    assert np.abs(pixels_of(data) - np.asarray(inks.convert("RGB")).astype(int)).mean() < 2
    longer = len(data).to_bytes(4, "little")  # a second, larger width, which libtiff decodes
    first, count = int.from_bytes(data[4:8], "little"), data[int.from_bytes(data[4:8], "little")]
    table = data[first + 2 : first + 2 + 12 * count]
    assert table[:2] == b"\0\1"
    wide = table[:8] + (1 << 15).to_bytes(4, "little")
    twice = (count + 1).to_bytes(2, "little") + wide + table + bytes(4)
    data = data[:4] + longer + data[8:] + twice
    if Image.open(io.BytesIO(data)).width == 48:  # Pillow 13 reads the larger width, too
        code, problem = rejection_of(data)
        assert code == "damaged" and "out.shape" in problem  # before anything is decoded
    layered = packed_tiff(gray.convert("LA"), lambda strip: strip, 7)
    assert rejection_of(layered) == (
        "unsupported",
        "a TIFF of JPEGs with 2 channels; convert it to JPEG or PNG",
    )


def test_a_compressed_tiff_is_judged_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(side: int) -> bytes:
        return tiff(
            zlib.compress(bytes(99)), bits=8, photometric=1, size=(side, side), compression=8
        )

    assert (
        rejection_of(huge(20))[0] == "damaged"
    )  # the file is complete, but unpacks to 99 of 400 bytes
    assert (
        rejection_of(
            tiff(
                zlib.compress(bytes(4)),
                bits=32,
                photometric=1,
                compression=8,
                sample_format=3,
                size=(1, 1),
            )
        )[0]
        == "unsupported"
    )
    monkeypatch.setattr(decoding, "decode_tiff", None)
    assert rejection_of(huge(20_000))[0] == "too_many_pixels"


# ---- other bytes and incomplete files


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_a_file_cut_anywhere_is_rejected_or_whole(kind: str) -> None:
    whole = encoded(picture(seed=1), kind)
    expected, num_rejected = pixels_of(whole), 0
    for length in range(0, len(whole), 10):
        try:
            found = pixels_of(whole[:length])
        except Rejection as rejection:
            assert (
                rejection.reason == "empty"
                if not length
                else rejection.reason in ("not_an_image", "truncated")
            )
            num_rejected += 1
        else:
            np.testing.assert_array_equal(
                found, expected
            )  # only what comes after the pixels was missing
    assert num_rejected >= 0.97 * len(range(0, len(whole), 10))
