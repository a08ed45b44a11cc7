"""STL-10, binary version: stl10_binary.tar.gz as downloaded, or its folder stl10_binary.

Pixels are stored channel by channel and column by column. Labels count from 1 in the files and from
0 in datasets; the 100,000 images of the split `unlabelled` have -1. The annotation `folds` of
`train` has a column for each of the ten folds of 1,000 images. MD5 sums are of the .tar.gz, or of
the .bin files of the folder. The .tar.gz is unpacked once into the work directory (3.1 GB), which
the build removes at the end.
"""

import shutil
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import (
    SourceError,
    check_md5,
    check_unchanged,
    report_damage,
    stamp_of,
)
from data_prep.archives.gzipped import unpack_members, unpacked_bytes
from data_prep.archives.inventory import Container, Entries, Entry, Outline
from data_prep.images import ppm
from data_prep.publish import hash_of_json
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Md5Policy, Source
from data_prep.sources.records import check_labels

ARCHIVE: Final = "stl10_binary.tar.gz"
MAX_BYTES: Final = 1 << 32
_SIDE: Final = 96
_STRIDE: Final = 3 * _SIDE * _SIDE
_PPM_BYTES: Final = len(b"P6\n96 96\n255\n") + _STRIDE
_LABELS: Final = {"train_X.bin": "train_y.bin", "test_X.bin": "test_y.bin"}
_SPLITS: Final = {"train_X.bin": "train", "test_X.bin": "test", "unlabeled_X.bin": "unlabelled"}
_CLASSES, _FOLDS = "class_names.txt", "fold_indices.txt"
_NUM_FOLDS: Final = 10

STL10_ARCHIVE = "91f7769df0f17e558f3565bffb0c7dfb"
STL10_FILES = {
    "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
    "train_y.bin": "5a34089d4802c674881badbb80307741",
    "unlabeled_X.bin": "5242ba1fed5e4be9e1e742405eb56ca4",
    "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
    "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
}
"""MD5 sums, from torchvision 0.26 (torchvision/datasets/stl10.py)."""


class Stl10Settings(Settings):
    """STL-10, binary version, with its ten folds."""

    kind: Literal["stl10"]
    path: str = Field(examples=["downloads/stl10_binary.tar.gz"])
    """stl10_binary.tar.gz as downloaded, or the folder that it unpacks to."""
    unlabelled: bool = True
    """Whether the 100,000 pictures without labels become the split `unlabelled`."""
    md5: Md5Policy = "published"


