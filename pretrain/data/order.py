"""The order of training: a pure function from position to sample, without tables.

Training follows one endless line of positions: position p is index p mod E of epoch p div E. Global
batch i has positions [i B, (i + 1) B), and each rank takes its slice. A resume needs only the
number of consumed samples. All ranks have the same number of steps, and all world sizes see the
same batches.

`data.last_batch` sets the length E of an epoch of N samples. `carry`: E = N, and a batch may span
two epochs. `drop`: E is N rounded down to complete batches, and each epoch drops different samples.
`pad`: E is N rounded up, and the last batch repeats the epoch's first samples.

The order within an epoch is a keyed permutation of 0..N-1. It is a Feistel network over Z_a x Z_b
(a b >= N), repeated while the result is >= N. `full` permutes all samples. `block` permutes blocks
of neighboring samples and then the samples within windows of several blocks, so a reader needs few
blocks at a time. The blocks begin at another sample in every epoch.

A `Mixture` of datasets is also one line: the source of each position is a pure function of weights
and position. For two sources of weights a and b, floor(p a / (a + b)) of the first p positions
belong to the first source. For more sources, the first is separated from all others, then the
second from the rest.

In every range of positions, the number of samples of a source differs from its expected number by
at most the number of sources. Position n of a source is position n of its own order. If the weights
are numbers of samples, one epoch has every sample of every source once. Sample ids of a source
follow the ids of the previous sources, as in `ShardReader`.

K `CanonicalStreams` divide the samples into K ranges, each with its own order. Every global batch
takes an equal part from each stream. A rank takes a contiguous part of the batch, so a node reads
only the streams of its ranks. The streams depend only on K, so all world sizes still train on the
same batches. If K does not divide N, some streams have one more sample than others, and their
epochs are longer.

All random numbers of training are counter-based: `hash64` computes each number from a key, without
a generator's state.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_prep.errors import UserError
from pretrain.config import LastBatch, Shuffle

Ids = NDArray[np.int64]
U64 = NDArray[np.uint64]

_NUM_ROUNDS = 6
LARGEST_SUM = 2**31 - 1
"""Largest sum of a mixture's weights. The product of two such numbers fits into 64 bits."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hash64(*parts: ArrayLike, after: U64 | None = None) -> U64:
    """Hash the parts, in their order, to 64 bits; arrays are broadcast. `after`: hash of earlier
    parts."""
    with np.errstate(over="ignore"):
        state = np.asarray(_GOLDEN) if after is None else after
        for part in parts:
            state = _mix(state + _GOLDEN + np.asarray(part).astype(np.uint64))
    return state


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def uniform(*parts: ArrayLike, after: U64 | None = None) -> NDArray[np.float64]:
    """Return uniform random numbers in [0, 1) with 53 bits, computed from the parts."""
    return (hash64(*parts, after=after) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hex_key(text: str) -> int:
    """Return the first 63 bits of a hex digest, as a part for `hash64`."""
    return int(text[:16], 16) >> 1


def permute(positions: Ids, *, size: int, key: int | U64) -> Ids:
    """Apply the permutation of 0..size-1 with this key to the positions. `key` may be an array."""
    rows = int(np.ceil(np.sqrt(size)))
    columns = -(-size // rows)
    result = _feistel(positions, rows=rows, columns=columns, key=key)
    outside = np.flatnonzero(result >= size)
    while len(outside):
        left_over = key if isinstance(key, int) else key[outside]
        result[outside] = _feistel(result[outside], rows=rows, columns=columns, key=left_over)
        outside = outside[result[outside] >= size]
    return result


def _feistel(positions: Ids, *, rows: int, columns: int, key: int | U64) -> Ids:
    left, right = np.divmod(positions, columns)
    for number in range(_NUM_ROUNDS):
        if number % 2 == 0:
            left = (left + (hash64(key, number, right) % np.uint64(rows)).astype(np.int64)) % rows
        else:
            right = (
                right + (hash64(key, number, left) % np.uint64(columns)).astype(np.int64)
            ) % columns
    return left * columns + right


class Line(Protocol):
    """Endless sequence of samples."""

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return (epoch, sample id) of positions on the endless line."""


def epoch_length(num_samples: int, *, global_batch_size: int, last_batch: LastBatch) -> int:
    if last_batch == "carry":
        return num_samples
    batches = (
        num_samples // global_batch_size
        if last_batch == "drop"
        else -(-num_samples // global_batch_size)
    )
    return batches * global_batch_size


@dataclass(frozen=True)
class Order:
    """Order of one split's samples. Equal fields give an equal order on every machine."""

    num_samples: int
    key: int
    """Key of the permutations, from the content hash and the seed."""
    shuffle: Shuffle = "full"
    block_size: int = 1024
    window_blocks: int = 16
    length: int | None = None
    """Number of positions in an epoch; None: `num_samples`."""
    first_block: int | None = None
    """Sample at which the first block begins. None: a different sample in every epoch."""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.length == 0:
            problem = "the split has no samples"
            raise UserError("data", problem, "choose another split", code="empty")

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, within = np.divmod(positions, self.length or self.num_samples)
        within %= self.num_samples  # `pad` repeats the first samples
        samples = np.empty_like(within)
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            samples[rows] = self._epoch(within[rows], int(epoch))
        return epochs, samples

    def _epoch(self, within: Ids, epoch: int) -> Ids:
        key = int(hash64(self.key, epoch))
        if self.shuffle == "none":
            return within
        if self.shuffle == "full" or self.num_samples <= self.block_size:
            return permute(within, size=self.num_samples, key=key)
        return self._blockwise(within, key)

    def _blockwise(self, within: Ids, key: int) -> Ids:
        """Permute the complete blocks, and the samples within each window. The last, shorter block
        ends the epoch."""
        num_blocks = self.num_samples // self.block_size
        window_size = self.block_size * self.window_blocks
        whole = num_blocks * self.block_size
        last_window = (whole - 1) // window_size
        samples, windows = within.copy(), within // window_size
        last_size = whole - last_window * window_size
        for rows, size in (
            (np.flatnonzero(windows < last_window), window_size),
            (np.flatnonzero((windows == last_window) & (within < whole)), last_size),
        ):
            starts = windows[rows] * window_size
            inside = permute(within[rows] - starts, size=size, key=hash64(key, 1, windows[rows]))
            slots, offsets = np.divmod(starts + inside, self.block_size)
            blocks = permute(slots, size=num_blocks, key=int(hash64(key, 2)))
            samples[rows] = blocks * self.block_size + offsets
        tail = np.flatnonzero(within >= whole)
        if len(tail):
            samples[tail] = whole + permute(
                within[tail] - whole, size=self.num_samples - whole, key=int(hash64(key, 3))
            )
        first = int(hash64(key, 4)) if self.first_block is None else self.first_block
        return (samples + first % self.num_samples) % self.num_samples


@dataclass(frozen=True)
class Mixture:
    orders: tuple[Order, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.orders) == len(self.weights) > 0, self
        assert min(self.weights) > 0 and sum(self.weights) <= LARGEST_SUM, self.weights

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return (epoch of the sample's source, sample id) of positions on the endless line."""
        sources, places = self.deal(positions)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        first_ids = np.cumsum([0, *(order.num_samples for order in self.orders)])
        for source, order in enumerate(self.orders):
            rows = np.flatnonzero(sources == source)
            epochs[rows], within = order.locate(places[rows])
            samples[rows] = first_ids[source] + within
        return epochs, samples

    def deal(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return the source of each position, and the position in the order of that source."""
        sources, places = np.zeros_like(positions), positions.copy()
        rows = np.arange(len(positions))
        for source in range(len(self.weights) - 1):
            weight, total = self.weights[source], sum(self.weights[source:])
            before = _share(places[rows], weight, total)
            after = _share(places[rows] + 1, weight, total)
            is_here = after > before
            places[rows] = np.where(is_here, before, places[rows] - before)
            rows = rows[~is_here]
            sources[rows] = source + 1
        return sources, places


@dataclass(frozen=True)
class CanonicalStreams:
    """Orders of ranges of samples. Each range fills an equal part of every global batch."""

    orders: tuple[Order, ...]
    global_batch_size: int

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return (epoch of the sample's stream, sample id) of positions on the endless line."""
        part = self.global_batch_size // len(self.orders)
        batches, offsets = np.divmod(positions, self.global_batch_size)
        streams, places = np.divmod(offsets, part)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        first_ids = np.cumsum([0, *(order.num_samples for order in self.orders)])
        for number in np.unique(streams).tolist():
            rows = np.flatnonzero(streams == number)
            epochs[rows], within = self.orders[number].locate(batches[rows] * part + places[rows])
            samples[rows] = first_ids[number] + within
        return epochs, samples


def _share(counts: Ids, weight: int, total: int) -> Ids:
    """Return floor(counts * weight / total) within 64 bits."""
    whole, rest = np.divmod(counts, total)
    share: Ids = whole * weight + rest * weight // total
    return share


def mixture_weights(weights: Sequence[float | None], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return integer weights without a common divisor. If there are no weights, all samples are
    equally frequent."""
    given = [round(1_000_000 * weight) for weight in weights if weight is not None]
    assert len(given) in (0, len(weights)), weights
    wanted = np.array(given or sizes, np.int64)
    reduced = wanted // np.gcd.reduce(wanted)
    if reduced.sum() > LARGEST_SUM:
        shares = " : ".join(map(str, reduced.tolist()))
        problem = f"the ratio of the weights ({shares}) has too many digits"
        raise UserError("data.weight", problem, "use weights with fewer digits", code="bad-value")
    return tuple(reduced.tolist())


@dataclass(frozen=True)
class FoldOrder:
    """Order of a subset of a split. `samples` lists the subset; `of` shuffles indices into
    `samples`."""

    of: Line
    samples: Ids

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, places = self.of.locate(positions)
        return epochs, self.samples[places]


@dataclass(frozen=True)
class AsItComes:
    """Order of a stream: the id of a sample is its position."""

    epoch_size: int

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        return positions // self.epoch_size, positions


@dataclass(frozen=True)
class BatchPlan:
    """The division of a global batch: `accumulation_steps` micro-batches of `local_batch_size` on
    each of `num_ranks` ranks."""

    global_batch_size: int
    local_batch_size: int
    num_ranks: int
    is_connected: bool = False
    """True if the micro-batches of a rank are adjacent in the global batch, as canonical streams
    need. False: micro-batches of the ranks alternate."""

    def __post_init__(self) -> None:
        assert self.global_batch_size % (self.local_batch_size * self.num_ranks) == 0, self

    @property
    def accumulation_steps(self) -> int:
        return self.global_batch_size // (self.local_batch_size * self.num_ranks)

    def positions(self, *, consumed: int, micro_step: int, rank: int) -> Ids:
        """Return the positions of one rank's micro-batch in the global batch that begins after
        `consumed` samples."""
        number = micro_step * self.num_ranks + rank
        if self.is_connected:
            number = rank * self.accumulation_steps + micro_step
        start = consumed + number * self.local_batch_size
        return np.arange(start, start + self.local_batch_size, dtype=np.int64)

    def of_ranks(self, positions: Ids, ranks: range) -> Ids:
        """Select the positions that the neighboring ranks `ranks` read. If `is_connected` is False,
        select all positions, because each shard has samples for each rank."""
        if not self.is_connected:
            return positions
        readers = positions % self.global_batch_size * self.num_ranks // self.global_batch_size
        return positions[(readers >= ranks.start) & (readers < ranks.stop)]

    def sequence(self, *, consumed: int, rank: int) -> Iterator[Ids]:
        for start in itertools.count(consumed, self.global_batch_size):
            for micro_step in range(self.accumulation_steps):
                yield self.positions(consumed=start, micro_step=micro_step, rank=rank)
