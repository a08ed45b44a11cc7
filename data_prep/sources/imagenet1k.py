"""ImageNet-1k (ILSVRC 2012): the folder into which its archives were downloaded, or in which they
were unpacked.

    ILSVRC2012_img_train.tar          or  train/  (synset tars or synset folders)
    ILSVRC2012_img_val.tar            or  val/    (synset folders, or the 50,000 pictures side by side)
    ILSVRC2012_devkit_t12.tar.gz      or  ILSVRC2012_devkit_t12/   needed where val is not in synset folders

Labels are the places of the sorted wnids, as everywhere. With `real` (real.json, from "Are we done
with ImageNet?") the split val gets the annotation `real`: a bit for each class that is right, none
for the pictures that have no right class.
"""  # noqa: E501 (a table)

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
from data_prep.archives.guard import SourceError, check_md5, refusing, stamp_of
from data_prep.archives.gzipped import read_members
from data_prep.archives.inventory import Container, Entries, Inventory, Outline
from data_prep.settings import Settings
from data_prep.sources.base import Arrangement, by_container
from data_prep.sources.synsets import SynsetSource, find_synsets, labelled, refuse_gzip

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
    """ImageNet-1k: a folder with the downloaded archives, or with what they unpack to."""

    kind: Literal["imagenet1k"]
    path: str = Field(examples=["downloads/imagenet"])
    """The folder with ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the devkit, or with what
    they unpack to."""
    splits: tuple[Literal["train", "val"], ...] = Field(("train", "val"), min_length=1)
    """Which of the two splits are built."""
    real: str | None = Field(None, examples=["downloads/real.json"])
    """The file real.json, for the reassessed labels of val."""
    md5: Literal["devkit", "all", "off"] = "devkit"
    """Which archives are held against their published MD5; `all` reads 144 GB once more."""


class ImageNet1kSource(SynsetSource):
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
            raise SourceError(
                f"source.path: {self.path} is not a directory; give the folder that holds"
                f" {TRAIN_TAR}"
            )
        classes: tuple[str, ...] | None = None
        containers: list[Container] = []
        kit_path = self._present(f"{DEVKIT}.tar.gz", DEVKIT)
        files = [] if kit_path is None else files_of(kit_path)
        files += [] if self.settings.real is None else [self._real_file()]
        beside = tuple((file.name, stamp_of([file])) for file in files)
        if self.settings.real is not None:
            self._real_labels()  # reports a mistake in it now, not after the packing
        kit = (
            None
            if kit_path is None
            else load_devkit(kit_path, must_be_published=self.settings.md5 != "off")
        )
        self._val_labels = kit.val_labels if kit is not None else ()
        if "train" in self.settings.splits:
            synsets = find_synsets(self.root, self._place(TRAIN_TAR, "train"), split="train")
            classes = tuple(sorted(synsets))
            if kit is not None:
                _refuse_difference("train", classes, "the development kit", kit.wnids)
            containers += labelled(synsets, classes)
        if "val" in self.settings.splits:
            place = self._place(VAL_TAR, "val")
            if place == VAL_TAR or not any(
                _WNID_FOLDER.match(path.name) for path in (self.root / place).iterdir()
            ):
                if kit is None:
                    raise SourceError(
                        f"source.path: {self.root / place} has no synset folders, so its labels are"
                        f" in {DEVKIT}.tar.gz; download it into {self.root}"
                    )
                classes = kit.wnids
                stamp = stamp_of([self.root / place]) if (self.root / place).is_file() else ""
                containers.append(Container(path=place, split="val", stamp=stamp))
            else:
                synsets = find_synsets(self.root, place, split="val")
                classes = classes or tuple(sorted(synsets))
                _refuse_difference("val", synsets, "train", classes)
                containers += labelled(synsets, classes)
        assert classes is not None
        return Outline(classes=classes, containers=tuple(containers), beside=beside)

    def entries(self, container: Container) -> Entries:
        if container.label is not None:
            return super().entries(container)
        rows = self.rows(container)
        return Entries.of(rows, label=[self._val_label(name) for name, _, _ in rows])

    def arrange(self, inventory: Inventory) -> Arrangement:
        """Refuses a val that lacks pictures whose labels are known."""
        arrangement = by_container(inventory)
        labels = {part.label for part in inventory.containers if part.split == "val"}
        is_whole = None in labels or len(labels) == len(inventory.classes)
        wanted = sum(is_whole or label in labels for label in self._val_labels)
        if self.settings.real is not None and is_whole:
            wanted = max(wanted, len(self._real_labels()))
        found = len(arrangement.splits.get("val", ()))
        if labels and found < wanted:
            raise SourceError(
                f"source.path: val has {found:,} pictures, but labels are known of {wanted:,};"
                " complete the archive"
            )
        return arrangement

    def annotations(
        self, locators: Sequence[str], labels: Sequence[int]
    ) -> dict[str, NDArray[np.bool_]]:
        if self.settings.real is None:
            return {}
        real = self._real_labels()
        bits = np.zeros((len(locators), max(NUM_CLASSES, len(labels))), np.bool_)
        for row, locator in enumerate(locators):
            number = _val_number(locator)
            if number > len(real):
                raise SourceError(
                    f"source.real: {self.settings.real} has {len(real)} lists, none for {locator}"
                )
            bits[row, real[number - 1]] = True
        everything = list(labels) == list(range(len(labels)))
        return {
            "real": (
                bits if everything else bits[:, [old for old, new in enumerate(labels) if new >= 0]]
            )
        }

    def _real_labels(self) -> list[list[int]]:
        file = self._real_file()
        try:
            real: Any = json.loads(file.read_bytes())
        except ValueError:
            real = None
        lists = isinstance(real, list) and all(isinstance(row, list) for row in real)
        if not lists or not all(
            type(label) is int and 0 <= label < NUM_CLASSES for row in real for label in row
        ):
            raise SourceError(
                f"source.real: {file} is not a list of label lists, one for each validation picture"
            )
        return list(real)

    def _real_file(self) -> Path:
        assert self.settings.real is not None
        file = Path(self.settings.real)
        if not file.is_file():
            raise SourceError(f"source.real: no file {file}; leave it out, or download real.json")
        return file

    def _place(self, tar: str, folder: str) -> str:
        """The one form of a split that is there."""
        path = self._present(tar, folder)
        if path is None:
            raise SourceError(
                f"source.path: {self.root} holds neither {tar} nor {folder}/; download it, or set"
                " source.splits to what is there"
            )
        if path.is_file() and self.settings.md5 == "all":
            refuse_gzip(path)  # before all of it is read for its sum
            check_md5(path, PUBLISHED_MD5[tar])
        return path.name

    def _present(self, archive: str, folder: str) -> Path | None:
        """The file, or else the folder, that is there. A link to nowhere must not pass for a part
        that was never downloaded."""
        packed, unpacked = self.root / archive, self.root / folder
        for path in (packed, unpacked):
            if os.path.lexists(path) and kind_of(path) not in ("folder", "file"):
                raise SourceError(f"source.path: {path} is {kind_of(path)}; mend or remove it")
        return packed if packed.is_file() else unpacked if unpacked.is_dir() else None

    def _val_label(self, name: str) -> int:
        number = _val_number(name)
        if not 1 <= number <= len(self._val_labels):
            raise SourceError(
                f"source.path: {name} is beyond the {len(self._val_labels)} labels of the"
                " development kit; are val and development kit of the same year?"
            )
        return self._val_labels[number - 1]


