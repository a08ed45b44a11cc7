"""Verified copies of shards on a node's disk, shared by all processes of a user.

Remote shards are fetched when they are needed, within `data.cache_gb` (`data.cache_dir`). Files to
stage are all fetched before training begins (`data.stage_dir`, staging.py).

    DIR/                 mode 0700, ours
      .locks             one byte for each file, at an offset from its hash; nothing is written
      SHA256.tar         a complete, verified copy of a shard; SHA256.npy: of an index
      SHA256.tar.part    a download, which has its full size from the start

All locks are open-file-description locks on bytes of `.locks`, so they end with their process, and
a holder needs one open file however many copies it holds. (A `flock` of each copy would need a file
for each: on overlayfs a mapping does not keep the lock.) `hold` takes these steps:

1. Lock the file's byte shared. If the copy is complete, it is held.
2. Otherwise lock the byte exclusively. If another thread or process has it, wait and repeat 1.
3. Lock the room's byte. Remove the least recently used files whose bytes can be locked, until the
   new file fits. If it does not fit, let this process's readers release idle files, wait, and
   repeat 1. Create the .part in its full size.
4. Fetch into the .part, check the hash, fsync, rename it, and lock the byte shared.

Read-ahead takes the same steps for the announced files, in their order, and holds none of them. It
removes no announced file. `hold` removes them last, and first the one that is needed last.

Invariants: a file has its final name only if its hash was correct; the sizes of all files stay
within the bound; a held file is not removed. The mtime of a copy is its last use.
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
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_prep.clients import options_for
from data_prep.errors import UserError
from data_prep.limits import cause_of
from data_prep.manifest import DatasetError, Shard
from data_prep.publish import sync
from data_prep.remote import ContentError, StoppedError, fetch, shown, tried

NUM_ATTEMPTS, SILENCE_S = 8, 30.0
"""Attempts to fetch a shard; a server that sends nothing for that long has failed."""
WAIT_S = 300.0
"""Longest wait for room. It is shorter than engine.timeout_s, whose message is vaguer."""
LOOK_S, WARN_AGAIN_S = 0.05, 30.0
NUM_THREADS, PIECE_BYTES = 4, 4 << 20
SPARED_BYTES, SPARED_FRACTION = 5e9, 0.1
"""Space of a disk that staging never uses: the smaller of the two."""
_NAME = re.compile(r"[0-9a-f]{64}\.(tar|npy)(\.part)?")


_LOCK_REQUEST = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


class NoRoomError(UserError):
    """The file does not fit at this moment."""


class File(NamedTuple):
    source: str
    """URL or path."""
    name: str
    """Name of the copy, from the content: datasets with equal content share copies."""
    num_bytes: int
    sha256: str


def tar_of(shard: Shard, directory: Path) -> File:
    source = shard.file if shard.is_remote else str(directory / shard.file)
    return File(source, f"{shard.sha256}.tar", shard.num_bytes, shard.sha256)


class Holder:
    """Holds copies of one directory until `release`, or as long as it lives."""

    def __init__(self, path: Path):
        self._locks = FileIO(os.open(path / ".locks", os.O_RDWR | os.O_CREAT, 0o600), "r+")
        self.close = weakref.finalize(self, self._locks.close)

    def release(self, file: File) -> None:
        self.lock(file.name, fcntl.F_UNLCK)

    def lock(self, name: str | None, kind: int) -> bool:
        """Set the lock on the name's byte. Return False if another holder's lock excludes it.
        Without a name, wait for the room's byte."""
        place = 1 << 61 if name is None else int(name[:15], 16)
        request = struct.pack(_LOCK_REQUEST, kind, os.SEEK_SET, place, 1, 0)
        command = fcntl.F_OFD_SETLKW if name is None else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._locks, command, request)
        except BlockingIOError:
            return False
        return True


class Reader(Protocol):
    """A user of held files."""

    def release_idle(self) -> None:
        """Release the files that are not in use at this moment."""


