"""TinyImageNet-200: tiny-imagenet-200.zip as downloaded, or the folder that it unpacks to.

    wnids.txt                               the 200 classes; labels are their sorted order
    train/WNID/images/*.JPEG                the boxes beside them are not read
    val/images/*.JPEG, val_annotations.txt  one flat folder: the labels stand in the text file alone
    test/images/*.JPEG                      never labelled

No sum of the zip is published, but its members carry CRCs, which are checked. A picture without
annotation, an annotation without picture, a class folder that wnids.txt does not name: each is an
error, so that nothing gets lost or mislabelled. A picture in any other folder is an error, too;
other files are counted as left out.
"""

import re
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from data_prep.archives.files import ENDINGS, Row, changed_in_folder, kind_of, read_file, walk_files
from data_prep.archives.guard import (
    SourceError,
    changed_since,
    check_unchanged,
    report_damage,
    stamp_of,
)
from data_prep.archives.inventory import Container, Entries, Entry, Inventory, Outline
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Arrangement, Source, by_container

TOP = "tiny-imagenet-200"
_WNIDS = "wnids.txt"
_ANNOTATIONS = "val/val_annotations.txt"
_PUBLISHED = re.compile(
    rf"(?:train/[^/]+|val|test)/images/.*|{_WNIDS}|words\.txt|{_ANNOTATIONS}|train/(.+)/\1_boxes\.txt",
    re.DOTALL,
)
_ENCRYPTED = 1


class TinyImageNetSettings(Settings):
    """TinyImageNet-200: 200 classes of ImageNet at 64 pixels."""

    kind: Literal["tinyimagenet"]
    path: str = Field(examples=["downloads/tiny-imagenet-200.zip"])
    """tiny-imagenet-200.zip as downloaded, or the folder that it unpacks to."""
    unlabelled_test: bool = False
    """Whether the 10,000 test pictures, whose labels were never published, become the split
    `test`."""


class TinyImageNetSource(Source):
    settings: TinyImageNetSettings

    def outline(self) -> Outline:
        stamp, tree = self._stamp, self._tree()
        lists = (_WNIDS, _ANNOTATIONS) if self.path.is_dir() else ()
        beside = tuple((name, stamp_of([self.path / name])) for name in lists)
        classes = _wnids(tree)
        folders = tree.subfolders("train")
        _refuse(set(classes) - set(folders), "wnids.txt names classes without a folder in train")
        _refuse(set(folders) - set(classes), "train holds folders that wnids.txt does not name")
        containers = [
            Container(path=f"train/{name}/images", split="train", label=label, stamp=stamp)
            for label, name in enumerate(classes)
        ]
        containers.append(Container(path="val/images", split="val", stamp=stamp))
        if self.settings.unlabelled_test:
            containers.append(
                Container(path="test/images", split="test", label=UNLABELLED, stamp=stamp)
            )
        _refuse(
            {name for name in self._others() if name.lower().endswith(ENDINGS)},
            "images are outside the published folders",
        )
        return Outline(classes=classes, containers=tuple(containers), beside=beside)

    def entries(self, container: Container) -> Entries:
        tree = self._tree()
        inner = tree.subfolders(container.path)
        if inner:
            raise SourceError(
                f"source.path: {container.path}/{inner[0]} is a folder where only pictures are"
                " published; download the archive again, or give this one as source.kind=folder"
            )
        rows = tree.files(container.path)
        if container.label is not None:
            return Entries.of(rows, label=container.label)
        labels, present = _val_labels(tree), {name for name, _, _ in rows}
        _refuse(labels.keys() - present, f"{_ANNOTATIONS} names pictures that are not there")
        _refuse(present - labels.keys(), f"{_ANNOTATIONS} lacks pictures that are there")
        return Entries.of(rows, label=[labels[name] for name, _, _ in rows])

    def arrange(self, inventory: Inventory) -> Arrangement:
        return replace(by_container(inventory), left_out={"other files": len(self._others())})

    def _others(self) -> list[str]:
        """The files that are neither in a published folder of pictures nor a published text."""
        return [name for name in self._tree().names() if not _PUBLISHED.fullmatch(name)]

    def read(self, entry: Entry) -> bytes:
        if self.path.is_dir():
            return read_file(self.path, entry)
        check_unchanged(entry.locator, entry.container.stamp, [self.path])
        return self._tree().read(entry.locator)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        if self.path.is_dir():
            return changed_in_folder(container, listed, walk_files(self.path / container.path))
        return changed_since([self.path], container.stamp)

    @property
    def _stamp(self) -> str:
        """Of the zip; only listing shows whether a folder is unchanged."""
        if self.path.is_dir():
            return ""
        if not self.path.is_file():
            raise SourceError(
                f"source.path: {self.path} is not there; give {TOP}.zip as downloaded, or the"
                " folder that it unpacks to"
            )
        return stamp_of([self.path])

    def _tree(self) -> "FolderTree":
        return FolderTree(self.path) if self.path.is_dir() else _zip_tree(self.path, self._stamp)


