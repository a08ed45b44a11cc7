"""Elements of parameters in ZeRO's flat shards, as integers that are equal on every rank. Padding
belongs to no segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    """Part of a parameter: `length` elements, from `offset` in the flat tensor and from `start` in
    the parameter."""

    parameter_number: int
    """Position in `model.named_parameters()`."""
    offset: int
    length: int
    start: int = 0


Layout = tuple[tuple[Segment, ...], ...]
"""Segments of one flat tensor by rank. Ranks that hold copies have the same segments."""


def cut_across(parameters: Sequence[Segment], *, shard_size: int, num_ranks: int) -> Layout:
    """Cut the concatenated parameters into equal shards (stages 1 and 2)."""
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
    """Cut every parameter, given as (number, numel), into equal parts (stage 3)."""
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
