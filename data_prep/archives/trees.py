"""The files below a folder, or in a zip, by their path from its top.

A zip is never unpacked, and a path leads to the member of that very name or nowhere. Invariants of a zip: its central directory
is read once in a process; no name occurs twice; what is read has the size and the CRC that the directory says.
"""

import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from data_prep.archives.files import kind_of, list_files
from data_prep.archives.guard import SourceError, refusing

MAX_MEMBER_BYTES: Final = 1 << 28
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 1


class FolderTree:
    """The files below a folder. All names are sorted; what begins with a dot is not there."""

    def __init__(self, root: Path):
        self.root = root

    def subfolders(self, folder: str) -> list[str]:
        with refusing(self.root / folder):
            inside = (path for path in (self.root / folder).iterdir() if not path.name.startswith("."))
            return sorted(path.name for path in inside if kind_of(path) == "folder")

    def files(self, folder: str) -> list[tuple[str, int, int]]:
        """(name, time of change, bytes) of each file in `folder`, which must exist."""
        with refusing(self.root / folder):
            return [row for row in list_files(self.root / folder) if "/" not in row[0]]

    def read(self, path: str) -> bytes:
        with refusing(self.root / path):
            return (self.root / path).read_bytes()


class ZipTree:
    """The members of a zip, in the same words."""

    def __init__(self, path: Path, top: str):
        self.path = path
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._folders: dict[str, list[tuple[str, int, int]]] = {}
        """The files of each."""
        with refusing(path):
            self._zip = zipfile.ZipFile(path)
            for member in self._zip.infolist():
                self._add(member, top)
        if not self._members:
            raise SourceError(f"source.path: {path} holds no files below {top}; give {top}.zip as downloaded")

    def subfolders(self, folder: str) -> list[str]:
        places = (name.rpartition("/") for name in self._folders)
        return sorted(last for above, _, last in places if above == folder and last)

    def files(self, folder: str) -> list[tuple[str, int, int]]:
        if folder not in self._folders:
            raise SourceError(f"source.path: {self.path} holds no {folder}; download it again")
        return sorted(self._folders[folder])

    def read(self, path: str) -> bytes:
        member = self._members.get(path)
        if member is None:
            raise SourceError(f"source.path: {self.path} holds no {path}; download it again")
        if member.flag_bits & _ENCRYPTED:
            raise SourceError(f"source.path: {self.path}: {path} is encrypted; repack it without a password")
        if member.compress_type not in _METHODS:
            raise SourceError(f"source.path: {self.path}: {path} is packed by method {member.compress_type}; repack it")
        with refusing(f"{self.path}: {path}"):
            return self._zip.read(member)

    def _add(self, member: zipfile.ZipInfo, top: str) -> None:
        name = member.filename.rstrip("/")
        parts = name.split("/")
        if parts[0] != top:
            return
        if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
            raise SourceError(f"source.path: {self.path} holds the path {member.filename!r}; download it again")
        if any(part.startswith(".") for part in parts):
            return  # .DS_Store and its like
        inner = "/".join(parts[1:])
        folder, _, last = inner.rpartition("/")
        if member.is_dir():
            self._folder(inner)
        elif inner in self._members:
            raise SourceError(f"source.path: {self.path} holds {inner} twice; download it again")
        elif member.file_size > MAX_MEMBER_BYTES:
            raise SourceError(f"source.path: {self.path}: {inner} unpacks to {member.file_size:,} bytes; download it again")
        else:
            self._members[inner] = member
            self._folder(folder).append((last, 0, member.file_size))

    def _folder(self, path: str) -> list[tuple[str, int, int]]:
        """The files of a folder, which is there from now on, as are those that it lies in."""
        if path not in self._folders:
            self._folders[path] = []
            self._folder(path.rpartition("/")[0])
        return self._folders[path]


Tree = FolderTree | ZipTree


@lru_cache(maxsize=1)
def open_zip_tree(path: Path, top: str, stamp: str) -> ZipTree:  # noqa: ARG001 (a changed zip is opened anew)
    return ZipTree(path, top)
