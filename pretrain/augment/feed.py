"""What the trainer takes its steps on: augmented micro-batches on the training device, one after the other.

On a CPU the loader's threads augment, and nothing is left to do here. On a GPU one more thread draws the augmentation of the next
micro-batches, and queues their copies from pinned memory and their augmentation on a side stream, while the model works: the
model's stream waits for an event, the host for nothing. Pinned buffers come from torch's caching allocator, which hands one out
again only when the copies from it are done.
"""

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pretrain.augment.augmentation import Augmentation, Prepared
from pretrain.data.loader import Batch, BatchSource, Waits, as_stored

NUM_AHEAD = 2
"""Micro-batches on the GPU besides the one in use."""


@dataclass(frozen=True)
class Fed:
    prepared: Prepared
    num_bad: int
    ready: torch.cuda.Event | None = None


class Feed:
    """Use as a context manager; `next(feed)` is the next micro-batch."""

    def __init__(
        self,
        open_batches: Callable[[Callable[[Batch], Batch | Fed]], BatchSource[Batch | Fed]],
        augmentation: Augmentation,
        *,
        waits: Waits[Fed] = Future.result,
    ):
        """`waits`: on a GPU, where the caller of `next` waits for our thread; else it waits for the loader, in its way."""
        self._augmentation, self._waits = augmentation, waits
        self._thread: ThreadPoolExecutor | None = None
        if augmentation.device.type != "cuda":
            self._batches = open_batches(lambda batch: Fed(augmentation.prepare(batch), batch.num_bad))
            return
        self._batches = open_batches(as_stored)
        self._stream = torch.cuda.Stream(augmentation.device)  # type: ignore[no-untyped-call]
        self._device = self._stream.device  # with its number, which accelerate's may lack and `set_device` needs
        # the constants of the augmentation may still be on their way, on the stream of whoever made it
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed", initializer=torch.cuda.set_device, initargs=(self._device,))
        self._ahead: collections.deque[Future[Fed]] = collections.deque(self._thread.submit(self._launch) for _ in range(NUM_AHEAD))

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *unused: object) -> None:
        self._batches.end_waits()  # or closing would last as long as a download
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._batches.close()

    def __next__(self) -> Fed:
        if self._thread is None:
            found = next(self._batches)
            assert isinstance(found, Fed)
            return found
        fed = self._waits(self._ahead.popleft())
        self._ahead.append(self._thread.submit(self._launch))
        current = torch.cuda.current_stream(self._device)
        assert fed.ready is not None
        current.wait_event(fed.ready)
        for tensor in vars(fed.prepared).values():
            if tensor is not None:
                tensor.record_stream(current)  # which owns the memory from here on
        return fed

    def _launch(self) -> Fed:
        """The next micro-batch: copy and augmentation, queued on the side stream."""
        batch = next(self._batches)
        assert isinstance(batch, Batch)
        with torch.cuda.stream(self._stream):
            prepared = self._augmentation.prepare(batch)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return Fed(prepared, batch.num_bad, ready)
