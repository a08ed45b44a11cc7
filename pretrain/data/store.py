"""Verified copies of shards on a node's disk, shared by all processes of a user.

Remote shards are fetched when they are needed, within `data.cache_gb` (`data.cache_dir`). Local
shards are copied before training begins (`data.stage_dir`, staging.py).

    DIR/                 mode 0700, ours
      .locks             one byte for each file, at an offset from its hash; nothing is written
      SHA256.tar         a complete, verified copy of a shard; SHA256.npy: of an index
      SHA256.tar.part    a download, which has its full size from the start

All locks are open-file-description locks on bytes of `.locks`. A lock ends with its process, and it
also excludes other threads of the same process. `hold` reads a file in these steps:

1. Lock the file's byte shared. If the copy is complete and verified, keep the lock until `release`.
2. Otherwise lock the byte exclusively. If another thread or process has it, wait and repeat 1.
3. Lock the room's byte. Remove the longest unused files whose bytes can be locked, until the new
   file fits. If it cannot fit, remove nothing, wait, and repeat 1. Create the .part in its full
   size, so that others count it. Unlock the room.
4. Fetch into the .part, check the hash, set its mtime to `VERIFIED_NS`, fsync, rename it with the
   room's lock, and turn the exclusive lock into a shared one.

Read-ahead takes steps 2 to 4 for the announced files, in their order. It never removes a file that
this process needs sooner. Processes do not know what others will need: a process may remove a file
that another one has announced, and the other one fetches it again.

Invariants: a file has its final name only if its hash was correct; the sizes of all files stay
within the bound; a locked file is not removed; a mapped file stays readable after its removal.
A copy is trusted while its size is the manifest's and its mtime is `VERIFIED_NS`, because a write
changes the mtime; otherwise the copy is hashed again. Its atime is its last use, set here.
"""

import enum
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_prep.clients import options_for
from data_prep.errors import UserError
from data_prep.limits import cause_of
from data_prep.manifest import DatasetError, Shard
from data_prep.publish import sync
from data_prep.remote import ContentError, RemoteError, StoppedError, fetch, shown, tried

NUM_ATTEMPTS, SILENCE_S = 8, 30.0
"""Attempts to fetch a shard; a server that sends nothing for that long has failed."""
WAIT_S = 300.0
"""Longest wait for room, or for another process's download without progress. It is shorter than
engine.timeout_s, whose message is vaguer."""
FIRST_LOOK_S, LONGEST_LOOK_S, LOOK_AGAIN_S = 0.01, 0.25, 0.5
"""Pauses of `hold` between looks at the directory, and the pause of read-ahead without room."""
WARN_AGAIN_S = 30.0
NUM_THREADS, PIECE_BYTES = 4, 4 << 20
VERIFIED_NS = 946_684_800 * 10**9
"""1 January 2000, the mtime of copies whose hash was correct."""
SPARED_FRACTION, SPARED_BYTES, MOST_SPARED_FRACTION = 0.01, 5e9, 0.1
"""Space of a disk that staging never uses: the larger of the first two, but at most the third."""
_UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT)
_NAME = re.compile(r"[0-9a-f]{64}\.(tar|npy)(\.part)?")
_ROOM = "room"
_LOCK_REQUEST = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


class StoreError(UserError):
    """A directory that cannot be used, or a file that cannot be fetched."""


class NoRoomError(StoreError):
    """The file does not fit."""


class File(NamedTuple):
    source: str
    """URL or path."""
    name: str
    """Name of the copy, from the content: datasets with equal content share copies."""
    num_bytes: int
    sha256: str

    @property
    def is_remote(self) -> bool:
        return "://" in self.source


def tar_of(shard: Shard, directory: Path) -> File:
    source = shard.file if shard.is_remote else str(directory / shard.file)
    return File(source, f"{shard.sha256}.tar", shard.num_bytes, shard.sha256)


class Reader(Protocol):
    """A user of held files."""

    def release_idle(self) -> None:
        """Release the files that are held but not in use at this moment."""


