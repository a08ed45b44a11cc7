"""Three fingerprints of a picture, for finding it again: 73 bytes, so that 14 million pictures need
1 GB.

`pixels`   128 bits of BLAKE2 over size and decoded RGB: the same picture, however it was encoded without loss (equal files
           decode to equal pixels, so the stored bytes need no hash of their own).
`bits`     a 64-bit perceptual hash: the signs of the 64 lowest frequencies (without the mean) of the discrete cosine transform
           of the 32 x 32 luma. Low frequencies survive JPEG, resizing, brightness; a sign needs no
           moving threshold.
`colours`  the mean colours of a 4 x 4 grid, brought to mean 0 and one spread, as int8: confirms
what the bits propose. Without it a
           red disc is a green disc, and at 10^14 pairs chance alone makes some hashes meet.

A picture of nearly one colour has signs of noise alone, and of line art, text and digits in one ink
on an even ground the low frequencies show the ground: such pictures are `plain`, and compared by
pixels only. Of 1,797 scanned digits (scikit-learn's) 201 were taken for near duplicates otherwise,
of 2,000 rendered numbers 956; with it 1 and 0. Coloured photographs on white are judged.
"""  # noqa: E501 (a table)

import hashlib
import io
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_prep.check.stored import each_picture
from data_prep.images import decode, resize
from data_prep.manifest import Shard
from data_prep.publish import write_atomic
from data_prep.remote import Storage

Hashes = NDArray[np.void]
DTYPE = np.dtype([("pixels", "<u8", 2), ("bits", "<u8"), ("colours", "i1", 48), ("plain", "?")])
VERSION = 2
"""Of what is computed here; kept hashes of another version are not used."""
NUM_BITS, SIDE, GRID = 64, 32, 4
SAME_COLOURS = 0.95
"""Correlation of the grids. Re-encoding (q 20), halving and a crop of 3 % stay above 0.96,
different pictures below 0.84."""
PLAIN_SPREAD = 3.0
"""Standard deviation, of 255 grey levels."""
FLAT_SHARE, FLAT_LEVELS, INK_SPREAD = 0.3, 5, 3.0
"""Line art is a picture of which that share lies within so many neighbouring grey levels, and whose
colours lie on one line between ground and ink: their standard deviation across it, of 255 levels,
is less than the last."""
_COLOUR_SCALE = 18.0  # 48 values of mean 0 and spread 1 lie within +-7
_BATCH = 256


def shard_hashes(directory: Path, cache: Path | None, storage: Storage, shard: Shard) -> Hashes:
    """One record for each row of the index; runs in a worker. What `cache` holds of the same bytes
    is not computed again."""
    identity = f"{VERSION}:{shard.sha256}:{shard.index_sha256}".encode()
    kept = None if cache is None else cache / f"{hashlib.sha256(identity).hexdigest()[:32]}.npy"
    if kept is not None:
        try:
            hashes: Hashes = np.load(kept, allow_pickle=False)
        except Exception:  # noqa: BLE001 (a damaged head makes numpy raise whatever its parser trips over)
            pass
        else:
            if hashes.dtype == DTYPE and len(hashes) == shard.num_samples:
                return hashes
    pictures = (picture for picture, _ in each_picture(decode, directory, shard, storage=storage))
    batches = iter(lambda: list(islice(pictures, _BATCH)), [])
    hashes = np.concatenate([np.zeros(0, DTYPE), *(picture_hashes(batch) for batch in batches)])
    if kept is not None:
        buffer = io.BytesIO()
        np.save(buffer, hashes)
        write_atomic(kept, buffer.getvalue())
    return hashes


def picture_hashes(pictures: list[Image.Image]) -> Hashes:
    """Of upright RGB pictures; of those that are not square, the central square counts."""
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
    hashes["colours"] = np.rint(normal * _COLOUR_SCALE).astype(np.int8)
    return hashes


def _is_line_art(luma: NDArray[np.float64], rgb: NDArray[np.float64]) -> NDArray[np.bool_]:
    colours = rgb.reshape(len(rgb), -1, 3)
    centred = colours - colours.mean(axis=1, keepdims=True)
    variances = np.linalg.eigvalsh(
        centred.transpose(0, 2, 1) @ centred / centred.shape[1]
    )  # ascending
    return (_flat_share(luma) >= FLAT_SHARE) & (variances[:, 1] < INK_SPREAD**2)


def _flat_share(luma: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest share of each picture that lies within `FLAT_LEVELS` grey levels."""
    levels = luma.reshape(len(luma), -1).astype(np.int64)
    counts = np.bincount(
        (levels + 256 * np.arange(len(luma))[:, None]).ravel(), minlength=256 * len(luma)
    )
    up_to = np.pad(counts.reshape(-1, 256).cumsum(axis=1), ((0, 0), (1, 0)))
    most: NDArray[np.int64] = (up_to[:, FLAT_LEVELS:] - up_to[:, :-FLAT_LEVELS]).max(axis=1)
    return most / levels.shape[1]


def same_colours(
    colours: NDArray[np.int8], a: NDArray[np.int64], b: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether the grids of the pictures a[i] and b[i] agree."""
    same = np.empty(len(a), np.bool_)
    for start in range(0, len(a), 1 << 17):
        part = slice(start, start + (1 << 17))
        x, y = colours[a[part]].astype(np.float32), colours[b[part]].astype(np.float32)
        same[part] = (x * y).sum(1) >= SAME_COLOURS * np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return same


def _pixel_hash(picture: Image.Image) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(b"%d x %d:" % picture.size, digest_size=16)
    digest.update(picture.tobytes())
    return np.frombuffer(digest.digest(), "<u8")


def _cosine_bits(luma: NDArray[np.float64]) -> NDArray[np.uint64]:
    matrix, rows, columns = _cosines()
    spectrum = matrix @ luma @ matrix.T
    # not > 0: where symmetry makes a coefficient zero, the sign of its rounding error differs
    # between machines
    signs = spectrum[:, rows, columns] > 1e-6
    packed = np.packbits(signs, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u8")[:, 0]


@lru_cache
def _cosines() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The transform, and the places of the lowest frequencies, by order."""
    k = np.arange(SIDE)
    matrix = np.cos(np.pi * (2 * k[None] + 1) * k[:, None] / (2 * SIDE))
    places = sorted(
        ((u, v) for u in k.tolist() for v in k.tolist() if u + v > 0),
        key=lambda place: (sum(place), place),
    )
    rows, columns = np.array(places[:NUM_BITS]).T
    return matrix, rows, columns
