"""Fetches ahead: threads that take the shards which will be needed next, in their order, while there is room for them.

Invariants: a shard is begun by one thread at a time, and never before one that is needed sooner and could be begun; what failed is
left to the one who needs it, who will hear why; what is evicted before it was needed is
fetched again in its turn; nothing here keeps a lock on what is whole.
"""

import threading
from collections.abc import Callable, Sequence

from data_prep.manifest import Shard
from data_prep.remote import StoppedError
from pretrain.shard_cache.directory import Refusal

LOOK_AGAIN_S = 0.5
"""What other processes have let go of, or evicted."""


class ReadAhead:
    """`obtain(shard, place)` fetches a shard that is needed after `place` others; None: it did."""

    def __init__(
        self,
        obtain: Callable[[Shard, int], Refusal | None],
        *,
        is_whole: Callable[[Shard], bool],
        num_threads: int,
    ):
        self._obtain, self._is_whole, self._num_threads = obtain, is_whole, num_threads
        self._changed = threading.Condition()
        self._wanted: list[Shard] = []
        self._begun: set[str] = set()
        self._left: set[str] = set()
        """To others, who fetch them, until we look again."""
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

    def go(self) -> None:
        with self._changed:
            while len(self._threads) < min(self._num_threads, len(self._wanted)):
                thread = threading.Thread(target=self._work, name="shard-cache", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._look_again()

    def arrived(self, shard: Shard) -> bool:
        """Whoever needed the shard has it; whether it had been wanted."""
        with self._changed:
            self._failed.discard(shard.sha256)
            before = len(self._wanted)
            self._wanted = [wanted for wanted in self._wanted if wanted.sha256 != shard.sha256]
            return len(self._wanted) < before

    def room_was_left(self) -> None:
        with self._changed:
            if self._full:
                self._look_again()

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
                    if not self._changed.wait(LOOK_AGAIN_S if self._wanted else None):
                        self._look_again()
                    found = self._next()
                if self._closed or found is None:
                    return
                shard, place = found
                self._begun.add(shard.sha256)
            refusal: Refusal | None = None
            try:
                refusal = self._obtain(shard, place)
            except StoppedError:
                return
            except Exception:  # noqa: BLE001
                # `hold` of this shard tries again, and what it meets is what the user must see
                with self._changed:
                    self._failed.add(shard.sha256)
            with self._changed:
                self._begun.discard(shard.sha256)
                self._full |= refusal is Refusal.NO_ROOM
                if refusal is Refusal.IS_FETCHED:
                    self._left.add(shard.sha256)

    def _next(self) -> tuple[Shard, int] | None:
        if self._full:
            return None
        for place, shard in enumerate(self._wanted):
            if shard.sha256 not in self._begun | self._left | self._failed and not self._is_whole(shard):
                return shard, place
        return None

    def _look_again(self) -> None:
        self._full = False
        self._left = set()
        self._changed.notify_all()
