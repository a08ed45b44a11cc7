"""Facts about the images, the dataset and the machine for `pretrain recommend`."""

import shlex
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_prep.errors import UserError
from data_prep.images.decoding import size_of
from data_prep.images.rejection import Rejection
from data_prep.local_copy import local_copy
from data_prep.manifest import Manifest, load_manifest
from data_prep.pictures import in_folder
from data_prep.settings import num_cores
from pretrain.tracking.node import usable_gpus

NUM_SAMPLED = 100


@dataclass(frozen=True)
class Pictures:
    """A folder of images, described by a sample."""

    num_pictures: int
    num_loose: int
    """Number of images outside class folders."""
    width: int
    height: int

    @classmethod
    def of(cls, folder: Path) -> "Pictures":
        found, sizes = list(in_folder(folder)), list[tuple[int, int]]()
        for each in found[:: max(1, len(found) // NUM_SAMPLED)]:
            with suppress(Rejection):
                sizes.append(size_of(each.read()))
        if not sizes:
            fix = "Choose another folder, or a name such as cifar10"
            if any(folder.glob("*.tar")):
                shards = shlex.quote(f"{folder}/*.tar")
                fix = f"Index its shards first: data_prep index --train {shards} --out data/NAME"
            problem = "the folder has no readable images"
            raise UserError(str(folder), problem, fix, code="empty")
        width, height = (round(statistics.median(side)) for side in zip(*sizes, strict=True))
        num_loose = sum(Path(each.path).parent == folder for each in found)
        return cls(len(found), num_loose, width, height)


@dataclass(frozen=True)
class Data:
    directory: Path | str
    manifest: Manifest
    train: str
    judged: str | None
    """Split for evaluation, or None."""

    @classmethod
    def of(cls, directory: Path | str) -> "Data":
        manifest = load_manifest(local_copy(directory, storage=None))
        train = "train" if "train" in manifest.splits else next(iter(manifest.splits))
        manifest.labeled_split(train, directory=directory)
        whole = [name for name in ("val", "test") if name != train and name in manifest.splits]
        return cls(
            directory,
            manifest,
            train,
            next((name for name in whole if not manifest.splits[name].num_unlabeled), None),
        )

    @property
    def num_train(self) -> int:
        return self.manifest.splits[self.train].num_samples

    @property
    def num_judged(self) -> int:
        return self.manifest.splits[self.judged].num_samples if self.judged else 0


@dataclass(frozen=True)
class Machine:
    num_cores: int
    memory_gb: float
    gpus: tuple[str, ...]

    @classmethod
    def here(cls) -> "Machine":
        return cls(num_cores(), psutil.virtual_memory().total / 1e9, tuple(usable_gpus()))

    def __str__(self) -> str:
        cores = f"{self.num_cores} CPU core{'s' * (self.num_cores > 1)}"
        machine = f"{cores}, {self.memory_gb:.0f} GB of memory"
        return (
            f"{len(self.gpus)} x {self.gpus[0]}, {machine}" if self.gpus else f"{machine}, no GPU"
        )
