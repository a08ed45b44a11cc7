"""What every archive layout provides to `build`: a `Source`.

A source is a list of containers (a folder, a tar, a file of records), each of which lists its own entries, so that listing and
reading can both be done by many processes. A source never decides an order: containers and entries are sorted by `build`. What it
holds out for validation is drawn by a seed and the class's own name, so that it depends on nothing but that class's inputs (and
on the inputs elsewhere that are equal to one of them: equal files are in one split).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import changed_since
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.progress import progress
from data_prep.settings import Settings

UNLABELLED = -1
NUM_READERS, NUM_AT_ONCE = 8, 1024
"""Threads that compare files, and files that wait for them."""
_MD5 = "published: a file that is not the published one, to the byte, is refused; off: its structure alone is checked."
Md5Policy = Annotated[Literal["published", "off"], Field(description=_MD5)]


@dataclass(frozen=True)
class Arrangement:
    """Which rows of the inventory make up each split, and which classes stay."""

    splits: dict[str, NDArray[np.int32]]
    labels: tuple[int, ...] | None = None
    """The classes that stay, by their label in the layout; None keeps all."""
    left_out: dict[str, int] | None = None
    """How many inputs were left out, by reason."""
    num_held_out: int = 0
    """How many of the archive's `train` are `val` here."""


class Source(ABC):
    """Picklable: every worker process of a build reads through its own copy."""

    settings: Settings
    num_workers = 1
    """Processes that a source may use which has to make its pictures first."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.path = Path(getattr(settings, "path", ""))
        """Of the archive, where it has one."""

    def describe(self) -> dict[str, Any]:
        """What goes into the manifest: the kind and whatever decides the content, but no path of this machine."""
        return self.settings.model_dump(mode="json", exclude={"path", "md5"})

    @abstractmethod
    def outline(self) -> Outline:
        """The containers, each path once; raises `SourceError` when the archive is not what it should be."""

    @abstractmethod
    def entries(self, container: Container) -> Entries:
        """What `container` holds, in any order; raises `SourceError` when it is damaged."""

    @abstractmethod
    def read(self, entry: Entry) -> bytes:
        """The bytes of one picture file; raises `SourceError` when the archive has changed since it was listed."""

    def files(self) -> Sequence[Path]:
        """That hold every container, where its stamp is of all of them."""
        return ()

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:  # noqa: ARG002
        """The files that hold `container` and are not, by size and time of change, as they were when it was listed."""
        return changed_since(self.files(), container.stamp)

    def arrange(self, inventory: Inventory) -> Arrangement:
        """The splits, each a sorted array of rows: here, every input into the split of its container."""
        return by_container(inventory)

    annotated_split: str | None = None
    """The split of whose samples more is known than a label."""

    def annotations(self, locators: Sequence[str], labels: Sequence[int]) -> dict[str, NDArray[np.bool_]]:
        """Such facts, each as a (samples, columns) matrix of bits: folds, several labels. `labels` says what each class of the
        layout is called in the dataset, -1 where it is left out."""
        raise NotImplementedError


def by_container(inventory: Inventory) -> Arrangement:
    names = sorted({container.split for container in inventory.containers})
    numbers = np.array([names.index(container.split) for container in inventory.containers], np.int8)
    of_row = numbers[inventory.container_numbers]
    return Arrangement(splits={name: np.flatnonzero(of_row == number).astype(np.int32) for number, name in enumerate(names)})


def move_to_val(
    inventory: Inventory,
    arrangement: Arrangement,
    *,
    count: Callable[[int], int],
    seed: int,
    firsts: NDArray[np.int64] | None = None,
) -> Arrangement:
    """Of every class of `train`, `count(images of the class)` become `val`: drawn for each class by its own name, whatever the
    other classes are. `firsts`: the position in `train` of the first image equal to each image. Only first images are counted and
    drawn, and equal images follow the first one."""
    train = arrangement.splits["train"]
    firsts = np.arange(len(train)) if firsts is None else firsts
    drawable = np.flatnonzero(firsts == np.arange(len(train)))
    labels, held = inventory.labels[train[drawable]], np.zeros(len(train), np.bool_)
    by_class = np.split(drawable[np.argsort(labels, kind="stable")], np.cumsum(np.bincount(labels))[:-1])
    for label, places in enumerate(by_class):
        digest = hashlib.sha256(inventory.classes[label].encode("utf-8", "surrogateescape")).digest()
        sequence = np.random.SeedSequence([seed, int.from_bytes(digest[:8], "big")])
        drawn = np.random.Generator(np.random.Philox(sequence)).permutation(places)
        held[drawn[: count(len(places))]] = True
    held = held[firsts]
    splits = arrangement.splits | {"train": train[~held], "val": train[held]}
    return replace(arrangement, splits=splits, num_held_out=int(held.sum()))


def hold_out(
    inventory: Inventory, arrangement: Arrangement, *, share: float, seed: int, read: Callable[[Entry], bytes] | None = None
) -> Arrangement:
    """Move a `share` of each class of `train` to `val` if there is no `val`: at least one image of two, none of one. `read`
    returns the bytes of an input, if sizes are listed: equal files then stay in one split."""
    if "train" not in arrangement.splits or "val" in arrangement.splits or not share:
        return arrangement

    def count(total: int) -> int:
        return max(1, round(total * share)) if total > 1 else 0

    firsts = None if read is None else first_equals(inventory, arrangement.splits["train"], read)
    moved = move_to_val(inventory, arrangement, count=count, seed=seed, firsts=firsts)
    return moved if moved.num_held_out else arrangement


def first_equals(inventory: Inventory, rows: NDArray[np.int32], read: Callable[[Entry], bytes]) -> NDArray[np.int64]:
    """For each of `rows` the position of the first row with equal bytes. Only files that share their size are read."""
    sizes, firsts = inventory.sizes[rows], np.arange(len(rows))
    _, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    shared = np.flatnonzero((counts[groups] > 1) & (sizes > 0))

    def digest(position: int) -> bytes:
        return hashlib.blake2b(read(inventory.entry(int(rows[position]))), digest_size=16).digest()

    first_of = dict[bytes, int]()
    with (
        ThreadPoolExecutor(NUM_READERS) as pool,
        progress("comparing files of equal size", total=len(shared), unit="files") as line,
    ):
        for start in range(0, len(shared), NUM_AT_ONCE):
            positions = shared[start : start + NUM_AT_ONCE].tolist()
            for position, key in zip(positions, pool.map(digest, positions), strict=True):
                firsts[position] = first_of.setdefault(key, position)
            line.advance(len(positions))
    return firsts
