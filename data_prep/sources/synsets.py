"""Finds and reads the pictures of synsets in the three forms in which ImageNet lies about: a tar of
one tar per synset (as it is downloaded), a folder of those tars, a folder of folders. A synset is
named by its wnid: n and eight digits.

Whatever the form, synsets are sorted by wnid and pictures by name, so that all forms make the same
samples. Nothing is unpacked: a picture is a range of bytes of the outermost file.
"""

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from data_prep.archives.files import (
    changed_in_folder,
    folders_and_files,
    read_file,
    refuse_loose_images,
    walk_files,
)
from data_prep.archives.guard import SourceError, changed_since, stamp_of
from data_prep.archives.inventory import Container, Entries, Entry
from data_prep.settings import Settings
from data_prep.sources.base import Source
from data_prep.tar import Member, TarError, members, read_checked

_WNID = re.compile(r"n\d{8}")
_GZIP_MAGIC = b"\x1f\x8b"


class SynsetSource(Source):
    """Each container is a folder, a tar, or a tar in a tar, below `root`."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.root = self.path.parent if self.path.is_file() else self.path

    def entries(self, container: Container) -> Entries:
        assert container.label is not None
        return Entries.of(self.rows(container), label=container.label)

    def rows(self, container: Container) -> list[tuple[str, int, int]]:
        """As `Entries.of` takes them."""
        if _is_folder(container):
            return list(walk_files(self.root / container.path))
        file, place = _file_of(self.root, container), self.root / container.path
        found = _visible(file, place, start=container.offset, num_bytes=container.num_bytes or None)
        if len({member.name for member in found}) < len(found):
            raise SourceError(f"source.path: {place} holds a name twice; download it again")
        return [(member.name, member.offset, member.num_bytes) for member in found]

    def read(self, entry: Entry) -> bytes:
        if _is_folder(entry.container):
            return read_file(self.root, entry)
        try:
            return read_checked(
                _open(self.root, entry.container).number, entry.offset, entry.num_bytes
            )
        except TarError:
            raise SourceError(
                f"{self.root / entry.container.path}: {entry.name} is not where it was when this"
                " tar was listed; it was changed or replaced: restore it, or remove the unfinished"
                " dataset and build again"
            ) from None

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        if _is_folder(container):
            return changed_in_folder(container, listed, walk_files(self.root / container.path))
        return changed_since([_file_of(self.root, container)], container.stamp)


def find_synsets(root: Path, place: str, *, split: str) -> dict[str, Container]:
    """The container of every synset in `root/place` (a tar or a folder), by wnid."""
    path = root / place
    if path.is_file():
        return _tar_of_tars(path, place, split)
    prefix = f"{place}/" if place else ""
    inside, files = folders_and_files(path)
    tars = [name for name in files if name.endswith(".tar")]
    others = [name for name in files if not name.endswith(".tar")]
    refuse_loose_images(path, others, of="synset")
    odd = [name for name in others if _WNID.match(name)]
    if odd:
        raise SourceError(
            f"source.path: {path} holds {odd[0]}, which is no finished synset tar; complete or"
            " remove it"
        )
    folders = {_wnid(name, path): Container(f"{prefix}{name}", split) for name in inside}
    if not tars and not folders:
        raise SourceError(
            f"source.path: {path} holds neither synset tars (n01440764.tar) nor synset folders"
        )
    packed = {
        _wnid(name, path): Container(f"{prefix}{name}", split, stamp=stamp_of([path / name]))
        for name in tars
    }
    if packed and folders.keys() - packed.keys():
        alone = min(folders.keys() - packed.keys())
        raise SourceError(
            f"source.path: {path} holds synset tars, but {alone} only as a folder; keep one form of"
            " them"
        )
    return packed or folders


def labelled(synsets: dict[str, Container], classes: tuple[str, ...]) -> list[Container]:
    labels = {name: label for label, name in enumerate(classes)}
    return [container._replace(label=labels[wnid]) for wnid, container in sorted(synsets.items())]


def _tar_of_tars(path: Path, place: str, split: str) -> dict[str, Container]:
    stamp = stamp_of([path])
    synsets: dict[str, Container] = {}
    for member in _visible(path, path):
        wnid = _wnid(member.name, path)
        if wnid in synsets:
            raise SourceError(
                f"source.path: {path} holds the synset {wnid} twice; download it again"
            )
        synsets[wnid] = Container(
            f"{place}/{member.name}",
            split,
            offset=member.offset,
            num_bytes=member.num_bytes,
            stamp=stamp,
        )
    if not synsets:
        raise SourceError(f"source.path: {path} is an empty tar")
    return synsets


def _visible(
    file: Path, place: Path, *, start: int = 0, num_bytes: int | None = None
) -> list[Member]:
    """The members of a tar, or of the range of `file` that is one, called `place`; hidden files
    aside."""
    refuse_gzip(file)
    try:
        found = list(members(file, start=start, num_bytes=num_bytes))
    except TarError as error:
        raise SourceError(f"source.path: {place} {error.or_fix('download it again')}") from None
    return [member for member in found if not member.name.rpartition("/")[2].startswith(".")]


def refuse_gzip(file: Path) -> None:
    with open(file, "rb") as stream:
        if stream.read(2) == _GZIP_MAGIC:
            raise SourceError(
                f"source.path: {file} is compressed, so its pictures cannot be reached one by one;"
                f" unpack it once (tar xzf {file.name}) and give the folder of synset tars"
            )


def _wnid(name: str, place: Path) -> str:
    stem = name.rpartition("/")[2].removesuffix(".tar")
    if not _WNID.fullmatch(stem):
        raise SourceError(
            f"source.path: {place} holds {name!r}, which is no synset (n and 8 digits); is this"
            " ImageNet?"
        )
    return stem


def _is_folder(container: Container) -> bool:
    """A tar has a stamp, whatever its name ends in."""
    return not container.stamp


def _file_of(root: Path, container: Container) -> Path:
    """A range of a file is called FILE/MEMBER; members of the published archives may lie in a
    folder of it."""
    path = root / container.path
    while not path.is_file():
        if path in (root, path.parent):
            raise SourceError(
                f"source.path: {root / container.path} has vanished; is its disk still there?"
            )
        path = path.parent
    return path


class _Descriptor:
    """An open file that closes when the cache drops it."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


@lru_cache(maxsize=64)
def _open(root: Path, container: Container) -> _Descriptor:
    return _Descriptor(_file_of(root, container))
