"""Any bytes give an image of the requested size or a rejection, the same result twice.

Thousands of damaged files of every format: flipped bits, cuts, splices, overwritten headers.
(Damage that claims 100 million pixels is valid, but slow: the limit is low.)
"""

import io
import zlib
from collections import Counter
from collections.abc import Callable

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from data_prep.images import ImageSpec, Rejection, convert
from tests.data_prep.samples import encoded, packed_tiff, picture, webp
from tests.soak import soaked

SIZE = 8
NUM_PER_SEED = 45
SPEC = ImageSpec(image_size=SIZE, max_pixels=300_000)
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF)

Mutation = Callable[[bytearray, np.random.Generator], bytes]


def seeds() -> dict[str, bytes]:
    """Return a small file of every kind in a build. The JPEGs are large enough for drafts."""
    image, exif = picture(seed=1, width=43, height=37), Image.Exif()
    exif[0x0112] = 6
    frames = [picture(seed=seed, width=19, height=17) for seed in (2, 3)]
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    return {
        "jpeg": encoded(image, quality=80),
        "jpeg progressive": encoded(image, progressive=True),
        "jpeg gray": encoded(image.convert("L")),
        "jpeg cmyk": encoded(image.convert("CMYK")),
        "jpeg exif": encoded(image, exif=exif),
        "mpo": encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        "png": encoded(image, "PNG", exif=exif),
        "png palette": encoded(palette, "PNG", transparency=bytes(range(0, 250, 5))),
        "png 16": encoded(
            Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100), "PNG"
        ),
        "apng": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "bmp": encoded(image, "BMP"),
        "ppm": encoded(image, "PPM"),
        "tiff": encoded(image, "TIFF"),
        "tiff packed": packed_tiff(image, zlib.compress, 8),
        "tiff float": encoded(Image.new("F", (9, 9), 0.5), "TIFF"),
        "webp": webp(image),
        "avif": bytes(imagecodecs.avif_encode(np.asarray(image))),
        "jxl": bytes(imagecodecs.jpegxl_encode(np.asarray(image))),
        "html": b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>",
    }


def flip_bits(data: bytearray, generator: np.random.Generator) -> bytes:
    for at in generator.integers(0, len(data), int(generator.integers(1, 20))):
        data[at] ^= 1 << int(generator.integers(8))
    return bytes(data)


def cut(data: bytearray, generator: np.random.Generator) -> bytes:
    return bytes(data[: int(generator.integers(0, len(data)))])


def splice(data: bytearray, generator: np.random.Generator) -> bytes:
    """Return the data without a piece, or with a piece repeated elsewhere."""
    begin, end, to = sorted(generator.integers(0, len(data), 3).tolist())
    return bytes(
        data[:begin] + data[end:]
        if generator.integers(2)
        else data[:end] + data[begin:to] + data[end:]
    )


def edit_header(data: bytearray, generator: np.random.Generator) -> bytes:
    """Write extreme sizes, counts and offsets into the first bytes, or into the last bytes (a
    TIFF's directory)."""
    for _ in range(int(generator.integers(1, 4))):
        at, width = (
            int(generator.integers(0, min(len(data), 200))),
            int(generator.choice((1, 2, 4))),
        )
        at = max(len(data) - 4 - at, 0) if generator.integers(4) == 0 else at
        number = int(generator.choice(NUMBERS)) % 256**width
        data[at : at + width] = number.to_bytes(width, "big" if generator.integers(2) else "little")
    return bytes(data)


def outcome(data: bytes) -> tuple[str, str] | bytes:
    try:
        return convert(data, SPEC).data
    except Rejection as rejection:
        return rejection.reason, rejection.detail


@soaked
@pytest.mark.parametrize("mutation", [flip_bits, cut, splice, edit_header])
def test_damage_ends_in_a_picture_or_a_rejection_the_same_both_times(
    mutation: Mutation, salt: int
) -> None:
    generator = np.random.default_rng(salt + sum(mutation.__name__.encode()))
    outcomes: Counter[str] = Counter()
    for whole in seeds().values():
        for _ in range(NUM_PER_SEED):
            damaged = mutation(bytearray(whole), generator)
            found = outcome(damaged)
            assert outcome(damaged) == found
            if isinstance(found, bytes):
                assert Image.open(io.BytesIO(found)).size == (SIZE, SIZE)
                assert len(found) == len(b"P6\n8 8\n255\n") + 3 * SIZE * SIZE
                outcomes["a picture"] += 1
            else:
                assert found[1].strip(), found
                assert " at 0x" not in found[1], found
                outcomes[found[0]] += 1
    assert outcomes.total() == NUM_PER_SEED * len(seeds()) > 700
    assert min(outcomes[kind] for kind in ("not_an_image", "truncated", "a picture")) > 6
    assert outcomes["damaged"] or mutation is cut  # such a file is truncated


def test_every_undamaged_seed_is_a_picture_but_those_that_cannot_be() -> None:
    found = {kind: outcome(data) for kind, data in seeds().items()}
    rejected = {kind: reason[0] for kind, reason in found.items() if isinstance(reason, tuple)}
    assert rejected == {"html": "not_an_image", "tiff float": "unsupported"}
