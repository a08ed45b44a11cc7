"""CIFAR-10 and CIFAR-100, python version: the .tar.gz as downloaded, or its folder.

File names tell the two datasets apart. Unpickling cannot import or call anything.
"""

import io
import pickle
import pickletools
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.guard import SourceError, damaged, report_damage
from data_prep.catalog import CATALOG
from data_prep.settings import Settings
from data_prep.sources.base import Md5Policy
from data_prep.sources.records import Batch, Records, RecordSource

CIFAR_ARCHIVES = {**CATALOG["cifar10"].files, **CATALOG["cifar100"].files}
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
"""Published files and their MD5 sums, from torchvision 0.26 (torchvision/datasets/cifar.py)."""

Kind = Literal["fine", "coarse"]


class Version(NamedTuple):
    batches: dict[str, str]
    """File of records -> its split."""
    meta: str
    """Name of the file with the class names."""
    keys: dict[Kind, tuple[str, str]]
    """For each kind of label: (key of the class names, key of the labels)."""


_VERSIONS = {
    "CIFAR-10": Version(
        {name: "test" if name == "test_batch" else "train" for name in list(CIFAR_FILES)[:6]},
        "batches.meta",
        {"fine": ("label_names", "labels")},
    ),
    "CIFAR-100": Version(
        {"train": "train", "test": "test"},
        "meta",
        {
            "fine": ("fine_label_names", "fine_labels"),
            "coarse": ("coarse_label_names", "coarse_labels"),
        },
    ),
}


class CifarSettings(Settings):
    """CIFAR-10 or CIFAR-100, python version, detected from the file names."""

    kind: Literal["cifar"]
    path: str = Field(examples=["downloads/cifar-10-python.tar.gz"])
    """The .tar.gz as downloaded, or the folder that it unpacks to."""
    labels: Kind = "fine"
    """Kind of labels: the 100 fine or the 20 coarse classes of CIFAR-100. CIFAR-10 has only
    fine labels."""
    md5: Md5Policy = "published"


class CifarSource(RecordSource, of=CifarSettings):
    settings: CifarSettings
    archives: ClassVar = CIFAR_ARCHIVES
    sums: ClassVar = CIFAR_FILES

    def names(self) -> tuple[str, ...]:
        if not self.path.is_dir():
            return tuple(CIFAR_FILES)
        _, version = self._version()
        return (*version.batches, version.meta)

    def load(self) -> Records:
        name, version = self._version()
        if self.settings.labels not in version.keys:
            problem = f"{self.path} is {name}, which has no {self.settings.labels} labels"
            raise SourceError("source.labels", problem, "set it to fine", code="conflict")
        names_key, labels_key = version.keys[self.settings.labels]
        with report_damage(self.path / version.meta):
            names = _unpickle(self.read_file(version.meta))[names_key]
            classes = tuple(map(_text, names))
        batches = {}
        for file, split in version.batches.items():
            with report_damage(self.path / file):
                fields = _unpickle(self.read_file(file))
                pixels, labels = fields["data"].images(), fields[labels_key]
                if not isinstance(labels, list) or not all(type(each) is int for each in labels):
                    raise ValueError(f"{labels_key} is no list of integers")
            batches[file] = Batch(split, pixels, np.array(labels, np.int64))
        return Records(classes, batches)

    def _version(self) -> tuple[str, Version]:
        """Return the name and the version of the dataset to which most files belong."""
        missing = {
            name: [
                file for file in (*each.batches, each.meta) if not (self.folder / file).is_file()
            ]
            for name, each in _VERSIONS.items()
        }
        name = min(missing, key=lambda name: len(missing[name]) - len(_VERSIONS[name].batches))
        if missing[name]:
            lacks = ", ".join(missing[name][:3])
            fix = f"give {' or '.join(CIFAR_ARCHIVES)}, or the folder that it unpacks to"
            raise damaged(self.path, f"lacks {lacks} of {name}", fix)
        return name, _VERSIONS[name]


def _unpickle(data: bytes) -> dict[str, Any]:
    for opcode, argument, _ in pickletools.genops(data):  # raises ValueError for wrong lengths
        if "PUT" in opcode.name and int(argument or 0) > len(data):
            # pickle would allocate memory up to this index
            raise ValueError("the pickle has an index beyond its length")
    value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    if not isinstance(value, dict):
        raise ValueError("no dict")
    return {_text(key): item for key, item in value.items()}


def _text(value: bytes | str) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


class _Unpickler(pickle.Unpickler):
    """Unpickler for plain values and arrays of bytes. Any other class or function raises an error
    with its name. No function of numpy is called, because damaged states of arrays crash numpy
    2."""

    def find_class(self, module: str, name: str) -> Any:
        match f"{module}.{name}":
            case "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct":
                return lambda *_: _Array()
            case "numpy.ndarray":
                return None
            case "numpy.dtype":
                return lambda code, *_: _Type(_text(code))
            case "_codecs.encode":
                return lambda text, _: text.encode("latin1")
        raise ValueError(f"the pickle refers to {module}.{name}, but arrays do not need this")


class _Type(str):
    def __setstate__(self, state: object) -> None:
        """Ignore the state: it has the byte order, and bytes have none."""


class _Array:
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.type, self.is_fortran, self.data = state

    def images(self) -> NDArray[np.uint8]:
        is_bytes = self.type == "u1" and isinstance(self.data, bytes)
        if not is_bytes or self.shape[1:] != (3072,):
            raise ValueError(f"data are {self.type} of shape {self.shape}, not u1 of (n, 3072)")
        rows = np.frombuffer(self.data, np.uint8)
        order: Literal["F", "C"] = "F" if self.is_fortran else "C"
        return rows.reshape(self.shape, order=order).reshape(-1, 3, 32, 32)