class ShardStore:
    """The copies in one directory, as one process uses them. All its threads may share it."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int | None = None,
        storage: Mapping[str, Any] | None = None,
        hosts: Collection[str] = (),
    ):
        """Without `max_bytes` (`data.stage_dir`) the copies may fill the disk up to the spared
        space. Only `hosts` receive `storage`."""
        self.path, self.max_bytes = path, max_bytes
        self.setting = "data.stage_dir" if max_bytes is None else "data.cache_dir"
        self.readers = weakref.WeakSet[Reader]()
        """Training and evaluation share the store. Each keeps files until the other needs room."""
        self._storage, self._hosts = storage or {}, hosts
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._announced, self._pending = dict[str, int](), deque[File]()
        """Place of each announced file in the list, and the files that read-ahead has yet to
        fetch."""
        self._threads = list[threading.Thread]()
        self._warned_s = -WARN_AGAIN_S
        self.num_written = 0
        """Bytes that this process has written, to see progress."""
        with self._disk_errors():
            _make_private(path, self.setting)
            Holder(path).close()  # a read-only disk is noticed now

    def hold(self, file: File, holder: Holder) -> Path:
        """Return the path of the verified copy, which no process removes until it is released."""
        until_s = time.monotonic() + WAIT_S
        while not self.hold_present(file, holder):
            try:
                if self._download(file, holder):
                    break
            except NoRoomError:
                if time.monotonic() > until_s:
                    raise
                for reader in list(self.readers):
                    reader.release_idle()
            self._stop.wait(LOOK_S)
        return self.path / file.name

    def hold_present(self, file: File, holder: Holder) -> bool:
        """Hold the copy if it is complete."""
        if not _NAME.fullmatch(file.name):  # it may be the manifest of others
            raise DatasetError(
                shown(file.source),
                f"the manifest's sha256 {file.sha256!r} is not a hash",
                "run data_prep index again",
                code="unsafe",
            )
        with self._disk_errors():
            if not holder.lock(file.name, fcntl.F_RDLCK):
                return False
            if self._is_complete(file):
                now_ns = time.time_ns()  # the kernel's own clock for files is too coarse
                os.utime(self.path / file.name, ns=(now_ns, now_ns))
                return True
            holder.release(file)
        return False

    def fetch_ahead(self, files: Sequence[File]) -> None:
        """Fetch the files in this order in the background, as far as there is room. An earlier list
        is forgotten."""
        with self._lock:
            if self._stop.is_set():
                raise StoppedError
            wanted = dict.fromkeys(files)
            self._announced = {file.name: place for place, file in enumerate(wanted)}
            self._pending = deque(wanted)
            while len(self._threads) < min(NUM_THREADS, len(self._pending)):
                thread = threading.Thread(target=self._read_ahead, name="shard-store", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """End the threads, downloads and waits. Complete files stay."""
        self._stop.set()
        for thread in list(self._threads):
            thread.join()

    def make_room(self, num_bytes: int) -> None:
        """Remove unused files until so many bytes fit, or raise `NoRoomError`."""
        with self._disk_errors(), self._room():
            self._make_room(num_bytes)

    def _is_complete(self, file: File) -> bool:
        with suppress(FileNotFoundError):
            return (self.path / file.name).stat().st_size == file.num_bytes
        return False

    def _download(self, file: File, holder: Holder, *, is_ahead: bool = False) -> bool:
        """Fetch and hold the file. Return False if another thread or process fetches it, or has
        fetched it meanwhile."""
        if self._stop.is_set():
            raise StoppedError
        part = self.path / f"{file.name}.part"
        with self._disk_errors(), closing(Holder(self.path)) as own:
            if not own.lock(file.name, fcntl.F_WRLCK) or self._is_complete(file):
                return False
            try:
                with self._room(), open(part, "wb") as reserved:
                    self._make_room(file.num_bytes, is_ahead=is_ahead)
                    os.posix_fallocate(reserved.fileno(), 0, file.num_bytes)
                with FileIO(part, "r+") as content:
                    self._fetch(file, content)
                    os.fsync(content.fileno())
                with self._room():
                    os.rename(part, self.path / file.name)
                    own.release(file)
                    is_held = self.hold_present(file, holder)
                sync(self.path)
                return is_held
            except BaseException:
                with self._room():
                    part.unlink(missing_ok=True)
                raise

    def _make_room(self, num_bytes: int, *, is_ahead: bool = False) -> None:
        """Called with the room's lock."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            problem = (
                f"a shard has {num_bytes / 1e9:,.3g} GB, the cache {self.max_bytes / 1e9:,.3g}"
            )
            raise UserError("data.cache_gb", problem, "raise data.cache_gb", code="no-space")
        files = {
            Path(item): item.stat(follow_symlinks=False)
            for item in os.scandir(self.path)
            if _NAME.fullmatch(item.name)
        }
        if self.max_bytes is None:
            missing = num_bytes - _free_bytes(self.path)
        else:
            missing = num_bytes + sum(each.st_size for each in files.values()) - self.max_bytes
        announced = self._announced

        def turn(path: Path) -> tuple[bool, int, int]:
            """Abandoned downloads first, then unannounced copies, then what is needed last."""
            place = announced.get(path.name, len(announced))
            return path.suffix != ".part", -place, files[path].st_mtime_ns

        for path in sorted(files, key=turn):
            if missing <= 0 or (is_ahead and path.name in announced):
                break
            with closing(Holder(self.path)) as own:
                if own.lock(path.name.removesuffix(".part"), fcntl.F_WRLCK):
                    path.unlink()
                    missing -= files[path].st_size
        if missing > 0:
            fix = f"free disk space, or choose another {self.setting}"
            raise NoRoomError(
                str(self.path),
                f"{num_bytes / 1e9:,.3g} GB need {missing / 1e9:,.3g} GB more than all files that"
                " are not in use can free",
                fix if self.max_bytes is None else "raise data.cache_gb",
                code="no-space",
            )

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
        except ContentError as error:
            raise UserError(
                shown(file.source),
                str(error).removeprefix(f"{shown(file.source)}: "),
                "restore the file, or run data_prep index again",
                code="damaged",
            ) from None

    def _fill(self, file: File, content: FileIO) -> None:
        """Make one attempt to write the file's bytes, and check them."""

        def write(data: bytes | memoryview) -> None:
            view = memoryview(data)
            if content.tell() + len(view) > file.num_bytes:
                raise ContentError(f"it has more than the manifest's {file.num_bytes:,} bytes")
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
        content.seek(0)
        if (sha256 := hashlib.file_digest(content, "sha256").hexdigest()) != file.sha256:
            raise ContentError(f"it has sha256 {sha256} instead of the manifest's {file.sha256}")

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
            raise UserError(str(source), problem, fix, code="unreadable") from None

    def _read_ahead(self) -> None:
        """Fetch the files of the newest list."""
        while not self._stop.is_set():
            with self._lock:
                if not (pending := self._pending):
                    self._threads.remove(threading.current_thread())
                    return
                file = pending.popleft()
            try:
                with closing(Holder(self.path)) as own:
                    if not self.hold_present(file, own):
                        self._download(file, own, is_ahead=True)
            except NoRoomError:
                pending.appendleft(file)
                self._stop.wait(LOOK_S)
            except Exception:  # noqa: BLE001 (`hold` tries again and reports the error)
                pass

    def _warn(self, problem: str) -> None:
        """Print the problem of a server, once for all threads that meet it."""
        if time.monotonic() - self._warned_s >= WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            print(f"waiting for {problem}", file=sys.stderr, flush=True)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Exclude all who count, reserve, rename or remove files."""
        with closing(Holder(self.path)) as room:
            room.lock(None, fcntl.F_WRLCK)
            yield

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, ContentError):
                raise
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            bound = "" if self.max_bytes is None else ", lower data.cache_gb"
            raise UserError(
                str(self.path),
                f"files cannot be written ({cause_of(error)})",
                f"free disk space{bound}, or choose another {self.setting}",
                code="no-space" if is_full else "unreadable",
            ) from None


def _free_bytes(path: Path) -> int:
    """Return the free space of the disk without the spared space. Other programs write to the disk,
    too, and a node with a full disk counts as bad."""
    disk = shutil.disk_usage(path)
    return int(disk.free - min(SPARED_BYTES, SPARED_FRACTION * disk.total))


def _make_private(path: Path, setting: str) -> None:
    """Create the directory, or reject one whose content another user could have written."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or writable:
        raise UserError(
            str(path),
            "this is not a directory that belongs to you and that only you can write to",
            f"choose a directory of your own as {setting}",
            code="unsafe",
        )
