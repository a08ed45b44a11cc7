"""The interface of an archive layout: a `Source`.

A source is a list of containers (a folder, a tar, a file of records). Processes list different
containers in parallel. `build` sorts containers and entries. Images for validation are drawn with a
seed and the name of their class. The choice depends only on the inputs of that class, and on equal
inputs in other classes.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import changed_since
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.progress import ProgressLine
from data_prep.settings import Settings

UNLABELLED = -1
NUM_END_BYTES = 4096
Inode = tuple[int, int]
"""Device and inode number of a file. They are the same for all hard links to the file."""
_MD5 = "published: compare files with their published MD5. off: check only their structure."
Md5Policy = Annotated[Literal["published", "off"], Field(description=_MD5)]


@dataclass(frozen=True)
class Arrangement:
    """Row numbers of the inventory in each split, and the classes to keep."""

    splits: dict[str, NDArray[np.int32]]
    labels: tuple[int, ...] | None = None
    """Numbers of the classes to keep; None: all."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of skipped inputs, by reason."""
    num_held_out: int = 0
    """Number of images of `train` that became `val`."""


class Source(ABC):
    """Reader of one archive layout. Picklable: every worker process of a build reads through its
    own copy."""

    by_settings: ClassVar[dict[type[Settings], type["Source"]]] = {}
    """Subclass for each settings section."""
    settings: Settings
    num_workers = 1
    """Number of processes for a source that generates its images."""
    work_directory: Path | None = None
    """Folder for unpacked archives; the build removes it at the end."""
    annotated_split: str | None = None
    """Split whose samples have annotations (`annotations`) in addition to labels."""

    def __init_subclass__(cls, *, of: type[Settings] | None = None) -> None:
        """Register a layout. `of`: its settings section; None for a shared base class."""
        if of is not None:
            cls.by_settings[of] = cls

    def __init__(self, settings: Any):
        self.settings = settings
        self.path = Path(getattr(settings, "path", ""))

    def describe(self) -> dict[str, Any]:
        """Return the `source` section of the manifest: settings that determine the content, without
        paths."""
        return self.settings.model_dump(mode="json", exclude={"path", "md5"})

    @abstractmethod
    def outline(self) -> Outline:
        """Return the classes and the containers (folders, tars or files), each path once. Raise
        SourceError if the source is not valid."""

    @abstractmethod
    def entries(self, container: Container) -> Entries:
        """Return the entries of a container in any order. Raise SourceError if the container is
        damaged."""

    @abstractmethod
    def read(self, entry: Entry) -> bytes:
        """Return the bytes of one image; raise SourceError if the archive has changed."""

    def files(self) -> Sequence[Path]:
        """Return the files of the source if all containers share one stamp, else ()."""
        return ()

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:  # noqa: ARG002
        """Return the files of a container that have changed since they were listed."""
        return changed_since(self.files(), container.stamp)

    def arrange(self, inventory: Inventory) -> Arrangement:
        """Return sorted row numbers of each split. Default: a container determines the split of its
        entries."""
        return by_container(inventory)

    def annotations(
        self, locators: Sequence[str], labels: Sequence[int]
    ) -> dict[str, NDArray[np.bool_]]:
        """Return boolean matrices (samples, columns) by name, such as folds. `labels`: for each
        class of the archive, its label in the dataset, or -1 for a skipped class."""
        raise NotImplementedError


def by_container(inventory: Inventory) -> Arrangement:
    names = sorted({container.split for container in inventory.containers})
    numbers = np.array([names.index(part.split) for part in inventory.containers], np.int8)
    of_row = numbers[inventory.container_numbers]
    rows = {name: np.flatnonzero(of_row == number) for number, name in enumerate(names)}
    return Arrangement(splits={name: found.astype(np.int32) for name, found in rows.items()})


