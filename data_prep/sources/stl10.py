"""STL-10, binary version: stl10_binary.tar.gz as downloaded, or its folder stl10_binary.

Pixels are stored channel by channel and column by column. Labels begin at 1 in the files and at 0
in datasets; the 100,000 images of the split `unlabeled` have the label -1. The annotation `folds`
of `train` has a column for each of the ten folds of 1,000 images.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import report_damage
from data_prep.catalog import CATALOG
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Md5Policy
from data_prep.sources.records import Batch, Records, RecordSource

_SIDE = 96
_STRIDE = 3 * _SIDE * _SIDE
_SPLITS = {"train_X.bin": "train", "test_X.bin": "test", "unlabeled_X.bin": "unlabeled"}
_LABELS = {"train_X.bin": "train_y.bin", "test_X.bin": "test_y.bin"}
_CLASSES, _FOLDS = "class_names.txt", "fold_indices.txt"
_NUM_FOLDS = 10

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
    unlabeled: bool = True
    """Add the 100,000 images without labels as the split `unlabeled`."""
    md5: Md5Policy = "published"


class Stl10Source(RecordSource, of=Stl10Settings):
    settings: Stl10Settings
    archives: ClassVar = CATALOG["stl10"].files
    sums: ClassVar = STL10_FILES
    annotated_split = "train"
    max_bytes = 1 << 32  # it unpacks to 3.1 GB

    def names(self) -> tuple[str, ...]:
        return (*self._splits(), *_LABELS.values(), _CLASSES, _FOLDS)

    def load(self) -> Records:
        with report_damage(self.path / _CLASSES):
            classes = tuple(self.read_file(_CLASSES).decode("ascii").split())
        batches = {}
        for name, split in self._splits().items():
            with report_damage(self.path / name):
                num_images, rest = divmod((self.folder / name).stat().st_size, _STRIDE)
                if rest or not num_images:
                    raise ValueError(
                        f"the size is no multiple of {_STRIDE:,} bytes, the size of an image"
                    )
                shape = (num_images, 3, _SIDE, _SIDE)
                pixels = np.memmap(self.folder / name, np.uint8, mode="r", shape=shape)
            labels = np.full(num_images, UNLABELLED)
            if name in _LABELS:
                labels = np.frombuffer(self.read_file(_LABELS[name]), np.uint8).astype(np.int64) - 1
            batches[name] = Batch(split, pixels.transpose(0, 1, 3, 2), labels)
        self._folds()  # its faults are reported before any image is packed
        return Records(classes, batches)

    def annotations(
        self,
        locators: Sequence[str],
        labels: Sequence[int],  # noqa: ARG002
    ) -> dict[str, NDArray[np.bool_]]:
        return {"folds": self._folds()[[int(locator.rpartition("/")[2]) for locator in locators]]}

    def _splits(self) -> dict[str, str]:
        return {
            name: split
            for name, split in _SPLITS.items()
            if self.settings.unlabeled or name in _LABELS
        }

    def _folds(self) -> NDArray[np.bool_]:
        """Return a matrix (training images, 10) that is True if the image belongs to the fold."""
        bits = np.zeros(((self.folder / "train_X.bin").stat().st_size // _STRIDE, _NUM_FOLDS), bool)
        with report_damage(_FOLDS):
            lines = self.read_file(_FOLDS).splitlines()
            folds = [[int(word) for word in line.split()] for line in lines]
            if len(folds) != _NUM_FOLDS or not all(folds):
                raise ValueError(f"{len(folds)} lines, but {_NUM_FOLDS} folds are published")
            for number, fold in enumerate(folds):
                bits[np.array(fold, np.uint32), number] = True
        return bits
