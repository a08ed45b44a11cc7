"""Three fingerprints that identify an image: 73 bytes, so 14 million images need 1 GB.

- `pixels`: 128 bits of BLAKE2 over size and decoded RGB. Lossless encodings of an image have equal
  `pixels`.
- `bits`: a 64-bit perceptual hash, from the discrete cosine transform of the 32 x 32 luma. It has
  the signs of the 64 lowest frequencies except the mean. Low frequencies survive JPEG, resizing and
  changes of brightness.
- `colors`: the mean colors of a 4 x 4 grid as int8, scaled to mean 0 and spread 1. They confirm
  matches of `bits`, which also match by chance or if only the color differs.

`plain` images are compared only by pixels: images of nearly one color, and line art, text or digits
in one ink on an even background. Their `bits` are noise, or show only the background. Without this
rule, 956 of 2,000 rendered numbers were near duplicates; with the rule, none is. Color photographs
on white are compared by all three.
"""

import hashlib
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_prep.check.stored import each_picture
from data_prep.images import decode, resize
from data_prep.manifest import Shard, write_array
from data_prep.remote import Storage

Hashes = NDArray[np.void]
DTYPE = np.dtype([("pixels", "<u8", 2), ("bits", "<u8"), ("colors", "i1", 48), ("plain", "?")])
VERSION = 2
"""Cached fingerprints of other versions are ignored."""
NUM_BITS, SIDE, GRID = 64, 32, 4
SAME_COLORS = 0.95
"""Smallest correlation of two color grids that count as equal. Re-encoding (quality 20), halving
the size and a crop of 3 % stay above 0.96; different images stay below 0.84."""
PLAIN_SPREAD = 3.0
"""Largest standard deviation, in levels of 0 to 255, of an image of nearly one color."""
FLAT_SHARE, FLAT_LEVELS, INK_SPREAD = 0.3, 5, 3.0
"""Thresholds of line art. At least the fraction FLAT_SHARE of the pixels is within FLAT_LEVELS
neighboring gray levels. All colors are on one line of RGB space: the standard deviation across the
line is below INK_SPREAD (of 255 levels)."""
_COLOR_SCALE = 18.0  # 48 values of mean 0 and spread 1 are within +-7
_BATCH = 256


def shard_hashes(directory: Path, cache: Path | None, storage: Storage, shard: Shard) -> Hashes:
    """Return the fingerprints of the shard's images, in the order of its index. Fingerprints in
    `cache` are reused."""
    identity = f"{VERSION}:{shard.sha256}:{shard.index_sha256}".encode()
    kept = None if cache is None else cache / f"{hashlib.sha256(identity).hexdigest()[:32]}.npy"
    if kept is not None:
        try:
            hashes: Hashes = np.load(kept, allow_pickle=False)
        except Exception:  # noqa: BLE001 (numpy raises anything for damaged files)
            pass
        else:
            if hashes.dtype == DTYPE and len(hashes) == shard.num_samples:
                return hashes
    pictures = (picture for picture, _ in each_picture(decode, directory, shard, storage=storage))
    batches = iter(lambda: list(islice(pictures, _BATCH)), [])
    hashes = np.concatenate([np.zeros(0, DTYPE), *(picture_hashes(batch) for batch in batches)])
    if kept is not None:
        write_array(kept, hashes)
    return hashes


def picture_hashes(pictures: list[Image.Image]) -> Hashes:
    """Return the fingerprints of upright RGB images. `bits` and `colors` cover the central
    square."""
    hashes = np.zeros(len(pictures), DTYPE)
    small = [
        resize(picture, size=SIDE, crop="center", interpolation="bicubic") for picture in pictures
    ]
    luma = np.stack([np.asarray(picture.convert("L"), np.float64) for picture in small])
    hashes["pixels"] = [_pixel_hash(picture) for picture in pictures]
    hashes["bits"] = _cosine_bits(luma)
    rgb = np.stack([np.asarray(picture, np.float64) for picture in small])
    grid = (
        rgb.reshape(len(small), GRID, SIDE // GRID, GRID, SIDE // GRID, 3)
        .mean(axis=(2, 4))
        .reshape(len(small), -1)
    )
    spread = grid.std(axis=1)
    hashes["plain"] = (
        (luma.std(axis=(1, 2)) < PLAIN_SPREAD) | (spread < PLAIN_SPREAD) | _is_line_art(luma, rgb)
    )
    normal = (grid - grid.mean(axis=1, keepdims=True)) / np.maximum(spread, PLAIN_SPREAD)[:, None]
    hashes["colors"] = np.rint(normal * _COLOR_SCALE).astype(np.int8)
    return hashes


def _is_line_art(luma: NDArray[np.float64], rgb: NDArray[np.float64]) -> NDArray[np.bool_]:
    colors = rgb.reshape(len(rgb), -1, 3)
    centered = colors - colors.mean(axis=1, keepdims=True)
    variances = np.linalg.eigvalsh(
        centered.transpose(0, 2, 1) @ centered / centered.shape[1]
    )  # ascending
    return (_flat_share(luma) >= FLAT_SHARE) & (variances[:, 1] < INK_SPREAD**2)


def _flat_share(luma: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each image, the largest fraction of pixels within `FLAT_LEVELS` neighboring gray
    levels."""
    levels = luma.reshape(len(luma), -1).astype(np.int64)
    counts = np.bincount(
        (levels + 256 * np.arange(len(luma))[:, None]).ravel(), minlength=256 * len(luma)
    )
    up_to = np.pad(counts.reshape(-1, 256).cumsum(axis=1), ((0, 0), (1, 0)))
    most: NDArray[np.int64] = (up_to[:, FLAT_LEVELS:] - up_to[:, :-FLAT_LEVELS]).max(axis=1)
    return most / levels.shape[1]


def same_colors(
    colors: NDArray[np.int8], a: NDArray[np.int64], b: NDArray[np.int64]
) -> NDArray[np.bool_]:
    same = np.empty(len(a), np.bool_)
    for start in range(0, len(a), 1 << 17):
        part = slice(start, start + (1 << 17))
        x, y = colors[a[part]].astype(np.float32), colors[b[part]].astype(np.float32)
        same[part] = (x * y).sum(1) >= SAME_COLORS * np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return same


def _pixel_hash(picture: Image.Image) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(b"%d x %d:" % picture.size, digest_size=16)
    digest.update(picture.tobytes())
    return np.frombuffer(digest.digest(), "<u8")


def _cosine_bits(luma: NDArray[np.float64]) -> NDArray[np.uint64]:
    matrix, rows, columns = _cosines()
    spectrum = matrix @ luma @ matrix.T
    # not > 0: symmetry makes coefficients zero, and the sign of their rounding error differs
    # between machines
    signs = spectrum[:, rows, columns] > 1e-6
    packed = np.packbits(signs, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u8")[:, 0]


@lru_cache
def _cosines() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the matrix of the cosine transform, and the positions of the lowest frequencies, in
    order."""
    k = np.arange(SIDE)
    matrix = np.cos(np.pi * (2 * k[None] + 1) * k[:, None] / (2 * SIDE))
    places = sorted(
        ((u, v) for u in k.tolist() for v in k.tolist() if u + v > 0),
        key=lambda place: (sum(place), place),
    )
    rows, columns = np.array(places[:NUM_BITS]).T
    return matrix, rows, columns
