"""Every input of an archive, in one sorted order, as columns on disk.

    PARTS/inventory/containers.json   classes and containers; the digest of what is listed; the stamp: what changes with the files
    PARTS/inventory/*.bin             container, label (int32), offset, size, name_end (int64) of each input; the names

Columns are memory-mapped: a listing of 14 million images costs 28 bytes an image and its name, on
disk, and every worker and array task reads the one copy. Invariants: containers are sorted, entries
are sorted by name within their container, so that a row number names the same input on every
machine; `containers.json` is written last.
"""  # noqa: E501 (a table)

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
    """A part of the archive that is listed as a unit."""

    path: str
    """Relative to the source's root; entries are found again as `path/name`."""
    split: str
    label: int | None = None
    """The label of all its entries, where one is known before they are listed."""
    offset: int = 0
    num_bytes: int = 0
    """Where it lies, when it is a part of a larger file."""
    stamp: str = ""
    """Changes when the container does (size and time of its file); empty where only listing it can
    show that."""


@dataclass(frozen=True)
class Entries:
    """What one container holds, as columns."""

    names: list[str]
    offsets: NDArray[np.int64]
    """Where an entry lies: whatever number the source's `read` wants to have back."""
    sizes: NDArray[np.int64]
    labels: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[tuple[str, int, int]], *, label: int | Sequence[int]) -> "Entries":
        """From (name, offset, size) rows, with one label for all or one for each."""
        labels = (
            np.full(len(rows), label, np.int32)
            if isinstance(label, int)
            else np.array(label, np.int32)
        )
        return cls(
            names=[row[0] for row in rows],
            offsets=np.array([row[1] for row in rows], np.int64),
            sizes=np.array([row[2] for row in rows], np.int64),
            labels=labels,
        )


class Entry(NamedTuple):
    """One input, as `read` gets it."""

    container: Container
    name: str
    offset: int
    num_bytes: int
    label: int

    @property
    def locator(self) -> str:
        """Where it is found again."""
        return f"{self.container.path}/{self.name}" if self.container.path else self.name

    @property
    def path(self) -> str:
        """What it is called in records."""
        return printable(self.locator)


@dataclass(frozen=True)
class Outline:
    """Of an archive: its classes and its containers."""

    classes: tuple[str, ...]
    containers: tuple[Container, ...]
    beside: tuple[tuple[str, str], ...] = ()
    """Name and stamp of the files that say what entries are (labels, annotations), where no
    container's stamp is of them, too."""

    def differs_from(self, other: "Outline") -> set[str]:
        """What only one of them has, or has so."""
        paths, others = ({part.path for part in outline.containers} for outline in (self, other))
        return (paths ^ others) | {name for name, _ in set(self.beside) ^ set(other.beside)}


class Inventory:
    """Read access to an inventory that `write_inventory` has made. ValueError or OSError if its
    head is damaged."""

    def __init__(self, directory: Path):
        head = unsealed(json.loads((directory / HEAD_NAME).read_text(encoding="utf-8")))
        self.directory, self.digest, self.stamp = directory, str(head["digest"]), str(head["stamp"])
        self.classes: tuple[str, ...] = tuple(head["classes"])
        self.containers = tuple(Container(*fields) for fields in head["containers"])
        self.outline = Outline(
            self.classes, self.containers, tuple((name, stamp) for name, stamp in head["beside"])
        )
        self.files: dict[str, str] = head["files"]
        """Name of a column's file -> its sha256."""
        columns = {name: _map(directory / f"{name}.bin", dtype) for name, dtype in _COLUMNS.items()}
        self.container_numbers, self.labels, self.sizes = (
            columns["container"],
            columns["label"],
            columns["size"],
        )
        self._offsets, self._name_ends, self._names = (
            columns["offset"],
            columns["name_end"],
            columns["names"],
        )

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
        return (
            self._names[begin : int(self._name_ends[row])]
            .tobytes()
            .decode("utf-8", "surrogateescape")
        )

    def rows_of_container(self, number: int) -> range:
        """Rows of a container are consecutive."""
        first, last = np.searchsorted(self.container_numbers, [number, number + 1])
        return range(int(first), int(last))


@lru_cache(maxsize=2)
def open_inventory(directory: Path, stamp: str) -> Inventory:  # noqa: ARG001 (another stamp is another inventory)
    """One copy for each worker process; its columns are shared with all others by the page
    cache."""
    return Inventory(directory)


def write_inventory(directory: Path, outline: Outline, listed: Iterable[Entries]) -> Inventory:
    """Spills what the containers of `outline` list, in their order, into `directory`."""
    with atomic_directory(directory) as temporary:
        digest, stamp = (
            hashlib.sha256(canonical_json(outline.classes)),
            hashlib.sha256(canonical_json(outline.beside)),
        )
        names_end = 0
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(open(temporary / f"{name}.bin", "wb"))
                for name in _COLUMNS
            }
            of_files = {name: hashlib.sha256() for name in _COLUMNS}
            for number, (container, entries) in enumerate(
                zip(outline.containers, listed, strict=True)
            ):
                columns, names = _sorted_columns(number, entries, names_end)
                contents = {name: column.tobytes() for name, column in columns.items()} | {
                    "names": b"".join(names)
                }
                for name, data in contents.items():
                    files[name].write(data)
                    of_files[name].update(data)
                names_end += sum(map(len, names))
                digest.update(
                    canonical_json([container.path, container.split, len(names)])
                    + b"\0".join(names)
                )
                digest.update(columns["label"].tobytes() + columns["size"].tobytes())
                stamp.update(container.stamp.encode() + columns["offset"].tobytes())
        files_sha256 = {f"{name}.bin": each.hexdigest() for name, each in of_files.items()}
        hashes = {"digest": digest.hexdigest(), "stamp": stamp.hexdigest(), "files": files_sha256}
        head = {
            "classes": outline.classes,
            "containers": outline.containers,
            "beside": outline.beside,
            **hashes,
        }
        write_json(temporary / HEAD_NAME, sealed(head))
    return Inventory(directory)


def _sorted_columns(
    number: int, entries: Entries, names_end: int
) -> tuple[dict[str, NDArray[Any]], list[bytes]]:
    """The columns of one container, its entries sorted by name, and the names."""
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
    return np.asarray(np.memmap(path, dtype, mode="r"))  # a memmap's own indexing is slow
