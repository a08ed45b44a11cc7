"""Several datasets as one sequence: which of them stands at each position is a pure function of the weights and the position.

The sources are dealt out as evenly as integers allow. Two sources of weights a and b: of the first p positions, floor(p a /
(a + b)) belong to the first. More sources: the first against all the others together, and so on among those. So in every stretch of
positions each source has its share to within the number of sources; the n-th position of a source is the n-th of its own order,
with its own epochs, and a resume needs nothing but the position. With weights equal to the numbers of samples, one epoch of the
mixture holds every sample of every source exactly once.

Sample ids of source k follow those of the sources before it, as the parts of a `ShardReader` do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.data.order import Ids, Order

LARGEST_SUM = 2**31 - 1
"""Of the weights: a product of two such numbers has 64 bits."""


@dataclass(frozen=True)
class Mixture:
    orders: tuple[Order, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.orders) == len(self.weights) > 0, self
        assert min(self.weights) > 0 and sum(self.weights) <= LARGEST_SUM, self.weights

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """(epoch of the sample's own source, sample id) of positions on the endless line."""
        sources, places = self.deal(positions)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        first_ids = np.cumsum([0, *(order.num_samples for order in self.orders)])
        for source, order in enumerate(self.orders):
            rows = np.flatnonzero(sources == source)
            epochs[rows], within = order.locate(places[rows])
            samples[rows] = first_ids[source] + within
        return epochs, samples

    def deal(self, positions: Ids) -> tuple[Ids, Ids]:
        """(source, place in the source's own line) of each position."""
        sources, places = np.zeros_like(positions), positions.copy()
        rows = np.arange(len(positions))
        for source in range(len(self.weights) - 1):
            weight, total = self.weights[source], sum(self.weights[source:])
            before, after = _share(places[rows], weight, total), _share(places[rows] + 1, weight, total)
            is_here = after > before
            places[rows] = np.where(is_here, before, places[rows] - before)
            rows = rows[~is_here]
            sources[rows] = source + 1
        return sources, places


def _share(counts: Ids, weight: int, total: int) -> Ids:
    """floor(counts * weight / total) without leaving 64 bits: counts is split, because weights may be numbers of samples."""
    whole, rest = np.divmod(counts, total)
    share: Ids = whole * weight + rest * weight // total
    return share


def mixture_weights(weights: Sequence[float | None], sizes: Sequence[int]) -> tuple[int, ...]:
    """As integers, in lowest terms: how often each source is drawn. Without weights, each sample is drawn equally often."""
    if all(weight is None for weight in weights):
        wanted = np.array(sizes, np.int64)
    else:
        assert all(weight is not None for weight in weights), weights
        wanted = np.array([round(1_000_000 * weight) for weight in weights if weight is not None], np.int64)
    reduced = wanted // np.gcd.reduce(wanted)
    if reduced.sum() > LARGEST_SUM:
        raise ValueError(
            f"data.weight: shares of {' : '.join(map(str, reduced.tolist()))} are too fine; give weights with fewer digits"
        )
    return tuple(reduced.tolist())
