"""Which shards can be read at this moment: all local ones from their first use on, remote ones while they are needed.

A remote shard is mapped from its copy in the node's cache. It is let go (unmapped, and free to be evicted) when nobody reads from
it and it is not among those that are needed next, or the cache has no room for what some reader of this process needs now.

Invariants: a shard stays mapped while a `reading` block that named it is open; what is mapped has the size that the manifest says.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from data_prep.manifest import DatasetError, Shard
from data_prep.settings import UserError
from pretrain.data.datasets import Part
from pretrain.data.mapping import FileRange
from pretrain.data.order import Ids
from pretrain.data.shard_cache import Held, ShardCache


class MappedShards:
    def __init__(self, shards: Sequence[tuple[Part, Shard]], *, cache: ShardCache | None):
        self._shards, self._cache = shards, cache
        self.files = FileRange([shard.num_bytes for _, shard in shards])
        self.is_remote = np.array([shard.is_remote for _, shard in shards], np.bool_)
        self.any_remote = bool(self.is_remote.any())
        assert cache is not None or not self.any_remote  # `open_cache` is for all who read
        self._mapped = np.zeros(len(shards), np.bool_)
        self._users = np.zeros(len(shards), np.int64)
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()
        self._mapping = [threading.Lock() for _ in shards]
        for number in np.flatnonzero(~self.is_remote):
            self._check_local(int(number))
        if cache is not None and self.any_remote:
            cache.when_full(self._let_go)

    @contextmanager
    def reading(self, numbers: Ids) -> Iterator[None]:
        """The shards are mapped for the length of the block; waits for those that are still on their way."""
        if not self.any_remote and self._mapped[numbers].all():
            yield  # the common case: local shards are never let go
            return
        needed = np.unique(numbers)
        with self._lock:
            self._users[needed] += 1
        try:
            for number in needed[~self._mapped[needed]].tolist():
                self._map(number)
            yield
        finally:
            with self._lock:
                self._users[needed] -= 1

    def fetch_ahead(self, numbers: Sequence[int]) -> None:
        """What is needed next, in this order; the rest is let go as soon as nobody reads from it."""
        remote = [number for number in numbers if self.is_remote[number]]
        if self._cache is None or not remote:
            return
        self._check_room(remote)
        self._let_go(but=frozenset(remote))
        self._cache.fetch_ahead([self._shards[number][1] for number in remote if not self._mapped[number]])

    def close(self) -> None:
        """Nothing may be read from here on."""
        with self._lock:
            for held in self._held.values():
                held.release()
            self._held = {}

    def _let_go(self, *, but: frozenset[int] = frozenset()) -> None:
        """What nobody reads from at this moment."""
        with self._lock:
            for number in [n for n in self._held if n not in but and not self._users[n]]:
                self.files.unmap(number)
                self._mapped[number] = False
                self._held.pop(number).release()

    def _map(self, number: int) -> None:
        part, shard = self._shards[number]
        with self._mapping[number]:
            if self._mapped[number]:
                return
            if shard.is_remote:
                assert self._cache is not None
                held = self._cache.hold(shard)
                self.files.map(number, held.path, num_bytes=shard.num_bytes)
                with self._lock:
                    self._held[number] = held
            else:
                self._check_local(number)
                self.files.map(number, part.tar(shard), num_bytes=shard.num_bytes)
            self._mapped[number] = True

    def _check_room(self, numbers: Sequence[int]) -> None:
        assert self._cache is not None
        wanted = sum({shard.sha256: shard.num_bytes for _, shard in (self._shards[n] for n in numbers)}.values())
        if wanted > self._cache.max_bytes:
            raise UserError(
                f"data.cache_gb: {self._cache.max_bytes / 1e9:g} will not do: the samples that come next lie in {len(numbers):,} "
                f"remote shards of {wanted / 1e9:.3g} GB together; raise it, or, to train, set data.shuffle=block (with smaller "
                "data.block_size and data.window_blocks), which needs few shards at a time"
            )

    def _check_local(self, number: int) -> None:
        part, shard = self._shards[number]
        path, directory = part.tar(shard), part.directory
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read ({error.strerror}); run data_prep verify {directory}") from None
        if num_bytes != shard.num_bytes:
            raise DatasetError(
                f"{path}: {num_bytes:,} bytes, the manifest says {shard.num_bytes:,}; it was cut or changed, rebuild it"
            )
