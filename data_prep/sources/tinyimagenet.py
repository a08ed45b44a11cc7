"""TinyImageNet-200: tiny-imagenet-200.zip as downloaded, or the folder that it unpacks to.

    wnids.txt                               the 200 classes; labels number them in sorted order
    train/WNID/images/*.JPEG                the box files of each WNID are not read
    val/images/*.JPEG, val_annotations.txt  one flat folder; only the text file has the labels
    test/images/*.JPEG                      never labeled

A zip is not unpacked. The CRCs of its members are checked. An image without annotation, an
annotation without image, a class folder that wnids.txt does not name, and an image in any other
folder are errors. Other files are skipped and counted.
"""

import re
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from data_prep.archives.files import ENDINGS, Row, changed_in_folder, read_file, walk_files
from data_prep.archives.guard import (
    changed_since,
    check_unchanged,
    damaged,
    report_damage,
    stamp_of,
)
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Arrangement, Source, by_container

TOP = "tiny-imagenet-200"
_WNIDS, _ANNOTATIONS = "wnids.txt", "val/val_annotations.txt"
_IMAGE = re.compile(r"(train/[^/]+/images|val/images|test/images)/(.*)", re.DOTALL)
_TEXT = re.compile(rf"{_WNIDS}|words\.txt|{_ANNOTATIONS}|train/(.+)/\1_boxes\.txt", re.DOTALL)
_ENCRYPTED = 1


class TinyImageNetSettings(Settings):
    """TinyImageNet-200: 200 classes of ImageNet at 64 pixels."""

    kind: Literal["tinyimagenet"]
    path: str = Field(examples=["downloads/tiny-imagenet-200.zip"])
    """Downloaded tiny-imagenet-200.zip, or the folder that it unpacks to."""
    unlabeled_test: bool = False
    """Add the 10,000 test images, published without labels, as the split `test`."""


