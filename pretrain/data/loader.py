"""Batches of one rank for training and evaluation, prefetched by threads in the order of the plan.

The loader has no state: it starts after `consumed` samples, a number in the trainer's checkpoint.
Threads suffice, because gathering from mapped shards, libjpeg-turbo and numpy release the GIL.

A batch is made in these steps:

1. The caller takes a finished batch. Then the loader submits the next request.
2. The first free thread locates the samples of a group of requests, because numpy is slow for few
   samples. The first group is one request, so that the first batch opens few indices. Later groups
   have up to LOCATED_TOGETHER samples.
3. The threads fill parts of one reused buffer.
4. The last thread to finish looks up the labels and calls `finish` (the augmentation if it runs on
   the CPU, see feed.py).

At most `prefetch` batches are in progress. Remote shards are prefetched for all ranks of a node.
"""

import itertools
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.data.bad_samples import BadSamples, left_out
from pretrain.data.order import BatchPlan, Ids, Line, Order
from pretrain.data.reader import Places, ShardReader, Unreadable
from pretrain.ranks.world import World

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OnBad = Callable[[Sequence[Unreadable], Ids, Tensor], Ids]
"""Function that replaces or masks the bad samples in (ids, images). For each row, it returns the id
of the sample whose label is used, or -1 for a masked row."""
Waits = Callable[[Future[T]], T]
"""Function that waits for a batch, for example `StopFlag.result`."""

SMALLEST_PART, SMALLEST_GATHER = 32, 2_000_000
"""Smallest number of images to decode, or bytes to copy, for which another thread pays off."""
LOCATED_TOGETHER = 8192
"""Number of samples that are looked up together after the first batches."""
LOOK_AHEAD = 32_768
"""Number of samples, over all ranks, whose remote shards are prefetched (at least two global
batches). The next prefetch starts after half of them."""
MOST_IDLE = 8
"""Largest number of idle buffers of one size in the pool. Other idle buffers are freed."""


class Reader(Protocol):
    """A source of images by number, for example a `ShardReader`."""

    num_samples: int
    stored_size: int
    is_remote: bool
    decodes: bool

    def locate(self, ids: Ids) -> Places: ...
    def read(self, places: Places, batch_BHWC: Tensor) -> list[Unreadable]: ...
    def aspects(self, places: Places) -> NDArray[np.float64] | None: ...
    def names(self, ids: Ids) -> list[tuple[str, str]]: ...
    def fetch_ahead(self, ids: Ids) -> None: ...
    def end_waits(self) -> None: ...


class BatchSource(Protocol[T_co]):
    """A source of batches: `Batches`, or the batches of a stream."""

    def __next__(self) -> T_co: ...
    def end_waits(self) -> None:
        """End all downloads, and start no new ones."""

    def close(self) -> None: ...