def _refuse(names: set[str], message: str) -> None:
    if names:
        raise SourceError(
            f"source.path: {message} ({', '.join(sorted(names)[:3])}); download the archive again"
        )


def _wnids(tree: "FolderTree") -> tuple[str, ...]:
    names = _lines(tree, _WNIDS)
    if (
        not names
        or len(set(names)) < len(names)
        or any("/" in name or name.startswith(".") for name in names)
    ):
        raise SourceError(
            "source.path: wnids.txt names no classes, one twice, or a path; download the archive"
            " again"
        )
    return tuple(sorted(names))


def _val_labels(tree: "FolderTree") -> dict[str, int]:
    """The label of each validation picture; the four numbers after it are a box."""
    labels = {name: label for label, name in enumerate(_wnids(tree))}
    found: dict[str, int] = {}
    for line in _lines(tree, _ANNOTATIONS):
        picture, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in labels:
            raise SourceError(
                f"source.path: {_ANNOTATIONS}: {picture} has the class {wnid!r}, which is not in"
                " wnids.txt; download the archive again"
            )
        if picture in found:
            raise SourceError(
                f"source.path: {_ANNOTATIONS} names {picture} twice; download the archive again"
            )
        found[picture] = labels[wnid]
    return found


def _lines(tree: "FolderTree", name: str) -> list[str]:
    data = tree.read(name)
    with report_damage(name):
        return [line.strip() for line in data.decode("ascii").splitlines() if line.strip()]


# ---- the files below a folder, or in a zip, by their path from its top
# ----------------------------------------------
#
# A zip is never unpacked, and a path leads to the member of that very name or nowhere. Invariants
# of a zip: its central directory is read once in a process; no name occurs twice; what is read has
# the size and the CRC that the directory says.


class FolderTree:
    """The files below a folder. All names are sorted; what begins with a dot is not there."""

    def __init__(self, root: Path):
        self.root = root

    def names(self) -> list[str]:
        """The path of each file."""
        return [name for name, _, _ in walk_files(self.root)]

    def subfolders(self, folder: str) -> list[str]:
        with report_damage(self.root / folder):
            inside = (
                path for path in (self.root / folder).iterdir() if not path.name.startswith(".")
            )
            return sorted(path.name for path in inside if kind_of(path) == "folder")

    def files(self, folder: str) -> list[Row]:
        """(name, time of change, bytes) of each file in `folder`, which must exist."""
        with report_damage(self.root / folder):
            return [row for row in walk_files(self.root / folder) if "/" not in row[0]]

    def read(self, path: str) -> bytes:
        with report_damage(self.root / path):
            return (self.root / path).read_bytes()


class ZipTree(FolderTree):
    """The members of a zip, in the same words."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._folders: dict[str, list[Row]] = {}
        """The files of each."""
        with report_damage(path):
            self._zip = zipfile.ZipFile(path)
            for member in self._zip.infolist():
                self._add(member)
        if not self._members:
            raise SourceError(
                f"source.path: {path} holds no files below {TOP}; give {TOP}.zip as downloaded"
            )

    def names(self) -> list[str]:
        return list(self._members)

    def subfolders(self, folder: str) -> list[str]:
        places = (name.rpartition("/") for name in self._folders)
        return sorted(last for above, _, last in places if above == folder and last)

    def files(self, folder: str) -> list[Row]:
        if folder not in self._folders:
            raise SourceError(f"source.path: {self.root} holds no {folder}; download it again")
        return sorted(self._folders[folder])

    def read(self, path: str) -> bytes:
        if path not in self._members:
            raise SourceError(f"source.path: {self.root} holds no {path}; download it again")
        if self._members[path].flag_bits & _ENCRYPTED:
            raise SourceError(
                f"source.path: {self.root}: {path} is encrypted; repack it without a password"
            )
        with report_damage(f"{self.root}: {path}"):
            return self._zip.read(self._members[path])

    def _add(self, member: zipfile.ZipInfo) -> None:
        first, *parts = member.filename.rstrip("/").split("/")
        if first != TOP:
            return  # __MACOSX and its like
        if any(part in ("", ".", "..") or "\\" in part for part in parts):
            raise SourceError(
                f"source.path: {self.root} holds the path {member.filename!r}; download it again"
            )
        if any(part.startswith(".") for part in parts):
            return  # .DS_Store and its like
        inner = "/".join(parts)
        if member.is_dir():
            self._folder(inner)
        elif inner in self._members:
            raise SourceError(f"source.path: {self.root} holds {inner} twice; download it again")
        else:
            self._members[inner] = member
            self._folder("/".join(parts[:-1])).append((parts[-1], 0, member.file_size))

    def _folder(self, path: str) -> list[Row]:
        """The files of a folder, which is there from now on, as are those that it lies in."""
        if path not in self._folders:
            self._folders[path] = []
            self._folder(path.rpartition("/")[0])
        return self._folders[path]


@lru_cache(maxsize=1)
def _zip_tree(path: Path, stamp: str) -> ZipTree:  # noqa: ARG001 (a changed zip is opened anew)
    return ZipTree(path)
