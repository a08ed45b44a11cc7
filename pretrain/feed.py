"""What the trainer takes its steps on: augmented micro-batches on the training device, one after the other.

On a CPU the loader's threads augment, and nothing is left to do here. On a GPU a side stream copies the next micro-batch from
pinned memory and augments it while the model works on this one: the model's stream waits for an event, the host for nothing.
Pinned buffers come from torch's caching allocator, which hands one out again only when the copies from it are done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from pretrain.augment.augmentation import Augmentation, Prepared
from pretrain.loader import Batch, Batches, as_stored


@dataclass(frozen=True)
class Fed:
    prepared: Prepared
    num_bad: int
    ready: torch.cuda.Event | None = None


class Feed:
    """Use as a context manager; `next(feed)` is the next micro-batch."""

    def __init__(
        self,
        open_batches: Callable[[Callable[[Batch], Batch | Fed]], Batches[Batch | Fed]],
        augmentation: Augmentation,
        *,
        end_waits: Callable[[], None] | None = None,
    ):
        self._augmentation, self._device = augmentation, augmentation.device
        self._on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._next: Fed | None = None
        self._end_waits = end_waits
        self._batches = open_batches(as_stored if self._on_gpu else self._prepare)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end_waits is not None:
            self._end_waits()  # or closing would last as long as a download
        self._batches.close()

    def __next__(self) -> Fed:
        found = self._next or self._take()
        self._next = None
        if self._on_gpu:
            self._hand_over(found)
            if self._batches.is_ready:
                self._next = self._take()
        return found

    def _take(self) -> Fed:
        batch = next(self._batches)
        return batch if isinstance(batch, Fed) else self._launch(batch)

    def _prepare(self, batch: Batch) -> Fed:
        return Fed(self._augmentation.prepare(batch), batch.num_bad)

    def _launch(self, batch: Batch) -> Fed:
        """Copy and augmentation, queued on the side stream."""
        with torch.cuda.stream(self._stream):
            prepared = self._augmentation.prepare(batch)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return Fed(prepared, batch.num_bad, ready)

    def _hand_over(self, fed: Fed) -> None:
        """From the side stream to the model's, which from here on owns the memory."""
        current = torch.cuda.current_stream(self._device)
        assert fed.ready is not None
        current.wait_event(fed.ready)
        prepared = fed.prepared
        for tensor in (prepared.images_BCHW, prepared.labels_B, prepared.other_labels_B, prepared.weight_B):
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)
