"""What every archive layout provides to `build`.

A source is a list of containers (a folder, a tar, a file of records), each of which lists its own entries, so that listing and
reading can both be done by many processes. A source never decides an order: containers and entries are sorted by `build`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.settings import UserError
from data_prep.sources.inventory import Container, Entries, Entry, Inventory, Layout

UNLABELLED = -1


class SourceError(UserError):
    """An archive that is not there or not in its published layout; the text names the place and the remedy."""


@dataclass(frozen=True)
class Arrangement:
    """Which rows of the inventory make up each split, and which classes stay."""

    splits: dict[str, NDArray[np.int32]]
    labels: tuple[int, ...] | None = None
    """The classes that stay, by their label in the layout; None keeps all."""
    left_out: dict[str, int] | None = None
    """How many inputs were left out, by reason."""


class Source(ABC):
    """Picklable: every worker process of a build reads through its own copy."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What goes into the manifest: the kind and whatever decides the content, but no path of this machine."""

    @abstractmethod
    def layout(self) -> Layout:
        """The containers, each path once; raises `SourceError` when the archive is not what it should be."""

    @abstractmethod
    def entries(self, container: Container) -> Entries:
        """What `container` holds, in any order; raises `SourceError` when it is damaged."""

    @abstractmethod
    def read(self, entry: Entry) -> bytes:
        """The bytes of one picture file; raises `SourceError` when the archive has changed since it was listed."""

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:  # noqa: ARG002
        """The files that hold `container` and are not, by size and time of change, as they were when it was listed."""
        return []

    def arrange(self, inventory: Inventory) -> Arrangement:
        """The splits, each a sorted array of rows: here, every input into the split of its container."""
        return by_container(inventory)

    def annotated_splits(self) -> tuple[str, ...]:
        """The splits of whose samples more is known than a label."""
        return ()

    def annotations(self, split: str, locators: Sequence[str], labels: Sequence[int]) -> dict[str, NDArray[np.bool_]]:
        """Such facts, each as a (samples, columns) matrix of bits: folds, several labels. `labels` says what each class of the
        layout is called in the dataset, -1 where it is left out."""
        raise NotImplementedError


def by_container(inventory: Inventory) -> Arrangement:
    names = sorted({container.split for container in inventory.containers})
    numbers = np.array([names.index(container.split) for container in inventory.containers], np.int8)
    of_row = numbers[inventory.container_numbers]
    return Arrangement(
        splits={name: np.flatnonzero(of_row == number).astype(np.int32) for number, name in enumerate(names)}
    )


def check_size(entry: Entry, data: bytes) -> bytes:
    """`data`, if it has the size that was listed."""
    if len(data) != entry.num_bytes:
        raise SourceError(
            f"{entry.locator}: {len(data):,} bytes, {entry.num_bytes:,} when it was listed; the source changes while it is "
            "read: wait until it is complete, remove the unfinished dataset and build again"
        )
    return data
