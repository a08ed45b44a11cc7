"""Small archives in their published layouts, and the samples in them."""

import gzip
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.sources import Source
from tests.data_prep.samples import encoded, picture, write_files
from tests.data_prep.sources.layouts import (
    Pixels,
    idx_of,
    opened,
    pixels,
    ppm_of,
    python2_pickle,
    tar_gz_of,
)

Samples = dict[str, dict[str, tuple[bytes, int]]]
"""Split -> path in the source -> (stored bytes, label)."""


class Layout(NamedTuple):
    kind: str
    files: dict[str, bytes]
    folder: str
    archive: str
    """Name of the archive; "" if the dataset is published as files."""
    classes: tuple[str, ...]
    samples: Samples
    options: dict[str, Any]

    def place(self, root: Path, *, packed: bool, **changes: bytes | None) -> Path:
        """Write the folder or the archive. `changes` replaces files; None removes a file."""
        given = {f"{self.folder}/{name}": data for name, data in (self.files | changes).items()}
        files = {name: data for name, data in given.items() if data is not None}
        if not packed:
            return write_files(root, files) / self.folder
        pack = zip_of if self.archive.endswith(".zip") else tar_gz_of
        return write_files(root, {self.archive: pack(files)}) / self.archive

    def open(self, path: Path, **fields: object) -> Source:
        return opened(self.kind, path, **(self.options | fields))


def zip_of(files: dict[str, bytes]) -> bytes:
    """Return a zip with entries for half of the folders: some programs write none, others all."""
    buffer = io.BytesIO()
    folders = {f"{name[:at]}/" for name in files for at, sign in enumerate(name) if sign == "/"}
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(folders)[1::2]:
            archive.writestr(zipfile.ZipInfo(name), b"")
        for name, data in files.items():
            method = zipfile.ZIP_STORED if name.endswith(".JPEG") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return buffer.getvalue()


def _records(images: dict[str, Pixels], labels: dict[str, list[int]]) -> Samples:
    """Return the samples of CIFAR batches."""
    found: Samples = {"train": {}, "test": {}}
    for name, batch in images.items():
        for row, image in enumerate(batch):
            sample = ppm_of(image.transpose(1, 2, 0)), labels[name][row]
            found["test" if name.startswith("test") else "train"][f"{name}/{row:06d}"] = sample
    return found


# ---- CIFAR

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
NUM = 4
"""Records in each file of these tests; the published files have 10,000 or more."""
TEN_PIXELS = {name: pixels(NUM, 3, 32, 32, seed=seed) for seed, name in enumerate(BATCHES)}
TEN_LABELS = {
    name: [(3 * number + row) % 10 for row in range(NUM)] for number, name in enumerate(BATCHES)
}
META = {"num_cases_per_batch": 10000, "label_names": TEN, "num_vis": 3072}


def batch(name: str = "data_batch_1", **fields: object) -> bytes:
    rows = TEN_PIXELS[name].reshape(NUM, 3072)
    known = {"batch_label": f"batch {name}", "labels": TEN_LABELS[name], "data": rows}
    return python2_pickle(
        known | {"filenames": [f"{name}_{row}.png" for row in range(NUM)]} | fields
    )


CIFAR_10 = Layout(
    "cifar",
    {"batches.meta": python2_pickle(META), **{name: batch(name) for name in BATCHES}},
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    tuple(TEN),
    _records(TEN_PIXELS, TEN_LABELS),
    {},
)

FINE, COARSE = ([f"{kind}_{number:02d}" for number in range(100)] for kind in ("fine", "coarse"))
HUNDRED = {
    name: pixels(NUM, 3, 32, 32, seed=10 + seed) for seed, name in enumerate(("train", "test"))
}
FINE_LABELS = {"train": [99, 0, 50, 7], "test": [3, 98, 3, 1]}
COARSE_LABELS = {"train": [19, 0, 5, 7], "test": [3, 18, 3, 1]}
_HUNDRED = {
    name: python2_pickle(
        {
            "fine_labels": FINE_LABELS[name],
            "coarse_labels": COARSE_LABELS[name],
            "data": HUNDRED[name].reshape(NUM, 3072),
        }
    )
    for name in HUNDRED
}
_META_100 = python2_pickle({"fine_label_names": FINE, "coarse_label_names": COARSE[:20]})
CIFAR_100 = Layout(
    "cifar",
    {"file.txt~": b"", "meta": _META_100, **_HUNDRED},
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    tuple(FINE),
    _records(HUNDRED, FINE_LABELS),
    {},
)
COARSE_100 = CIFAR_100._replace(
    classes=tuple(COARSE[:20]),
    samples=_records(HUNDRED, COARSE_LABELS),
    options={"labels": "coarse"},
)

# ---- MNIST

DIGITS = {"train": pixels(7, 28, 28, seed=1), "test": pixels(3, 28, 28, seed=2)}
NUMBERS = {
    "train": np.array([5, 0, 4, 1, 9, 2, 1], np.uint8),
    "test": np.array([7, 2, 1], np.uint8),
}


def _pgm(image: Pixels) -> bytes:
    return b"P5\n28 28\n255\n" + image.tobytes()


