"""Positions of parameters in ZeRO's flat shards. Every rank computes the same positions. Padding
belongs to no segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    """`length` elements of a parameter. They begin at `offset` in the flat tensor and at `start` in
    the parameter."""

    parameter_number: int
    """Position in `model.named_parameters()`."""
    offset: int
    length: int
    start: int = 0


Layout = tuple[tuple[Segment, ...], ...]
"""For each rank, the segments of its shard of one flat tensor. Ranks with copies of the same
elements have the same segments."""


def cut_across(parameters: Sequence[Segment], *, shard_size: int, num_ranks: int) -> Layout:
    """Cut the concatenated parameters into equal shards (ZeRO stages 1 and 2)."""
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
    """Cut each parameter into equal parts (ZeRO stage 3). `numels`: pairs (parameter number, number
    of elements)."""
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
