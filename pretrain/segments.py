"""Which stretch of a flat tensor belongs to which parameter: what ZeRO's shards are made of. Plain data, no torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Entries `offset` to `offset + length` of a flat tensor are a part of one parameter, or all of it."""

    parameter_number: int
    """The same on every rank."""
    offset: int
    length: int
