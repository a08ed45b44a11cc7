"""`data.stage_dir`: copies of datasets' shards on a node's own disk, shared by all ranks and jobs of a user there. No torch here.

    DIR/HASH/           of the dataset whose content has this hash, wherever it lies; mode 0700, ours
      SHA256.tar        a whole shard that hashed right
      SHA256.npy        its index
      manifest.json     for people; written when all that was asked for is there
    DIR/HASH.lock       whoever reads or fills HASH holds a shared flock on it; who removes HASH, an exclusive one. Its mtime is the
                        last use
    DIR/HASH.copy       flock'd by the one that fills HASH

How a file is staged: 1. under HASH.copy, what a killed copier has left under temporary names is removed, and what is missing is
listed; 2. if it does not fit, other datasets go that nobody holds, the longest unused first, but only if that is enough; 3. each
file is copied under a temporary name, hashed meanwhile, synced and renamed. So a file that has its name is whole, and a copy that
was killed goes on with the next file.
"""

import errno
import fcntl
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from data_prep.manifest import Manifest, Shard, save_manifest
from data_prep.publish import atomic_file, remove_leftovers
from data_prep.settings import UserError
from pretrain.ranks.hangs import PROGRESS

SPARED_SHARE, SPARED_BYTES = 0.01, 5e9
"""Of the disk, which is never filled: whichever is more. Others write there, too, and a node with a full disk counts as bad."""
MOST_SPARED_SHARE = 0.1
"""Of a small disk."""
PIECE_BYTES = 4 << 20
NUM_THREADS = 4
_LOOK_S = 0.5


class StageError(UserError):
    """Why something is not staged; training then reads it where it lies."""


class Stopped(Exception):  # noqa: N818
    """The copy was given up, because training is to stop."""


@dataclass(frozen=True)
class Wanted:
    """A file to be staged."""

    source: Path
    name: str
    num_bytes: int
    sha256: str


class Hold:
    """A shared flock, until it is closed or forgotten."""

    def __init__(self, path: Path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, file)
        fcntl.flock(file, fcntl.LOCK_SH)  # waits only while somebody removes what it protects
        os.utime(path)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


@dataclass(frozen=True)
class StagedCopy:
    """What a reader opens instead of the dataset; nobody removes it while this object lives."""

    directory: Path
    hold: Hold

    def tar(self, shard: Shard) -> Path:
        return self.directory / tar_name(shard)

    def index(self, shard: Shard) -> Path:
        return self.directory / index_name(shard)


def tar_name(shard: Shard) -> str:
    """By content: several shards of a subset may lie in one tar."""
    return f"{shard.sha256}.tar"


def index_name(shard: Shard) -> str:
    """By content, too: datasets of one content may name their shards otherwise."""
    return f"{shard.index_sha256}.npy"


