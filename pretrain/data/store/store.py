"""Copies of files for the threads of a process: fetched when they are needed, or ahead. The
protocol stands in __init__.py."""

import hashlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from data_prep.clients import options_for
from data_prep.publish import sync
from data_prep.remote import ContentError, RemoteError, StoppedError, fetch, shown, tried
from pretrain.data.store.directory import (
    NOW,
    Claim,
    File,
    NoRoomError,
    StoreDirectory,
    StoreError,
    open_file,
)

NUM_ATTEMPTS, SILENCE_S = 8, 30.0
"""To fetch a shard from a server; one that sends nothing for so long has failed."""
WAIT_S = 300.0
"""For others to let go of room, or to progress with a file that we need. Below engine.timeout_s,
whose message is vaguer."""
FIRST_LOOK_S, LONGEST_LOOK_S, LOOK_AGAIN_S = 0.01, 0.25, 0.5
"""Between looks at what other processes do; the last is that of read-ahead."""
WARN_AGAIN_S = 30.0
NUM_THREADS, PIECE_BYTES = 4, 4 << 20
VERIFIED_NS = 946_684_800 * 10**9
"""1 January 2000 as the mtime of a file says that it has not been written to since its hash was
found right."""
Moves = Callable[[int], None]
"""Receives how many bytes more have been copied; 0 at each look at others who copy. What it raises
ends the copy, or the wait."""


