"""What every archive layout provides to `build`."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from data_prep.settings import UserError


class SourceError(UserError):
    """An archive that is not there or not in its published layout; the text names the place and the remedy."""


class Item(NamedTuple):
    locator: str
    """Where the source finds these bytes again, relative to its root; it also names the input in rejected.jsonl."""
    label: int
    num_bytes: int


@dataclass(frozen=True)
class Listing:
    """All inputs of an archive, in one sorted order per split."""

    classes: tuple[str, ...]
    splits: dict[str, tuple[Item, ...]]


class Source(Protocol):
    """Picklable: every worker process of a build reads through its own copy."""

    def describe(self) -> dict[str, Any]:
        """What goes into the manifest: the kind and whatever decides the content, but no path of this machine."""

    def listing(self) -> Listing:
        """Raises `SourceError` when the layout is not what it should be."""

    def read(self, locator: str) -> bytes: ...
