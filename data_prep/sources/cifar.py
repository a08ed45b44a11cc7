"""CIFAR-10 and CIFAR-100, python and binary versions: the .tar.gz as it is downloaded, or the folder that it unpacks to.

Which of the four it is is told by the names of its files. MD5: of the whole .tar.gz, or of each file of a folder of the python
version; no sums are published of the files of the binary version. The sums are checked before an archive is opened or a pickle
looked at, and the pickles are read without running anything (unpickle.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.sources.base import SourceError
from data_prep.sources.config import CifarSettings
from data_prep.sources.guard import check_md5, md5_of, refusing
from data_prep.sources.published import CIFAR_ARCHIVES, CIFAR_FILES
from data_prep.sources.records import Batch, Records, RecordSource
from data_prep.sources.targz import read_members
from data_prep.sources.unpickle import PickledArray, load_plain

_PICTURE = (3, 32, 32)
_NUM_PICTURE_BYTES = 3 * 32 * 32
_TEN = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")


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


class CifarSource(RecordSource[CifarSettings]):
    def __init__(self, settings: CifarSettings):
        super().__init__(settings)
        self.path = Path(settings.path)

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
            raise SourceError(
                f"source.labels: {self.path} is CIFAR-10, which has no {kind} labels; leave the setting out"
            )
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
                _check_archive(self.path)
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
                f"source.path: {self.path} looks like {version.archive} but lacks {', '.join(missing[:3])}; "
                "download it again"
            )
        return version


def _check_archive(path: Path) -> None:
    """Refuses what is none of the published archives, whatever it is called."""
    found = md5_of(path)
    if found not in CIFAR_ARCHIVES.values():
        published = CIFAR_ARCHIVES.get(path.name) or ", ".join(
            f"{md5} ({name})" for name, md5 in CIFAR_ARCHIVES.items()
        )
        raise SourceError(
            f"source.path: {path} has the MD5 {found}, published is {published}; download it again, or set source.md5=off "
            "if you know that it is another version"
        )


def _class_names(data: bytes, key: str) -> tuple[str, ...]:
    """From a pickle under `key`, or from lines."""
    if not key:
        return tuple(line for line in data.decode("ascii").split() if line)
    names = _fields(data)[key]
    if not (isinstance(names, list) and all(isinstance(name, bytes | str) for name in names)):
        raise ValueError(f"{key} is no list of names")
    return tuple(_text(name) for name in names)


def _records(
    data: bytes, version: Version, kind: Literal["fine", "coarse"]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
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
    array = pixels.to_numpy() if isinstance(pixels, PickledArray) else None
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != _NUM_PICTURE_BYTES:
        found = "no array" if array is None else f"{array.dtype} of the shape {array.shape}"
        raise ValueError(f"data is {found}, not uint8 of the shape (records, {_NUM_PICTURE_BYTES})")
    return array, np.array(labels, np.int64)


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise ValueError(f"has no {key}")


def _fields(data: bytes) -> _Fields:
    value = load_plain(data)
    if not isinstance(value, dict):
        raise ValueError("is no dict")
    return _Fields({_text(key): item for key, item in value.items()})


def _text(value: object) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)