class Request(NamedTuple):
    positions: Ids
    mask: NDArray[np.bool_] | None = None
    mix_keys: Ids | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, not yet augmented."""

    images_BHWC: Tensor
    labels_B: Tensor
    epochs: Ids
    samples: Ids
    mix_keys: Ids
    """Key of each image's random MixUp draw: position // 2 for pairs, or the number of the global
    batch. For batch numbers, `images_BHWC` has an extra first row: the partner of the first image.
    """
    mask_B: Tensor | None = None
    """False for padding of an evaluation, and for samples that do not decode."""
    aspects_B: NDArray[np.float64] | None = None
    """Width / height of each image before it was squashed (`crop=full`); None if all images were
    cropped to squares."""
    num_bad: int = 0
    """Number of samples that do not decode."""


def as_stored(batch: Batch) -> Batch:
    return batch


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
    previous_in: int | None = None,
    node_ranks: range | None = None,
) -> "Batches[T]":
    """Return the endless micro-batches of a rank after `consumed` samples.

    `node_ranks`: ranks that share copies of remote shards with this rank (default: all).
    `previous_in`: global batch size. If set, each micro-batch begins with an extra image: the
    previous image of the global batch. The last image of a global batch precedes its first image.
    """
    return Batches(
        reader,
        order,
        (
            _with_previous(own, previous_in) if previous_in else Request(own)
            for own in plan.sequence(consumed=consumed, rank=rank)
        ),
        finish=finish,
        on_bad=(bad_samples or BadSamples(reader)).replace,
        num_threads=num_threads,
        prefetch=prefetch,
        pin=pin,
        look_ahead=max(LOOK_AHEAD, 2 * plan.global_batch_size),
        read_here=partial(plan.of_ranks, ranks=node_ranks or range(plan.num_ranks)),
        waits=waits,
    )


def _with_previous(own: Ids, global_batch_size: int) -> Request:
    previous = own[0] - 1 if own[0] % global_batch_size else own[0] + global_batch_size - 1
    return Request(np.concatenate([[previous], own]), mix_keys=own // global_batch_size)


def evaluation_batches(
    reader: Reader,
    *,
    local_batch_size: int,
    world: World,
    num_threads: int = 1,
    pin: bool = False,
    on_bad: OnBad = left_out,
    waits: Waits[Batch] = Future.result,
) -> "Batches[Batch]":
    """Return this rank's batches. Together the ranks read each sample of the split once, in order.
    Padding and unreadable samples are masked."""
    plan = BatchPlan(local_batch_size * world.num_ranks, local_batch_size, world.num_ranks)
    num_batches = -(-reader.num_samples // plan.global_batch_size)  # per rank
    positions = itertools.islice(plan.sequence(consumed=0, rank=world.rank), num_batches)
    return Batches(
        reader,
        Order(reader.num_samples, 0, "none", length=num_batches * plan.global_batch_size),
        (Request(own, own < reader.num_samples) for own in positions),
        finish=as_stored,
        on_bad=on_bad,
        num_threads=num_threads,
        prefetch=2,
        pin=pin,
        waits=waits,
    )


class Batches(Generic[T]):
    """Iterator over finished batches, in the order of the requests. Use it as a context manager."""

    def __init__(
        self,
        reader: Reader,
        order: Line,
        requests: Iterable[Request],
        *,
        finish: Callable[[Batch], T],
        on_bad: OnBad,
        num_threads: int,
        prefetch: int,
        pin: bool,
        look_ahead: int = LOOK_AHEAD,
        read_here: Callable[[Ids], Ids] = np.asarray,
        waits: Waits[T] = Future.result,
    ):
        """`read_here`: function that selects the positions that this node reads. `waits`: function
        with which `next` waits for a batch."""
        self.reader, self.order, self.pin = reader, order, pin
        self.finish, self.on_bad = finish, on_bad
        self.requests, self.buffers = iter(requests), BufferPool()
        self._waits, self._num_threads, self._prefetch = waits, num_threads, prefetch
        self._read_here, self._look_ahead = read_here, look_ahead
        self._announce_from, self._announcing = -1, threading.Lock()
        self._pool = lone_threads(num_threads, pin=pin)
        self._ahead: deque[Future[T]] = deque()
        self._group = _Group(self, most_samples=1)
        self._following: _Group | None = None
        for _ in range(prefetch):
            self._request()

    def __enter__(self) -> "Batches[T]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is not None:
            self.end_waits()  # otherwise closing may wait for a download
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        batch = self._waits(self._ahead.popleft())
        self._request()
        return batch

    def end_waits(self) -> None:
        self.reader.end_waits()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def announce(self, position: int) -> None:
        """Prefetch the next samples of all ranks of this node, because these ranks share copies."""
        if not self.reader.is_remote:
            return
        with self._announcing:
            if position >= self._announce_from:
                following = np.arange(position, position + self._look_ahead)
                _, samples = self.order.locate(self._read_here(following))
                self.reader.fetch_ahead(samples)
                self._announce_from = position + self._look_ahead // 2

    def _request(self) -> None:
        if not self._group.jobs:
            self._group, self._following = self._following or self._group.next(), None
        if not self._group.jobs:
            return
        group = self._group
        request, own = group.jobs.popleft()
        # all threads decode parts of a batch, but only idle threads help to gather raw images
        smallest, sharing = SMALLEST_PART, self._num_threads
        if not self.reader.decodes:
            smallest = max(1, SMALLEST_GATHER // (3 * self.reader.stored_size**2))
            sharing = -(-sharing // self._prefetch)
        num_parts = max(1, min(sharing, len(request.positions) // smallest))
        job = _Job(self, group, request, own=own, num_parts=num_parts)
        self._ahead.append(job.done)
        for part in range(num_parts):
            self._pool.submit(job.run, part)
        if self._following is None and len(group.jobs) <= group.num_requests // 2:
            self._following = group.next()
            if self._following.jobs:
                self._pool.submit(self._following.located)


class _Group:
    """Next requests, whose samples are looked up together."""

    def __init__(self, batches: Batches[Any], *, most_samples: int):
        """Take requests until the group has at least `most_samples` samples."""
        self._batches, self._lock = batches, threading.Lock()
        self.jobs: deque[tuple[Request, slice]] = deque()
        """Requests, each with the rows of its samples in the group."""
        num_samples = 0
        while num_samples < most_samples and (request := next(batches.requests, None)) is not None:
            end = num_samples + len(request.positions)
            self.jobs.append((request, slice(num_samples, end)))
            num_samples = end
        self._positions = [request.positions for request, _ in self.jobs]
        self.num_requests, self._num_samples = len(self.jobs), num_samples
        self._located: tuple[Ids, Places] | None = None

    def next(self) -> "_Group":
        return _Group(self._batches, most_samples=min(LOCATED_TOGETHER, 2 * self._num_samples))

    def located(self) -> tuple[Ids, Places]:
        """Return (epochs, places). The first thread looks up the samples; other threads wait."""
        with self._lock:
            if self._located is None:
                epochs, samples = self._batches.order.locate(np.concatenate(self._positions))
                self._located = epochs, self._batches.reader.locate(samples)
            return self._located


class _Job(Generic[T]):
    def __init__(
        self, batches: Batches[T], group: _Group, request: Request, *, own: slice, num_parts: int
    ):
        self._batches, self._group, self._request, self._own = batches, group, request, own
        self._size = len(request.positions)
        self._cuts = [self._size * part // num_parts for part in range(num_parts + 1)]
        self._lock = threading.Lock()
        self._images_BHWC: Tensor | None = None
        self._shown: dict[int, Ids] = {}
        self._num_done = self._num_bad = 0
        self.done: Future[T] = Future()

    def run(self, part: int) -> None:
        try:
            self._run(part)
        except BaseException as error:  # noqa: BLE001 (raised for the waiting caller)
            with self._lock:
                if not self.done.done():
                    self.done.set_exception(error)

    def _run(self, part: int) -> None:
        batches, first, end = self._batches, self._cuts[part], self._cuts[part + 1]
        batches.announce(int(self._request.positions.min()))
        epochs, places = self._group.located()
        places = places.part(self._own)
        with self._lock:
            if self._images_BHWC is None:
                self._images_BHWC = batches.buffers.pictures(
                    self._size, batches.reader.stored_size, pin=batches.pin
                )
            images_BHWC = self._images_BHWC
        mine = places.part(slice(first, end))
        bad = batches.reader.read(mine, images_BHWC[first:end])
        shown = batches.on_bad(bad, mine.ids, images_BHWC[first:end]) if bad else None
        with self._lock:
            if shown is not None:
                self._shown[first] = shown
                self._num_bad += len(bad)
            self._num_done += 1
            is_last = self._num_done == len(self._cuts) - 1
        if is_last:
            self.done.set_result(
                batches.finish(self._batch(images_BHWC, epochs[self._own], places))
            )

    def _batch(self, images_BHWC: Tensor, epochs: Ids, places: Places) -> Batch:
        reader, mask, ids = self._batches.reader, self._request.mask, places.ids.copy()
        readable = np.ones(self._size, np.bool_)
        for first, shown in self._shown.items():
            part = slice(first, first + len(shown))
            readable[part] = shown >= 0
            ids[part] = np.where(shown >= 0, shown, ids[part])
        read = reader.locate(ids) if self._shown else places
        labels_B = torch.from_numpy(np.ascontiguousarray(read.labels))
        mask_B = None if mask is None else torch.from_numpy(mask & readable)
        return Batch(
            images_BHWC=images_BHWC,
            labels_B=labels_B.pin_memory() if self._batches.pin else labels_B,
            epochs=epochs,
            samples=places.ids,
            mix_keys=(
                self._request.positions // 2
                if self._request.mix_keys is None
                else self._request.mix_keys
            ),
            mask_B=mask_B.pin_memory() if self._batches.pin and mask_B is not None else mask_B,
            aspects_B=reader.aspects(read),
            num_bad=self._num_bad if mask is None else int((mask & ~readable).sum()),
        )


def num_cpu_threads(device: torch.device) -> int | None:
    """Return the number of torch's CPU threads, which affects the rounding of sums. Return None on
    a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else None


