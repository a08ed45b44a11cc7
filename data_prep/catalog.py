"""Datasets that `data_prep fetch` downloads: URLs, checksums and build settings.

No URL has been tested, because no server could be reached. URLs and MD5 sums are from torchvision
0.26, except TinyImageNet's URL. TinyImageNet has no published MD5. The authors of CIFAR-10 (web
page) and Fashion-MNIST (README) publish the same MD5 sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHIVES = Path("archives")
"""Default folder of downloads."""


@dataclass(frozen=True)
class Published:
    addresses: tuple[str, ...]
    """URLs of web folders that contain the files, the official one first."""
    files: Mapping[str, str]
    """File name -> published MD5, or "" if there is none."""
    sums_from: str
    """Publisher of the MD5 sums."""
    settings: dict[str, Any]
    """Settings of `data_prep build`, except `source.path` and `out`."""
    folder: str = ""
    """Name of the folder for the downloaded files, if there are several files."""
    installed: Path | None = None
    """Folder in which a Debian package installs the same files."""

    def path(self, archives: Path = ARCHIVES) -> Path:
        """Return the folder of the Debian package if it is installed and nothing was downloaded.
        Otherwise return the path of the download."""
        own = archives / (self.folder or next(iter(self.files), ""))
        if self.installed is not None and self.installed.is_dir() and not own.exists():
            return self.installed
        return own

    def build_settings(self, archives: Path = ARCHIVES) -> dict[str, Any]:
        """Return all settings of `data_prep build` except `out`."""
        place = {"source.path": str(self.path(archives))} if self.files else {}
        return self.settings | place


_TORCHVISION = "torchvision 0.26"
_PRINTED = f"its authors and {_TORCHVISION}"
_FFCV = {"crop": "longer_side", "interpolation": "area"}
_CIFAR = {"source.kind": "cifar", "image_size": 32, **_FFCV}
_KRIZ = ("https://www.cs.toronto.edu/~kriz",)

CATALOG = {
    "cifar10": Published(
        _KRIZ, {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}, _PRINTED, _CIFAR
    ),
    "cifar100": Published(
        _KRIZ, {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}, _TORCHVISION, _CIFAR
    ),
    "stl10": Published(
        ("http://ai.stanford.edu/~acoates/stl10",),
        {"stl10_binary.tar.gz": "91f7769df0f17e558f3565bffb0c7dfb"},
        _TORCHVISION,
        {"source.kind": "stl10", "image_size": 64, **_FFCV},
    ),
    "tinyimagenet": Published(
        ("http://cs231n.stanford.edu",),
        {"tiny-imagenet-200.zip": ""},
        "",
        {"source.kind": "tinyimagenet", "image_size": 64, **_FFCV},
    ),
    "mnist": Published(
        ("http://yann.lecun.com/exdb/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        _TORCHVISION,
        {"source.kind": "mnist", "image_size": 28},
        folder="mnist",
    ),
    "fashion-mnist": Published(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        _PRINTED,
        {"source.kind": "mnist", "source.variant": "fashion", "image_size": 32},
        folder="fashion-mnist",
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    "digits": Published((), {}, "", {"source.kind": "digits", "image_size": 8}),
}
"""Datasets by name. scikit-learn contains the files of `digits`."""
BY_HAND = {"imagenet1k": "imagenet", "imagenet21k": "winter21_whole"}
"""Datasets that you must download by hand, to accept their terms: name -> folder in `ARCHIVES`."""
