"""Verified copies of shards on a node's disk, shared by all processes of a user.

Remote shards are fetched when they are needed, within `data.cache_gb` (`data.cache_dir`). Files to
stage are all fetched before training begins (`data.stage_dir`, staging.py).

    DIR/                 mode 0700, owned by the user
      .locks             lock file: each shard has a byte, at an offset from its hash
      SHA256.tar         complete, verified copy of a shard (SHA256.npy: of an index)
      SHA256.tar.part    incomplete download, with its full size from the start

All locks are open-file-description locks on bytes of `.locks`. A lock ends with its process, and
also excludes other threads of the same process. `hold` fetches and locks a file in these steps:

1. Take a shared lock on the file's byte. If the copy is complete, keep the lock until `release`.
2. Otherwise take an exclusive lock on the byte. If it is taken, wait and repeat step 1.
3. Take the space lock (another byte). Remove the least recently used files whose bytes can be
   locked, until the new file fits. If it cannot fit, remove nothing, release one prefetched file
   and all idle files of this process, wait, and repeat step 1. Create the .part file.
4. Fetch into the .part file, check the hash, fsync, rename the file under the space lock, and turn
   the exclusive lock into a shared lock.

Read-ahead threads take the same steps for a list of files, in order. They hold each file until a
reader holds it or a new list arrives. They pause while `hold` waits for space.

Invariants:

- A file has its final name only if its hash was correct.
- The total size of all files stays within `max_bytes`.
- A held file is not removed; a mapped file stays readable after its removal.
- The mtime of a copy is its last use.
"""

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
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_prep.clients import options_for, shown
from data_prep.errors import UserError
from data_prep.limits import cause_of
from data_prep.manifest import DatasetError, Shard
from data_prep.publish import sync
from data_prep.remote import ContentError, RemoteError, StoppedError, fetch, tried

NUM_ATTEMPTS, SILENCE_S = 8, 30.0
"""Number of attempts to fetch a shard, and seconds without data after which an attempt fails."""
WAIT_S = 300.0
"""Longest wait for free space, in seconds. It is shorter than engine.timeout_s, because the message
of that timeout is less specific."""
LOOK_S, WARN_AGAIN_S = 0.05, 30.0
NUM_THREADS, PIECE_BYTES = 4, 4 << 20
SPARED_FRACTION, SPARED_BYTES, MOST_SPARED_FRACTION = 0.01, 5e9, 0.1
"""Disk space that staging never uses: 1 % of the disk, or 5 GB (at most 10 % of the disk) if that
is more."""
_NAME = re.compile(r"[0-9a-f]{64}\.(tar|npy)(\.part)?")
_LOCK_REQUEST = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


class StoreError(UserError):
    """A directory is not usable, or a file cannot be fetched."""


class NoRoomError(StoreError):
    """The file does not fit now, but may fit later."""


class File(NamedTuple):
    source: str
    """URL or path."""
    name: str
    """Name of the copy, from the content hash. Shards with equal content share a copy."""
    num_bytes: int
    sha256: str


def tar_of(shard: Shard, directory: Path) -> File:
    source = shard.file if shard.is_remote else str(directory / shard.file)
    return File(source, f"{shard.sha256}.tar", shard.num_bytes, shard.sha256)


class Reader(Protocol):
    """Object that holds files of the store, for example `MappedShards`."""

    def release_idle(self) -> None:
        """Release the held files that are not in use now."""