def lone_threads(number: int, *, pin: bool) -> ThreadPoolExecutor:
    """Return a pool of started threads. torch uses a single core in each thread, so that the
    threads do not compete."""
    device = torch.cuda.current_device() if pin else None
    started, before = threading.Barrier(number), torch.get_num_threads()

    def initialize() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # else pinned memory opens a context on the first GPU
            torch.get_num_threads()  # else torch's first operation resets the number of threads
            torch.set_num_threads(1)  # for this thread, and for threads that begin later
        except BaseException:
            started.abort()
            raise
        with suppress(threading.BrokenBarrierError):
            started.wait()

    pool = ThreadPoolExecutor(number, thread_name_prefix="loader")
    try:
        for each in [pool.submit(initialize) for _ in range(number)]:
            each.result()
    except BaseException:
        started.abort()
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(before)
    return pool


class BufferPool:
    """Reused memory of batches. Page faults of fresh memory take as long as filling the memory.

    Memory returns to the pool when no tensor, view or autograd graph refers to it. torch pools
    pinned memory itself. Several threads may use the pool.
    """

    def __init__(self) -> None:
        self._idle: dict[int, deque[NDArray[np.uint8]]] = defaultdict(
            lambda: deque(maxlen=MOST_IDLE)
        )

    def pictures(self, count: int, size: int, *, pin: bool) -> Tensor:
        if pin:
            return torch.empty(count, size, size, 3, dtype=torch.uint8, pin_memory=True)
        return self.empty(count, size, size, 3, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        idle = self._idle[num_bytes]
        try:
            memory = idle.pop()
        except IndexError:
            memory = np.empty(num_bytes, np.uint8)
        loan = memory.view()
        weakref.finalize(loan, idle.append, memory).atexit = False
        return torch.from_numpy(loan).view(dtype).view(shape)