class StageArea:
    def __init__(
        self,
        root: Path,
        *,
        stops: Callable[[], bool] = lambda: False,
        begins: Callable[[int], None] = lambda num_bytes: None,
        moves: Callable[[int], None] = lambda num_bytes: None,
    ):
        """`begins` hears how many bytes will be copied, `moves` how many more have been, from several threads."""
        self.root, self._stops, self._begins, self._moves = root, stops, begins, moves

    def take(self, content_hash: str, wanted: Sequence[Wanted]) -> StagedCopy | None:
        """The copy, if it is whole; else None."""
        directory = self.root / content_hash
        if not directory.is_dir() or directory.stat().st_uid != os.getuid():
            return None
        hold = Hold(self._lock(content_hash))
        if not directory.is_dir() or _missing(directory, wanted):
            hold.close()
            return None
        return StagedCopy(directory, hold)

    def fill(self, manifest: Manifest, wanted: Sequence[Wanted]) -> None:
        """Copies what is missing; raises StageError where that cannot be done."""
        try:
            self._fill(manifest, wanted)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._remove(manifest.content_hash)  # a disk that we leave full would fail others
            raise StageError(f"{self.root}: {error.strerror or error}") from None

    def _fill(self, manifest: Manifest, wanted: Sequence[Wanted]) -> None:
        directory = self.root / manifest.content_hash
        self.root.mkdir(parents=True, exist_ok=True)
        with Hold(self._lock(manifest.content_hash)):
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory.stat().st_uid != os.getuid():
                raise StageError(f"{directory}: belongs to another user; name a data.stage_dir of your own")
            with self._copying(manifest.content_hash):
                remove_leftovers(directory)
                missing = _missing(directory, wanted)
                if missing:
                    self._make_room(sum(file.num_bytes for file in missing))
                    self._begins(sum(file.num_bytes for file in missing))
                    self._copy(directory, missing)
                    save_manifest(directory, manifest)

    def _copy(self, directory: Path, files: Sequence[Wanted]) -> None:
        """Several at once: hashing, reading and writing let go of Python's lock."""
        failed = threading.Event()

        def copy(file: Wanted) -> None:
            try:
                if not failed.is_set():
                    self._copy_file(file, directory / file.name, given_up=failed.is_set)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="staging") as threads:
            copies = [threads.submit(copy, file) for file in files]
        errors = [error for copied in copies if (error := copied.exception()) is not None]
        if errors:  # what was given up because of another's is no reason
            raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])

    def _copy_file(self, file: Wanted, target: Path, *, given_up: Callable[[], bool]) -> None:
        digest, piece = sha256(), memoryview(bytearray(PIECE_BYTES))
        with open(file.source, "rb", buffering=0) as source, atomic_file(target) as copy:
            while count := source.readinto(piece):
                if self._stops() or given_up():
                    raise Stopped
                digest.update(piece[:count])
                copy.write(piece[:count])
                self._moves(count)
                PROGRESS.touch()
            if digest.hexdigest() != file.sha256:
                raise StageError(f"{file.source}: is not what its manifest says; run data_prep verify on the dataset")

    def _make_room(self, num_bytes: int) -> None:
        free = self._free_bytes()
        if num_bytes <= free:
            return
        others = [
            lock.stem
            for lock in sorted(self.root.glob("*.lock"), key=lambda lock: lock.stat().st_mtime_ns)
            if (self.root / lock.stem).is_dir() and _is_unused(lock)
        ]
        gain = sum(_size_of(self.root / other) for other in others)
        if num_bytes > free + gain:
            raise StageError(
                f"{self.root}: {num_bytes / 1e9:,.3g} GB will not fit, {max(0, free + gain) / 1e9:,.3g} GB are free or can be freed"
            )
        for other in others:
            if num_bytes > self._free_bytes():
                self._remove(other)

    def _free_bytes(self) -> int:
        disk = shutil.disk_usage(self.root)
        spared = max(SPARED_SHARE * disk.total, min(SPARED_BYTES, MOST_SPARED_SHARE * disk.total))
        return int(disk.free - spared)

    def _remove(self, content_hash: str) -> None:
        """Unless somebody holds it."""
        with suppress(OSError), open(self._lock(content_hash), "r+b", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.root / content_hash)

    def _lock(self, content_hash: str) -> Path:
        return self.root / f"{content_hash}.lock"

    @contextmanager
    def _copying(self, content_hash: str) -> Iterator[None]:
        """As the only one; who waits gets on as far as the one does that copies."""
        with open(self.root / f"{content_hash}.copy", "ab") as lock:
            seen = -1
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._stops():
                        raise Stopped from None
                    size = _size_of(self.root / content_hash)
                    if size != seen:
                        seen = size
                        PROGRESS.touch()
                    time.sleep(_LOOK_S)
            yield


def _missing(directory: Path, wanted: Sequence[Wanted]) -> list[Wanted]:
    with os.scandir(directory) as entries:
        found = {entry.name: entry.stat().st_size for entry in entries}
    return [file for file in wanted if found.get(file.name) != file.num_bytes]


def _is_unused(lock: Path) -> bool:
    with open(lock, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _size_of(directory: Path) -> int:
    total = 0
    with suppress(FileNotFoundError), os.scandir(directory) as entries:  # a copier renames what it has finished
        for entry in entries:
            total += entry.stat().st_size
    return total
