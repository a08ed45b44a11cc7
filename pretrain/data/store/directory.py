"""The directory of the store: whole files, files on their way, what processes do with them, and
room for more.

The protocol stands in __init__.py. No network here, and no waiting but for the room, which is never
kept for longer than it takes to list and remove files. All methods but `room` itself are called
within it.
"""

import enum
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Shard
from data_prep.remote import shown

SPARED_SHARE, SPARED_BYTES, MOST_SPARED_SHARE = 0.01, 5e9, 0.1
"""Of a disk, which is never filled: the first or the second, whichever is more, but of a small disk
no more than the third. Others write there, too, and a node with a full disk counts as bad."""
NOW = -1
"""The place in the order of needs that comes before all that is read ahead."""
_NAME = re.compile(r"[0-9a-f]{64}\.(tar|npy)(\.part)?")


class StoreError(UserError):
    """A directory that cannot serve; the text names it and the remedy."""


class NoRoomError(StoreError):
    """What is to be copied does not fit."""


class File(NamedTuple):
    """What is to be copied."""

    source: str
    """URL or path."""
    name: str
    """By content: several shards of a subset may lie in one tar, and datasets of one content may
    name their shards otherwise."""
    num_bytes: int
    sha256: str

    @property
    def is_remote(self) -> bool:
        return "://" in self.source


def tar_of(shard: Shard, directory: Path) -> File:
    source = shard.file if shard.is_remote else str(directory / shard.file)
    return File(source, f"{shard.sha256}.tar", shard.num_bytes, shard.sha256)


class Claim(enum.Enum):
    IS_THERE = enum.auto()
    """Its hash may have to be read again."""
    IS_OURS = enum.auto()
    """Its .part is made, and we fetch it."""
    IS_FETCHED = enum.auto()
    """By another process or thread."""
    HAS_NO_ROOM = enum.auto()


@dataclass
class Users:
    """What the processes that live have to do with the files."""

    reading: set[str] = field(default_factory=set)
    fetching: set[str] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)
    """How many files the process that needs this one first will need before it."""
    waiting_bytes: int = 0
    """Of the files that processes cannot go on without, and for which there was no room yet."""


