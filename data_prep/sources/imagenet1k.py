"""ImageNet-1k (ILSVRC 2012): the folder with its archives, or with the folders that they unpack to.

    ILSVRC2012_img_train.tar      or  train/  (synset tars or synset folders)
    ILSVRC2012_img_val.tar        or  val/    (synset folders, or the 50,000 images in one folder)
    ILSVRC2012_devkit_t12.tar.gz  or  ILSVRC2012_devkit_t12/   if val is not in synset folders

Labels are positions in the sorted list of wnids. If `real` is set (real.json, from "Are we done
with ImageNet?"), the split val gets the annotation `real`: a bit for each correct class.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_prep.archives.files import kind_of
from data_prep.archives.guard import SourceError, check_md5, damaged, report_damage, stamp_of
from data_prep.archives.gzipped import read_members
from data_prep.archives.inventory import Container, Entries, Inventory, Outline
from data_prep.settings import Settings
from data_prep.sources.base import Arrangement, by_container
from data_prep.sources.synsets import SynsetSource, find_synsets, refuse_gzip, with_labels

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
DEVKIT_MD5 = (  # as published on image-net.org and checked by torchvision
    "fa75699e90414af021442c21a62c3abf"
)
_META, _TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"
PUBLISHED_MD5 = {
    TRAIN_TAR: "1d675b47d978889d74fa0da5fadfb00e",
    VAL_TAR: "29b22e2961454d5413ddabcf34fc5622",
}
NUM_CLASSES = 1000
_VAL_NAME = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")
_WNID_FOLDER = re.compile(r"n\d{8}")


class ImageNet1kSettings(Settings):
    """ImageNet-1k: a folder with the downloaded archives, or with their folders."""

    kind: Literal["imagenet1k"]
    path: str = Field(examples=["downloads/imagenet"])
    """Folder with ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the development kit, or with
    the folders that they unpack to."""
    splits: tuple[Literal["train", "val"], ...] = Field(("train", "val"), min_length=1)
    """Splits to build."""
    real: str | None = Field(None, examples=["downloads/real.json"])
    """File real.json with the reassessed labels of `val` ("Are we done with ImageNet?")."""
    md5: Literal["devkit", "all", "off"] = "devkit"
    """Archives that are checked against their published MD5. devkit: only the development kit. all:
    every archive, so that 144 GB are read twice. off: none."""


class ImageNet1kSource(SynsetSource, of=ImageNet1kSettings):
    settings: ImageNet1kSettings
    annotated_split = "val"
    _val_labels: tuple[int, ...] = ()

    def describe(self) -> dict[str, Any]:
        described = self.settings.model_dump(mode="json", exclude={"path", "md5", "real"})
        if self.settings.real is not None:
            described["real"] = hashlib.sha256(self._real_file().read_bytes()).hexdigest()
        return described

    def outline(self) -> Outline:
        if not self.path.is_dir():
            problem, fix = f"{self.path} is no folder", f"give the folder of {TRAIN_TAR}"
            raise SourceError("source.path", problem, fix, code="missing-path")
        kit_path = self._present(f"{DEVKIT}.tar.gz", DEVKIT)
        files = [] if kit_path is None else files_of(kit_path)
        if self.settings.real is not None:
            files.append(self._real_file())
            self._real_labels()  # its faults are reported before any image is packed
        beside = tuple((file.name, stamp_of([file])) for file in files)
        kit = None
        if kit_path is not None:
            kit = load_devkit(kit_path, must_be_published=self.settings.md5 != "off")
            self._val_labels = kit.val_labels
        classes: tuple[str, ...] = ()
        containers: list[Container] = []
        if "train" in self.settings.splits:
            synsets = find_synsets(self.root, self._place(TRAIN_TAR, "train"), split="train")
            classes = tuple(sorted(synsets))
            if kit is not None:
                _refuse_difference("train", classes, "the development kit", kit.wnids)
            containers += with_labels(synsets, classes)
        if "val" in self.settings.splits:
            place = self._place(VAL_TAR, "val")
            path = self.root / place
            if path.is_dir() and any(_WNID_FOLDER.match(each.name) for each in path.iterdir()):
                synsets = find_synsets(self.root, place, split="val")
                classes = classes or tuple(sorted(synsets))
                _refuse_difference("val", synsets, "train", classes)
                containers += with_labels(synsets, classes)
            elif kit is None:
                problem = (
                    f"{path} has no synset folders, so {DEVKIT}.tar.gz is needed for its labels"
                )
                fix = f"download it into {self.root}"
                raise SourceError("source.path", problem, fix, code="missing-path")
            else:
                classes = kit.wnids
                stamp = stamp_of([path]) if path.is_file() else ""
                containers.append(Container(path=place, split="val", stamp=stamp))
        return Outline(classes=classes, containers=tuple(containers), beside=beside)

    def entries(self, container: Container) -> Entries:
        if container.label is not None:
            return super().entries(container)
        rows = self.rows(container)
        numbers = [_val_number(name) for name, _, _ in rows]
        wrong = [number for number in numbers if not 1 <= number <= len(self._val_labels)]
        if wrong:
            problem = (
                f"image {wrong[0]} is not among the {len(self._val_labels)} labels of {DEVKIT}"
            )
            fix = "use val and development kit of the same year"
            raise SourceError("source.path", problem, fix, code="mismatch")
        return Entries.of(rows, label=[self._val_labels[number - 1] for number in numbers])

    def arrange(self, inventory: Inventory) -> Arrangement:
        """Return the splits; raise SourceError if val lacks images that have labels."""
        arrangement = by_container(inventory)
        labels = {part.label for part in inventory.containers if part.split == "val"}
        is_complete = None in labels or len(labels) == len(inventory.classes)
        wanted = sum(is_complete or label in labels for label in self._val_labels)
        if self.settings.real is not None and is_complete:
            wanted = max(wanted, len(self._real_labels()))
        found = len(arrangement.splits.get("val", ()))
        if labels and found < wanted:
            problem = f"val has {found:,} images, but {wanted:,} labels are known"
            raise SourceError("source.path", problem, "complete the archive", code="mismatch")
        return arrangement

    def annotations(
        self, locators: Sequence[str], labels: Sequence[int]
    ) -> dict[str, NDArray[np.bool_]]:
        if self.settings.real is None:
            return {}
        real, numbers = self._real_labels(), [_val_number(locator) for locator in locators]
        if max(numbers, default=0) > len(real):
            problem = (
                f"{self.settings.real} has {len(real)} lists, but none for image {max(numbers)}"
            )
            fix = "download real.json again"
            raise SourceError("source.real", problem, fix, code="mismatch")
        bits = np.zeros((len(locators), max(NUM_CLASSES, len(labels))), np.bool_)
        for row, number in enumerate(numbers):
            bits[row, real[number - 1]] = True
        kept = [old for old, new in enumerate(labels) if new >= 0]
        return {"real": bits if len(kept) == len(labels) else bits[:, kept]}

    def _real_labels(self) -> list[list[int]]:
        file = self._real_file()
        with report_damage(file, field="source.real", fix="download real.json again"):
            real: Any = json.loads(file.read_bytes())
            if not all(
                type(label) is int and 0 <= label < NUM_CLASSES for row in real for label in row
            ):
                raise ValueError("it is no list of label lists, one for each validation image")
        return list(real)

    def _real_file(self) -> Path:
        file = Path(self.settings.real or "")
        if not file.is_file():
            problem, fix = f"{file} does not exist", "remove this setting, or download real.json"
            raise SourceError("source.real", problem, fix, code="missing-path")
        return file

    def _place(self, tar: str, folder: str) -> str:
        """Return the name of the archive or folder of a split. Raise SourceError if neither
        exists."""
        path = self._present(tar, folder)
        if path is None:
            problem = f"{self.root} contains neither {tar} nor {folder}/"
            fix = "download one of them, or set source.splits to the existing splits"
            raise SourceError("source.path", problem, fix, code="missing-path")
        if path.is_file() and self.settings.md5 == "all":
            refuse_gzip(path)  # before reading all of it for its MD5
            check_md5(path, PUBLISHED_MD5[tar])
        return path.name

    def _present(self, archive: str, folder: str) -> Path | None:
        """Return the archive if it exists, or else its folder. A broken link is an error, not a
        missing file."""
        packed, unpacked = self.root / archive, self.root / folder
        for path in (packed, unpacked):
            if os.path.lexists(path) and kind_of(path) not in ("folder", "file"):
                raise damaged(path, f"is {kind_of(path)}", "fix or remove it")
        return packed if packed.is_file() else unpacked if unpacked.is_dir() else None


def _refuse_difference(
    place: str, found: Collection[str], other: str, wanted: Collection[str]
) -> None:
    odd = sorted(set(found) ^ set(wanted))
    if odd:
        counts = f"{place} has {len(found)} synsets, but {other} has {len(wanted)}"
        problem = f"{counts} ({odd[0]} is only in {place if odd[0] in found else other})"
        raise SourceError("source.path", problem, "complete the archive", code="mismatch")


def _val_number(name: str) -> int:
    match = _VAL_NAME.fullmatch(name)
    if not match:
        problem = f"{name} is not named like a validation image, ILSVRC2012_val_00000001.JPEG"
        raise SourceError("source.path", problem, "rename it", code="unknown-format")
    return int(match[1])


# ---- the development kit: the synset of each number, and the numbers of the images of val


class Devkit(NamedTuple):
    wnids: tuple[str, ...]
    """Sorted classes; the position of a class is its label."""
    val_labels: tuple[int, ...]
    """Labels of the validation images, in the order ILSVRC2012_val_00000001.JPEG and so on."""


def files_of(path: Path) -> list[Path]:
    """Return the paths of the needed files: the archive itself, or two files of its folder."""
    return [path / "data" / _META, path / "data" / _TRUTH] if path.is_dir() else [path]


def load_devkit(path: Path, *, must_be_published: bool) -> Devkit:
    from scipy.io import loadmat  # takes half a second, so only this source imports it

    if path.is_file() and must_be_published:
        check_md5(path, DEVKIT_MD5)
    with report_damage(path, fix=f"download {DEVKIT}.tar.gz again"):
        if path.is_dir():
            files = {file.name: file.read_bytes() for file in files_of(path)}
        else:
            files = read_members(path, (_META, _TRUTH))
        synsets: Any = loadmat(io.BytesIO(files[_META]), squeeze_me=True)["synsets"]
        wnid_of_number = {
            int(row["ILSVRC2012_ID"]): str(row["WNID"])
            for row in synsets
            if int(row["num_children"]) == 0
        }
        wnids = tuple(sorted(wnid_of_number.values()))
        numbers = map(int, files[_TRUTH].split())
        return Devkit(wnids, tuple(wnids.index(wnid_of_number[number]) for number in numbers))
