"""Archives whose files are lists of records, each an image and its label (CIFAR, MNIST, STL-10).

The archive is a folder of files, or a .tar.gz. A .tar.gz is unpacked once into the work directory,
which the build removes at the end. MD5 sums are checked before a listing opens any file. Every
process parses or memory-maps the files once. The name of an input is its number in its file.
"""

import shutil
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data_prep.archives.guard import (
    SourceError,
    check_md5,
    check_unchanged,
    damaged,
    report_damage,
    stamp_of,
)
from data_prep.archives.gzipped import MAX_BYTES, unpack_members, unpacked_bytes
from data_prep.archives.inventory import Container, Entries, Entry, Outline
from data_prep.images import pgm, ppm
from data_prep.publish import hash_of_json
from data_prep.sources.base import UNLABELLED, Source


@dataclass(frozen=True)
class Batch:
    """The records of one file, in file order."""

    split: str
    pixels: NDArray[np.uint8]
    """Array of shape (records, 3, height, width) for color, (records, height, width) for gray."""
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Records:
    classes: tuple[str, ...]
    batches: dict[str, Batch]
    """Name of the file with the pixels -> its records."""


class RecordSource(Source):
    archives: ClassVar[Mapping[str, str]] = {}
    """Published .tar.gz files and their MD5 sums."""
    sums: ClassVar[Mapping[str, str]] = {}
    """MD5 sums of the unpacked files."""
    max_bytes: ClassVar[int] = MAX_BYTES
    """Largest unpacked size of an archive."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of all required files in `folder`."""

    @abstractmethod
    def load(self) -> Records:
        """Return the records of the files in `folder`."""

    @property
    def folder(self) -> Path:
        """Folder with the files. For a .tar.gz it exists after `outline` has unpacked the
        archive."""
        if self.path.is_dir():
            return self.path
        assert self.work_directory is not None
        identity = [stamp_of([self.path]), self.names()]
        return self.work_directory / f"unpacked-{hash_of_json(identity)[:16]}"

    def files(self) -> list[Path]:
        if self.path.is_dir():
            return [self.path / name for name in self.names()]
        if self.path.is_file() and self.archives:
            return [self.path]
        forms = (" or ".join(self.archives) + ", or its folder") if self.archives else "its folder"
        problem, fix = f"{self.path} does not exist", f"run data_prep fetch, or give {forms}"
        raise SourceError("source.path", problem, fix, code="missing-path")

    def outline(self) -> Outline:
        files = self.files()
        stamp = stamp_of(files)
        if getattr(self.settings, "md5", "off") == "published":
            self.check_sums(files)
        if not self.folder.is_dir():
            self._unpack()
        records = self._records(stamp)
        containers = (
            Container(path=name, split=batch.split, stamp=stamp)
            for name, batch in records.batches.items()
        )
        return Outline(classes=records.classes, containers=tuple(containers))

    def check_sums(self, files: list[Path]) -> None:
        for path in files:
            if path == self.path:
                check_md5(path, self.archives)
            elif path.name in self.sums:
                check_md5(path, self.sums[path.name])

    def entries(self, container: Container) -> Entries:
        labels = self._records(container.stamp).batches[container.path].labels.tolist()
        num_bytes = len(self._image(container, 0))
        rows = [(f"{number:06d}", number, num_bytes) for number in range(len(labels))]
        return Entries.of(rows, label=labels)

    def read(self, entry: Entry) -> bytes:
        check_unchanged(entry.locator, entry.container.stamp, self.files())
        return self._image(entry.container, entry.offset)

    def read_file(self, name: str) -> bytes:
        with report_damage(self.path / name):
            return (self.folder / name).read_bytes()

    def _image(self, container: Container, number: int) -> bytes:
        pixels = self._records(container.stamp).batches[container.path].pixels[number]
        return pgm(pixels) if pixels.ndim == 2 else ppm(pixels.transpose(1, 2, 0))

    def _records(self, stamp: str) -> Records:
        return _loaded(type(self), self.settings, self.work_directory, stamp)

    def _unpack(self) -> None:
        num_bytes, place = unpacked_bytes(self.path), self.folder.parent
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
        if free < num_bytes:
            raise SourceError(
                "source.path",
                f"{self.path} needs {num_bytes:,} bytes in {place}, but only {free:,} are free",
                "free some space, or set source.path to the unpacked folder",
                code="no-space",
            )
        print(f"data_prep: unpacking {self.path} into {place}", file=sys.stderr)
        unpack_members(self.path, self.names(), self.folder, max_bytes=self.max_bytes)


@lru_cache(maxsize=1)
def _loaded(
    kind: type[RecordSource], settings: Any, work_directory: Path | None, stamp: str
) -> Records:
    """Return the records, loaded once per process. A changed archive has another stamp and is
    loaded again."""
    source = kind(settings)
    source.work_directory = work_directory
    records = source.load()
    if stamp_of(source.files()) != stamp:
        problem, fix = f"{source.path} changes during reading", "wait until it is complete"
        raise SourceError("source.path", problem, fix, code="changed")
    num_classes = len(records.classes)
    if not num_classes or len(set(records.classes)) < num_classes:
        raise damaged(source.path, "contains no class names, or one of them twice")
    for name, batch in records.batches.items():
        labels, num_images = batch.labels, len(batch.pixels)
        if num_images != len(labels) or not num_images:
            raise damaged(name, f"has {len(labels):,} labels for {num_images:,} images")
        wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
        if len(wrong) and not (labels == UNLABELLED).all():
            problem = f"has the label {labels[wrong[0]]} in record {wrong[0]}"
            raise damaged(name, f"{problem}, but only {num_classes} classes")
    return records
