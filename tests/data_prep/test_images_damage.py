"""JPEGs with damage are rejected if libjpeg-turbo warns inside a scan, with its words. Harmless
damage is accepted. Compared with libjpeg-turbo in strict mode and with markers set by hand.
"""

from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from data_prep.images import Rejection, decode, decode_square
from data_prep.images.decoding import decoder_version
from tests.data_prep.samples import encoded, picture
from tests.soak import soaked

Change = Callable[[bytes, np.random.Generator], bytes]


END = b"\xff\xd9"
PROGRESSIVE = (1, 6, 7)


def original(number: int) -> bytes:
    """Return one of eight kinds of JPEGs."""
    noise = np.random.default_rng(number).normal(0, 12, (90, 120, 3))
    soft = np.asarray(picture(seed=number, width=120, height=90))
    image, turned = Image.fromarray((soft + noise).clip(0, 255).astype(np.uint8)), Image.Exif()
    turned[0x0112] = 6
    mode, options = (
        ("RGB", {}),
        ("RGB", {"progressive": True}),
        ("RGB", {"restart_marker_blocks": 4}),
        ("L", {}),
        ("CMYK", {}),
        ("RGB", {"exif": turned, "subsampling": 0}),
        ("L", {"progressive": True}),
        ("CMYK", {"progressive": True}),
    )[number % 8]
    return encoded(image.convert(mode), quality=(75, 90, 60)[number % 3], **options)


def in_scan(data: bytes, generator: np.random.Generator, *, room: int = 2) -> int:
    return int(generator.integers(scan_of(data), len(data) - room))


def scan_of(data: bytes) -> int:
    """Return the start of the first scan's entropy-coded data."""
    at = data.index(b"\xff\xda")
    return at + 2 + int.from_bytes(data[at + 2 : at + 4])


def cut(data: bytes, generator: np.random.Generator) -> bytes:
    return data[: in_scan(data, generator)]


def scrambled(data: bytes, generator: np.random.Generator) -> bytes:
    at = in_scan(data, generator, room=22)
    return data[:at] + generator.bytes(20) + data[at + 20 :]


def flipped(data: bytes, generator: np.random.Generator) -> bytes:
    at = in_scan(data, generator)
    return data[:at] + bytes([data[at] ^ 1 << int(generator.integers(8))]) + data[at + 1 :]


def warning_of(data: bytes) -> str | None:
    try:
        simplejpeg.decode_jpeg(data, "CMYK" if data[data.index(b"\xff\xda") + 4] == 4 else "RGB")
    except ValueError as error:
        return str(error)
    return None


@soaked
@pytest.mark.parametrize(("damage", "least"), [(cut, 160), (scrambled, 96), (flipped, 24)])
def test_damage_that_the_decoder_notices_is_rejected_in_its_words(
    damage: Change, least: int, salt: int
) -> None:
    """The reason has libjpeg-turbo's words. No other decoder reads the file silently."""
    generator, num_rejected = np.random.default_rng(1 + salt), 0
    for number in range(160):
        whole = original(number)
        data = damage(whole, generator)
        warning = warning_of(data)
        if warning is None:
            decode(data)
            continue
        with pytest.raises(Rejection) as caught:
            decode(data)
        if damage is not cut:
            assert (caught.value.reason, caught.value.detail) == ("damaged", warning)
        elif caught.value.reason != "truncated":
            assert caught.value.reason == "no_end_marker"
            np.testing.assert_array_equal(
                np.asarray(decode(data + END)[0]), np.asarray(decode(whole)[0])
            )
        with pytest.raises(Rejection, match=caught.value.reason):
            decode_square(
                data,
                np.empty((90, 120, 3), np.uint8)[:, :90],
                crop="center",
                interpolation="bicubic",
            )
        num_rejected += 1
    assert num_rejected >= least


def before_end(extra: bytes) -> Change:
    return lambda data, _: data[:-2] + extra + data[-2:]


def header_junk(data: bytes, generator: np.random.Generator) -> bytes:
    """Return the JPEG with bytes inserted between the first segments and before the scan."""
    at, junk = data.index(b"\xff\xdb"), bytes(generator.integers(0, 255, 9, dtype=np.uint8))
    scan = data.index(b"\xff\xda")
    return data[:at] + junk + data[at:scan] + junk[:3] + data[scan:]


def other_jfif(data: bytes, _: np.random.Generator) -> bytes:
    return data[:2] + b"\xff\xe0\0\x10JFIF\0\2\7\0\0\1\0\1\0\0" + data[2:]


def other_adobe(data: bytes, _: np.random.Generator) -> bytes:
    """Return the JPEG with an Adobe marker of an unknown transform. libjpeg assumes YCbCr, which is
    wrong for CMYK."""
    return (
        data[:2] + b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\7" + data[2:]
        if b"Adobe" not in data
        else data
    )


def broken_profile(data: bytes, _: np.random.Generator) -> bytes:
    return data[:2] + b"\xff\xe2\0\x12ICC_PROFILE\0\5\1xx" + data[2:]


