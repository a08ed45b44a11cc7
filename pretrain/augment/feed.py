"""Batches on the model's device: augmented micro-batches for training (`Feed`), or the batches of
one pass (`on_device`).

On a CPU the loader's threads augment. On a GPU one more thread (`Ahead`) draws the augmentation of
the next batches. The thread queues copies from pinned memory, and the augmentation, on a side
stream. The model's stream waits for an event; the host does not wait. Torch's allocator reuses
pinned buffers only after their copies are done.
"""

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pretrain.augment.augmentation import Augmentation, Prepared
from pretrain.data.loader import Batch, Batches, BatchSource, Waits, as_stored

T = TypeVar("T")
NUM_AHEAD = 2
"""Number of batches that the GPU prepares in addition to the current batch."""


@dataclass(frozen=True)
class Fed:
    prepared: Prepared
    num_bad: int


class Ahead(Generic[T]):
    """Iterator over `make(batch)` for batches on a GPU. A side stream prepares `NUM_AHEAD` results
    in advance.

    Enter its context manager inside the context manager of the batches.
    """

    def __init__(
        self,
        batches: BatchSource[Batch],
        make: Callable[[Batch], T],
        device: torch.device,
        *,
        waits: "Waits[tuple[T, torch.cuda.Event]]" = Future.result,
    ):
        """`waits`: function that waits for a future of the thread."""
        self._batches, self._make, self._waits = batches, make, waits
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = self._stream.device  # has an index, unlike accelerate's device
        # constants of the augmentation may still be copied on the current stream
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="feed",
            initializer=torch.cuda.set_device,
            initargs=(self._device,),
        )
        self._ahead = collections.deque(self._thread.submit(self._launch) for _ in range(NUM_AHEAD))

    def __enter__(self) -> "Ahead[T]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is not None:
            self._batches.end_waits()  # without it, closing may wait for a download
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        made, ready = self._waits(self._ahead.popleft())
        self._ahead.append(self._thread.submit(self._launch))
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for tensor in _on_gpu(made):
            tensor.record_stream(current)
        return made

    def _launch(self) -> "tuple[T, torch.cuda.Event]":
        batch = next(self._batches)
        with torch.cuda.stream(self._stream):
            made, ready = self._make(batch), torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return made, ready


def _on_gpu(made: object) -> Iterator[Tensor]:
    for value in vars(made).values():
        if isinstance(value, Prepared):
            yield from _on_gpu(value)
        elif torch.is_tensor(value) and value.is_cuda:
            yield value


def finish_for(augmentation: Augmentation) -> Callable[[Batch], Any]:
    """Return the function that the loader's threads apply to each batch. On a CPU the function
    augments the batch."""
    return as_stored if augmentation.device.type == "cuda" else partial(_augmented, augmentation)


def _augmented(augmentation: Augmentation, batch: Batch) -> Fed:
    return Fed(augmentation.prepare(batch), batch.num_bad)


class Feed:
    """Iterator over the augmented micro-batches. Use it as a context manager."""

    def __init__(
        self,
        batches: BatchSource[Any],
        augmentation: Augmentation,
        *,
        waits: "Waits[tuple[Fed, torch.cuda.Event]]" = Future.result,
    ):
        """`batches`: made with `finish=finish_for(augmentation)`. `waits`: function that waits for
        a batch on a GPU. On a CPU, the loader waits."""
        self._batches, self._ahead = batches, None
        if augmentation.device.type == "cuda":
            make = partial(_augmented, augmentation)
            self._ahead = Ahead(batches, make, augmentation.device, waits=waits)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *unused: object) -> None:
        self._batches.end_waits()  # without it, closing may wait for a download
        if self._ahead is not None:
            self._ahead.__exit__(None)
        self._batches.close()

    def __next__(self) -> Fed:
        found = next(self._batches if self._ahead is None else self._ahead)
        assert isinstance(found, Fed)
        return found


@contextmanager
def on_device(
    batches: Batches[Batch],
    device: torch.device,
    *,
    waits: "Waits[tuple[Batch, torch.cuda.Event]]" = Future.result,
) -> Iterator[Iterator[Batch]]:
    """Yield an iterator over the batches, with images and labels on the device. The mask stays on
    the host."""
    if device.type != "cuda":
        yield batches
        return

    def move(batch: Batch) -> Batch:
        images, labels = (
            each.to(device, non_blocking=True) for each in (batch.images_BHWC, batch.labels_B)
        )
        return replace(batch, images_BHWC=images, labels_B=labels)

    with Ahead(batches, move, device, waits=waits) as ahead:
        yield ahead
