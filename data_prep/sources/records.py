"""Archives that are small enough to be held in memory: a few files of records, each a picture and
its label (CIFAR, MNIST).

Every process decompresses and parses them once, into memory and never onto the disk. The name of an
input is its number in its file of records.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.archives.guard import SourceError, check_unchanged, stamp_of
from data_prep.archives.inventory import Container, Entries, Entry, Outline
from data_prep.images import pgm, ppm
from data_prep.sources.base import Source


@dataclass(frozen=True)
class Batch:
    """One file of records, in file order."""

    split: str
    pixels: NDArray[np.uint8]
    """(records, 3, height, width) in colour, (records, height, width) in grey."""
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Records:
    classes: tuple[str, ...]
    batches: dict[str, Batch]
    """By the name of the file that holds them."""


class RecordSource(Source):
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """All the files that the archive consists of."""

    @abstractmethod
    def load(self) -> Records:
        """The whole archive, checked against its published sums."""

    def outline(self) -> Outline:
        stamp = stamp_of(self.files())
        records = _loaded(type(self), self.settings, stamp)
        containers = (
            Container(path=name, split=batch.split, stamp=stamp)
            for name, batch in records.batches.items()
        )
        return Outline(classes=records.classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        labels = self._batch(container).labels.tolist()
        num_bytes = len(self._picture(container, 0))
        return Entries.of(
            [(f"{number:05d}", number, num_bytes) for number in range(len(labels))], label=labels
        )

    def read(self, entry: Entry) -> bytes:
        check_unchanged(entry.locator, entry.container.stamp, self.files())
        return self._picture(entry.container, entry.offset)

    def _batch(self, container: Container) -> Batch:
        return _loaded(type(self), self.settings, container.stamp).batches[container.path]

    def _picture(self, container: Container, number: int) -> bytes:
        pixels = self._batch(container).pixels[number]
        return pgm(pixels) if pixels.ndim == 2 else ppm(pixels.transpose(1, 2, 0))


@lru_cache(maxsize=1)
def _loaded(kind: type[RecordSource], settings: Any, stamp: str) -> Records:
    """The records of a process; the stamp makes those of a changed archive be loaded anew."""
    source = kind(settings)
    records = source.load()
    if stamp_of(source.files()) != stamp:
        raise SourceError(
            "source.path: the archive changes while it is read; wait until it is complete, then"
            " build again"
        )
    if len(set(records.classes)) < len(records.classes):
        raise SourceError("source.path: a class name occurs twice; download the archive again")
    for name, batch in records.batches.items():
        check_labels(
            name, batch.labels, num_pictures=len(batch.pixels), num_classes=len(records.classes)
        )
    return records


def check_labels(
    name: str, labels: NDArray[np.int64], *, num_pictures: int, num_classes: int, first: int = 0
) -> None:
    """As many labels, in the file `name`, as pictures; and every label one of the classes, which
    are numbered from `first`."""
    if num_pictures != len(labels) or not num_pictures:
        raise SourceError(
            f"source.path: {name} holds {len(labels):,} labels for {num_pictures:,} pictures;"
            " download it again"
        )
    last = first + num_classes - 1
    wrong = np.flatnonzero((labels < first) | (labels > last))
    if len(wrong):
        raise SourceError(
            f"source.path: {name}: record {wrong[0]} has the label {labels[wrong[0]]}, which is not"
            f" one of {first} to {last}; download it again"
        )