class ShardStore:
    """Verified copies in one directory, for all threads of one process."""

    def __init__(
        self,
        path: Path,
        *,
        setting: str,
        max_bytes: int | None,
        storage: dict[str, Any],
        hosts: Collection[str] = (),
    ):
        """`setting`: name of the setting for the directory, used in messages. `max_bytes`: limit
        for all copies; None: the free disk space minus the spared space. `storage`: fsspec options,
        sent only to `hosts`."""
        self.path, self.setting, self.max_bytes = path, setting, max_bytes
        self.readers = weakref.WeakSet[Reader]()
        """Readers of this store. Training and evaluation share the store. Each reader keeps files
        until the other needs space."""
        self._storage, self._hosts = storage, hosts
        self._stop, self._lock = threading.Event(), threading.RLock()
        self._held, self._paused_until_s = Counter[str](), 0.0
        self._ahead, self._pending = list[File](), deque[File]()
        """Files that the read-ahead threads hold, and files that they have yet to fetch."""
        self._threads = list[threading.Thread]()
        self._warned_s = -WARN_AGAIN_S
        self.num_written = 0
        """Number of bytes that this process has written, to show progress."""
        with self._disk_errors():
            _make_private(path, setting)
            self._locks = self._open_locks()
        weakref.finalize(self, self._locks.close)

    def hold(self, file: File, *, waits_for_room: bool = True) -> Path:
        """Fetch the file if necessary, and return the path of the verified copy. No process removes
        the copy until `release`."""
        self._check(file)
        until_s = time.monotonic() + WAIT_S
        while not self._share(file):
            try:
                if self._download(file):
                    break
            except NoRoomError:
                if not waits_for_room or time.monotonic() > until_s:
                    raise
                self._release_one_ahead()
                for reader in list(self.readers):
                    reader.release_idle()
            self._stop.wait(LOOK_S)
        with self._lock:
            with suppress(ValueError):
                self._pending.remove(file)
            if file in self._ahead:
                self._ahead.remove(file)
                self.release([file])
        return self.path / file.name

    def hold_present(self, files: Sequence[File]) -> bool:
        """If all copies are complete, hold all files and return True. Otherwise hold none and
        return False."""
        for count, file in enumerate(files):
            self._check(file)
            if not self._share(file):
                self.release(files[:count])
                return False
        return True

    def release(self, files: Sequence[File]) -> None:
        """Undo one `hold` of each file, also after `close`."""
        with self._lock:
            for file in files:
                with suppress(FileNotFoundError):
                    os.utime(self.path / file.name, ns=(time.time_ns(),) * 2)
                self._held[file.name] -= 1
                if not self._held[file.name]:
                    del self._held[file.name]
                    _lock(self._locks, file.name, fcntl.F_UNLCK)

    def fetch_ahead(self, files: Sequence[File]) -> None:
        """Prefetch the files in this order, in the background, while there is space. The list
        replaces the previous list."""
        with self._lock:
            if self._stop.is_set():
                raise StoppedError
            ahead, wanted = self._ahead, dict.fromkeys(files)
            self._ahead = [file for file in ahead if file in wanted]
            self.release([file for file in ahead if file not in wanted])
            self._pending = deque(file for file in wanted if file not in self._ahead)
            while len(self._threads) < min(NUM_THREADS, len(self._pending)):
                thread = threading.Thread(target=self._read_ahead, name="shard-store", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """End the threads, downloads and waits. Complete and held files stay."""
        self._stop.set()
        for thread in list(self._threads):
            thread.join()

    def make_room(self, files: Sequence[File]) -> None:
        """Remove unused files until all these files fit. If they cannot fit, remove nothing and
        raise `NoRoomError`."""
        with self._disk_errors(), self._room() as locks:
            self._make_room(files, locks)

    def _share(self, file: File) -> bool:
        """Hold the file if its copy is complete. Otherwise return False."""
        with self._lock:
            is_held = self._held[file.name] or (
                self._is_complete(file) and _lock(self._locks, file.name, fcntl.F_RDLCK)
            )
            if not is_held:
                return False
            self._held[file.name] += 1
            if not (is_complete := self._is_complete(file)):  # another process removed it before
                self.release([file])
            return is_complete

    def _is_complete(self, file: File) -> bool:
        path = self.path / file.name
        with suppress(FileNotFoundError):
            if path.lstat().st_size == file.num_bytes and not path.is_symlink():
                os.utime(path, ns=(time.time_ns(),) * 2)
                return True
        return False

    def _download(self, file: File) -> bool:
        """Fetch and hold the file. Return False if another thread or process fetches it."""
        if self._stop.is_set():
            raise StoppedError
        with self._disk_errors(), self._open_locks() as locks:
            if not _lock(locks, file.name, fcntl.F_WRLCK):
                return False
            if not self._is_complete(file):
                self._write(file)
            _lock(locks, file.name, fcntl.F_RDLCK)
            return self._share(file)

    def _write(self, file: File) -> None:
        """Fetch the file into a .part file, and rename it. The caller holds the exclusive lock."""
        complete, part = self.path / file.name, self.path / f"{file.name}.part"
        try:
            with self._room() as room:
                for path in complete, part:
                    path.unlink(missing_ok=True)
                self._make_room([file], room)
                with open(part, "xb") as content:
                    os.posix_fallocate(content.fileno(), 0, file.num_bytes)
            with FileIO(part, "r+") as content:
                self._fetch(file, content)
                os.fsync(content.fileno())
            with self._room():
                os.rename(part, complete)
            sync(self.path)
        finally:
            with self._room():
                part.unlink(missing_ok=True)

    def _make_room(self, files: Sequence[File], locks: FileIO) -> None:
        """Remove unused files until `files` fit. The caller holds the space lock. The removed files
        are locked through `locks`."""
        entries = {
            item.name: item.stat(follow_symlinks=False)
            for item in os.scandir(self.path)
            if _NAME.fullmatch(item.name)
        }
        names = {file.name for file in files}
        num_bytes = sum(file.num_bytes for file in files if file.name not in entries)
        if self.max_bytes is None:
            missing = num_bytes - _free_bytes(self.path)
        else:
            missing = num_bytes + sum(each.st_size for each in entries.values()) - self.max_bytes
        chosen = []
        # abandoned downloads first, then the least recently used copies
        for name in sorted(
            entries, key=lambda name: (not name.endswith(".part"), entries[name].st_mtime_ns)
        ):
            complete = name.removesuffix(".part")
            if missing > 0 and complete not in names and _lock(locks, complete, fcntl.F_WRLCK):
                chosen.append(name)
                missing -= entries[name].st_size
        if missing > 0:
            source = shown(files[0].source) if len(files) == 1 else f"{len(files):,} files"
            fix = f"free disk space, or choose another {self.setting}"
            raise NoRoomError(
                str(self.path),
                f"{source} ({num_bytes / 1e9:,.3g} GB) cannot be stored: {missing / 1e9:,.3g} GB"
                " are missing, even after removal of all unused files",
                fix if self.max_bytes is None else "raise data.cache_gb",
                code="no-space",
            )
        for name in chosen:
            (self.path / name).unlink(missing_ok=True)

    def _fetch(self, file: File, content: FileIO) -> None:
        try:
            if "://" not in file.source:
                self._fill(file, content)
                return
            tried(
                file.source,
                lambda: self._fill(file, content),
                num_attempts=NUM_ATTEMPTS,
                stop=self._stop,
                report=self._warn,
            )
        except RemoteError as error:
            raise StoreError(error.field, error.problem, error.fix, code=error.code) from None
        except ContentError as error:
            raise StoreError(
                shown(file.source),
                str(error).removeprefix(f"{shown(file.source)}: "),
                "restore the file, or run data_prep index again",
                code="damaged",
            ) from None

    def _fill(self, file: File, content: FileIO) -> None:
        """Try once to write the file, and check its size and hash."""

        def write(data: bytes | memoryview) -> None:
            view = memoryview(data)
            if content.tell() + len(view) > file.num_bytes:
                raise ContentError(f"it has more bytes than the manifest's {file.num_bytes:,}")
            self.num_written += len(view)
            with self._disk_errors():
                while view:
                    view = view[content.write(view) :]

        content.seek(0)
        if "://" in file.source:
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
        if content.tell() != file.num_bytes:
            num_bytes = f"{content.tell():,} of the manifest's {file.num_bytes:,} bytes"
            raise ContentError(f"it has {num_bytes}")
        content.seek(0)
        if (sha256 := hashlib.file_digest(content, "sha256").hexdigest()) != file.sha256:
            raise ContentError(f"it has sha256 {sha256}, not the manifest's {file.sha256}")

    def _pieces(self, source: Path) -> Iterator[memoryview]:
        piece = memoryview(bytearray(PIECE_BYTES))
        try:
            with open(source, "rb", buffering=0) as content:
                while count := content.readinto(piece):
                    if self._stop.is_set():
                        raise StoppedError
                    yield piece[:count]
        except OSError as error:
            problem = f"the file cannot be copied ({cause_of(error)})"
            fix = "restore the file, or make it readable"
            raise StoreError(str(source), problem, fix, code="unreadable") from None

    def _read_ahead(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not (pending := self._pending):
                    self._threads.remove(threading.current_thread())
                    return
                file = pending.popleft()
            try:
                self._check(file)
                if time.monotonic() < self._paused_until_s:
                    raise NoRoomError(file.source, "the shard cache is full", code="no-space")
                is_held = self._share(file) or self._download(file)
            except NoRoomError:
                pending.appendleft(file)
                self._stop.wait(LOOK_S)
                continue
            except Exception:  # noqa: BLE001 (`hold` tries again and reports the error)
                continue
            with self._lock:
                if not is_held:
                    pending.append(file)  # another thread or process fetches it
                elif pending is self._pending and file not in self._ahead:
                    self._ahead.append(file)
                else:
                    self.release([file])
            if not is_held:
                self._stop.wait(LOOK_S)

    def _release_one_ahead(self) -> None:
        """Release the read-ahead file that is needed last, to make space for `hold`."""
        with self._lock:
            self._paused_until_s = time.monotonic() + 5 * LOOK_S
            if self._ahead:
                file = self._ahead.pop()
                self.release([file])
                self._pending.appendleft(file)

    def _check(self, file: File) -> None:
        """Raise an error if the name may lead out of the directory, or the cache is too small."""
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
                f"{shown(file.source)} has {file.num_bytes / 1e9:,.3f} GB, but the cache has only"
                f" {self.max_bytes / 1e9:,.3f} GB",
                "raise data.cache_gb",
                code="no-space",
            )

    def _warn(self, problem: str) -> None:
        if time.monotonic() - self._warned_s >= WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            print(f"waiting for {problem}", file=sys.stderr, flush=True)

    @contextmanager
    def _room(self) -> Iterator[FileIO]:
        """Hold the space lock, which excludes all threads that count, reserve, rename or remove
        files."""
        with self._open_locks() as locks:
            _lock(locks, None, fcntl.F_WRLCK)
            yield locks

    def _open_locks(self) -> FileIO:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return FileIO(os.open(self.path / ".locks", flags, 0o600), "r+")

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            bound = "" if self.max_bytes is None else ", lower data.cache_gb"
            raise StoreError(
                str(self.path),
                f"files cannot be written ({cause_of(error)})",
                f"free disk space{bound}, or choose another {self.setting}",
                code="no-space" if is_full else "unreadable",
            ) from None


def _lock(locks: FileIO, name: str | None, kind: int) -> bool:
    """Lock or unlock the byte of a file name in the open lock file. Return False if another open
    file holds the lock. Without a name, wait for the space lock."""
    place = 1 << 61 if name is None else int(name[:15], 16)
    request = struct.pack(_LOCK_REQUEST, kind, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(locks, fcntl.F_OFD_SETLKW if name is None else fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


def _free_bytes(path: Path) -> int:
    """Return the free space of the disk, minus the spared space. Other programs write to the disk,
    too, and schedulers exclude nodes with a full disk."""
    disk = shutil.disk_usage(path)
    spared = max(SPARED_FRACTION * disk.total, min(SPARED_BYTES, MOST_SPARED_FRACTION * disk.total))
    return int(disk.free - spared)


def _make_private(path: Path, setting: str) -> None:
    """Create the directory. Reject a directory to which another user could have written."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or writable:
        raise StoreError(
            str(path),
            "it must be a directory that belongs to you and that no other user can write to",
            f"choose a directory of your own as {setting}",
            code="unsafe",
        )
