"""Batches for one rank, fetched ahead by threads, in the one order that the plan and the order fix: to train, and to judge.

The loader has no state of its own: it starts after `consumed` samples and the trainer, which knows what it has used, says so in
the checkpoint. Threads serve where processes would copy: gathering from mapped shards, libjpeg-turbo and numpy let go of the GIL.

How a batch comes about: 1. a batch is taken, which makes room for one more request; 2. whichever thread is free first
locates its samples; 3. the threads fill parts of one buffer; 4. the thread that ends last looks up the labels and calls `finish`
(on a CPU the augmentation; for a GPU nothing, see `feed.py`). At most `prefetch` batches are under way or waiting.
"""

import collections
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.bad_samples import BadSamples, left_out
from pretrain.order import BatchPlan, Ids, InSequence, Line, evaluation_slices
from pretrain.shards import ShardReader, Unreadable
from pretrain.world import World

T = TypeVar("T")
OnBad = Callable[[Sequence[Unreadable], Ids, Tensor], Ids]
"""Mends the bad places of (ids, images) and returns whose labels count at each place; -1: leave the place out."""

SMALLEST_PART = 32
"""Pictures: less is not worth the change of threads."""
LOOK_AHEAD = 32_768
"""Samples whose remote shards are asked for in advance; said anew every half of it."""


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


class Request(NamedTuple):
    positions: Ids
    mask: NDArray[np.bool_] | None = None


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
    ):
        self.reader, self.order, self.finish, self.on_bad, self.pin = reader, order, finish, on_bad, pin
        self.look_ahead = LookAhead(reader, order)
        self._requests = iter(requests)
        self._num_threads = num_threads
        # pinned memory belongs to a GPU's context: without this every rank would open one on the first GPU
        on_gpu: dict[str, Any] = (
            {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)} if pin else {}
        )
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="loader", **on_gpu)
        self._ahead: collections.deque[Future[T]] = collections.deque()
        for _ in range(prefetch):
            self._request()

    def __enter__(self) -> "Batches[T]":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        batch = self._ahead.popleft().result()
        self._request()
        return batch

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _request(self) -> None:
        request = next(self._requests, None)
        if request is None:
            return
        num_parts = max(1, min(self._num_threads, len(request.positions) // SMALLEST_PART))
        job = _Job(self, request, num_parts=num_parts)
        self._ahead.append(job.done)
        for part in range(num_parts):
            self._pool.submit(job.run, part)


class _Job(Generic[T]):
    """One batch on its way through the threads."""

    def __init__(self, batches: Batches[T], request: Request, *, num_parts: int):
        self._batches, self._request = batches, request
        self._cuts = np.linspace(0, len(request.positions), num_parts + 1).astype(np.int64)
        self._lock = threading.Lock()
        self._located: tuple[Ids, Ids, Tensor] | None = None
        self._shown: dict[int, Ids] = {}
        self._num_bad = 0
        self.done: Future[T] = Future()

    def run(self, part: int) -> None:
        try:
            self._run(part)
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits for this batch)
            with self._lock:
                if not self.done.done():
                    self.done.set_exception(error)

    def _run(self, part: int) -> None:
        epochs, samples, images_BHWC = self._locate()
        start, end = self._cuts[part : part + 2].tolist()
        ids, images = samples[start:end], images_BHWC[start:end]
        bad = self._batches.reader.read(ids, images)
        shown = self._batches.on_bad(bad, ids, images) if bad else ids
        with self._lock:
            self._shown[part] = shown
            self._num_bad += len(bad)
            is_last = len(self._shown) == len(self._cuts) - 1
        if is_last:
            self.done.set_result(self._batches.finish(self._batch(epochs, samples, images_BHWC)))

    def _locate(self) -> tuple[Ids, Ids, Tensor]:
        with self._lock:
            if self._located is None:
                batches, positions = self._batches, self._request.positions
                batches.look_ahead.announce(int(positions[0]))
                epochs, samples = batches.order.locate(positions)
                self._located = (epochs, samples, batches.reader.empty(len(samples), pin=batches.pin))
            return self._located

    def _batch(self, epochs: Ids, samples: Ids, images_BHWC: Tensor) -> Batch:
        shown = np.concatenate([self._shown[part] for part in sorted(self._shown)])
        labels_B = torch.from_numpy(self._batches.reader.labels_of(np.maximum(shown, 0)))
        mask = self._request.mask
        return Batch(
            images_BHWC=images_BHWC,
            labels_B=labels_B.pin_memory() if self._batches.pin else labels_B,
            epochs=epochs,
            samples=samples,
            pairs=self._request.positions // 2,
            mask_B=None if mask is None else torch.from_numpy(mask & (shown >= 0)),
            num_bad=self._num_bad if mask is None else int((mask & (shown < 0)).sum()),
        )


class LookAhead:
    """Tells the reader, now and then, which samples of the whole sequence come next: the ranks of a node share their copies."""

    def __init__(self, reader: ShardReader, order: Line):
        self._reader, self._order, self._next = reader, order, -1
        self._lock = threading.Lock()

    def announce(self, position: int) -> None:
        if not self._reader.is_remote:
            return
        with self._lock:
            if position < self._next:
                return
            _, samples = self._order.locate(np.arange(position, position + LOOK_AHEAD))
            self._reader.fetch_ahead(samples)
            self._next = position + LOOK_AHEAD // 2


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
    )


def evaluation_batches(
    reader: ShardReader, *, local_batch_size: int, world: World, num_threads: int = 1, pin: bool = False
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
    )


def as_stored(batch: Batch) -> Batch:
    """The `finish` of whoever wants batches as they are."""
    return batch
