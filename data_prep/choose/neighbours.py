"""All pairs of 64-bit hashes within a Hamming distance: exact, and without comparing all with all.

Cut into `near + agreeing` blocks, two hashes within `near` bits of each other have `agreeing`
blocks in common, because every bit that differs spoils at most one. So for every choice of
`agreeing` blocks the hashes are sorted by those bits, and only runs of equal ones are compared.
More agreeing blocks mean more sorts and shorter runs: `plan` takes what costs least. The first
table that finds a pair keeps it, so memory grows with the pairs and not with the tables.

14 million hashes, near 6: 84 sorts by 21 bits each, 3 * 10^9 comparisons instead of 10^14. A table
takes 6 to 8 s and 0.9 GB on one busy core, so all of them ten minutes.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from data_prep.progress import progress

Ids = NDArray[np.int64]
NUM_BITS = 64
MAX_NEAR = 10
_SORT_COST, _PAIR_COST = 300.0, 30.0
"""Nanoseconds for each hash and for each compared pair, roughly; only their ratio matters."""


def near_pairs(
    bits: NDArray[np.uint64], *, near: int, first: int = 0
) -> tuple[Ids, Ids, NDArray[np.uint8]]:
    """(a, b, distance) of all pairs a < b with b >= `first`, sorted by b, then distance, then a."""
    masks = plan(len(bits), near=near)
    found: list[tuple[Ids, Ids]] = []
    with progress("comparing hashes", total=len(masks), unit="tables") as line:
        for number in range(len(masks)):
            found.append(_pairs_of_table(bits, masks[: number + 1], near=near, first=first))
            line.advance()
    a, b = (np.concatenate(column) for column in zip(*found, strict=True))
    distance = np.bitwise_count(bits[a] ^ bits[b])
    order = np.lexsort((a, distance, b))
    return a[order], b[order], distance[order]


def _pairs_of_table(
    bits: NDArray[np.uint64], masks: list[np.uint64], *, near: int, first: int
) -> tuple[Ids, Ids]:
    """The pairs that the last of the masks finds and no mask before it."""
    keys = bits & masks[-1]
    order = np.argsort(keys)
    keys, ordered = keys[order], bits[order]  # so that what is compared lies side by side
    lows, highs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    step = 1
    alive = np.flatnonzero(keys[1:] == keys[:-1])
    while len(alive):
        close = alive[np.bitwise_count(ordered[alive] ^ ordered[alive + step]) <= near]
        for mask in masks[:-1]:
            close = close[(ordered[close] ^ ordered[close + step]) & mask != 0]
        a, b = order[close], order[close + step]
        a, b = np.minimum(a, b), np.maximum(a, b)
        lows.append(a[b >= first])
        highs.append(b[b >= first])
        step += 1
        alive = alive[alive + step < len(keys)]
        alive = alive[keys[alive] == keys[alive + step]]
    return np.concatenate(lows), np.concatenate(highs)


def plan(num_hashes: int, *, near: int) -> list[np.uint64]:
    """The bits by which to sort, one mask for each table."""

    def cost(agreeing: int) -> float:
        num_blocks = near + agreeing
        pairs_per_hash = num_hashes / 2 ** (NUM_BITS * agreeing / num_blocks) / 2
        return math.comb(num_blocks, agreeing) * (_SORT_COST + _PAIR_COST * pairs_per_hash)

    agreeing = min(range(1, 5), key=cost)
    num_blocks = near + agreeing
    edges = [NUM_BITS * number // num_blocks for number in range(num_blocks + 1)]
    blocks = [(1 << high) - (1 << low) for low, high in itertools.pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in itertools.combinations(blocks, agreeing)]
