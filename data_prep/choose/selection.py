"""Which samples a subset takes: pure functions of labels, size and seed.

Invariants: the classes keep their shares; exactly as many samples are chosen as were asked for;
selections of one seed are nested (the samples of a smaller size are among those of a larger one),
as scaling-law runs want them.

Both follow from one ranking, of which any prefix is a selection. Each class is put into a seeded
order, and its sample number r of n gets the priority (r + 1/2) / n: taking the k smallest is the
Sainte-Laguë apportionment, which rounds every class's share to the nearest whole number and, unlike
largest remainders, never takes a seat back when the house grows.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def ranking(labels: Ids, *, seed: int, keep: NDArray[np.bool_]) -> Ids:
    """The positions in `keep`, in the order in which they are chosen.

    The order within a class depends on the position in the split alone, so what is left out moves
    nothing else.
    """
    positions = np.flatnonzero(keep)
    ranks, sizes, classes = _ranks(labels, positions, seed=seed)
    priorities = (ranks + 0.5) / sizes
    turns = np.argsort(_draws(int(labels.max(initial=-1)) + 2, seed=seed, stream=1), kind="stable")
    return positions[np.lexsort((turns[classes + 1], priorities))]


def per_class(labels: Ids, count: int, *, seed: int, keep: NDArray[np.bool_]) -> Ids:
    """`count` positions of every class (all of a smaller one), of those in `keep`."""
    positions = np.flatnonzero(keep)
    ranks, _, _ = _ranks(labels, positions, seed=seed)
    return positions[ranks < count]


def _ranks(labels: Ids, positions: Ids, *, seed: int) -> tuple[Ids, Ids, Ids]:
    """Of each position: its place in the seeded order of its class, the size of that class, the
    class."""
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
    """Raw words: numpy keeps these the same in all versions, which it does not promise of
    permutations."""
    return np.asarray(
        np.random.Philox(np.random.SeedSequence([seed, stream])).random_raw(count), np.uint64
    )