def _mnist(
    options: dict[str, Any], *, pack: Callable[[bytes], bytes], test: str, end: str
) -> Layout:
    turn = (0, 2, 1) if options.get("transposed") else (0, 1, 2)
    files = {}
    for split, stem in {"train": "train", "test": test}.items():
        start = options.get("prefix", "") + stem
        files[f"{start}-images-idx3-ubyte{end}"] = pack(idx_of(DIGITS[split]))
        files[f"{start}-labels-idx1-ubyte{end}"] = pack(idx_of(NUMBERS[split]))
    samples: Samples = {
        split: {
            f"{split}/{row:06d}": (_pgm(image), int(NUMBERS[split][row]))
            for row, image in enumerate(DIGITS[split].transpose(turn))
        }
        for split in DIGITS
    }
    return Layout("mnist", files, "mnist", "", tuple("0123456789"), samples, options)


MNIST = _mnist({}, pack=bytes, test="t10k", end="")
MNIST_GZ = _mnist({}, pack=lambda data: gzip.compress(data, mtime=0), test="t10k", end=".gz")
EMNIST = _mnist(
    {"variant": "other", "prefix": "emnist-letters-", "transposed": True},
    pack=gzip.compress,
    test="test",
    end=".gz",
)

# ---- STL-10

STL_CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
STL_PIXELS = {
    "train": pixels(12, 96, 96, 3, seed=1),
    "test": pixels(4, 96, 96, 3, seed=2),
    "unlabeled": pixels(6, 96, 96, 3, seed=3),
}
STL_LABELS = {
    "train": [1, 9, 0, 3, 3, 2, 1, 0, 5, 4, 8, 7],
    "test": [9, 0, 4, 4],
    "unlabeled": [-1] * 6,
}
STL_FILES = {"train": "train_X.bin", "test": "test_X.bin", "unlabeled": "unlabeled_X.bin"}
FOLDS = [[fold, (fold + 5) % 12] for fold in range(10)]


def by_columns(image: Pixels) -> bytes:
    """Return the bytes in the order color, column, row."""
    columns = ((column, color) for color in range(3) for column in range(image.shape[1]))
    return b"".join(image[:, column, color].tobytes() for column, color in columns)


STL10 = Layout(
    "stl10",
    {
        **{name: b"".join(map(by_columns, STL_PIXELS[split])) for split, name in STL_FILES.items()},
        **{
            f"{split}_y.bin": bytes(label + 1 for label in STL_LABELS[split])
            for split in ("train", "test")
        },
        "class_names.txt": "".join(f"{name}\n" for name in STL_CLASSES).encode(),
        "fold_indices.txt": "".join(" ".join(map(str, fold)) + "\n" for fold in FOLDS).encode(),
    },
    "stl10_binary",
    "stl10_binary.tar.gz",
    tuple(STL_CLASSES),
    {
        split: {
            f"{name}/{row:06d}": (ppm_of(image), STL_LABELS[split][row])
            for row, image in enumerate(STL_PIXELS[split])
        }
        for split, name in STL_FILES.items()
    },
    {},
)

# ---- TinyImageNet

WNIDS = ["n01443537", "n01629819", "n01641577", "n04596742"]
VAL = ["n04596742", "n01443537", "n01443537", "n01641577", "n01629819"]


def jpeg(seed: int) -> bytes:
    return encoded(picture(seed=seed, width=64, height=64), quality=90)


_TINY: Samples = {
    "train": {
        f"train/{name}/images/{name}_{row}.JPEG": (jpeg(10 * label + row), label)
        for label, name in enumerate(WNIDS)
        for row in (2, 0, 1)  # in the order of the file system, not sorted
    },
    "val": {
        f"val/images/val_{row}.JPEG": (jpeg(100 + row), WNIDS.index(name))
        for row, name in enumerate(VAL)
    },
    "test": {f"test/images/test_{row}.JPEG": (jpeg(200 + row), -1) for row in range(2)},
}
ANNOTATIONS = "val/val_annotations.txt"
LINES = "".join(f"val_{row}.JPEG\t{name}\t0\t32\t44\t62\n" for row, name in enumerate(VAL)).encode()
TINY = Layout(
    "tinyimagenet",
    {
        "words.txt": b"n00001740\tentity\n",
        "wnids.txt": "".join(f"{name}\n" for name in reversed(WNIDS)).encode(),
        ANNOTATIONS: LINES,
        **{f"train/{name}/{name}_boxes.txt": b"a.JPEG\t0\t10\t63\t60\n" for name in WNIDS},
        **{path: data for found in _TINY.values() for path, (data, _) in found.items()},
    },
    "tiny-imagenet-200",
    "tiny-imagenet-200.zip",
    tuple(WNIDS),
    _TINY,
    {"unlabeled_test": True},
)

LAYOUTS = {
    "cifar-10": CIFAR_10,
    "cifar-100": CIFAR_100,
    "cifar-100 coarse": COARSE_100,
    "mnist": MNIST,
    "mnist.gz": MNIST_GZ,
    "emnist": EMNIST,
    "stl10": STL10,
    "tinyimagenet": TINY,
}
FORMS = [
    (name, packed)
    for name, layout in LAYOUTS.items()
    for packed in (False, True)
    if layout.archive or not packed
]


def pickled(protocol: int, **fields: object) -> bytes:
    """Return a CIFAR batch pickled by Python 3."""
    rows = np.asfortranarray(TEN_PIXELS["data_batch_1"].reshape(NUM, 3072))
    more = {"long": 1 << 70, "float": 0.5, "é": (None, True)}
    known = {"labels": TEN_LABELS["data_batch_1"], "data": rows}
    return pickle.dumps(known | more | fields, protocol=protocol)
