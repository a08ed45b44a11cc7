"""Find and read the images of synsets. A synset is named by its wnid: n and eight digits.

Three forms are read: a tar of one tar per synset (as ImageNet is downloaded), a folder of such
tars, or a folder of folders. Synsets are sorted by wnid and images by name, so all forms give the
same samples. No tar is unpacked: its images are ranges of bytes of the outermost file.
"""

import os
import re
from collections import Counter
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
from data_prep.archives.guard import SourceError, changed, changed_since, damaged, stamp_of
from data_prep.archives.inventory import Container, Entries, Entry
from data_prep.settings import Settings
from data_prep.sources.base import Source
from data_prep.tar import Member, TarError, members, read_checked

_WNID = re.compile(r"n\d{8}")
_GZIP_MAGIC = b"\x1f\x8b"


class SynsetSource(Source):
    """A source of synset containers below `root`: folders, tars, or tars in a tar. Only tars have a
    stamp."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.root = self.path.parent if self.path.is_file() else self.path

    def entries(self, container: Container) -> Entries:
        assert container.label is not None
        return Entries.of(self.rows(container), label=container.label)

    def rows(self, container: Container) -> list[tuple[str, int, int]]:
        """Return (name, offset or modification time, number of bytes) of each image."""
        place = self.root / container.path
        if not container.stamp:
            return list(walk_files(place))
        file, num_bytes = _file_of(self.root, container), container.num_bytes or None
        found = _visible(file, place, start=container.offset, num_bytes=num_bytes)
        if repeated := [name for name, n in Counter(m.name for m in found).items() if n > 1]:
            raise damaged(place, f"contains two files named {repeated[0]}")
        return [(member.name, member.offset, member.num_bytes) for member in found]

    def read(self, entry: Entry) -> bytes:
        if not entry.container.stamp:
            return read_file(self.root, entry)
        descriptor = _open(self.root, entry.container).number
        try:
            return read_checked(descriptor, entry.offset, entry.num_bytes)
        except TarError:
            raise changed(f"{self.root / entry.container.path}: {entry.name}") from None

    def changed(self, container: Container, listed: Iterable[Entry]) -> list[str]:
        if not container.stamp:
            return changed_in_folder(container, listed, walk_files(self.root / container.path))
        return changed_since([_file_of(self.root, container)], container.stamp)


def find_synsets(root: Path, place: str, *, split: str) -> dict[str, Container]:
    """Return the container of every synset in `root/place` (a tar or a folder), by wnid."""
    path = root / place
    if path.is_file():
        return _tar_of_tars(path, place, split)
    prefix = f"{place}/" if place else ""
    inside, files = folders_and_files(path)
    tars = [name for name in files if name.endswith(".tar")]
    others = [name for name in files if not name.endswith(".tar")]
    refuse_loose_images(path, others, of="synset")
    parts = [name for name in others if _WNID.match(name)]
    if parts:
        raise damaged(path, f"has {parts[0]}, an unfinished tar", "complete or remove it")
    folders = {_wnid(name, path): Container(f"{prefix}{name}", split) for name in inside}
    packed = {
        _wnid(name, path): Container(f"{prefix}{name}", split, stamp=stamp_of([path / name]))
        for name in tars
    }
    if not packed and not folders:
        problem, fix = f"{path} has no synsets", "give synset tars (n01440764.tar) or folders"
        raise SourceError("source.path", problem, fix, code="unknown-format")
    alone = sorted(folders.keys() - packed.keys())
    if packed and alone:
        problem = f"{path} contains synset tars, but {alone[0]} only as a folder"
        raise SourceError(
            "source.path", problem, "keep only the tars or only folders", code="unknown-format"
        )
    return packed or folders


def with_labels(synsets: dict[str, Container], classes: tuple[str, ...]) -> list[Container]:
    labels = {name: label for label, name in enumerate(classes)}
    return [container._replace(label=labels[wnid]) for wnid, container in sorted(synsets.items())]


def _tar_of_tars(path: Path, place: str, split: str) -> dict[str, Container]:
    stamp = stamp_of([path])
    synsets: dict[str, Container] = {}
    for name, offset, num_bytes in _visible(path, path):
        wnid = _wnid(name, path)
        if wnid in synsets:
            raise damaged(path, f"has the synset {wnid} twice")
        synsets[wnid] = Container(f"{place}/{name}", split, None, offset, num_bytes, stamp)
    if not synsets:
        raise damaged(path, "is an empty tar")
    return synsets


def _visible(
    file: Path, place: Path, *, start: int = 0, num_bytes: int | None = None
) -> list[Member]:
    """Return the members of the tar in a range of `file`, except hidden files."""
    refuse_gzip(file)
    try:
        found = list(members(file, start=start, num_bytes=num_bytes))
    except TarError as error:
        raise damaged(place, error.problem, error.fix or "download it again") from None
    return [member for member in found if not member.name.rpartition("/")[2].startswith(".")]


def refuse_gzip(file: Path) -> None:
    with open(file, "rb") as stream:
        if stream.read(2) == _GZIP_MAGIC:
            problem = f"{file} is compressed, so single images cannot be read"
            fix = f"unpack it once (tar xzf {file.name}) and give the folder of synset tars"
            raise SourceError("source.path", problem, fix, code="unsupported")


def _wnid(name: str, place: Path) -> str:
    stem = name.rpartition("/")[2].removesuffix(".tar")
    if not _WNID.fullmatch(stem):
        problem = f"{place} has {name!r}, which is no synset (n and 8 digits)"
        fix = "remove it, or use --source folder for other classes"
        raise SourceError("source.path", problem, fix, code="unknown-format")
    return stem


def _file_of(root: Path, container: Container) -> Path:
    """Return the file on disk of a container, whose path can be FILE/MEMBER."""
    place = root / container.path
    for path in (place, *place.parents):
        if path.is_file():
            return path
        if path == root:
            break
    problem, fix = f"{place} does not exist any more", "check its disk"
    raise SourceError("source.path", problem, fix, code="missing-path")


class _Descriptor:
    """An open file descriptor, which is closed when the cache drops it."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


@lru_cache(maxsize=64)
def _open(root: Path, container: Container) -> _Descriptor:
    return _Descriptor(_file_of(root, container))
