"""Fetches ahead: threads that take the shards which will be needed next, in their order, while there is room for them.

Invariants: a shard is begun by one thread at a time, and never before one that is needed sooner and could be begun; what failed is
left to the one who needs it, who will hear why; nothing here keeps a lock on what is whole.
"""

import threading
from collections.abc import Callable, Sequence

from data_prep.manifest import Shard
from data_prep.remote import StoppedError
from pretrain.shard_cache.directory import Refusal

LOOK_AGAIN_S = 0.5
"""Whether another process has let go of room."""


class ReadAhead:
    """`obtain(shard, place)` fetches a shard that is needed after `place` others; None: it did, or it was there."""

    def __init__(self, obtain: Callable[[Shard, int], Refusal | None], *, num_threads: int):
        self._obtain, self._num_threads = obtain, num_threads
        self._changed = threading.Condition()
        self._wanted: list[Shard] = []
        self._done: set[str] = set()
        """What of it was begun, wherever that led."""
        self._failed: set[str] = set()
        self._full = False
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def wanted(self) -> list[str]:
        with self._changed:
            return [shard.sha256 for shard in self._wanted]

    def want(self, shards: Sequence[Shard]) -> None:
        """From now on; `go` begins with it."""
        with self._changed:
            assert not self._closed
            self._wanted = list({shard.sha256: shard for shard in shards}.values())
            self._done = set()
            self._full = False

    def go(self) -> None:
        with self._changed:
            while len(self._threads) < min(self._num_threads, len(self._wanted)):
                thread = threading.Thread(target=self._work, name="shard-cache", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def arrived(self, shard: Shard) -> bool:
        """Whoever needed the shard has it; whether it had been wanted."""
        with self._changed:
            self._failed.discard(shard.sha256)
            before = len(self._wanted)
            self._wanted = [wanted for wanted in self._wanted if wanted.sha256 != shard.sha256]
            return len(self._wanted) < before

    def look_again(self) -> None:
        """There may be room now."""
        with self._changed:
            self._full = False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                found = self._next()
                while found is None and not self._closed:
                    self._full &= self._changed.wait(LOOK_AGAIN_S if self._full else None)
                    found = self._next()
                if self._closed or found is None:
                    return
                shard, place = found
                self._done.add(shard.sha256)
            try:
                refusal = self._obtain(shard, place)
            except StoppedError:
                return
            except Exception:  # noqa: BLE001
                # `hold` of this shard tries again, and what it meets is what the user must see
                with self._changed:
                    self._failed.add(shard.sha256)
                continue
            if refusal is Refusal.NO_ROOM:
                with self._changed:
                    self._done.discard(shard.sha256)
                    self._full = True

    def _next(self) -> tuple[Shard, int] | None:
        if self._full:
            return None
        for place, shard in enumerate(self._wanted):
            if shard.sha256 not in self._done and shard.sha256 not in self._failed:
                return shard, place
        return None
