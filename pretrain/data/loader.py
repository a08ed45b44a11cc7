"""Batches for one rank, fetched ahead by threads, in the one order that the plan and the order fix: to train, and to judge.

The loader has no state of its own: it starts after `consumed` samples and the trainer, which knows what it has used, says so in
the checkpoint. Threads serve where processes would copy: gathering from mapped shards, libjpeg-turbo and numpy let go of the GIL.

How a batch comes about: 1. a batch is taken, which makes room for one more request; 2. whichever thread is free first
locates its samples; 3. the threads fill parts of one buffer; 4. the thread that ends last looks up the labels and calls `finish`
(on a CPU the augmentation; for a GPU nothing, see `feed.py`). At most `prefetch` batches are under way or waiting.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pretrain.data.bad_samples import BadSamples, left_out
from pretrain.data.locating import LOOK_AHEAD, Group, LookAhead, Request
from pretrain.data.order import BatchPlan, Ids, InSequence, Line, evaluation_slices
from pretrain.data.shards import Places, ShardReader, Unreadable
from pretrain.data.threads import lone_threads
from pretrain.ranks.world import World

T = TypeVar("T")
OnBad = Callable[[Sequence[Unreadable], Ids, Tensor], Ids]
"""Mends the bad places of (ids, images) and returns whose labels count at each place; -1: leave the place out."""
Waits = Callable[[Future[T]], T]
"""How to wait for a batch: see `StopFlag.result`."""

SMALLEST_PART = 32
"""Pictures: less is not worth the change of threads."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, as stored (not yet augmented)."""

    images_BHWC: Tensor
    labels_B: Tensor
    epochs: Ids
    samples: Ids
    pairs: Ids
    """position // 2: the two neighbours of a MixUp pair share it, on every world size."""
    mask_B: Tensor | None = None
    """False where evaluation is padded, or a sample cannot be read."""
    num_bad: int = 0
    """Samples that could not be read."""


