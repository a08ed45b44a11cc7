"""TinyImageNet-200: tiny-imagenet-200.zip as downloaded, or the folder that it unpacks to.

    wnids.txt                               the 200 classes; labels are their sorted order
    train/WNID/images/*.JPEG                the boxes beside them are not read
    val/images/*.JPEG, val_annotations.txt  one flat folder: the labels stand in the text file alone
    test/images/*.JPEG                      never labelled

No sum of the zip is published, but its members carry CRCs, which are checked. A picture without annotation, an annotation without
picture, a class folder that wnids.txt does not name: each is an error, so that nothing gets lost or mislabelled.
"""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from data_prep.archives.files import changed_in_folder, read_file
from data_prep.archives.guard import SourceError, changed_since, check_unchanged, refusing, stamp_of
from data_prep.archives.inventory import Container, Entries, Entry, Outline
from data_prep.archives.trees import FolderTree, Tree, open_zip_tree
from data_prep.settings import Settings
from data_prep.sources.base import UNLABELLED, Source

TOP = "tiny-imagenet-200"
_WNIDS = "wnids.txt"
_ANNOTATIONS = "val/val_annotations.txt"


class TinyImageNetSettings(Settings):
    """TinyImageNet-200: 200 classes of ImageNet at 64 pixels."""

    kind: Literal["tinyimagenet"]
    path: str = Field(examples=["downloads/tiny-imagenet-200.zip"])
    """tiny-imagenet-200.zip as downloaded, or the folder that it unpacks to."""
    unlabelled_test: bool = False
    """Whether the 10,000 test pictures, whose labels were never published, become the split `test`."""


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
            Container(path=f"train/{name}/images", split="train", label=label, stamp=stamp) for label, name in enumerate(classes)
        ]
        containers.append(Container(path="val/images", split="val", stamp=stamp))
        if self.settings.unlabelled_test:
            containers.append(Container(path="test/images", split="test", label=UNLABELLED, stamp=stamp))
        return Outline(classes=classes, containers=tuple(containers), beside=beside)

    def entries(self, container: Container) -> Entries:
        tree = self._tree()
        inner = tree.subfolders(container.path)
        if inner:
            raise SourceError(
                f"source.path: {container.path}/{inner[0]} is a folder where only pictures are published; download the "
                "archive again, or give this one as source.kind=folder"
            )
        rows = tree.files(container.path)
        if container.label is not None:
            return Entries.of(rows, label=container.label)
        labels, present = _val_labels(tree), {name for name, _, _ in rows}
        _refuse(labels.keys() - present, f"{_ANNOTATIONS} names pictures that are not there")
        _refuse(present - labels.keys(), f"{_ANNOTATIONS} lacks pictures that are there")
        return Entries.of(rows, label=[labels[name] for name, _, _ in rows])

    def read(self, entry: Entry) -> bytes:
        if self.path.is_dir():
            return read_file(self.path, entry)
        check_unchanged(entry.locator, entry.container.stamp, self._stamp)
        return self._tree().read(entry.locator)

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        if self.path.is_dir():
            return changed_in_folder(self.path, container, listed)
        return changed_since([self.path], container.stamp)

    @property
    def _stamp(self) -> str:
        """Of the zip; only listing shows whether a folder is unchanged."""
        if self.path.is_dir():
            return ""
        if not self.path.is_file():
            raise SourceError(
                f"source.path: {self.path} is not there; give {TOP}.zip as downloaded, or the folder that it unpacks to"
            )
        return stamp_of([self.path])

    def _tree(self) -> Tree:
        return FolderTree(self.path) if self.path.is_dir() else open_zip_tree(self.path, TOP, self._stamp)


def _refuse(names: set[str], message: str) -> None:
    if names:
        raise SourceError(f"source.path: {message} ({', '.join(sorted(names)[:3])}); download the archive again")


def _wnids(tree: Tree) -> tuple[str, ...]:
    names = _lines(tree, _WNIDS)
    if not names or len(set(names)) < len(names) or any("/" in name or name.startswith(".") for name in names):
        raise SourceError("source.path: wnids.txt names no classes, one twice, or a path; download the archive again")
    return tuple(sorted(names))


def _val_labels(tree: Tree) -> dict[str, int]:
    """The label of each validation picture; the four numbers after it are a box."""
    labels = {name: label for label, name in enumerate(_wnids(tree))}
    found: dict[str, int] = {}
    for line in _lines(tree, _ANNOTATIONS):
        picture, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in labels:
            raise SourceError(
                f"source.path: {_ANNOTATIONS}: {picture} has the class {wnid!r}, which is not in wnids.txt; download the "
                "archive again"
            )
        if picture in found:
            raise SourceError(f"source.path: {_ANNOTATIONS} names {picture} twice; download the archive again")
        found[picture] = labels[wnid]
    return found


def _lines(tree: Tree, name: str) -> list[str]:
    data = tree.read(name)
    with refusing(name):
        return [line.strip() for line in data.decode("ascii").splitlines() if line.strip()]
