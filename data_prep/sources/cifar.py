"""CIFAR-10 and CIFAR-100, python and binary versions: the .tar.gz as it is downloaded, or the folder that it unpacks to.

The names of its files show which of the four it is. MD5: of the whole .tar.gz, or of each file of a folder of the python
version; no sums are published of the files of the binary version. The sums are checked before an archive is opened or a pickle
looked at, and of a pickle nothing is imported or called, whatever it names (`_Unpickler`).
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.archives.guard import SourceError, check_md5, refusing
from data_prep.archives.gzipped import read_members
from data_prep.settings import Settings
from data_prep.sources.base import Md5Policy
from data_prep.sources.records import Batch, Records, RecordSource

_PICTURE = (3, 32, 32)
_NUM_PICTURE_BYTES = 3 * 32 * 32
_NUMBERS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
_TEN = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")

CIFAR_ARCHIVES = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
}
CIFAR_FILES = {
    "cifar-10-batches-py": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    "cifar-100-python": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
}
"""MD5 sums, from torchvision 0.26 (torchvision/datasets/cifar.py); of the binary archives from the table on
https://www.cs.toronto.edu/~kriz/cifar.html."""


@dataclass(frozen=True)
class Version:
    archive: str
    folder: str
    batches: dict[str, str]
    """The split of each file of records."""
    names: dict[Literal["fine", "coarse"], tuple[str, str]]
    """The file, and the key in it, with the class names of each kind of label."""
    keys: dict[Literal["fine", "coarse"], str]
    """The key of the labels in a pickle."""
    num_label_bytes: int = 0
    """In a binary record, before the picture; 0 for pickles."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.batches, *(file for file, _ in self.names.values())]))


_VERSIONS = (
    Version(
        archive="cifar-10-python.tar.gz",
        folder="cifar-10-batches-py",
        batches=dict.fromkeys(_TEN, "train") | {"test_batch": "test"},
        names={"fine": ("batches.meta", "label_names")},
        keys={"fine": "labels"},
    ),
    Version(
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        batches={f"{name}.bin": "train" for name in _TEN} | {"test_batch.bin": "test"},
        names={"fine": ("batches.meta.txt", "")},
        keys={},
        num_label_bytes=1,
    ),
    Version(
        archive="cifar-100-python.tar.gz",
        folder="cifar-100-python",
        batches={"train": "train", "test": "test"},
        names={"fine": ("meta", "fine_label_names"), "coarse": ("meta", "coarse_label_names")},
        keys={"fine": "fine_labels", "coarse": "coarse_labels"},
    ),
    Version(
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        batches={"train.bin": "train", "test.bin": "test"},
        names={"fine": ("fine_label_names.txt", ""), "coarse": ("coarse_label_names.txt", "")},
        keys={},
        num_label_bytes=2,
    ),
)
_ALL_FILES = frozenset(name for version in _VERSIONS for name in version.files)


class CifarSettings(Settings):
    """CIFAR-10 or CIFAR-100, python or binary version; the content shows which."""

    kind: Literal["cifar"]
    path: str
    """The .tar.gz as downloaded, or the folder that it unpacks to."""
    labels: Literal["fine", "coarse"] = "fine"
    """CIFAR-100 has 100 fine and 20 coarse classes."""
    md5: Md5Policy = "published"


class CifarSource(RecordSource):
    settings: CifarSettings

    def files(self) -> tuple[Path, ...]:
        if self.path.is_file():
            return (self.path,)
        if not self.path.is_dir():
            raise SourceError(
                f"source.path: {self.path} is not there; give the .tar.gz as downloaded "
                f"({', '.join(CIFAR_ARCHIVES)}), or the folder that it unpacks to"
            )
        present = {name for name in _ALL_FILES if (self.path / name).is_file()}
        return tuple(self.path / name for name in self._version(present).files)

    def load(self) -> Records:
        contents, version = self._contents()
        kind = self.settings.labels
        if kind not in version.names:
            raise SourceError(f"source.labels: {self.path} is CIFAR-10, which has no {kind} labels; leave the setting out")
        file, key = version.names[kind]
        with refusing(self.path / file):
            classes = _class_names(contents[file], key)
        batches = {}
        for name, split in version.batches.items():
            with refusing(self.path / name):
                pixels, labels = _records(contents.pop(name), version, kind)
            batches[name] = Batch(split=split, pixels=pixels.reshape(-1, *_PICTURE), labels=labels)
        return Records(classes=classes, batches=batches)

    def _contents(self) -> tuple[dict[str, bytes], Version]:
        if not self.path.is_dir():
            if self.settings.md5 == "published":
                check_md5(self.path, CIFAR_ARCHIVES)
            contents = read_members(self.path, _ALL_FILES)
            return contents, self._version(set(contents))
        files = {path.name: path for path in self.files()}
        version = self._version(set(files))
        if self.settings.md5 == "published":
            for name, md5 in CIFAR_FILES.get(version.folder, {}).items():
                check_md5(files[name], md5)
        contents = {}
        for name, path in files.items():
            with refusing(path):
                contents[name] = path.read_bytes()
        return contents, version

    def _version(self, present: set[str]) -> Version:
        version = max(_VERSIONS, key=lambda version: len(present & set(version.files)))
        missing = [name for name in version.files if name not in present]
        if len(missing) == len(version.files):
            raise SourceError(
                f"source.path: {self.path} holds none of the files of CIFAR-10 or CIFAR-100; give the .tar.gz as downloaded "
                "or the folder that it unpacks to"
            )
        if missing:
            raise SourceError(
                f"source.path: {self.path} looks like {version.archive} but lacks {', '.join(missing[:3])}; download it again"
            )
        return version


def _class_names(data: bytes, key: str) -> tuple[str, ...]:
    """From a pickle under `key`, or from lines."""
    if not key:
        return tuple(line for line in data.decode("ascii").split() if line)
    names = _fields(data)[key]
    if not (isinstance(names, list) and all(isinstance(name, bytes | str) for name in names)):
        raise ValueError(f"{key} is no list of names")
    return tuple(_text(name) for name in names)


def _records(data: bytes, version: Version, kind: Literal["fine", "coarse"]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(records, 3072) pixels and (records,) labels."""
    if version.num_label_bytes:
        stride = version.num_label_bytes + _NUM_PICTURE_BYTES
        if len(data) % stride:
            raise ValueError(f"{len(data):,} bytes are not a whole number of records of {stride:,}")
        rows = np.frombuffer(data, np.uint8).reshape(-1, stride)
        column = version.num_label_bytes - 1 if kind == "fine" else 0  # CIFAR-100: coarse, fine, picture
        return rows[:, version.num_label_bytes :], rows[:, column].astype(np.int64)
    fields = _fields(data)
    labels, pixels = fields[version.keys[kind]], fields["data"]
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise ValueError(f"{version.keys[kind]} is no list of integers")
    array = pixels.to_numpy() if isinstance(pixels, _PickledArray) else None
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != _NUM_PICTURE_BYTES:
        found = "no array" if array is None else f"{array.dtype} of the shape {array.shape}"
        raise ValueError(f"data is {found}, not uint8 of the shape (records, {_NUM_PICTURE_BYTES})")
    return array, np.array(labels, np.int64)


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise ValueError(f"has no {key}")