def _refuse_difference(
    place: str, found: Collection[str], other: str, wanted: Collection[str]
) -> None:
    odd = sorted(set(found) ^ set(wanted))
    if odd:
        raise SourceError(
            f"source.path: {place} has {len(found)} synsets, {other} {len(wanted)} (for example"
            f" {odd[0]} is in one only); complete the archive"
        )


def _val_number(name: str) -> int:
    match = _VAL_NAME.fullmatch(name)
    if not match:
        raise SourceError(
            f"source.path: {name} is not named like a validation picture,"
            " ILSVRC2012_val_00000001.JPEG"
        )
    return int(match[1])


# ---- the development kit: which synset each of the 1,000 numbers means, and the numbers of the
# validation pictures -----


class Devkit(NamedTuple):
    wnids: tuple[str, ...]
    """The classes, sorted: the place is the label that everyone uses."""
    val_labels: tuple[int, ...]
    """Of ILSVRC2012_val_00000001.JPEG and so on."""


def files_of(path: Path) -> list[Path]:
    """What is read of the development kit at `path`, the archive or the folder."""
    return [path / "data" / _META, path / "data" / _TRUTH] if path.is_dir() else [path]


def load_devkit(path: Path, *, must_be_published: bool) -> Devkit:
    files = {}
    if path.is_dir():
        for file in files_of(path):
            with refusing(file, remedy=f"unpack {DEVKIT}.tar.gz whole"):
                files[file.name] = file.read_bytes()
    else:
        if must_be_published:
            check_md5(path, DEVKIT_MD5)
        files = read_members(path, (_META, _TRUTH))
        if len(files) < 2:
            raise SourceError(f"source.path: {path} is not the development kit; download it again")
    wnid_of_number = _wnids(files[_META], path)
    wnids = tuple(sorted(wnid_of_number.values()))
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    with refusing(path / _TRUTH):
        return Devkit(
            wnids, tuple(labels[wnid_of_number[int(line)]] for line in files[_TRUTH].split())
        )


def _wnids(meta: bytes, path: Path) -> dict[int, str]:
    """The wnid of each number whose synset has no children."""
    from scipy.io import loadmat  # half a second that no other source should pay

    try:
        synsets: Any = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        rows = [
            (int(row["ILSVRC2012_ID"]), str(row["WNID"]), int(row["num_children"]))
            for row in synsets
        ]
    except Exception as error:  # noqa: BLE001 (a damaged .mat makes its reader raise anything)
        raise SourceError(
            f"source.path: {path}: its meta.mat cannot be read ({error}); download it again"
        ) from None
    return {number: wnid for number, wnid, num_children in rows if num_children == 0}
