"""All pairs of 64-bit hashes within a Hamming distance: exact, without comparing all pairs.

Hashes are cut into `near + agreeing` blocks. Two hashes within `near` bits have `agreeing` equal
blocks, because each differing bit changes at most one block. For every choice of `agreeing` blocks,
a table sorts the hashes by these blocks, and only hashes with equal blocks are compared. A larger
`agreeing` needs more tables but fewer comparisons; `plan` chooses the cheapest. Only the first
table that finds a pair keeps the pair, so memory does not grow with the number of tables.

14 million hashes with near = 6 need 84 tables, sorted by 21 bits each, and 3 * 10^9 comparisons
instead of 10^14. A table takes 6 to 8 s and 0.9 GB on one busy core; all tables take ten minutes.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from data_prep.progress import ProgressLine

Ids = NDArray[np.int64]
NUM_BITS = 64
MAX_NEAR = 10
_SORT_COST, _PAIR_COST = 300.0, 30.0
"""Approximate cost in ns per sorted hash and per compared pair. Only their ratio matters."""


def near_pairs(
    bits: NDArray[np.uint64], *, near: int, first: int = 0
) -> tuple[Ids, Ids, NDArray[np.uint8]]:
    """Return (a, b, distance) of all near pairs a < b with b >= `first`, sorted by b, distance and
    a."""
    masks = plan(len(bits), near=near)
    found: list[tuple[Ids, Ids]] = []
    with ProgressLine("comparing hashes", total=len(masks), unit="tables") as line:
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
    """Return the near pairs that agree in the bits of the last mask, but of no earlier mask."""
    keys = bits & masks[-1]
    order = np.argsort(keys)
    keys, ordered = keys[order], bits[order]  # makes compared values contiguous
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
    """Return one bit mask for each table: the bits to sort by."""

    def cost(agreeing: int) -> float:
        num_blocks = near + agreeing
        pairs_per_hash = num_hashes / 2 ** (NUM_BITS * agreeing / num_blocks) / 2
        return math.comb(num_blocks, agreeing) * (_SORT_COST + _PAIR_COST * pairs_per_hash)

    agreeing = min(range(1, 5), key=cost)
    num_blocks = near + agreeing
    edges = [NUM_BITS * number // num_blocks for number in range(num_blocks + 1)]
    blocks = [(1 << high) - (1 << low) for low, high in itertools.pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in itertools.combinations(blocks, agreeing)]
