"""Which elements of which parameter a flat tensor holds: ZeRO's optimizers step 1-D shards, not
parameters.

Pure integers, the same computation on every rank. Padding belongs to no segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    """`length` elements of the flat tensor from `offset` on are those of the flattened parameter
    from `start` on."""

    parameter_number: int
    """In the order of `model.named_parameters()`."""
    offset: int
    length: int
    start: int = 0


Layout = tuple[tuple[Segment, ...], ...]
"""The segments of one flat tensor by rank. Where ranks hold copies instead of shards, all have the
same."""


def cut_across(parameters: Sequence[Segment], *, shard_size: int, num_ranks: int) -> Layout:
    """Stages 1 and 2: whole parameters in one row, which is cut into equal shards wherever the cut
    falls."""
    return tuple(
        tuple(
            Segment(each.parameter_number, low - rank * shard_size, high - low, low - each.offset)
            for each in parameters
            if (low := max(each.offset, rank * shard_size))
            < (high := min(each.offset + each.length, (rank + 1) * shard_size))
        )
        for rank in range(num_ranks)
    )


def cut_each(numels: Sequence[tuple[int, int]], *, num_ranks: int) -> Layout:
    """Stage 3: every parameter, given as (number, numel), is cut into equal parts, and a shard is a
    part of each."""
    parts = [-(-numel // num_ranks) for _, numel in numels]
    offsets = [0, *accumulate(parts)]
    return tuple(
        tuple(
            Segment(number, offset, min(part, numel - rank * part), rank * part)
            for (number, numel), part, offset in zip(numels, parts, offsets, strict=False)
            if rank * part < numel
        )
        for rank in range(num_ranks)
    )