def move_to_val(
    inventory: Inventory,
    arrangement: Arrangement,
    *,
    seed: int,
    share: float = 0,
    per_class: int = 0,
    firsts: NDArray[np.int64] | None = None,
) -> Arrangement:
    """Move a number of images, or a fraction, of every class from `train` to `val`. A fraction
    takes at least one image of a class with two or more, and none of a class with one. Unlabeled
    images stay in `train`. `firsts`: for each image, the position in `train` of the first
    byte-equal image. Only first images are counted and drawn; their copies follow them."""
    train = arrangement.splits["train"]
    labels, held = inventory.labels[train], np.zeros(len(train), np.bool_)
    firsts = np.arange(len(train)) if firsts is None else firsts
    drawable = np.flatnonzero((firsts == np.arange(len(train))) & (labels != UNLABELLED))
    counts = np.bincount(labels[drawable], minlength=len(inventory.classes))
    in_order = drawable[np.argsort(labels[drawable], kind="stable")]
    by_class = np.split(in_order, np.cumsum(counts)[:-1])
    for name, places in zip(
        inventory.classes, by_class, strict=False
    ):  # without classes, `by_class` has one empty part
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        sequence = np.random.SeedSequence([seed, int.from_bytes(digest[:8], "big")])
        drawn = np.random.Generator(np.random.Philox(sequence)).permutation(places)
        of_share = max(1, round(len(places) * share)) if share and len(places) > 1 else 0
        held[drawn[: per_class or of_share]] = True
    held = held[firsts]
    splits = arrangement.splits | {"train": train[~held], "val": train[held]}
    return replace(arrangement, splits=splits, num_held_out=int(held.sum()))


def hold_out(
    inventory: Inventory,
    arrangement: Arrangement,
    *,
    seed: int,
    share: float = 0,
    per_class: int = 0,
    root: Path | None = None,
) -> Arrangement:
    """Move a number or a fraction of the images of each class from `train` to `val` if there is no
    `val`. `root`: folder of the inputs, if they are files. Byte-equal files then stay in one
    split."""
    if "train" not in arrangement.splits or "val" in arrangement.splits:
        return arrangement
    if not share and not per_class:
        return arrangement
    firsts = None if root is None else first_equals(inventory, arrangement.splits["train"], root)
    moved = move_to_val(
        inventory, arrangement, seed=seed, share=share, per_class=per_class, firsts=firsts
    )
    return moved if moved.num_held_out else arrangement


def first_equals(inventory: Inventory, rows: NDArray[np.int32], root: Path) -> NDArray[np.int64]:
    """Return, for each of `rows`, the position of the first row whose file has the same bytes.
    Files are below `root`.

    1. Read the last bytes of all files of equal size.
    2. Read files completely if their last bytes are equal, too. Links to one file are read once.
    """
    sizes, firsts = inventory.sizes[rows], np.arange(len(rows))
    _, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    shared = np.flatnonzero((counts[groups] > 1) & (sizes > 0)).tolist()
    paths = [f"{root}/{inventory.entry(row).locator}" for row in rows[shared].tolist()]
    ends = list(_fingerprints(paths, last=NUM_END_BYTES))
    owners = dict[bytes, dict[Inode, str]]()
    for path, (inode, end) in zip(paths, ends, strict=True):
        owners.setdefault(end, {}).setdefault(inode, path)
    alike = {
        inode: path for found in owners.values() if len(found) > 1 for inode, path in found.items()
    }
    digests = (digest for _, digest in _fingerprints(list(alike.values())))
    complete = dict(zip(alike, digests, strict=True))
    first_of = dict[bytes | Inode, int]()
    for position, (inode, _) in zip(shared, ends, strict=True):
        firsts[position] = first_of.setdefault(complete.get(inode, inode), position)
    return firsts


def _fingerprints(
    paths: Sequence[str], *, last: int | None = None
) -> Iterator[tuple[Inode, bytes]]:
    """Yield the inode of each path, and a digest of its size and its last bytes, or of all bytes.
    An unreadable file equals no other file: the build reports it later. Threads are not used,
    because on a local disk they take five times as long."""
    with ProgressLine("comparing files", total=len(paths), unit="files") as line:
        for path in paths:
            try:
                with open(path, "rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
                    if last is not None and status.st_size > last:
                        file.seek(-last, os.SEEK_END)
                    content = b"%d " % status.st_size + file.read()
                    digest = hashlib.blake2b(content, digest_size=16).digest()
                    yield (status.st_dev, status.st_ino), digest
            except OSError:
                yield (-1, hash(path)), os.fsencode(path)
            line.advance()
