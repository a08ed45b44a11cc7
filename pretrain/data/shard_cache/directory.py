"""The cache directory: whole shards, shards on their way, and room for more. The protocol stands in __init__.py.

No network here, and no waiting but for the room, which is never kept for longer than it takes to list and remove files.
"""

import enum
import errno
import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from data_prep.manifest import DatasetError, Shard
from data_prep.publish import sync
from data_prep.remote import shown
from pretrain.data.shard_cache.files import (
    CacheError,
    allocate,
    let_go,
    open_file,
    plain_errors,
    private_directory,
    stands,
    try_lock,
)
from pretrain.data.shard_cache.wants import read_wants

VERIFIED_NS = 946_684_800 * 10**9
"""1 January 2000 as the mtime of a file says that it has not been written to since its hash was found right."""
NOW = -1
"""The place in the order of needs that comes before all that is read ahead."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARD_FILE = re.compile(_SHA256.pattern + r"\.(tar|part)")


class Refusal(enum.Enum):
    IS_WHOLE = enum.auto()
    IS_FETCHED = enum.auto()
    """By another process or thread."""
    NO_ROOM = enum.auto()


@dataclass(frozen=True)
class _Entry:
    path: Path
    num_bytes: int
    used_ns: int

    @property
    def is_part(self) -> bool:
        return self.path.suffix == ".part"


class CacheDirectory:
    def __init__(self, path: Path, *, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        private_directory(path)
        with plain_errors(path), self.room():
            read_wants(path)
            for entry in self._entries():
                if entry.is_part:
                    self._remove_idle(entry)

    def check(self, shard: Shard) -> None:
        """A manifest of others must not lead out of the directory."""
        if not _SHA256.fullmatch(shard.sha256):
            raise DatasetError(f"{shown(shard.file)}: sha256 {shard.sha256!r} in the manifest is none; index it again")
        if shard.num_bytes > self.max_bytes:
            raise CacheError(
                f"{shown(shard.file)}: has {shard.num_bytes / 1e9:,.3f} GB, more than the whole cache of "
                f"{self.max_bytes / 1e9:,.3f} GB in {self.path}; raise data.cache_gb"
            )

    def whole_path(self, shard: Shard) -> Path:
        return self.path / f"{shard.sha256}.tar"

    def part_path(self, shard: Shard) -> Path:
        return self.path / f"{shard.sha256}.part"

    @contextmanager
    def room(self) -> Iterator[None]:
        """One thread of one process at a time."""
        path = self.path / ".lock"
        while True:
            try:
                file = open_file(path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # somebody has cleaned up
                private_directory(self.path)
                continue
            fcntl.flock(file, fcntl.LOCK_EX)
            if stands(file, path):
                break
            let_go(file)
        try:
            yield
        finally:
            let_go(file)

    def is_whole(self, shard: Shard) -> bool:
        path = self.whole_path(shard)
        return path.exists() and not path.is_symlink()

    def whole(self, shard: Shard) -> FileIO | None:
        """The verified file of a shard, with a shared lock on it, as one more use of it."""
        path = self.whole_path(shard)
        while True:
            try:
                file = open_file(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:  # none of ours; publishing will replace it
                    return None
                raise
            if try_lock(file, exclusive=False) and stands(file, path):
                break
            file.close()
            time.sleep(0.001)  # it is being evicted or published
        if self._is_right(file, shard):
            os.utime(file.fileno(), ns=(time.time_ns(), VERIFIED_NS))
            return file
        with self.room():
            if stands(file, path):
                path.unlink()
        let_go(file)
        return None

    def _is_right(self, file: FileIO, shard: Shard) -> bool:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return False
        if status.st_size == shard.num_bytes and status.st_mtime_ns == VERIFIED_NS:
            return True
        return status.st_size == shard.num_bytes and hash_of(file) == shard.sha256

    def mark_used(self, file: FileIO) -> None:
        """It is not said to be right: somebody may have written to it."""
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))

    def progress(self, shard: Shard) -> object:
        """Changes while somebody gets on with fetching the shard."""
        try:
            status = self.part_path(shard).lstat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def reserve(self, shard: Shard, *, place: int) -> FileIO | Refusal:
        """The .part of a shard, ours and of full size; or why there is none. `place`: how many shards are needed before it."""
        with plain_errors(self.path), self.room():
            path = self.part_path(shard)
            if self.is_whole(shard):
                return Refusal.IS_WHOLE
            if path.is_symlink():
                path.unlink()
            part = open_file(path, os.O_RDWR | os.O_CREAT)
            if not try_lock(part, exclusive=True):
                part.close()
                return Refusal.IS_FETCHED
            try:
                if self._make_room(shard, place=place):
                    allocate(part, shard.num_bytes)
                    return part
            except BaseException:
                path.unlink()
                let_go(part)
                raise
            path.unlink()
            let_go(part)
            return Refusal.NO_ROOM

    def publish(self, part: FileIO, shard: Shard, *, keep: bool) -> None:
        """The .part, whose bytes are right, becomes the whole shard; its lock is then a reader's, or none."""
        with plain_errors(self.path):
            os.utime(part.fileno(), ns=(time.time_ns(), VERIFIED_NS))
            os.fsync(part.fileno())
            with self.room():
                if not stands(part, self.part_path(shard)):
                    raise CacheError(f"{self.path}: somebody removes files there; name another data.cache_dir")
                os.rename(self.part_path(shard), self.whole_path(shard))
                fcntl.flock(part, fcntl.LOCK_SH if keep else fcntl.LOCK_UN)
            sync(self.path)
        if not keep:
            part.close()

    def drop(self, part: FileIO, shard: Shard) -> None:
        with self.room():
            if stands(part, self.part_path(shard)):
                self.part_path(shard).unlink()
            let_go(part)

    def _make_room(self, shard: Shard, *, place: int) -> bool:
        others = [entry for entry in self._entries() if entry.path != self.part_path(shard)]
        wants = read_wants(self.path)
        needed = shard.num_bytes + (0 if place == NOW else wants.waiting_bytes)
        excess = sum(entry.num_bytes for entry in others) + needed - self.max_bytes
        if excess <= 0:
            return True
        ranked = []
        for entry in others:
            wanted = wants.places.get(entry.path.stem)
            if entry.is_part:
                ranked.append(((0, 0), entry))
            elif wanted is None:
                ranked.append(((1, entry.used_ns), entry))
            elif wanted > place:
                ranked.append(((2, -wanted), entry))
        chosen = []
        for _, entry in sorted(ranked, key=lambda pair: (pair[0], pair[1].path.name)):
            if excess > 0 and self._is_idle(entry):
                chosen.append(entry)
                excess -= entry.num_bytes
        if excess > 0:
            return False
        removed = [self._remove_idle(entry) for entry in chosen]
        return all(removed)

    def _entries(self) -> list[_Entry]:
        """The shards here, whole or on their way."""
        found = []
        with os.scandir(self.path) as listing:
            for item in listing:
                if _SHARD_FILE.fullmatch(item.name):
                    try:
                        status = item.stat(follow_symlinks=False)
                    except FileNotFoundError:  # somebody cleans up
                        continue
                    if stat.S_ISREG(status.st_mode):
                        found.append(_Entry(self.path / item.name, status.st_size, status.st_atime_ns))
        return sorted(found, key=lambda entry: entry.path.name)

    def _is_idle(self, entry: _Entry) -> bool:
        return self._with_idle(entry, remove=False)

    def _remove_idle(self, entry: _Entry) -> bool:
        return self._with_idle(entry, remove=True)

    def _with_idle(self, entry: _Entry, *, remove: bool) -> bool:
        try:
            file = open_file(entry.path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        with file:
            idle = try_lock(file, exclusive=True)
            if idle and remove:
                entry.path.unlink()
        return idle


def hash_of(file: FileIO) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
