"""The list of a source's inputs in one sorted order, as columns on disk.

    PARTS/inventory/containers.json   classes, containers, hash of the listing, stamp of the files
    PARTS/inventory/*.bin             container and label (int32), offset, size and name_end (int64)
                                      of each input; the names

Columns are memory-mapped, so all workers and tasks read one copy. On disk, an input takes 32 bytes
plus its name. Invariants: containers are sorted, and the entries of a container are sorted by name.
A row number is therefore the same input on every machine. `containers.json` is written last.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.publish import atomic_directory, canonical_json, sealed, unsealed, write_json
from data_prep.settings import printable

HEAD_NAME = "containers.json"
_COLUMNS = {
    "container": "<i4",
    "label": "<i4",
    "offset": "<i8",
    "size": "<i8",
    "name_end": "<i8",
    "names": "u1",
}


class Container(NamedTuple):
    """A part of the source that one call of `Source.entries` lists: a folder, a tar or a file of
    records."""

    path: str
    """Path relative to the source's root. The path of an entry is `path/name`."""
    split: str
    label: int | None = None
    """Label of all entries in the container; None if each entry has its own."""
    offset: int = 0
    num_bytes: int = 0
    """Size of the container's range in a larger file, from `offset`, in bytes, items or row
    groups."""
    stamp: str = ""
    """Size and modification time of the container's file; "" if only a new listing can show
    changes."""


@dataclass(frozen=True)
class Entries:
    """Entries of one container as parallel columns."""

    names: list[str]
    offsets: NDArray[np.int64]
    """Position of each entry for `Source.read`. If the entry is a file, this is its modification
    time in ns."""
    sizes: NDArray[np.int64]
    labels: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[tuple[str, int, int]], *, label: int | Sequence[int]) -> "Entries":
        """Convert (name, offset, size) rows to columns. `label`: one label for all rows, or a label
        for each row."""
        return cls(
            names=[row[0] for row in rows],
            offsets=np.array([row[1] for row in rows], np.int64),
            sizes=np.array([row[2] for row in rows], np.int64),
            labels=np.broadcast_to(np.array(label, np.int32), len(rows)),
        )


class Entry(NamedTuple):
    container: Container
    name: str
    offset: int
    num_bytes: int
    label: int

    @property
    def locator(self) -> str:
        """Path of the input relative to the source's root."""
        return f"{self.container.path}/{self.name}" if self.container.path else self.name

    @property
    def path(self) -> str:
        """`locator` as valid UTF-8 text, for records."""
        return printable(self.locator)


@dataclass(frozen=True)
class Outline:
    classes: tuple[str, ...]
    containers: tuple[Container, ...]
    beside: tuple[tuple[str, str], ...] = ()
    """Name and stamp (size, time) of other files that determine labels, such as annotations."""

    def differs_from(self, other: "Outline") -> set[str]:
        """Return the paths of containers in only one outline, and of files with different
        stamps."""
        paths, others = ({part.path for part in outline.containers} for outline in (self, other))
        return (paths ^ others) | {name for name, _ in set(self.beside) ^ set(other.beside)}


class Inventory:
    """Read access to an inventory. Raises ValueError or OSError for a damaged containers.json."""

    def __init__(self, directory: Path):
        head = unsealed(json.loads((directory / HEAD_NAME).read_text(encoding="utf-8")))
        self.directory, self.digest, self.stamp = directory, str(head["digest"]), str(head["stamp"])
        self.classes: tuple[str, ...] = tuple(head["classes"])
        self.containers = tuple(Container(*fields) for fields in head["containers"])
        self.outline = Outline(
            self.classes, self.containers, tuple((name, stamp) for name, stamp in head["beside"])
        )
        self.files: dict[str, str] = head["files"]
        """Name of each column file -> its sha256."""
        columns = {name: _map(directory / f"{name}.bin", dtype) for name, dtype in _COLUMNS.items()}
        self.container_numbers = columns["container"]
        self.labels, self.sizes = columns["label"], columns["size"]
        self._offsets, self._name_ends = columns["offset"], columns["name_end"]
        self._names = columns["names"]

    def __len__(self) -> int:
        return len(self.labels)

    def entry(self, row: int) -> Entry:
        container = self.containers[self.container_numbers[row]]
        return Entry(
            container,
            self.name(row),
            int(self._offsets[row]),
            int(self.sizes[row]),
            int(self.labels[row]),
        )

    def name(self, row: int) -> str:
        begin = int(self._name_ends[row - 1]) if row else 0
        name = self._names[begin : int(self._name_ends[row])]
        return name.tobytes().decode("utf-8", "surrogateescape")

    def rows_of_container(self, number: int) -> range:
        """Return the row numbers of a container. They are consecutive."""
        first, last = np.searchsorted(self.container_numbers, [number, number + 1])
        return range(int(first), int(last))


@lru_cache(maxsize=2)
def open_inventory(directory: Path, stamp: str) -> Inventory:  # noqa: ARG001 (a new stamp opens the inventory again)
    return Inventory(directory)


def write_inventory(directory: Path, outline: Outline, listed: Iterable[Entries]) -> Inventory:
    """Write and return an inventory. `listed`: entries of each container of the outline."""
    digest = hashlib.sha256(canonical_json(outline.classes))
    stamp = hashlib.sha256(canonical_json(outline.beside))
    hashes = {name: hashlib.sha256() for name in _COLUMNS}
    with atomic_directory(directory) as temporary, ExitStack() as stack:
        files = {
            name: stack.enter_context(open(temporary / f"{name}.bin", "wb")) for name in _COLUMNS
        }
        names_end = 0
        for number, (container, entries) in enumerate(zip(outline.containers, listed, strict=True)):
            columns, names = _sorted_columns(number, entries, names_end)
            contents = {name: column.tobytes() for name, column in columns.items()}
            contents["names"] = b"".join(names)
            for name, data in contents.items():
                files[name].write(data)
                hashes[name].update(data)
            names_end += len(contents["names"])
            digest.update(canonical_json([container.path, container.split, len(names)]))
            digest.update(b"\0".join(names) + contents["label"] + contents["size"])
            stamp.update(container.stamp.encode() + contents["offset"])
        head = {
            "classes": outline.classes,
            "containers": outline.containers,
            "beside": outline.beside,
            "digest": digest.hexdigest(),
            "stamp": stamp.hexdigest(),
            "files": {f"{name}.bin": each.hexdigest() for name, each in hashes.items()},
        }
        write_json(temporary / HEAD_NAME, sealed(head))
    return Inventory(directory)


def _sorted_columns(
    number: int, entries: Entries, names_end: int
) -> tuple[dict[str, NDArray[Any]], list[bytes]]:
    order = sorted(range(len(entries.names)), key=entries.names.__getitem__)
    names = [entries.names[row].encode("utf-8", "surrogateescape") for row in order]
    columns = {
        "container": np.full(len(order), number),
        "label": entries.labels[order],
        "offset": entries.offsets[order],
        "size": entries.sizes[order],
        "name_end": names_end + np.cumsum([len(name) for name in names], dtype=np.int64),
    }
    return {name: column.astype(_COLUMNS[name]) for name, column in columns.items()}, names


def _map(path: Path, dtype: str) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))  # indexing a memmap is slow
