"""What every archive layout provides to `build`: a `Source`.

A source is a list of containers (a folder, a tar, a file of records), each of which lists its own
entries, so that listing and reading can both be done by many processes. A source never decides an
order: containers and entries are sorted by `build`. What it holds out for validation is drawn by a
seed and the class's own name, so that it depends on nothing but that class's inputs (and on the
inputs elsewhere that are equal to one of them: equal files are in one split).
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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
NUM_END_BYTES = 4096
Inode = tuple[int, int]
"""Device and number of a file, which its links share."""
_MD5 = (
    "published: a file that is not the published one, to the byte, is refused; off: its structure"
    " alone is checked."
)
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
    """Processes for a source that makes its images first."""
    work_directory: Path | None = None
    """Where a source unpacks an archive, if it has to; the build removes it at the end."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.path = Path(getattr(settings, "path", ""))
        """Of the archive, where it has one."""

    def describe(self) -> dict[str, Any]:
        """What goes into the manifest: the kind and whatever decides the content, but no path of
        this machine."""
        return self.settings.model_dump(mode="json", exclude={"path", "md5"})

    @abstractmethod
    def outline(self) -> Outline:
        """The containers, each path once; raises `SourceError` when the archive is not what it
        should be."""

    @abstractmethod
    def entries(self, container: Container) -> Entries:
        """What `container` holds, in any order; raises `SourceError` when it is damaged."""

    @abstractmethod
    def read(self, entry: Entry) -> bytes:
        """The bytes of one picture file; raises `SourceError` when the archive has changed since it
        was listed."""

    def files(self) -> Sequence[Path]:
        """That hold every container, where its stamp is of all of them."""
        return ()

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:  # noqa: ARG002
        """The files that hold `container` and are not, by size and time of change, as they were
        when it was listed."""
        return changed_since(self.files(), container.stamp)

    def arrange(self, inventory: Inventory) -> Arrangement:
        """The splits, each a sorted array of rows: here, every input into the split of its
        container."""
        return by_container(inventory)

    annotated_split: str | None = None
    """The split of whose samples more is known than a label."""

    def annotations(
        self, locators: Sequence[str], labels: Sequence[int]
    ) -> dict[str, NDArray[np.bool_]]:
        """Such facts, each as a (samples, columns) matrix of bits: folds, several labels. `labels`
        says what each class of the layout is called in the dataset, -1 where it is left out."""
        raise NotImplementedError


def by_container(inventory: Inventory) -> Arrangement:
    names = sorted({container.split for container in inventory.containers})
    numbers = np.array(
        [names.index(container.split) for container in inventory.containers], np.int8
    )
    of_row = numbers[inventory.container_numbers]
    return Arrangement(
        splits={
            name: np.flatnonzero(of_row == number).astype(np.int32)
            for number, name in enumerate(names)
        }
    )


def move_to_val(
    inventory: Inventory,
    arrangement: Arrangement,
    *,
    count: Callable[[int], int],
    seed: int,
    firsts: NDArray[np.int64] | None = None,
) -> Arrangement:
    """Of every class of `train`, `count(images of the class)` become `val`: drawn for each class by
    its own name, whatever the other classes are. Unlabeled images stay in `train`. `firsts`: the
    position in `train` of the first image equal to each image. Only first images are counted and
    drawn, and equal images follow the first one."""
    train = arrangement.splits["train"]
    labels, held = inventory.labels[train], np.zeros(len(train), np.bool_)
    firsts = np.arange(len(train)) if firsts is None else firsts
    drawable = np.flatnonzero((firsts == np.arange(len(train))) & (labels != UNLABELLED))
    counts = np.bincount(labels[drawable], minlength=len(inventory.classes))
    by_class = np.split(
        drawable[np.argsort(labels[drawable], kind="stable")], np.cumsum(counts)[:-1]
    )
    for name, places in zip(
        inventory.classes, by_class, strict=False
    ):  # no class at all is one empty part
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        sequence = np.random.SeedSequence([seed, int.from_bytes(digest[:8], "big")])
        drawn = np.random.Generator(np.random.Philox(sequence)).permutation(places)
        held[drawn[: count(len(places))]] = True
    held = held[firsts]
    splits = arrangement.splits | {"train": train[~held], "val": train[held]}
    return replace(arrangement, splits=splits, num_held_out=int(held.sum()))


def hold_out(
    inventory: Inventory,
    arrangement: Arrangement,
    *,
    share: float,
    seed: int,
    root: Path | None = None,
) -> Arrangement:
    """Move a `share` of each class of `train` to `val` if there is no `val`: at least one image of
    two, none of one. `root`: the folder of the inputs, if they are files. Equal files then stay in
    one split."""
    if "train" not in arrangement.splits or "val" in arrangement.splits or not share:
        return arrangement

    def count(total: int) -> int:
        return max(1, round(total * share)) if total > 1 else 0

    firsts = None if root is None else first_equals(inventory, arrangement.splits["train"], root)
    moved = move_to_val(inventory, arrangement, count=count, seed=seed, firsts=firsts)
    return moved if moved.num_held_out else arrangement


def first_equals(inventory: Inventory, rows: NDArray[np.int32], root: Path) -> NDArray[np.int64]:
    """For each of `rows`, files below `root`, the position of the first row with equal bytes.

    1. Read the ends of all files that share their size.
    2. Read all bytes of files that share their ends, too: of several links only one.
    """
    sizes, firsts = inventory.sizes[rows], np.arange(len(rows))
    _, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    shared = np.flatnonzero((counts[groups] > 1) & (sizes > 0)).tolist()
    paths = [f"{root}/{inventory.entry(row).locator}" for row in rows[shared].tolist()]
    ends = list(_fingerprints(paths, last=NUM_END_BYTES))
    inodes, owners = dict[bytes, set[Inode]](), dict[Inode, str]()
    for path, (inode, end) in zip(paths, ends, strict=True):
        inodes.setdefault(end, set()).add(inode)
        owners.setdefault(inode, path)
    alike = [inode for found in inodes.values() if len(found) > 1 for inode in sorted(found)]
    whole = dict(
        zip(
            alike,
            (digest for _, digest in _fingerprints([owners[inode] for inode in alike])),
            strict=True,
        )
    )
    first_of = dict[bytes | Inode, int]()
    for position, (inode, _) in zip(shared, ends, strict=True):
        firsts[position] = first_of.setdefault(whole.get(inode, inode), position)
    return firsts


def _fingerprints(
    paths: Sequence[str], *, last: int | None = None
) -> Iterator[tuple[Inode, bytes]]:
    """Which file each path is, and a digest of its size and its `last` bytes, or of all. A file
    that cannot be read equals no
    other: the build reports it later. No threads: on a local disk they take five times as long."""
    with progress("comparing files", total=len(paths), unit="files") as line:
        for path in paths:
            try:
                with open(path, "rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
                    if last is not None and status.st_size > last:
                        file.seek(-last, os.SEEK_END)
                    digest = hashlib.blake2b(
                        b"%d " % status.st_size + file.read(), digest_size=16
                    ).digest()
                    yield (status.st_dev, status.st_ino), digest
            except OSError:
                yield (-1, hash(path)), os.fsencode(path)
            line.advance()