class _Outcome(enum.Enum):
    COMPLETE = enum.auto()
    LOCKED = enum.auto()
    """Another thread or process fetches the file."""
    NO_ROOM = enum.auto()


class ShardStore:
    """The copies in one directory, as one process uses them. All its threads may share it."""

    def __init__(
        self,
        path: Path,
        *,
        setting: str,
        max_bytes: int | None,
        storage: dict[str, Any],
        hosts: Collection[str] = (),
    ):
        """`setting` names the directory in messages. Without `max_bytes` the copies may fill the
        disk up to the spared space. Only `hosts` receive `storage`."""
        self.path, self.setting, self.max_bytes = path, setting, max_bytes
        self._storage, self._hosts = storage, hosts
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._held = Counter[str]()
        self._wanted: list[File] = []
        self._begun = set[str]()
        """Announced files that read-ahead has fetched, fetches, or failed to fetch."""
        self._threads: list[threading.Thread] = []
        self._readers = weakref.WeakSet[Reader]()
        self._warned_s = -WARN_AGAIN_S
        with self._disk_errors():
            _make_private(path, setting)
            self._locks = self._open_locks()
        weakref.finalize(self, self._locks.close)

    def hold(self, file: File, *, waits_for_room: bool = True) -> Path:
        """Return the path of the verified copy, which no process removes until `release`."""
        began_s, seen, pause_s = time.monotonic(), None, FIRST_LOOK_S
        while not self._share(file):
            outcome = self._download(file, is_ahead=False)
            if outcome is _Outcome.COMPLETE:
                break
            if outcome is _Outcome.NO_ROOM:
                if not waits_for_room:
                    raise self._no_room(file)
                with self._changed:
                    readers = list(self._readers)
                for reader in readers:
                    reader.release_idle()
            if (progress := self.progress(file)) != seen:
                began_s, seen = time.monotonic(), progress
            if time.monotonic() - began_s > WAIT_S:
                raise self._no_room(file) if outcome is _Outcome.NO_ROOM else self._stalled(file)
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return self.path / file.name

    def hold_present(self, files: Sequence[File]) -> bool:
        """Hold the files if all copies are complete."""
        held = list[File]()
        for file in files:
            if not self._share(file):
                self.release(held)
                return False
            held.append(file)
        return True

    def release(self, files: Sequence[File]) -> None:
        """Release each file once for each `hold`. This also works after `close`."""
        with self._changed:
            for file in files:
                path = self.path / file.name
                with suppress(FileNotFoundError):  # only its last use changes
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                self._unshare(file)
            self._changed.notify_all()

    def fetch_ahead(self, files: Sequence[File]) -> None:
        """Fetch the files in this order in the background, as far as there is room. An earlier list
        is forgotten."""
        with self._changed:
            if self._stop.is_set():
                raise StoppedError
            self._wanted, self._begun = list(dict.fromkeys(files)), set()
            while len(self._threads) < min(NUM_THREADS, len(self._wanted)):
                thread = threading.Thread(target=self._read_ahead, name="shard-store", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def add_reader(self, reader: Reader) -> None:
        """Ask this reader to release idle files when a `hold` finds no room.

        Training and evaluation share the store, and each keeps the files that it needs next.
        """
        with self._changed:
            self._readers.add(reader)

    def close(self) -> None:
        """End the threads, downloads and waits. Complete and held files stay."""
        with self._changed:
            self._stop.set()
            self._wanted = []
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def progress(self, file: File) -> object:
        """Return a value that changes while any process fetches the file."""
        with suppress(FileNotFoundError):
            status = self._part(file).lstat()
            return status.st_ino, status.st_mtime_ns
        return None

    def make_room(self, files: Sequence[File]) -> int:
        """Remove unused files until all these files fit, and return 0. If they cannot fit, remove
        nothing and return how many bytes are missing."""
        with self._disk_errors(), self._room() as locks:
            return self._make_room(files, locks, kept=frozenset())

    def _share(self, file: File) -> bool:
        """Hold the file if its copy is complete and verified."""
        self._check(file)
        with self._changed:
            is_held = self._held[file.name] > 0
            if not (is_held or _lock(self._locks, file.name, fcntl.F_RDLCK)):
                return False
            self._held[file.name] += 1
            self._wanted = [each for each in self._wanted if each.name != file.name]
        if self._is_verified(file):
            return True
        with self._changed:
            self._unshare(file)
        return False

    def _unshare(self, file: File) -> None:
        self._held[file.name] -= 1
        if not self._held[file.name]:
            del self._held[file.name]
            _lock(self._locks, file.name, fcntl.F_UNLCK)

    def _download(self, file: File, *, is_ahead: bool) -> _Outcome:
        """Fetch the file if no thread or process fetches it and there is room. Hold it unless it
        is fetched ahead."""
        self._check(file)
        if self._stop.is_set():
            raise StoppedError
        with self._disk_errors(), self._open_locks() as locks:
            if not _lock(locks, file.name, fcntl.F_WRLCK):
                return _Outcome.LOCKED
            if not self._is_verified(file):
                for path in (self.path / file.name, self._part(file)):
                    path.unlink(missing_ok=True)
                if not self._reserve(file, is_ahead=is_ahead):
                    return _Outcome.NO_ROOM
                self._fetch(file)
            _lock(locks, file.name, fcntl.F_RDLCK)
            return _Outcome.COMPLETE if is_ahead or self._share(file) else _Outcome.LOCKED

    def _reserve(self, file: File, *, is_ahead: bool) -> bool:
        kept = frozenset[str]()
        if is_ahead:
            names = [each.name for each in self._wanted]
            kept = frozenset(names[: names.index(file.name)] if file.name in names else ())
        with self._room() as locks:
            if self._make_room([file], locks, kept=kept):
                return False
            part = self._part(file)
            try:
                with _open(part, os.O_RDWR | os.O_CREAT) as content:
                    _allocate(content, file.num_bytes)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            return True

    def _make_room(self, files: Sequence[File], locks: FileIO, *, kept: frozenset[str]) -> int:
        """Called with the room's lock. `locks` also gets the locks of the files to remove."""
        entries, asked = self._entries(), {file.name for file in files}
        missing = sum(file.num_bytes for file in files if file.name not in entries)
        if self.max_bytes is None:
            missing -= _free_bytes(self.path)
        else:
            missing += sum(entry.st_size for entry in entries.values()) - self.max_bytes
        place = {file.name: place for place, file in enumerate(self._wanted, start=1)}

        def priority(name: str) -> tuple[bool, bool, int, int]:
            """Abandoned downloads, then the longest unused, then announced files, last first."""
            is_complete = not name.endswith(".part")
            return name in place, is_complete, -place.get(name, 0), entries[name].st_atime_ns

        chosen = []
        for name in sorted(entries, key=priority):
            complete = name.removesuffix(".part")
            if missing <= 0:
                break
            if complete not in asked | kept and _lock(locks, complete, fcntl.F_WRLCK):
                chosen.append(name)
                missing -= entries[name].st_size
        if missing > 0:
            return missing
        for name in chosen:
            (self.path / name).unlink(missing_ok=True)
        with self._changed:  # read-ahead fetches an announced file again
            self._begun.difference_update(chosen)
        return 0

    def _fetch(self, file: File) -> None:
        part = self._part(file)
        try:
            with _open(part, os.O_RDWR) as content:
                if file.is_remote:
                    tried(
                        file.source,
                        lambda: self._fill(content, file),
                        num_attempts=NUM_ATTEMPTS,
                        stop=self._stop,
                        report=self._warn,
                    )
                else:
                    self._fill(content, file)
                os.utime(content.fileno(), ns=(time.time_ns(), VERIFIED_NS))
                os.fsync(content.fileno())
            with self._room():
                os.rename(part, self.path / file.name)
            sync(self.path)
        except RemoteError as error:
            raise StoreError(error.field, error.problem, error.fix, code=error.code) from None
        except ContentError as error:
            raise StoreError(
                shown(file.source),
                f"the server sends {error}",
                "restore the file on the server, or run data_prep index again",
                code="damaged",
            ) from None
        finally:
            part.unlink(missing_ok=True)

    def _fill(self, part: FileIO, file: File) -> None:
        """Make one attempt to write the file's bytes, and check them."""

        def write(data: bytes | memoryview) -> None:
            view = memoryview(data)
            if part.tell() + len(view) > file.num_bytes:
                raise _wrong(file, f"more than the manifest's {file.num_bytes:,} bytes")
            with self._disk_errors():
                while view:
                    view = view[part.write(view) :]

        part.seek(0)
        os.utime(part.fileno())  # others see progress
        if file.is_remote:
            fetch(
                file.source,
                write,
                num_bytes=file.num_bytes,
                storage=options_for(file.source, self._storage, hosts=self._hosts),
                silence_s=SILENCE_S,
                stop=self._stop,
            )
        else:
            for piece in self._pieces(Path(file.source)):
                write(piece)
        if part.tell() != file.num_bytes:
            raise _wrong(file, f"{part.tell():,} of the manifest's {file.num_bytes:,} bytes")
        part.seek(0)
        if (sha256 := hashlib.file_digest(part, "sha256").hexdigest()) != file.sha256:
            raise _wrong(file, f"sha256 {sha256} instead of the manifest's {file.sha256}")

    def _pieces(self, source: Path) -> Iterator[memoryview]:
        piece = memoryview(bytearray(PIECE_BYTES))
        try:
            with open(source, "rb", buffering=0) as content:
                while count := content.readinto(piece):
                    if self._stop.is_set():
                        raise StoppedError
                    yield piece[:count]
        except OSError as error:
            raise StoreError(
                str(source),
                f"the file cannot be copied ({cause_of(error)})",
                "restore the file, or make it readable",
                code="unreadable",
            ) from None

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                file = next((each for each in self._wanted if each.name not in self._begun), None)
                if file is not None:
                    self._begun.add(file.name)
                elif self._stop.is_set():
                    return
                else:
                    self._changed.wait()
                    continue
            try:
                outcome = self._download(file, is_ahead=True)
            except StoppedError:
                return
            except Exception:  # noqa: BLE001 (`hold` tries again and reports the error)
                continue
            if outcome is _Outcome.NO_ROOM:
                with self._changed:
                    self._begun.discard(file.name)
                    self._changed.wait(LOOK_AGAIN_S)

    def _is_verified(self, file: File) -> bool:
        """Mark the copy as used now and return True if its bytes are correct."""
        path = self.path / file.name
        if path.is_symlink():
            return False
        with suppress(FileNotFoundError), _open(path, os.O_RDONLY) as copy:
            status = os.fstat(copy.fileno())
            if status.st_size == file.num_bytes and (
                status.st_mtime_ns == VERIFIED_NS
                or hashlib.file_digest(copy, "sha256").hexdigest() == file.sha256
            ):
                os.utime(path, ns=(time.time_ns(), VERIFIED_NS))
                return True
        return False

    def _check(self, file: File) -> None:
        """A manifest of others must not lead out of the directory."""
        if not _NAME.fullmatch(file.name):
            raise DatasetError(
                shown(file.source),
                f"the manifest's sha256 {file.sha256!r} is not a hash",
                "run data_prep index again",
                code="unsafe",
            )
        if self.max_bytes is not None and file.num_bytes > self.max_bytes:
            raise StoreError(
                "data.cache_gb",
                f"{shown(file.source)} has {file.num_bytes / 1e9:,.3f} GB, and the cache only"
                f" {self.max_bytes / 1e9:,.3f} GB",
                "raise data.cache_gb",
                code="no-space",
            )

    def _no_room(self, file: File) -> NoRoomError:
        problem = f"there is no room for {shown(file.source)} ({file.num_bytes / 1e9:,.3f} GB)"
        fix = f"free disk space, or choose another {self.setting}"
        if self.max_bytes is not None:
            problem += f", because all {self.max_bytes / 1e9:,.3f} GB are in use"
            fix = "raise data.cache_gb"
        return NoRoomError(str(self.path), problem, fix, code="no-space")

    def _stalled(self, file: File) -> StoreError:
        return StoreError(
            str(self.path),
            f"another process fetches {shown(file.source)}, without progress for {WAIT_S:,.0f} s",
            f"end that process, or choose another {self.setting}",
            code="busy",
        )

    def _warn(self, problem: str) -> None:
        """Print the problem of a server, once for all threads that meet it."""
        if time.monotonic() - self._warned_s >= WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            print(f"waiting for {problem}", file=sys.stderr, flush=True)

    def _part(self, file: File) -> Path:
        return self.path / f"{file.name}.part"

    @contextmanager
    def _room(self) -> Iterator[FileIO]:
        """Hold the room's lock. It excludes all who count, reserve, rename or remove files."""
        with self._open_locks() as locks:
            _lock(locks, _ROOM, fcntl.F_WRLCK, waits=True)
            yield locks

    def _open_locks(self) -> FileIO:
        return _open(self.path / ".locks", os.O_RDWR | os.O_CREAT)

    def _entries(self) -> dict[str, os.stat_result]:
        entries = {}
        with os.scandir(self.path) as listing:
            for item in listing:
                with suppress(FileNotFoundError):  # a failed download removes its .part
                    if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                        entries[item.name] = item.stat(follow_symlinks=False)
        return entries

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                bound = "" if self.max_bytes is None else ", lower data.cache_gb"
                fix = f"free disk space{bound}, or choose another {self.setting}"
                raise NoRoomError(
                    str(self.path), "the disk is full", fix, code="no-space"
                ) from None
            if error.errno not in _UNUSABLE:
                raise
            problem = f"files cannot be written ({cause_of(error)})"
            fix = f"choose another {self.setting}"
            raise StoreError(str(self.path), problem, fix, code="unreadable") from None


def _lock(locks: FileIO, name: str, kind: int, *, waits: bool = False) -> bool:
    """Set the lock of this open file on the name's byte. Return False if another open file's lock
    excludes it."""
    place = 1 << 61 if name == _ROOM else int(name[:15], 16)
    request = struct.pack(_LOCK_REQUEST, kind, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(locks, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


def _open(path: Path, flags: int) -> FileIO:
    """Open a file, never through a link."""
    mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "rb+"
    return FileIO(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), mode)


def _allocate(file: FileIO, num_bytes: int) -> None:
    try:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file.fileno(), num_bytes)


def _free_bytes(path: Path) -> int:
    """Return the free space of the disk without the spared space. Other programs write to the disk,
    too, and a node with a full disk counts as bad."""
    disk = shutil.disk_usage(path)
    spared = max(SPARED_FRACTION * disk.total, min(SPARED_BYTES, MOST_SPARED_FRACTION * disk.total))
    return int(disk.free - spared)


def _make_private(path: Path, setting: str) -> None:
    """Create the directory, or reject one whose content another user could have written."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status, user, problem = path.lstat(), os.geteuid(), None
    if not stat.S_ISDIR(status.st_mode):
        problem = "this is a link or file, not a directory"
    elif status.st_uid != user:
        problem = f"the directory belongs to user {status.st_uid}, not to you ({user})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "other users can write to the directory"
    if problem is not None:
        fix = f"choose a directory of your own as {setting}"
        raise StoreError(str(path), problem, fix, code="unsafe")


def _wrong(file: File, problem: str) -> Exception:
    if file.is_remote:
        return ContentError(problem)
    return StoreError(
        file.source,
        f"the copy has {problem}",
        "run data_prep verify on the dataset",
        code="damaged",
    )
