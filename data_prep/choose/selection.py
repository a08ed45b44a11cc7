"""Choose the samples of a subset: pure functions of labels, size and seed.

Invariants: classes keep their fractions; the number of samples is exact; selections of one seed are
nested, as scaling-law runs need.

All three follow from one ranking: every prefix is a selection. Each class has a seeded order, and
its sample r of n has the priority (r + 1/2) / n. Taking the k smallest is the Sainte-Laguë
apportionment: it rounds each class to the nearest integer. Unlike largest remainders, a larger k
never removes a sample.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def ranking(labels: Ids, *, seed: int, keep: NDArray[np.bool_]) -> Ids:
    """Return the positions that `keep` marks, in the order of selection. The order within a class
    depends only on positions in the split, so excluding samples does not change the order of the
    others."""
    positions = np.flatnonzero(keep)
    ranks, sizes, classes = _ranks(labels, positions, seed=seed)
    priorities = (ranks + 0.5) / sizes
    turns = np.argsort(_draws(int(labels.max(initial=-1)) + 2, seed=seed, stream=1), kind="stable")
    return positions[np.lexsort((turns[classes + 1], priorities))]


def per_class(labels: Ids, count: int, *, seed: int, keep: NDArray[np.bool_]) -> Ids:
    """Return `count` positions that `keep` marks in each class, or all of a smaller class."""
    positions = np.flatnonzero(keep)
    ranks, _, _ = _ranks(labels, positions, seed=seed)
    return positions[ranks < count]


def _ranks(labels: Ids, positions: Ids, *, seed: int) -> tuple[Ids, Ids, Ids]:
    """Return, for each position, its rank in the seeded order of its class, the size of the class
    in `positions`, and the class."""
    classes = labels[positions]
    draws = _draws(len(labels), seed=seed, stream=0)[positions]
    order = np.lexsort((draws, classes))
    _, starts, inverse, sizes = np.unique(
        classes[order], return_index=True, return_inverse=True, return_counts=True
    )
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - starts[inverse]
    all_sizes = np.empty(len(order), np.int64)
    all_sizes[order] = sizes[inverse]
    return ranks, all_sizes, classes


def _draws(count: int, *, seed: int, stream: int) -> NDArray[np.uint64]:
    """Return random 64-bit integers. numpy promises that these, but not permutations, are equal in
    all versions."""
    return np.asarray(
        np.random.Philox(np.random.SeedSequence([seed, stream])).random_raw(count), np.uint64
    )