class TinyImageNetSource(Source, of=TinyImageNetSettings):
    settings: TinyImageNetSettings

    def outline(self) -> Outline:
        stamp = "" if self.path.is_dir() else stamp_of([self.path])
        lists = (_WNIDS, _ANNOTATIONS) if self.path.is_dir() else ()
        beside = tuple((name, stamp_of([self.path / name])) for name in lists)
        folders, others = self._listing()
        classes = self._wnids()
        named = {f"train/{name}/images" for name in classes}
        found = {folder for folder in folders if folder.startswith("train/")}
        _refuse(named - found, "lacks folders of classes that wnids.txt names")
        _refuse(found - named, "has folders of classes that wnids.txt does not name")
        images = {name for name in others if name.lower().endswith(ENDINGS)}
        _refuse(images, "has images outside of the published folders")
        containers = [
            Container(f"train/{name}/images", "train", label, stamp=stamp)
            for label, name in enumerate(classes)
        ]
        containers.append(Container("val/images", "val", stamp=stamp))
        if self.settings.unlabeled_test:
            containers.append(Container("test/images", "test", UNLABELLED, stamp=stamp))
        return Outline(classes=classes, containers=tuple(containers), beside=beside)

    def entries(self, container: Container) -> Entries:
        if self.path.is_dir():
            with report_damage(self.path / container.path):
                rows = list(walk_files(self.path / container.path))
        else:
            rows = self._listing()[0].get(container.path, [])
        if not rows:
            raise damaged(self.path, f"lacks the images of {container.path}")
        _refuse({name for name, _, _ in rows if "/" in name}, f"has folders in {container.path}")
        if container.label is not None:
            return Entries.of(rows, label=container.label)
        labels, present = self._val_labels(), {name for name, _, _ in rows}
        _refuse(labels.keys() - present, f"lacks images that {_ANNOTATIONS} names")
        _refuse(present - labels.keys(), f"has images that {_ANNOTATIONS} does not name")
        return Entries.of(rows, label=[labels[name] for name, _, _ in rows])

    def arrange(self, inventory: Inventory) -> Arrangement:
        _, others = self._listing()
        count = sum(_TEXT.fullmatch(name) is None for name in others)
        return replace(by_container(inventory), left_out={"other files": count})

    def read(self, entry: Entry) -> bytes:
        if self.path.is_dir():
            return read_file(self.path, entry)
        check_unchanged(entry.locator, entry.container.stamp, [self.path])
        return self._read(entry.locator)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        if self.path.is_dir():
            return changed_in_folder(container, listed, walk_files(self.path / container.path))
        return changed_since([self.path], container.stamp)

    def _listing(self) -> tuple[dict[str, list[Row]], list[str]]:
        """Return the images below each published folder, and the paths of all other files."""
        if self.path.is_dir():
            return _by_folder(walk_files(self.path))
        return _open_zip(self.path, stamp_of([self.path])).listing

    def _read(self, name: str) -> bytes:
        place = self.path / name
        with report_damage(place):
            if self.path.is_dir():
                return place.read_bytes()
            opened = _open_zip(self.path, stamp_of([self.path]))
            member = opened.members.get(name)
            if member is None:
                raise FileNotFoundError
            if member.flag_bits & _ENCRYPTED:
                raise damaged(place, "is encrypted", "repack it without a password")
            return opened.file.read(member)

    def _lines(self, name: str) -> list[str]:
        data = self._read(name)
        with report_damage(self.path / name):
            return [line.strip() for line in data.decode("ascii").splitlines() if line.strip()]

    def _wnids(self) -> tuple[str, ...]:
        names = self._lines(_WNIDS)
        odd = any("/" in name or name.startswith(".") for name in names)
        if odd or not names or len(set(names)) < len(names):
            raise damaged(self.path / _WNIDS, "names no classes, a class twice, or a path")
        return tuple(sorted(names))

    def _val_labels(self) -> dict[str, int]:
        """Return the label of each validation image. The other four numbers of a line (a box) are
        ignored."""
        labels = {name: label for label, name in enumerate(self._wnids())}
        found: dict[str, int] = {}
        for line in self._lines(_ANNOTATIONS):
            name, wnid, *_ = f"{line}\t".split("\t")
            if wnid not in labels or name in found:
                problem = (
                    "again" if name in found else f"with the class {wnid!r}, which has no folder"
                )
                raise damaged(self.path / _ANNOTATIONS, f"names {name} {problem}")
            found[name] = labels[wnid]
        return found


def _refuse(names: set[str], problem: str) -> None:
    if names:
        raise damaged("the archive", f"{problem} ({', '.join(sorted(names)[:3])})")


def _by_folder(rows: Iterable[Row]) -> tuple[dict[str, list[Row]], list[str]]:
    folders, others = dict[str, list[Row]](), list[str]()
    for name, changed_ns, num_bytes in rows:
        if match := _IMAGE.fullmatch(name):
            folders.setdefault(match[1], []).append((match[2], changed_ns, num_bytes))
        else:
            others.append(name)
    return folders, others


class _Zip:
    """Members of a zip below TOP. Hidden files are skipped, and no name occurs twice."""

    def __init__(self, path: Path):
        self.members = dict[str, zipfile.ZipInfo]()
        with report_damage(path):
            self.file = zipfile.ZipFile(path)
            for member in self.file.infolist():
                first, *parts = member.filename.split("/")
                inner = "/".join(parts)
                if first != TOP or member.is_dir():
                    continue
                if {"", ".", ".."} & set(parts) or "\\" in inner or inner in self.members:
                    raise ValueError(f"its path {member.filename!r} is not valid, or occurs twice")
                if not any(part.startswith(".") for part in parts):
                    self.members[inner] = member
        if not self.members:
            raise damaged(path, f"has no files below {TOP}", f"give {TOP}.zip as downloaded")
        rows = sorted((name, 0, member.file_size) for name, member in self.members.items())
        self.listing = _by_folder(rows)


@lru_cache(maxsize=1)
def _open_zip(path: Path, stamp: str) -> _Zip:  # noqa: ARG001 (a changed zip is opened again)
    return _Zip(path)
