"""Fetches ahead: threads that take the shards which will be needed next, in their order, while there is room for them.

Invariants: a shard is begun by one thread at a time, and never before one that is needed sooner and could be begun; what failed is
left to the one who needs it, who will hear why; what is evicted before it was needed is
fetched again in its turn; nothing here keeps a lock on what is whole.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from data_prep.manifest import Shard
from data_prep.remote import StoppedError
from pretrain.data.shard_cache.directory import Refusal

LOOK_AGAIN_S = 0.5
"""What other processes have let go of, or evicted."""
Result = TypeVar("Result")


class ReadAhead:
    """`reserve(shard, place)` makes room for a shard that is needed after `place` others, and returns what then fetches it."""

    def __init__(
        self,
        reserve: Callable[[Shard, int], Callable[[], None] | Refusal],
        *,
        is_whole: Callable[[Shard], bool],
        num_threads: int,
    ):
        self._reserve, self._is_whole, self._num_threads = reserve, is_whole, num_threads
        self._turn = threading.Lock()
        """Held from the choice of a shard until its room is taken: else one that is needed later could take that room."""
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
        with suppress(StoppedError):
            while True:
                with self._turn:
                    found = self._wait_for_next()
                    if found is None:
                        return
                    shard, place = found
                    fetch = self._attempt(shard, partial(self._reserve, shard, place))
                if callable(fetch):
                    self._attempt(shard, fetch)
                with self._changed:
                    self._begun.discard(shard.sha256)
                    self._full |= fetch is Refusal.NO_ROOM
                    if fetch is Refusal.IS_FETCHED:
                        self._left.add(shard.sha256)
                    self._changed.notify_all()

    def _wait_for_next(self) -> tuple[Shard, int] | None:
        """Begins with it; None: there is nothing to wait for any more."""
        with self._changed:
            found = self._next()
            while found is None and not self._closed:
                if not self._changed.wait(LOOK_AGAIN_S if self._wanted else None):
                    self._look_again()
                found = self._next()
            if self._closed or found is None:
                return None
            self._begun.add(found[0].sha256)
            return found

    def _attempt(self, shard: Shard, step: Callable[[], Result]) -> Result | None:
        """`hold` of a shard that failed tries again, and what it meets is what the user must see."""
        try:
            return step()
        except StoppedError:
            raise
        except Exception:  # noqa: BLE001
            with self._changed:
                self._failed.add(shard.sha256)
            return None

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