def _fields(data: bytes) -> _Fields:
    try:
        value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except MemoryError:  # an opcode for a bytearray reserves whatever a damaged length is
        raise ValueError("has a length that is more than memory holds") from None
    if not isinstance(value, dict):
        raise ValueError("is no dict")
    return _Fields({_text(key): item for key, item in value.items()})


def _text(value: object) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


class _Unpickler(pickle._Unpickler):
    """Reads plain values and arrays of integers; any other global ends the reading with its name.

    What stands for numpy's functions merely keeps what they would be given: a damaged pickle cannot make numpy reserve or read
    what is not there. Python's own machine, not that in C, which reserves memory for whatever number a damaged length is.
    """

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


class _PickledType:
    def __init__(self, code: str):
        self.code, self.byte_order = code, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = _text(state[1])


class _PickledArray:
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.type, self.is_fortran, self.data = state

    def to_numpy(self) -> NDArray[Any]:
        if not (self.type.code in _NUMBERS and self.type.byte_order in ("<", ">", "|") and isinstance(self.data, bytes)):
            raise ValueError("an array of something else than integers")
        dtype = np.dtype(self.type.byte_order.replace("|", "<") + self.type.code)
        if not all(type(length) is int and length >= 0 for length in self.shape):
            raise ValueError("an array with a wrong shape")
        return np.frombuffer(self.data, dtype).reshape(self.shape, order="F" if self.is_fortran else "C")