class StoreDirectory:
    """As one process sees it; all its threads share it, one at a time."""

    def __init__(self, path: Path, *, setting: str, max_bytes: int | None):
        """`setting` names the directory. `max_bytes` None: as much as the disk has to spare."""
        self.path, self.setting, self.max_bytes = path, setting, max_bytes
        self.changed = threading.Condition()
        """Held by who is in the room; notified when there may be more of it."""
        self.reading, self.fetching = Counter[str](), set[str]()
        """By this process. A file that has just been published may still stand among those that are
        fetched: it serves as well."""
        self.wanted: list[File] = []
        self.waiting: list[int] = []
        """The bytes for which threads of this process wait."""
        self._record: FileIO | None = None
        self._record_path = path / f"{os.getpid()}-{secrets.token_hex(8)}.user"
        self._make()
        with self.room():
            fetching = self._users().fetching
            for name in self._entries():
                if name.endswith(".part") and name.removesuffix(".part") not in fetching:
                    (path / name).unlink()

    def whole(self, file: File) -> Path:
        return self.path / file.name

    def part(self, file: File) -> Path:
        return self.path / f"{file.name}.part"

    def check(self, file: File) -> None:
        """A manifest of others must not lead out of the directory."""
        if not _NAME.fullmatch(file.name):
            raise DatasetError(
                f"{shown(file.source)}: sha256 {file.sha256!r} in the manifest is none; index it"
                " again"
            )
        if self.max_bytes is not None and file.num_bytes > self.max_bytes:
            most = f"the whole cache of {self.max_bytes / 1e9:,.3f} GB in {self.path}"
            raise StoreError(
                f"{shown(file.source)}: has {file.num_bytes / 1e9:,.3f} GB, more than {most}; raise"
                " data.cache_gb"
            )

    @contextmanager
    def room(self) -> Iterator[None]:
        """One thread of one process at a time."""
        path = self.path / ".lock"
        with self.changed, self.plain_errors():
            while True:
                try:
                    lock = open_file(path, os.O_RDWR | os.O_CREAT)
                except FileNotFoundError:  # somebody has cleaned up
                    self._make()
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _stands(lock, path):
                    break
                lock.close()
            try:
                yield
            finally:
                fcntl.flock(
                    lock, fcntl.LOCK_UN
                )  # closing alone does not, while a fork of this process has the file, too
                lock.close()

    def is_there(self, file: File) -> bool:
        path = self.whole(file)
        return path.is_file() and not path.is_symlink()

    def claim(self, file: File, *, place: int, keep: bool) -> Claim:
        """`place`: how many files are needed before it. `keep`: it is read from now on if it is
        there."""
        users = self._users()
        if self.is_there(file):
            if keep:
                with self.recorded():
                    self.keep([file])
            return Claim.IS_THERE
        if file.name in users.fetching and self.part(file).exists():
            return Claim.IS_FETCHED
        if self.make_room([file], place=place, users=users):
            return Claim.HAS_NO_ROOM
        part = self.part(file)
        try:
            with self.recorded(), open_file(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as content:
                _take_up(content, file.num_bytes)
                self.fetching.add(file.name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return Claim.IS_OURS

    def make_room(
        self, files: Sequence[File], *, place: int = NOW, users: Users | None = None
    ) -> int:
        """How many bytes are missing for what is not there; then nothing has been removed."""
        needed = sum(file.num_bytes for file in files if not self.is_there(file))
        missing = needed - self._free_bytes() if self.max_bytes is None else needed
        if missing <= 0:
            return 0
        users, entries, parts = (
            users or self._users(),
            self._entries(),
            {self.part(file).name for file in files},
        )
        asked = parts | {file.name for file in files}
        missing += 0 if place == NOW else users.waiting_bytes
        if self.max_bytes is not None:
            missing += (
                sum(entry.st_size for name, entry in entries.items() if name not in parts)
                - self.max_bytes
            )
        ranked = []
        for name, entry in entries.items():
            whole = name.removesuffix(".part")
            needed_at = users.places.get(whole)
            if name in asked or whole in users.fetching or name in users.reading:
                continue
            if name != whole:
                ranked.append(((0, 0), name))
            elif needed_at is None:
                ranked.append(((1, entry.st_atime_ns), name))
            elif needed_at > place:
                ranked.append(((2, -needed_at), name))
        chosen = []
        for _, name in sorted(ranked):
            if missing > 0:
                chosen.append(name)
                missing -= entries[name].st_size
        if missing <= 0:
            for name in chosen:
                (self.path / name).unlink()
        return max(0, missing)

    def keep(self, files: Sequence[File]) -> None:
        """They are read by this process from now on."""
        self.reading.update(file.name for file in files)
        names = {file.name for file in files}
        self.wanted = [file for file in self.wanted if file.name not in names]

    def let_go(self, files: Sequence[File]) -> None:
        self.reading -= Counter(file.name for file in files)
        self.publish_record()
        self.changed.notify_all()

    def remove_unread(self, files: Sequence[File]) -> None:
        users = self._users()
        for file in files:
            if file.name not in users.reading and file.name not in users.fetching:
                self.whole(file).unlink(missing_ok=True)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The block says what this process does more. Where that cannot be published, nothing has
        changed."""
        before = self.reading.copy(), self.fetching.copy(), self.wanted.copy(), self.waiting.copy()
        try:
            yield
            self.publish_record()
        except BaseException:
            self.reading, self.fetching, self.wanted, self.waiting = before
            raise

    def publish_record(self) -> None:
        """What this process does; no record where it does nothing."""
        wanted = [file.name for file in self.wanted]
        is_needed = bool(self.reading or self.fetching or self.waiting or wanted)
        if self._record is not None and not (
            is_needed and _stands(self._record, self._record_path)
        ):
            self._record_path.unlink(missing_ok=True)
            self._record.close()
            self._record = None
        if not is_needed:
            return
        if self._record is None:
            self._record = open_file(self._record_path, os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, self._record.close)
            fcntl.flock(self._record, fcntl.LOCK_EX)  # the name is ours alone
        found = {
            "reading": sorted(self.reading),
            "fetching": sorted(self.fetching),
            "wanted": wanted,
        }
        data = json.dumps(found | {"waiting_bytes": sum(self.waiting)}).encode()
        _take_up(
            self._record, len(data)
        )  # a full disk refuses here, and what stands there is still what was published last
        os.pwrite(self._record.fileno(), data, 0)
        os.ftruncate(self._record.fileno(), len(data))

    def _users(self) -> Users:
        """Removes the records of the dead."""
        users = Users()
        for path in sorted(self.path.glob("*.user")):
            found = _living_record(path)
            users.reading.update(found.get("reading", ()))
            users.fetching.update(found.get("fetching", ()))
            users.waiting_bytes += found.get("waiting_bytes", 0)
            for place, name in enumerate(found.get("wanted", ())):
                users.places[name] = min(place, users.places.get(name, place))
        return users

    def _free_bytes(self) -> int:
        disk = shutil.disk_usage(self.path)
        spared = max(SPARED_SHARE * disk.total, min(SPARED_BYTES, MOST_SPARED_SHARE * disk.total))
        return int(disk.free - spared)

    def _entries(self) -> dict[str, os.stat_result]:
        """The files here, whole or on their way."""
        found = {}
        with os.scandir(self.path) as listing:
            for item in listing:
                with suppress(FileNotFoundError):  # somebody cleans up
                    if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                        found[item.name] = item.stat(follow_symlinks=False)
        return found

    def _make(self) -> None:
        """Makes the directory, or refuses one in which others could have put, or could change, what
        we are about to trust."""
        path, setting = self.path, self.setting
        with self.plain_errors():
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except FileExistsError:
                raise StoreError(f"{path}: is no directory; name another as {setting}") from None
            status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise StoreError(
                f"{path}: is a link, which others may turn; name the directory itself as {setting}"
            )
        doubt, user = "so what it holds cannot be trusted", os.geteuid()
        if status.st_uid != user:
            owner = f"belongs to user {status.st_uid}, not to you ({user})"
            raise StoreError(f"{path}: {owner}, {doubt}; name a directory of your own as {setting}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                f"{path}: others may write there, {doubt}; empty it and chmod 700 it, or name"
                f" another as {setting}"
            )

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """What the disk refuses, in one line with a remedy."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_full:
                bound = "" if self.max_bytes is None else ", lower data.cache_gb"
                remedy = f"its disk is full; free some of it{bound}, or name another {self.setting}"
            elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
                remedy = f"cannot be written to; name another directory as {self.setting}"
            else:
                raise
            raise (NoRoomError if is_full else StoreError)(
                f"{self.path}: {remedy} ({error.strerror})"
            ) from None


def open_file(path: Path, flags: int) -> FileIO:
    """Never through a link."""
    mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "rb+"
    return FileIO(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), mode)


def _take_up(file: FileIO, num_bytes: int) -> None:
    """So much of the disk, from now on; what the file holds stays, and zeros follow."""
    try:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file.fileno(), max(num_bytes, os.fstat(file.fileno()).st_size))


def _living_record(path: Path) -> dict[str, Any]:
    """Nothing where its process is dead, and then it goes."""
    with suppress(FileNotFoundError), open_file(path, os.O_RDWR) as record:  # somebody cleans up
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            with suppress(ValueError):  # it has just been made, on a full disk
                found: dict[str, Any] = json.loads(record.readall().rstrip(b"\0"))
                return found
    return {}


def _stands(file: FileIO, path: Path) -> bool:
    """Whether the open file is still what the path names: it may have been removed before we had
    its lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
