"""Batches for one rank, fetched ahead by a background thread, in the one order that the plan and the order fix.

The loader has no state of its own: it starts after `consumed` samples and the trainer, which knows what it has used, says so in
the checkpoint. Gathering from memory-mapped shards and decoding release the GIL, so threads serve where processes would copy.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.order import BatchPlan, Order, evaluation_slices
from pretrain.shards import SplitReader

Ids = NDArray[np.int64]


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
    """False where evaluation is padded."""


class TrainingBatches:
    """Iterates micro-batches from `consumed` samples on, without end; use as a context manager."""

    def __init__(
        self,
        reader: SplitReader,
        order: Order,
        plan: BatchPlan,
        *,
        rank: int,
        consumed: int,
        num_threads: int,
        prefetch: int,
        pin: bool,
    ):
        self.reader, self.order, self.plan, self.rank, self.pin = reader, order, plan, rank, pin
        self._consumed, self._micro_step = consumed, 0
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="loader")
        self._ahead: queue.SimpleQueue[Future[Batch]] = queue.SimpleQueue()
        for _ in range(prefetch):
            self._request()

    def __enter__(self) -> "TrainingBatches":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __next__(self) -> Batch:
        batch = self._ahead.get().result()
        self._request()
        return batch

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _request(self) -> None:
        positions = self.plan.positions(consumed=self._consumed, micro_step=self._micro_step, rank=self.rank)
        self._micro_step += 1
        if self._micro_step == self.plan.accumulation_steps:
            self._consumed, self._micro_step = self._consumed + self.plan.global_batch_size, 0
        self._ahead.put(self._pool.submit(self._load, positions))

    def _load(self, positions: Ids) -> Batch:
        epochs, samples = self.order.locate(positions)
        batch = Batch(
            images_BHWC=self.reader.images(samples),
            labels_B=torch.from_numpy(self.reader.labels[samples]),
            epochs=epochs,
            samples=samples,
            pairs=positions // 2,
        )
        return pinned(batch) if self.pin else batch


def evaluation_batches(reader: SplitReader, *, local_batch_size: int, num_ranks: int, rank: int) -> Iterator[Batch]:
    """Every sample of the split once over all ranks, in order; the padding of the last batches is masked."""
    size = {
        "num_samples": reader.num_samples,
        "local_batch_size": local_batch_size,
        "num_ranks": num_ranks,
        "rank": rank,
    }
    for samples, mask in evaluation_slices(**size):
        yield Batch(
            images_BHWC=reader.images(samples),
            labels_B=torch.from_numpy(reader.labels[samples]),
            epochs=np.zeros_like(samples),
            samples=samples,
            pairs=samples // 2,
            mask_B=torch.from_numpy(mask),
        )


def pinned(batch: Batch) -> Batch:
    return Batch(
        batch.images_BHWC.pin_memory(),
        batch.labels_B.pin_memory(),
        batch.epochs,
        batch.samples,
        batch.pairs,
        batch.mask_B,
    )
