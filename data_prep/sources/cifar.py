"""CIFAR-10 and CIFAR-100, python version: the .tar.gz as downloaded, or its folder.

The names of the files show which of the two it is. MD5 sums (of the .tar.gz, or of each file of a
folder) are checked before an archive is opened or a pickle is read. No pickle can import or call
anything (`_Unpickler`).
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import SourceError, check_md5, report_damage
from data_prep.archives.gzipped import read_members
from data_prep.settings import Settings
from data_prep.sources.base import Md5Policy
from data_prep.sources.records import Batch, Records, RecordSource

_PICTURE = (3, 32, 32)
_NUM_PICTURE_BYTES = 3 * 32 * 32
_TEN = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")

CIFAR_ARCHIVES = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
CIFAR_FILES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
"""MD5 sums, from torchvision 0.26 (torchvision/datasets/cifar.py)."""


Kind = Literal["fine", "coarse"]


class Labels(NamedTuple):
    """Places of the labels of one kind."""

    names_file: str
    names_key: str
    """Key of the class names in that file."""
    key: str
    """Key of the labels in a file of records."""


@dataclass(frozen=True)
class Version:
    archive: str
    batches: dict[str, str]
    """The split of each file of records."""
    labels: dict[Kind, Labels]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys([*self.batches, *(labels.names_file for labels in self.labels.values())])
        )


_VERSIONS = (
    Version(
        "cifar-10-python.tar.gz",
        batches=dict.fromkeys(_TEN, "train") | {"test_batch": "test"},
        labels={"fine": Labels("batches.meta", "label_names", "labels")},
    ),
    Version(
        "cifar-100-python.tar.gz",
        batches={"train": "train", "test": "test"},
        labels={
            "fine": Labels("meta", "fine_label_names", "fine_labels"),
            "coarse": Labels("meta", "coarse_label_names", "coarse_labels"),
        },
    ),
)
_GIVE = (
    f"give the .tar.gz as downloaded ({', '.join(CIFAR_ARCHIVES)}), or the folder that it"
    " unpacks to"
)
_ALL_FILES = frozenset(name for version in _VERSIONS for name in version.files)


class CifarSettings(Settings):
    """CIFAR-10 or CIFAR-100, python version; the content shows which."""

    kind: Literal["cifar"]
    path: str = Field(examples=["downloads/cifar-10-python.tar.gz"])
    """The .tar.gz as downloaded, or the folder that it unpacks to."""
    labels: Kind = "fine"
    """CIFAR-100 has 100 fine and 20 coarse classes."""
    md5: Md5Policy = "published"


class CifarSource(RecordSource):
    settings: CifarSettings

    def files(self) -> tuple[Path, ...]:
        if self.path.is_file():
            return (self.path,)
        if not self.path.is_dir():
            raise SourceError(f"source.path: {self.path} is not there; {_GIVE}")
        present = {name for name in _ALL_FILES if (self.path / name).is_file()}
        return tuple(self.path / name for name in self._version(present).files)

    def load(self) -> Records:
        contents = self._contents()
        version, kind = self._version(set(contents)), self.settings.labels
        if kind not in version.labels:
            raise SourceError(
                f"source.labels: {self.path} is CIFAR-10, which has no {kind} labels; leave the"
                " setting out"
            )
        names_file, names_key, key = version.labels[kind]
        with report_damage(self.path / names_file):
            classes = _class_names(contents[names_file], names_key)
        batches = {}
        for name, split in version.batches.items():
            with report_damage(self.path / name):
                pixels, labels = _records(contents.pop(name), key)
            batches[name] = Batch(split, pixels.reshape(-1, *_PICTURE), labels)
        return Records(classes, batches)

    def _contents(self) -> dict[str, bytes]:
        """Of all files, as published."""
        is_published = self.settings.md5 == "published"
        if not self.path.is_dir():
            if is_published:
                check_md5(self.path, CIFAR_ARCHIVES)
            return read_members(self.path, _ALL_FILES)
        contents = {}
        for path in self.files():
            if is_published and path.name in CIFAR_FILES:
                check_md5(path, CIFAR_FILES[path.name])
            with report_damage(path):
                contents[path.name] = path.read_bytes()
        return contents

    def _version(self, present: set[str]) -> Version:
        version = max(_VERSIONS, key=lambda version: len(present & set(version.files)))
        missing = [name for name in version.files if name not in present]
        if len(missing) == len(version.files):
            raise SourceError(
                f"source.path: {self.path} holds none of the files of CIFAR-10 or CIFAR-100;"
                f" {_GIVE}"
            )
        if missing:
            lacking = ", ".join(missing[:3])
            raise SourceError(
                f"source.path: {self.path} looks like {version.archive} but lacks {lacking};"
                " download it again"
            )
        return version


def _class_names(data: bytes, key: str) -> tuple[str, ...]:
    names = _fields(data)[key]
    if not (isinstance(names, list) and all(isinstance(name, bytes | str) for name in names)):
        raise ValueError(f"{key} is no list of names")
    return tuple(_text(name) for name in names)


def _records(data: bytes, key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the (records, 3072) pixels and the (records,) labels."""
    fields = _fields(data)
    labels, pixels = fields[key], fields["data"]
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise ValueError(f"{key} is no list of integers")
    if not isinstance(pixels, _PickledArray):
        raise ValueError("data is no array")
    return pixels.rows(), np.array(labels, np.int64)


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise ValueError(f"has no {key}")


def _fields(data: bytes) -> _Fields:
    value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    if not isinstance(value, dict):
        raise ValueError("is no dict")
    return _Fields({_text(key): item for key, item in value.items()})


def _text(value: object) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


class _Unpickler(pickle._Unpickler):
    """Reads plain values and arrays of bytes; any other global ends the reading with its name.

    What stands for numpy's functions merely keeps what they would be given: a damaged pickle cannot
    make numpy reserve or read what is not there. Python's own machine, not that in C, which
    reserves memory for whatever number a damaged length is; of its opcodes one does so, too, and is
    refused.
    """

    def load_bytearray8(self) -> None:
        raise ValueError("holds a bytearray, which arrays of numbers never need")

    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {
        pickle.BYTEARRAY8[0]: load_bytearray8
    }

    def find_class(self, module: str, name: str) -> Any:
        match f"{module}.{name}":
            case "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct":
                return lambda *_: _PickledArray()
            case "numpy.ndarray":
                return None
            case "numpy.dtype":
                return lambda code, *_: _PickledType(_text(code))
            case "_codecs.encode" | "codecs.encode":
                return lambda text, _: text.encode("latin1")
        raise ValueError(f"asks for the global {module}.{name}, which arrays of numbers never need")


class _PickledType(str):
    def __setstate__(self, state: object) -> None:
        """Its byte order, which bytes do not have."""


class _PickledArray:
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.type, self.is_fortran, self.data = state

    def rows(self) -> NDArray[np.uint8]:
        if (
            self.type != "u1"
            or not isinstance(self.data, bytes)
            or self.shape[1:] != (_NUM_PICTURE_BYTES,)
        ):
            raise ValueError(
                f"data is {self.type} of the shape {self.shape}, not u1 of the shape (records,"
                f" {_NUM_PICTURE_BYTES})"
            )
        return np.frombuffer(self.data, np.uint8).reshape(
            self.shape, order="F" if self.is_fortran else "C"
        )
