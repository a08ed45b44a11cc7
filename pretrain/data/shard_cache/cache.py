"""Copies of remote shards on local disk, for the threads of a process. The protocol stands in __init__.py."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from data_prep.manifest import Shard
from data_prep.remote import ContentError, RemoteError, StoppedError, shown
from pretrain.data.shard_cache.ahead import ReadAhead
from pretrain.data.shard_cache.directory import NOW, CacheDirectory, Refusal
from pretrain.data.shard_cache.fetching import Patience, fill
from pretrain.data.shard_cache.files import CacheError, let_go, plain_errors, raise_file_limit
from pretrain.data.shard_cache.wants import Wants

FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.25
"""Between looks at what other processes do."""
TELL_AGAIN_S = 30.0
"""What is said of a server that does not deliver; many threads may be told the same by it."""


class Held:
    """A whole shard at `path`; until `release`, no process evicts it."""

    def __init__(self, path: Path, file: FileIO, cache: "ShardCache"):
        self.path = path
        self._file, self._cache, self._pid = file, cache, os.getpid()

    def release(self) -> None:
        """May be called again, and after the cache is closed."""
        if self._file.closed:
            return
        if os.getpid() != self._pid:
            self._file.close()  # the lock is our parent's
            return
        self._cache._release(self._file)

    def __enter__(self) -> "Held":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ShardCache:
    """Copies of remote shards on local disk, each whole and verified or not there at all."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        storage: dict[str, Any],
        patience: Patience | None = None,
        parallel_downloads: int = 4,
    ):
        raise_file_limit()
        self._directory = CacheDirectory(directory, max_bytes=max_bytes)
        self._storage, self._patience = storage, patience or Patience()
        self._parallel_downloads = parallel_downloads
        self._when_full: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._begin()

    @property
    def max_bytes(self) -> int:
        return self._directory.max_bytes

    def hold(self, shard: Shard) -> Held:
        """Waits until the shard stands on disk, verified; it counts as used now."""
        self._mind_forks()
        self._directory.check(shard)
        path = self._directory.whole_path(shard)
        with plain_errors(self._directory.path):
            file = self._directory.whole(shard)
        if file is None:
            try:
                file = self._wait_for(shard)
            except (RemoteError, ContentError) as error:
                raise CacheError(str(error)) from None
        if self._ahead.arrived(shard):
            self._publish_wants()
        return Held(path, file, self)

    def fetch_ahead(self, shards: Sequence[Shard]) -> None:
        """In this order, in the background. What was asked for before and has not begun is forgotten."""
        self._mind_forks()
        self._ahead.want([shard for shard in shards if shard.num_bytes <= self._directory.max_bytes])
        self._publish_wants()
        self._ahead.go()

    def when_full(self, let_go: Callable[[], None]) -> None:
        """A method that is called when a `hold` finds no room: it releases what is held, but not in use at that moment."""
        self._when_full.append(weakref.WeakMethod(let_go))

    def close(self) -> None:
        """Ends the threads and every wait; what is cached, or held, stays."""
        self._mind_forks()
        self._stop.set()
        self._ahead.close()
        with self._directory.room():
            self._wants.withdraw()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._wants = Wants(self._directory.path)
        self._waiting_bytes: list[int] = []
        self._told_s = -TELL_AGAIN_S
        self._ahead = ReadAhead(
            self._reserve_ahead, is_whole=self._directory.is_whole, num_threads=self._parallel_downloads
        )

    def _mind_forks(self) -> None:
        """Threads do not survive a fork, and its locks and wants are the parent's."""
        if os.getpid() != self._pid:
            self._wants.forget()
            self._begin()

    def _wait_for(self, shard: Shard) -> FileIO:
        since, seen, look_s = time.monotonic(), None, FIRST_LOOK_S
        waiting = False
        try:
            while True:
                found = self._obtain(shard)
                if isinstance(found, FileIO):
                    return found
                if found is Refusal.IS_WHOLE:
                    file = self._directory.whole(shard)
                    if file is not None:
                        return file
                    continue
                if found is Refusal.NO_ROOM and not waiting:
                    waiting = True
                    self._publish_wants(waits_for=shard.num_bytes)
                if found is Refusal.NO_ROOM:
                    self._let_go_idle()
                now = self._directory.progress(shard)
                if now != seen:
                    since, seen = time.monotonic(), now
                if time.monotonic() - since > self._patience.wait_s:
                    raise CacheError(self._gave_up(shard, found))
                if self._stop.wait(look_s):
                    raise StoppedError
                look_s = min(2 * look_s, LONGEST_LOOK_S)
        finally:
            if waiting:
                self._publish_wants(waits_no_longer_for=shard.num_bytes)

    def _let_go_idle(self) -> None:
        """Training and evaluation share the cache, and each keeps what it needs next: neither must lock the other out."""
        for reference in self._when_full:
            let_go = reference()
            if let_go is not None:
                let_go()

    def _gave_up(self, shard: Shard, refusal: Refusal) -> str:
        seconds = f"{self._patience.wait_s:,.0f} s"
        if refusal is Refusal.NO_ROOM:
            return (
                f"{self._directory.path}: no room for {shown(shard.file)} ({shard.num_bytes / 1e9:,.3f} GB) in {seconds}, as all "
                f"of its {self._directory.max_bytes / 1e9:,.3f} GB are being read; raise data.cache_gb"
            )
        return (
            f"{self._directory.path}: another process fetches {shown(shard.file)}, and has not got on with it in {seconds}; "
            "end that process, or name another data.cache_dir"
        )

    def _reserve_ahead(self, shard: Shard, place: int) -> Callable[[], None] | Refusal:
        self._directory.check(shard)
        part = self._directory.reserve(shard, place=place)
        return part if isinstance(part, Refusal) else partial(self._fetch, part, shard, keep=False)

    def _obtain(self, shard: Shard) -> FileIO | Refusal:
        """Fetches the shard, and keeps a lock on it, unless it is there, or nothing can be done for now."""
        part = self._directory.reserve(shard, place=NOW)
        if not isinstance(part, Refusal):
            self._fetch(part, shard, keep=True)
        return part

    def _fetch(self, part: FileIO, shard: Shard, *, keep: bool) -> None:
        try:
            fill(
                part,
                shard,
                self._directory,
                storage=self._storage,
                patience=self._patience,
                stop=self._stop,
                tell=self._tell,
            )
            self._directory.publish(part, shard, keep=keep)
        except BaseException:
            self._directory.drop(part, shard)
            raise

    def _tell(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_AGAIN_S:
            self._told_s = now_s
            print(f"waiting for {what}", file=sys.stderr, flush=True)

    def _publish_wants(self, *, waits_for: int | None = None, waits_no_longer_for: int | None = None) -> None:
        with self._directory.room():
            if waits_for is not None:
                self._waiting_bytes.append(waits_for)
            if waits_no_longer_for is not None:
                self._waiting_bytes.remove(waits_no_longer_for)
            self._wants.publish(self._ahead.wanted, waiting_bytes=sum(self._waiting_bytes))

    def _release(self, file: FileIO) -> None:
        self._directory.mark_used(file)
        let_go(file)
        if not self._stop.is_set():
            self._ahead.room_was_left()