def zeros_in_the_scan_header(data: bytes, _: np.random.Generator) -> bytes:
    at = scan_of(data)
    return data[: at - 3] + bytes(3) + data[at:] if b"\xff\xc0" in data else data


HARMLESS: list[Change] = [
    before_end(bytes(40)),
    before_end(b"\xff" * 9),
    before_end(b"\xff\0" * 20 + b"\0"),
    lambda data, generator: data + generator.bytes(30),
    header_junk,
    other_jfif,
    other_adobe,
    broken_profile,
    zeros_in_the_scan_header,
    lambda data, _: data.replace(b"\xff\xdb", b"\xff" * 3 + b"\xff\xdb"),
]


@pytest.mark.parametrize("change", HARMLESS)
def test_what_does_no_harm_is_taken_with_the_same_pixels_and_hides_no_damage(
    change: Change,
) -> None:
    generator, num_hidden = np.random.default_rng(2), 0
    for number in range(16):
        whole = original(number)
        if change in (other_jfif, other_adobe) and b"Adobe" not in whole:
            whole = whole[:2] + whole[whole.index(b"\xff\xdb") :]
        expected = np.asarray(decode(whole)[0])
        np.testing.assert_array_equal(np.asarray(decode(change(whole, generator))[0]), expected)
        at = len(whole) - 60
        damaged = whole[:at] + b"\xff\xd3\xff\xd3" + whole[at:]
        with pytest.raises(Rejection, match="damaged: "):
            decode(change(damaged, generator))
        num_hidden += warning_of(change(whole, generator)) is not None
    assert num_hidden or change in (HARMLESS[1], HARMLESS[3], HARMLESS[-1])


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (0, before_end(b"junk" * 9), r"[0-9]+ extraneous bytes before marker 0xd9"),
        (0, before_end(b"junk" * 9 + b"\xff" * 30), r"[0-9]+ extraneous bytes before marker 0xd9"),
        (0, before_end(b"\xff\xf7"), "Unsupported marker type 0xf7"),
        (0, lambda data, _: data[:-90] + END, "damaged: .*premature end of data segment"),
        (2, lambda data, _: data.replace(b"\xff\xd1", b"junk" * 9 + b"\xff\xd1", 1), "extraneous bytes before marker 0xd1"),
        (2, lambda data, _: data.replace(b"\xff\xd1", b"\xff\xd4", 1), "found marker 0xd4 instead of RST1"),
        (1, lambda data, _: (b"junk" * 9 + b"\xff\xda").join(data.rsplit(b"\xff\xda", 1)), "before marker 0xda"),
    ],
)  # fmt: skip
def test_damage_by_its_words(number: int, change: Change, words: str) -> None:
    with pytest.raises(Rejection, match=words):
        decode(change(original(number), np.random.default_rng(3)))


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-2], "no_end_marker"),
        (lambda data: data[:-1], "no_end_marker"),
        (lambda data: data[:-40], "truncated"),
        (
            lambda data: data[:-900] + bytes(900),
            "truncated",
        ),  # a download that stopped after its space was reserved
        (lambda data: data[: scan_of(data)], "truncated"),
        (lambda data: data[: data.index(b"\xff\xdb") + 9], "truncated"),
        (lambda data: data[:3], "truncated"),
        (lambda data: data[:-900] + END, "damaged"),
        (lambda data: data[:1], "not_an_image"),
        (lambda data: b"", "empty"),
        (lambda data: b"\xff\xd8" + b"text" * len(data), "not_an_image"),
    ],
)
def test_a_jpeg_that_ends_early_has_the_true_reason(
    number: int, change: Callable[[bytes], bytes], reason: str
) -> None:
    """A progressive JPEG does not state its number of scans: it may lack more than the end
    marker."""
    if reason == "no_end_marker" and number in PROGRESSIVE:
        reason = "truncated"
    with pytest.raises(Rejection) as caught:
        decode(change(original(number)))
    assert caught.value.reason == reason


def test_a_subsampling_that_turbojpeg_does_not_know_is_decoded_and_its_markers_are_checked() -> (
    None
):
    image = picture(seed=1, width=64, height=64).convert("CMYK")
    data = encoded(image, subsampling=2, restart_marker_blocks=1)
    assert "subsampling" in str(warning_of(data))
    assert (
        np.abs(np.asarray(decode(data)[0]).astype(int) - np.asarray(image.convert("RGB"))).mean()
        < 3
    )
    for damaged in (
        data[:-2],
        data.replace(b"\xff\xd1", b"\xff\xd4"),
        data[:-30] + b"\xff\xd0" + data[-28:],
    ):
        with pytest.raises(Rejection, match=r"is misplaced|Premature end"):
            decode(damaged)


def test_the_decoders_are_named() -> None:
    assert [name.split()[0] for name in decoder_version().split(", ")] == [
        "Pillow",
        "libjpeg",
        "simplejpeg",
        "imagecodecs",
        "opencv-python-headless",
    ]
