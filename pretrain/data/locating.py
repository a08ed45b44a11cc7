"""Which samples come next, found ahead of the loader's threads: many at a time, because numpy is slow at finding few.

What lies behind a network is asked for long before it is needed, and for all ranks at once: those of a node share their copies.
"""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.order import Ids, Line
from pretrain.data.shards import Places, ShardReader

LOCATED_TOGETHER = 8192
"""Samples."""
LOOK_AHEAD = 32_768
"""Samples of all ranks whose remote shards are asked for in advance (two global batches, if that is more); said anew every half."""


class Request(NamedTuple):
    positions: Ids
    mask: NDArray[np.bool_] | None = None


class Group:
    """Some requests whose samples are located together: numpy is slow at finding few numbers at a time."""

    def __init__(self, reader: ShardReader, order: Line, requests: Iterator[Request]):
        self._reader, self._order = reader, order
        self._requests: list[Request] = []
        num_samples = 0
        while num_samples < LOCATED_TOGETHER:
            request = next(requests, None)
            if request is None:
                break
            self._requests.append(request)
            num_samples += len(request.positions)
        self._lock = threading.Lock()
        self._located: tuple[Ids, Places] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def jobs(self) -> Iterator[tuple["Group", Request, int]]:
        """(self, request, where its samples begin among those of the group)."""
        start = 0
        for request in self._requests:
            yield self, request, start
            start += len(request.positions)

    def located(self) -> tuple[Ids, Places]:
        """(epochs, places): by the thread that comes first; the others wait."""
        with self._lock:
            if self._located is None:
                epochs, samples = self._order.locate(np.concatenate([each.positions for each in self._requests]))
                self._located = epochs, self._reader.locate(samples)
            return self._located


class LookAhead:
    """Tells the reader, now and then, which samples of the whole sequence come next: the ranks of a node share their copies."""

    def __init__(self, reader: ShardReader, order: Line, *, span: int):
        self._reader, self._order, self._span, self._next = reader, order, span, -1
        self._lock = threading.Lock()

    def announce(self, position: int) -> None:
        if not self._reader.is_remote:
            return
        with self._lock:
            if position < self._next:
                return
            _, samples = self._order.locate(np.arange(position, position + self._span))
            self._reader.fetch_ahead(samples)
            self._next = position + self._span // 2
