"""The files below a folder, or in a zip, by their path from its top.

A zip is never unpacked, and a path leads to the member of that very name or nowhere. Invariants of a zip: its central directory
is read once in a process; no name occurs twice; what is read has the size and the CRC that the directory says.
"""

import zipfile
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Final

from data_prep.archives.files import kind_of, list_files
from data_prep.archives.guard import SourceError, refusing

MAX_MEMBER_BYTES: Final = 1 << 28
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 1


class Tree(ABC):
    """All names are sorted; what begins with a dot is not there."""

    @abstractmethod
    def subfolders(self, folder: str) -> list[str]: ...

    @abstractmethod
    def files(self, folder: str) -> list[tuple[str, int, int]]:
        """(name, time of change, bytes) of each file in `folder`, which must exist."""

    @abstractmethod
    def read(self, path: str) -> bytes: ...


class FolderTree(Tree):
    def __init__(self, root: Path):
        self.root = root

    def subfolders(self, folder: str) -> list[str]:
        with refusing(self.root / folder):
            inside = (path for path in (self.root / folder).iterdir() if not path.name.startswith("."))
            return sorted(path.name for path in inside if kind_of(path) == "folder")

    def files(self, folder: str) -> list[tuple[str, int, int]]:
        with refusing(self.root / folder):
            return [row for row in list_files(self.root / folder) if "/" not in row[0]]

    def read(self, path: str) -> bytes:
        with refusing(self.root / path):
            return (self.root / path).read_bytes()


class ZipTree(Tree):
    def __init__(self, path: Path, top: str):
        self.path = path
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._files: dict[str, list[tuple[str, int, int]]] = {}
        self._folders: dict[str, set[str]] = {}
        with refusing(path):
            self._zip = zipfile.ZipFile(path)
            for member in self._zip.infolist():
                self._add(member, top)
        if not self._members:
            raise SourceError(f"source.path: {path} holds no files below {top}; give {top}.zip as downloaded")

    def subfolders(self, folder: str) -> list[str]:
        return sorted(self._folders.get(folder, ()))

    def files(self, folder: str) -> list[tuple[str, int, int]]:
        if folder not in self._files and folder not in self._folders:
            raise SourceError(f"source.path: {self.path} holds no {folder}; download it again")
        return sorted(self._files.get(folder, []))

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
            self._add_folder(inner)
            return
        self._add_folder(folder)
        if inner in self._members:
            raise SourceError(f"source.path: {self.path} holds {inner} twice; download it again")
        if member.file_size > MAX_MEMBER_BYTES:
            raise SourceError(f"source.path: {self.path}: {inner} unpacks to {member.file_size:,} bytes; download it again")
        self._members[inner] = member
        self._files.setdefault(folder, []).append((last, 0, member.file_size))

    def _add_folder(self, folder: str) -> None:
        if folder and folder not in self._folders:
            self._folders[folder] = set()
            above, _, last = folder.rpartition("/")
            self._add_folder(above)
            self._folders.setdefault(above, set()).add(last)


@lru_cache(maxsize=1)
def open_zip_tree(path: Path, top: str, stamp: str) -> ZipTree:  # noqa: ARG001 (a changed zip is opened anew)
    return ZipTree(path, top)