class ShardStore:
    """Each file is whole and verified or not there at all."""

    def __init__(
        self,
        path: Path,
        *,
        setting: str,
        max_bytes: int | None,
        storage: dict[str, Any],
        hosts: Collection[str] = (),
        num_threads: int = NUM_THREADS,
    ):
        """`hosts`: the only servers that receive `storage`."""
        self.directory = StoreDirectory(path, setting=setting, max_bytes=max_bytes)
        self._storage, self._hosts, self._num_threads = storage, hosts, num_threads
        self._stop, self._warned_s = threading.Event(), -WARN_AGAIN_S
        self._threads: list[threading.Thread] = []
        self._not_before_s: dict[str, float] = {}
        """When read-ahead looks again at a file that others fetch, or that failed."""
        self._full_until_s = 0.0
        self._when_full: list[weakref.WeakMethod[Callable[[], None]]] = []

    def hold(
        self, file: File, *, waits_for_room: bool = True, moves: Moves = lambda num_bytes: None
    ) -> Path:
        """Waits until the file stands on disk, verified; no process evicts it until `release`. It
        counts as used now."""
        directory = self.directory
        directory.check(file)
        began_s, seen, look_s, is_waiting = time.monotonic(), None, FIRST_LOOK_S, False
        try:
            while True:
                with directory.room():
                    claim = directory.claim(file, place=NOW, keep=True)
                    if claim is Claim.HAS_NO_ROOM and waits_for_room and not is_waiting:
                        with directory.recorded():
                            directory.waiting.append(file.num_bytes)
                        is_waiting = True
                if claim is Claim.IS_OURS:
                    self._fetch(file, keep=True, moves=moves)
                if claim is Claim.IS_OURS or (claim is Claim.IS_THERE and self._is_right(file)):
                    self._not_before_s.pop(file.name, None)
                    return directory.whole(file)
                for reference in self._when_full if claim is Claim.HAS_NO_ROOM else ():
                    if (let_go := reference()) is not None:
                        let_go()
                if (now := self._progress(file)) != seen:
                    began_s, seen = time.monotonic(), now
                moves(0)
                if claim is Claim.HAS_NO_ROOM and not waits_for_room:
                    raise NoRoomError(self._gave_up(file, claim))
                if time.monotonic() - began_s > WAIT_S:
                    raise StoreError(self._gave_up(file, claim))
                if self._stop.wait(look_s):
                    raise StoppedError
                look_s = min(2 * look_s, LONGEST_LOOK_S)
        finally:
            if is_waiting:
                with (
                    suppress(OSError, StoreError),
                    directory.room(),
                ):  # what the caller must see is why we wait no more
                    directory.waiting.remove(file.num_bytes)
                    directory.publish_record()

    def hold_all_there(self, files: Sequence[File]) -> bool:
        """Holds the files if all of them are there."""
        with self.directory.room():
            if not all(map(self.directory.is_there, files)):
                return False
            with self.directory.recorded():
                self.directory.keep(files)
        if all(map(self._is_right, files)):
            return True
        self.release(files)
        return False

    def release(self, files: Sequence[File]) -> None:
        """Each as often as it is held; also after the store is closed."""
        with self.directory.room():
            for file in files:
                path = self.directory.whole(file)
                with suppress(
                    FileNotFoundError
                ):  # it is not marked as right: somebody may have written to it
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            self._full_until_s = 0.0
            self.directory.let_go(files)

    def fetch_ahead(self, files: Sequence[File]) -> None:
        """In this order, in the background, while there is room. What was asked for before and has
        not begun is forgotten."""
        directory, most = self.directory, self.directory.max_bytes
        with directory.room():
            if self._stop.is_set():
                raise StoppedError
            with directory.recorded():
                directory.wanted = [
                    file for file in dict.fromkeys(files) if most is None or file.num_bytes <= most
                ]
            self._full_until_s = 0.0
            directory.changed.notify_all()
            while len(self._threads) < min(self._num_threads, len(directory.wanted)):
                self._threads.append(
                    threading.Thread(target=self._work, name="shard-store", daemon=True)
                )
                self._threads[-1].start()

    def when_full(self, let_go: Callable[[], None]) -> None:
        """A method that is called when a `hold` finds no room: it releases what is held, but not in
        use at that moment.

        Training and evaluation share the store, and each keeps what it needs next: neither must
        lock the other out.
        """
        self._when_full.append(weakref.WeakMethod(let_go))

    def close(self) -> None:
        """Ends the threads and every wait; what is whole, or held, stays."""
        self._stop.set()
        with self.directory.changed:
            self.directory.changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self.directory.room():
            self.directory.wanted = []
            self.directory.publish_record()

    def _fetch(self, file: File, *, keep: bool, moves: Moves) -> None:
        """Fills the .part that we have claimed, and publishes it."""
        directory, part = self.directory, self.directory.part(file)
        try:
            with open_file(part, os.O_RDWR) as content:
                self._fill(content, file, moves=moves)
                with directory.plain_errors():
                    os.utime(content.fileno(), ns=(time.time_ns(), VERIFIED_NS))
                    os.fsync(content.fileno())
            with directory.room():
                os.rename(part, directory.whole(file))
                directory.fetching.discard(file.name)
                if keep:
                    directory.keep([file])
                else:
                    directory.publish_record()
            sync(directory.path)
        except BaseException as error:
            with directory.changed:  # which `recorded` holds as well
                directory.fetching.discard(file.name)
            with (
                suppress(OSError, StoreError),
                directory.room(),
            ):  # what the caller must see is the error that led here
                part.unlink(missing_ok=True)
                directory.publish_record()
            if isinstance(error, FileNotFoundError):
                raise StoreError(
                    f"{directory.path}: somebody removes files there; name another"
                    f" {directory.setting}"
                ) from None
            if isinstance(error, RemoteError | ContentError):
                raise StoreError(str(error)) from None
            raise

    def _fill(self, part: FileIO, file: File, *, moves: Moves) -> None:
        """Again and again, until its bytes are those of the manifest."""

        def write(data: Any) -> None:
            if part.tell() + len(data) > file.num_bytes:
                raise _wrong(file, f"more than the {file.num_bytes:,} bytes")
            with self.directory.plain_errors():
                view = memoryview(data)
                while view:
                    view = view[part.write(view) :]
            moves(len(data))

        def attempt() -> None:
            part.seek(0)
            os.utime(part.fileno())  # those who wait see that something is done
            if file.is_remote:
                own = options_for(file.source, self._storage, hosts=self._hosts)
                fetch(
                    file.source,
                    write,
                    num_bytes=file.num_bytes,
                    storage=own,
                    silence_s=SILENCE_S,
                    stop=self._stop,
                )
            else:
                self._copy(Path(file.source), write)
            if part.tell() != file.num_bytes:
                raise _wrong(file, f"{part.tell():,} of the {file.num_bytes:,} bytes")
            part.seek(0)
            found = hashlib.file_digest(part, "sha256").hexdigest()
            if found != file.sha256:
                raise _wrong(file, f"sha256 {found} instead of {file.sha256}")

        if file.is_remote:
            tried(
                file.source, attempt, num_attempts=NUM_ATTEMPTS, stop=self._stop, report=self._warn
            )
        else:
            attempt()

    def _copy(self, source: Path, write: Callable[[memoryview], None]) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        try:
            with open(source, "rb", buffering=0) as content:
                while count := content.readinto(piece):
                    write(piece[:count])
        except OSError as error:
            raise StoreError(f"{source}: cannot be copied ({error.strerror})") from None

    def _is_right(self, file: File) -> bool:
        """Of a file that we hold; if not, it is removed, and held no more."""
        path = self.directory.whole(file)
        with suppress(FileNotFoundError), open_file(path, os.O_RDONLY) as copy:
            status = os.fstat(copy.fileno())
            if status.st_size == file.num_bytes and (
                status.st_mtime_ns == VERIFIED_NS
                or hashlib.file_digest(copy, "sha256").hexdigest() == file.sha256
            ):
                os.utime(path, ns=(time.time_ns(), VERIFIED_NS))
                return True
        with self.directory.room():
            path.unlink(missing_ok=True)
            self.directory.let_go([file])
        return False

    def _progress(self, file: File) -> object:
        """Changes while somebody fetches the file."""
        try:
            status = self.directory.part(file).lstat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _gave_up(self, file: File, claim: Claim) -> str:
        path, most = self.directory.path, self.directory.max_bytes
        if claim is Claim.IS_FETCHED:
            stalled = (
                f"another process fetches {shown(file.source)}, and has made no progress in"
                f" {WAIT_S:,.0f} s"
            )
            return f"{path}: {stalled}; end that process, or name another {self.directory.setting}"
        room = f"{path}: no room for {shown(file.source)} ({file.num_bytes / 1e9:,.3f} GB)"
        if most is None:
            return room
        return (
            f"{room} in {WAIT_S:,.0f} s, as all of its {most / 1e9:,.3f} GB are being read; raise"
            " data.cache_gb"
        )

    def _warn(self, what: str) -> None:
        """Of a server that does not deliver; many threads may learn the same."""
        if time.monotonic() - self._warned_s >= WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            print(f"waiting for {what}", file=sys.stderr, flush=True)

    def _work(self) -> None:
        """Read-ahead. A file is begun by one thread at a time, and never before one that is needed
        sooner and could be begun; what failed is left to the one who needs it, who will learn why;
        what is evicted too early is fetched again in its turn.
        """
        changed = self.directory.changed
        while not self._stop.is_set():
            # from the choice to the claim, else a thread that needs its file later could take that
            # room
            with changed:
                file = next(
                    (
                        file
                        for place, file in enumerate(self.directory.wanted)
                        if self._claims(file, place=place)
                    ),
                    None,
                )
                if file is None:
                    changed.wait(0 if self._stop.is_set() else LOOK_AGAIN_S)
                    continue
            try:
                self._fetch(file, keep=False, moves=lambda num_bytes: None)
            except StoppedError:
                return
            except Exception:  # noqa: BLE001 (`hold` tries again, and what it meets is what the user must see)
                self._not_before_s[file.name] = float("inf")

    def _claims(self, file: File, *, place: int) -> bool:
        directory, now_s = self.directory, time.monotonic()
        if (
            self._stop.is_set()
            or now_s < max(self._full_until_s, self._not_before_s.get(file.name, 0))
            or directory.is_there(file)
        ):
            return False
        try:
            directory.check(file)
            with directory.room():
                claim = directory.claim(file, place=place, keep=False)
        except Exception:  # noqa: BLE001 (as above)
            self._not_before_s[file.name] = float("inf")
            return False
        if claim is Claim.HAS_NO_ROOM:
            self._full_until_s = now_s + LOOK_AGAIN_S
        elif claim is Claim.IS_FETCHED:
            self._not_before_s[file.name] = now_s + LOOK_AGAIN_S
        return claim is Claim.IS_OURS


def _wrong(file: File, what: str) -> Exception:
    if not file.is_remote:
        return StoreError(
            f"{file.source}: is not what its manifest says; run data_prep verify on the dataset"
        )
    remedy = "it was changed or is damaged: put the right file back, or run data_prep index again"
    return ContentError(
        f"{shown(file.source)}: delivers {what} that the manifest promises, each time; {remedy}"
    )
