"""MNIST and datasets in its layout: a folder of four idx files, compressed as downloaded or not.

Gray images stay gray in shards (PGM); decoding makes them RGB. MD5 sums are known for the unpacked
files of MNIST and Fashion-MNIST, and for the .gz files of KMNIST, but not for EMNIST.
"""

import gzip
import hashlib
import math
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import SourceError, report_damage, wrong_sum
from data_prep.settings import Settings
from data_prep.sources.base import Md5Policy
from data_prep.sources.records import Batch, Records, RecordSource

_UINT8 = 0x08
_STEMS = {"train": ("train",), "test": ("t10k", "test")}
"""Prefixes of file names, by split. EMNIST uses `test`."""

_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
}

MNIST_FILES = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "kmnist": {
        "train-images-idx3-ubyte.gz": "bdb82020997e1d708af4cf47b453dcf7",
        "train-labels-idx1-ubyte.gz": "e144d726b3acfaa3e44228e80efcd344",
        "t10k-images-idx3-ubyte.gz": "5c965bf0a639b31b8f53240b1b52f4d7",
        "t10k-labels-idx1-ubyte.gz": "7320c461ea6c1c855c0b718fb2a4b134",
    },
}
"""Files and their MD5 sums: KMNIST's from torchvision 0.26 (torchvision/datasets/mnist.py), the
others computed from the content of the published .gz files."""


class MnistSettings(Settings):
    """MNIST or a dataset in its layout: a folder of four idx files, .gz or not."""

    kind: Literal["mnist"]
    path: str = Field(examples=["downloads/mnist"])
    """Folder of the four files."""
    variant: Literal["mnist", "fashion", "kmnist", "other"] = "mnist"
    """Dataset in the folder. It determines MD5 sums and class names. other: both are unknown, as
    for EMNIST."""
    prefix: str = Field("", pattern="^[a-z-]*$")
    """Prefix of all file names, such as emnist-letters-."""
    transposed: bool = False
    """Swap rows and columns of the images, for EMNIST."""
    class_names: tuple[str, ...] | None = Field(None, examples=[["zero", "one"]])
    """Class names. Default: the names of the `variant`, or numbers if variant=other."""
    md5: Md5Policy = "published"


class MnistSource(RecordSource, of=MnistSettings):
    settings: MnistSettings

    def names(self) -> tuple[str, ...]:
        return tuple(name for pair in self._pairs().values() for name in pair)

    def load(self) -> Records:
        batches, turn = {}, (0, 2, 1) if self.settings.transposed else (0, 1, 2)
        for split, (images, labels) in self._pairs().items():
            pixels, numbers = self._array(images, 3), self._array(labels, 1)
            batches[split] = Batch(split, pixels.transpose(turn), numbers.astype(np.int64))
        highest = max(int(batch.labels.max(initial=0)) for batch in batches.values())
        classes = self.settings.class_names or _CLASSES.get(self.settings.variant)
        return Records(classes or tuple(map(str, range(1 + highest))), batches)

    def check_sums(self, files: list[Path]) -> None:
        """Check the MD5 of each file, as it is or unpacked. The error names the variant to which
        the file belongs."""
        published = MNIST_FILES.get(self.settings.variant, {})
        for path in files:
            name = path.name.removeprefix(self.settings.prefix)
            contents = {name: self.read_file(path.name), name.removesuffix(".gz"): self._data(path)}
            for key in contents.keys() & published.keys():
                found = hashlib.md5(contents[key], usedforsecurity=False).hexdigest()
                for other, sums in MNIST_FILES.items():
                    if other != self.settings.variant and found in sums.values():
                        problem, fix = f"{path} is a file of {other}", f"set source.variant={other}"
                        raise SourceError("source.variant", problem, fix, code="conflict")
                if found != published[key]:
                    raise wrong_sum(str(path), found, published[key])

    def _pairs(self) -> dict[str, tuple[str, str]]:
        return {
            split: (self._find(split, "images-idx3"), self._find(split, "labels-idx1"))
            for split in _STEMS
        }

    def _find(self, split: str, kind: str) -> str:
        names = [
            f"{self.settings.prefix}{stem}-{kind}-ubyte{end}"
            for stem in _STEMS[split]
            for end in (".gz", "")
        ]
        found = next((name for name in names if (self.path / name).is_file()), None)
        if found is None:
            problem, fix = (
                f"{self.path} lacks {names[0]}",
                "give the folder with the four idx files",
            )
            raise SourceError("source.path", problem, fix, code="missing-path")
        return found

    def _data(self, path: Path) -> bytes:
        with report_damage(path):
            stored = path.read_bytes()
            return gzip.decompress(stored) if path.suffix == ".gz" else stored

    def _array(self, name: str, num_dimensions: int) -> NDArray[np.uint8]:
        """Return the array in an idx file: two zeros, type, number of dimensions, big-endian sizes,
        values."""
        data, begin = self._data(self.path / name), 4 + 4 * num_dimensions
        with report_damage(self.path / name):
            if len(data) < begin or data[:4] != bytes([0, 0, _UINT8, num_dimensions]):
                raise ValueError(f"no idx file with uint8 values in {num_dimensions} dimensions")
            shape = np.frombuffer(data[4:begin], ">u4").tolist()
            if len(data) - begin != math.prod(shape) or not all(shape[1:]):
                raise ValueError(f"{len(data) - begin:,} values, but the shape is {shape}")
            return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)