class Batches(Generic[T]):
    """Iterates what has been made of the requests, in their order; use as a context manager."""

    def __init__(
        self,
        reader: ShardReader,
        order: Line,
        requests: Iterable[Request],
        *,
        finish: Callable[[Batch], T],
        on_bad: OnBad,
        num_threads: int,
        prefetch: int,
        pin: bool,
        look_ahead: int = LOOK_AHEAD,
        waits: Waits[T] = Future.result,
    ):
        """`waits` is how the caller of `next` waits."""
        self.reader, self.order, self.finish, self.on_bad, self.pin = reader, order, finish, on_bad, pin
        self.look_ahead = LookAhead(reader, order, span=look_ahead)
        self._waits = waits
        self._requests = iter(requests)
        self._num_threads = num_threads
        self._pool = lone_threads(num_threads, pin=pin)
        self._ahead: deque[Future[T]] = deque()
        self._group: deque[tuple[Group, Request, int]] = deque()
        self._following: Group | None = None
        for _ in range(prefetch):
            self._request()

    def __enter__(self) -> "Batches[T]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is not None:
            self.reader.end_waits()  # or closing would last as long as a download
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        batch = self._waits(self._ahead.popleft())
        self._request()
        return batch

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _request(self) -> None:
        if not self._group:
            self._group = deque((self._following or self._new_group()).jobs())
            self._following = None
        if not self._group:
            return
        group, request, start = self._group.popleft()
        if self._following is None and len(self._group) <= group.num_requests // 2:
            self._following = self._new_group()
            if self._following.num_requests:
                self._pool.submit(self._following.located)  # meanwhile the others have batches to fill
        # decoding a batch takes long enough to share it; gathering one does not: there each thread has a batch of its own
        num_parts = (
            max(1, min(self._num_threads, len(request.positions) // SMALLEST_PART)) if self.reader.decodes else 1
        )
        job = _Job(self, group, request, start=start, num_parts=num_parts)
        self._ahead.append(job.done)
        for part in range(num_parts):
            self._pool.submit(job.run, part)

    def _new_group(self) -> Group:
        return Group(self.reader, self.order, self._requests)


class _Job(Generic[T]):
    """One batch on its way through the threads."""

    def __init__(self, batches: Batches[T], group: Group, request: Request, *, start: int, num_parts: int):
        self._batches, self._group, self._request = batches, group, request
        self._start, self._size = start, len(request.positions)
        self._cuts = [self._size * part // num_parts for part in range(num_parts + 1)]
        self._lock = threading.Lock()
        self._images_BHWC: Tensor | None = None
        self._shown: dict[int, Ids] = {}
        self._num_done = self._num_bad = 0
        self.done: Future[T] = Future()

    def run(self, part: int) -> None:
        try:
            self._run(part)
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits for this batch)
            with self._lock:
                if not self.done.done():
                    self.done.set_exception(error)

    def _run(self, part: int) -> None:
        # for each batch: those of one group may lie far apart, as between them stand those of all other ranks
        self._batches.look_ahead.announce(int(self._request.positions[0]))
        epochs, places = self._group.located()
        first, end = self._cuts[part], self._cuts[part + 1]
        mine, images = places.part(self._start + first, self._start + end), self._buffer()[first:end]
        bad = self._batches.reader.read(mine, images)
        shown = self._batches.on_bad(bad, mine.ids, images) if bad else None
        with self._lock:
            if shown is not None:
                self._shown[first] = shown
                self._num_bad += len(bad)
            self._num_done += 1
            is_last = self._num_done == len(self._cuts) - 1
        if is_last:
            own = slice(self._start, self._start + self._size)
            self.done.set_result(self._batches.finish(self._batch(epochs[own], places.part(own.start, own.stop))))

    def _buffer(self) -> Tensor:
        with self._lock:
            if self._images_BHWC is None:
                self._images_BHWC = self._batches.reader.empty(self._size, pin=self._batches.pin)
            return self._images_BHWC

    def _batch(self, epochs: Ids, places: Places) -> Batch:
        labels, mask = places.labels, self._request.mask
        readable = np.ones(self._size, np.bool_)
        for first, shown in self._shown.items():
            readable[first : first + len(shown)] = shown >= 0
            labels = labels.copy()
            labels[first : first + len(shown)] = self._batches.reader.locate(np.maximum(shown, 0)).labels
        labels_B = torch.from_numpy(np.ascontiguousarray(labels))
        return Batch(
            images_BHWC=self._buffer(),
            labels_B=labels_B.pin_memory() if self._batches.pin else labels_B,
            epochs=epochs,
            samples=places.ids,
            pairs=self._request.positions // 2,
            mask_B=None if mask is None else torch.from_numpy(mask & readable),
            num_bad=self._num_bad if mask is None else int((mask & ~readable).sum()),
        )


def training_batches(
    reader: ShardReader,
    order: Line,
    plan: BatchPlan,
    *,
    rank: int,
    consumed: int,
    num_threads: int,
    prefetch: int,
    pin: bool,
    finish: Callable[[Batch], T],
    bad_samples: BadSamples | None = None,
    waits: Waits[T] = Future.result,
) -> Batches[T]:
    """The micro-batches of a rank from `consumed` samples on, without end."""
    return Batches(
        reader,
        order,
        map(Request, plan.sequence(consumed=consumed, rank=rank)),
        finish=finish,
        on_bad=(bad_samples or BadSamples(reader)).replace,
        num_threads=num_threads,
        prefetch=prefetch,
        pin=pin,
        look_ahead=max(LOOK_AHEAD, 2 * plan.global_batch_size),
        waits=waits,
    )


def evaluation_batches(
    reader: ShardReader,
    *,
    local_batch_size: int,
    world: World,
    num_threads: int = 1,
    pin: bool = False,
    waits: Waits[Batch] = Future.result,
) -> Batches[Batch]:
    """Every sample of the split once over all ranks, in order; padding is masked, and so is what cannot be read."""
    slices = evaluation_slices(
        num_samples=reader.num_samples,
        local_batch_size=local_batch_size,
        num_ranks=world.num_ranks,
        rank=world.rank,
    )
    return Batches(
        reader,
        InSequence(reader.num_samples),
        (Request(ids, mask) for ids, mask in slices),
        finish=as_stored,
        on_bad=left_out,
        num_threads=num_threads,
        prefetch=2,
        pin=pin,
        waits=waits,
    )


def as_stored(batch: Batch) -> Batch:
    """The `finish` of whoever wants batches as they are."""
    return batch
