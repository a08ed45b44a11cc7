"""MNIST, and what is published in its layout: a folder of four idx files, compressed as downloaded
or not.

Grey pictures stay grey here (PGM); they become RGB when they are decoded. MD5 sums: of the unpacked
files of MNIST and Fashion-MNIST, which are the same however they were compressed, and of the .gz
files of KMNIST. EMNIST has none: only headers and sizes are checked.
"""

import gzip
import hashlib
import math
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import SourceError, report_damage, wrong_sum
from data_prep.settings import Settings
from data_prep.sources.base import Md5Policy
from data_prep.sources.records import Batch, Records, RecordSource

_UINT8: Final = 0x08
_STEMS: Final = {"train": ("train",), "test": ("t10k", "test")}
"""What the file names of a split begin with; EMNIST says test."""

_CLASSES: Final = {
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
"""MD5 sums: of KMNIST from torchvision 0.26 (torchvision/datasets/mnist.py), of the others of what
the published .gz files hold."""


class MnistSettings(Settings):
    """MNIST or what is published in its layout: a folder of four idx files, .gz or not."""

    kind: Literal["mnist"]
    path: str = Field(examples=["downloads/mnist"])
    """The folder of the four files."""
    variant: Literal["mnist", "fashion", "kmnist", "other"] = "mnist"
    """Whose published sums and class names these are; other (EMNIST, say) has none."""
    prefix: str = Field("", pattern="^[a-z-]*$")
    """What all file names begin with, such as emnist-letters-"""
    transposed: bool = False
    """EMNIST's pictures are stored with rows and columns exchanged."""
    class_names: tuple[str, ...] | None = Field(None, examples=[["zero", "one"]])
    """By default those of the variant, or else the numbers."""
    md5: Md5Policy = "published"


class MnistSource(RecordSource):
    settings: MnistSettings

    def files(self) -> tuple[Path, ...]:
        return tuple(file for pair in self._pairs().values() for file in pair)

    def load(self) -> Records:
        batches = {}
        for split, (pictures, labels) in self._pairs().items():
            pixels = self._read(pictures, num_dimensions=3)
            if self.settings.transposed:
                pixels = pixels.transpose(0, 2, 1)
            batches[split] = Batch(
                split=split,
                pixels=pixels,
                labels=self._read(labels, num_dimensions=1).astype(np.int64),
            )
        return Records(classes=self._classes(batches), batches=batches)

    def _pairs(self) -> dict[str, tuple[Path, Path]]:
        return {
            split: (self._find(split, "images-idx3"), self._find(split, "labels-idx1"))
            for split in _STEMS
        }

    def _find(self, split: str, kind: str) -> Path:
        names = [
            f"{self.settings.prefix}{stem}-{kind}-ubyte{end}"
            for stem in _STEMS[split]
            for end in (".gz", "")
        ]
        for name in names:
            if (self.path / name).is_file():
                return self.path / name
        raise SourceError(
            f"source.path: {self.path} holds no {names[0]}; give the folder with the four idx files"
        )

    def _read(self, path: Path, *, num_dimensions: int) -> NDArray[np.uint8]:
        with report_damage(path):
            stored = path.read_bytes()
            data = gzip.decompress(stored) if path.suffix == ".gz" else stored
        if self.settings.md5 == "published":
            self._check_published(path, stored, data)
        with report_damage(path):
            return parse_idx(data, num_dimensions=num_dimensions)

    def _check_published(self, path: Path, stored: bytes, data: bytes) -> None:
        """Refuse a file that is not the published one of this variant, and name the variant that it
        is of."""
        name = path.name.removeprefix(self.settings.prefix)
        contents = {name: stored, name.removesuffix(".gz"): data}
        sums = {
            key: hashlib.md5(content, usedforsecurity=False).hexdigest()
            for key, content in contents.items()
        }
        published = MNIST_FILES.get(self.settings.variant, {})
        for key in sums.keys() & published.keys():
            for other, files in MNIST_FILES.items():
                if other != self.settings.variant and set(files.values()) & set(sums.values()):
                    raise SourceError(
                        f"source.variant: {path} is a file of {other}; set source.variant={other}"
                    )
            if sums[key] != published[key]:
                raise wrong_sum(f"{path}{', unpacked,' * (key != name)}", sums[key], published[key])

    def _classes(self, batches: dict[str, Batch]) -> tuple[str, ...]:
        highest = max(int(batch.labels.max(initial=0)) for batch in batches.values())
        return (
            self.settings.class_names
            or _CLASSES.get(self.settings.variant)
            or tuple(map(str, range(1 + highest)))
        )


def parse_idx(data: bytes, *, num_dimensions: int) -> NDArray[Any]:
    """The array of an idx file: two zeros, type, number of dimensions, big-endian lengths,
    values."""
    begin = 4 + 4 * num_dimensions
    if len(data) < begin or data[:4] != bytes([0, 0, _UINT8, num_dimensions]):
        raise ValueError(
            f"begins with {data[:4].hex(' ')}, not with 00 00 {_UINT8:02x} {num_dimensions:02x}"
        )
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, begin, 4)]
    if len(data) - begin != math.prod(shape):
        raise ValueError(
            f"{len(data) - begin:,} values, its header says {' x '.join(map(str, shape))}"
        )
    if num_dimensions > 1 and not all(shape[1:]):
        raise ValueError(f"its header says {' x '.join(map(str, shape))}")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)