class Stl10Source(Source):
    settings: Stl10Settings
    annotated_split = "train"

    def __init__(self, settings: Stl10Settings):
        super().__init__(settings)
        self.splits = {
            name: split for name, split in _SPLITS.items() if settings.unlabelled or name in _LABELS
        }
        self.needed = (*self.splits, *_LABELS.values(), _CLASSES, _FOLDS)

    def outline(self) -> Outline:
        stamp = stamp_of(self.files())
        if self.settings.md5 == "published":
            self._check_sums()
        if not self.path.is_dir():
            self._unpack()
        classes, containers = self._classes(), []
        for name, split in self.splits.items():
            num_bytes = self._num_bytes(name)
            if num_bytes == 0 or num_bytes % _STRIDE:
                raise SourceError(
                    f"source.path: {name} has {num_bytes:,} bytes, which is not a number of"
                    f" pictures of {_STRIDE:,}; download it again"
                )
            containers.append(Container(path=name, split=split, num_bytes=num_bytes, stamp=stamp))
        if len(set(classes)) != len(classes) or not classes:
            raise SourceError(
                f"source.path: {_CLASSES} names no classes, or one twice; download it again"
            )
        self._folds()  # refused now rather than after all pictures are packed
        return Outline(classes=classes, containers=tuple(containers))

    def entries(self, container: Container) -> Entries:
        count = container.num_bytes // _STRIDE
        labels = np.full(count, UNLABELLED)
        if container.path in _LABELS:
            name = _LABELS[container.path]
            stored = np.frombuffer(self._small(name), np.uint8).astype(np.int64)
            check_labels(
                name, stored, num_pictures=count, num_classes=len(self._classes()), first=1
            )
            labels = stored - 1
        return Entries.of(
            [(f"{number:06d}", number, _PPM_BYTES) for number in range(count)],
            label=labels.tolist(),
        )

    def read(self, entry: Entry) -> bytes:
        container = entry.container
        check_unchanged(entry.locator, container.stamp, self.files())
        data = self._read(container.path, entry.offset * _STRIDE, _STRIDE)
        with report_damage(entry.locator):  # cut since that moment
            return ppm(np.frombuffer(data, np.uint8).reshape(3, _SIDE, _SIDE).transpose(2, 1, 0))

    def annotations(
        self,
        locators: Sequence[str],
        labels: Sequence[int],  # noqa: ARG002
    ) -> dict[str, NDArray[np.bool_]]:
        return {"folds": self._folds()[[int(locator.rpartition("/")[2]) for locator in locators]]}

    def _folds(self) -> NDArray[np.bool_]:
        """(training pictures, 10): who belongs to which fold."""
        count = self._num_bytes("train_X.bin") // _STRIDE
        bits = np.zeros((count, _NUM_FOLDS), np.bool_)
        with report_damage(_FOLDS):
            folds = [
                [int(word) for word in line.split()] for line in self._small(_FOLDS).splitlines()
            ]
            if len(folds) != _NUM_FOLDS or not all(folds):
                raise ValueError(f"{len(folds)} lines, {_NUM_FOLDS} folds are published")
            for number, fold in enumerate(folds):
                bits[np.array(fold, np.uint32), number] = True
        return bits

    def _classes(self) -> tuple[str, ...]:
        with report_damage(_CLASSES):
            return tuple(self._small(_CLASSES).decode("ascii").split())

    # ---- the two forms of the archive

    def files(self) -> list[Path]:
        if self.path.is_dir():
            return [self.path / name for name in self.needed]
        if not self.path.is_file():
            raise SourceError(
                f"source.path: {self.path} is not there; give {ARCHIVE} as downloaded, or the"
                " folder that it unpacks to"
            )
        return [self.path]

    def _check_sums(self) -> None:
        for path in self.files():
            md5 = STL10_ARCHIVE if path == self.path else STL10_FILES.get(path.name)
            if md5 is not None:
                _check_once(path, md5, stamp_of([path]))

    @property
    def _folder(self) -> Path:
        """The folder with the files, once `_unpack` has made it."""
        if self.path.is_dir():
            return self.path
        assert self.work_directory is not None
        identity = [stamp_of([self.path]), self.needed, self.settings.md5]
        return self.work_directory / f"unpacked-{hash_of_json(identity)[:16]}"

    def _unpack(self) -> None:
        if self._folder.is_dir():
            return
        num_bytes = unpacked_bytes(self.path)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder.parent).free
        if free < num_bytes:
            raise SourceError(
                "source.path",
                f"{self.path} needs {num_bytes:,} bytes unpacked in {self._folder.parent}, and"
                f" {free:,} are free",
                "free some space, or unpack it elsewhere and give the folder",
                code="no-space",
            )
        print(f"data_prep: unpacking {self.path} into {self._folder}", file=sys.stderr)
        unpack_members(self.path, self.needed, self._folder, max_bytes=MAX_BYTES)

    def _num_bytes(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            raise SourceError(
                "source.path",
                f"{self.path} lacks {name}",
                f"give {ARCHIVE} as downloaded",
                code="missing-path",
            ) from None

    def _read(self, name: str, offset: int, num_bytes: int) -> bytes:
        with report_damage(self.path / name), open(self._folder / name, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(num_bytes) or b""

    def _small(self, name: str) -> bytes:
        return self._read(name, 0, self._num_bytes(name))


@lru_cache(maxsize=16)
def _check_once(path: Path, md5: str, stamp: str) -> None:  # noqa: ARG001 (a changed file is checked anew)
    check_md5(path, md5)
