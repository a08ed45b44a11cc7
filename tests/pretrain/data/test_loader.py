"""The loader gives each rank its slice of the same sequence from any position, and leaves no
threads.

Memory is reused only after nothing refers to it.
"""

import gc
import threading
from typing import cast

import numpy as np
import pytest
import torch

from data_prep.manifest import DatasetError
from pretrain.data.loader import LOOK_AHEAD, MOST_IDLE, Batch, BufferPool, evaluation_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import Places, ShardReader
from pretrain.ranks.world import World
from tests.errors import fails
from tests.pretrain.data.tiny import loaded


def samples_of(
    reader: ShardReader, *, ranks: int, local: int, consumed: int, steps: int, threads: int = 1
) -> list[int]:
    """Return the samples of `steps` global batches of 24, in the order of their positions."""
    plan, order = BatchPlan(24, local, ranks), Order(reader.num_samples, 9)
    rows: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(ranks):
        with loaded(
            reader, order, plan, rank=rank, consumed=consumed, num_threads=threads, prefetch=3
        ) as batches:
            for step in range(steps):
                for micro_step in range(plan.accumulation_steps):
                    batch = next(batches)
                    assert batch.labels_B.tolist() == reader.labels[batch.samples].tolist()
                    assert torch.equal(batch.images_BHWC, reader.images(batch.samples))
                    rows[step, micro_step, rank] = batch.samples.tolist()
    return [sample for key in sorted(rows) for sample in rows[key]]


def test_every_world_and_thread_count_reads_or_resumes_the_same_sequence_and_leaves_no_thread(
    reader: ShardReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = samples_of(reader, ranks=1, local=24, consumed=0, steps=20)
    monkeypatch.setattr(
        "pretrain.data.loader.SMALLEST_GATHER", 1000
    )  # several threads share a batch
    assert sorted(straight[:240]) == list(range(240))
    for ranks, local, threads in [(2, 12, 1), (3, 4, 4), (4, 2, 2)]:
        assert (
            samples_of(reader, ranks=ranks, local=local, consumed=0, steps=20, threads=threads)
            == straight
        )
    assert samples_of(reader, ranks=3, local=8, consumed=24 * 7, steps=13) == straight[24 * 7 :]
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_an_error_while_loading_reaches_the_trainer(
    reader: ShardReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(ids: np.ndarray, batch: object) -> None:
        raise DatasetError("shard 3", "sample 7 does not decode", code="damaged")

    monkeypatch.setattr(reader, "read", broken)
    with fails("damaged", "shard 3"):
        samples_of(reader, ranks=1, local=24, consumed=0, steps=1)


def test_evaluation_reads_every_sample_once_on_uneven_worlds(reader: ShardReader) -> None:
    for ranks, local in ((1, 11), (2, 8), (3, 80), (7, 11)):
        seen, num_batches = [], set()
        for rank in range(ranks):
            with evaluation_batches(
                reader, local_batch_size=local, world=World(rank, rank, ranks)
            ) as found:
                batches = list(found)
            num_batches.add(len(batches))
            for batch in batches:
                assert batch.mask_B is not None and len(batch.samples) == local
                seen += batch.samples[batch.mask_B.numpy()].tolist()
        assert sorted(seen) == list(range(240)) and num_batches == {-(-240 // (ranks * local))}


class FarAway:
    """A remote reader that reads only the samples of the last request."""

    is_remote, decodes, stored_size = True, False, 1

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []
        self.located_sizes: list[int] = []

    def fetch_ahead(self, ids: np.ndarray) -> None:
        self.asked.append(ids)

    def aspects(self, places: Places) -> None:
        pass

    def locate(self, ids: np.ndarray) -> Places:
        self.located_sizes.append(len(ids))
        return Places(ids, *[np.zeros_like(ids)] * 4)

    def read(self, places: Places, batch: torch.Tensor) -> list[object]:
        batch.zero_()
        assert np.isin(places.ids, self.asked[-1]).all(), places.ids
        return []


@pytest.mark.parametrize(("ranks", "local"), [(1, 16), (64, 16), (256, 256)])
def test_a_rank_of_any_world_asks_for_its_remote_shards_before_it_reads(
    ranks: int, local: int
) -> None:
    far, plan, steps = FarAway(), BatchPlan(ranks * local, local, ranks), 70
    order = Order(10**8, 3, "none")
    with loaded(
        cast(ShardReader, far), order, plan, rank=ranks - 1, num_threads=1, prefetch=1
    ) as batches:
        for _ in range(steps):
            next(batches)
    assert 1 <= len(far.asked) <= 1 + (steps + 1) * ranks * local / (LOOK_AHEAD / 2)
    assert len(far.asked[0]) >= 2 * plan.global_batch_size  # including the next step


def test_the_first_batch_locates_only_its_own_samples() -> None:
    """To locate a sample, the index of its shard must be open."""
    far, order = FarAway(), Order(10**8, 3, "none")
    with loaded(
        cast(ShardReader, far), order, BatchPlan(64, 64, 1), rank=0, num_threads=1, prefetch=1
    ) as batches:
        for _ in range(520):
            next(batches)
    assert far.located_sizes[:10] == [64 * 2**group for group in range(8)] + [8192, 8192]


def test_the_threads_work_alone_and_leave_the_main_thread_its_number(reader: ShardReader) -> None:
    """The threads are checked after torch has worked in them, which gives a new thread the
    process's number of threads."""

    def threads_of_torch(batch: Batch) -> int:
        assert int(batch.images_BHWC.long().sum()) > 0
        return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with loaded(
            reader, Order(240, 9), BatchPlan(240, 240, 1), finish=threads_of_torch
        ) as batches:
            assert [next(batches) for _ in range(8)] == [1] * 8
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_memory_is_a_tensor_like_any_other_and_comes_back_when_its_last_view_is_gone() -> None:
    pool = BufferPool()
    for dtype in (torch.uint8, torch.bfloat16, torch.int64):
        loan = pool.empty(3, 4, 5, dtype=dtype).fill_(7)
        assert (
            loan.shape == (3, 4, 5)
            and loan.dtype == dtype
            and loan.is_contiguous()
            and (loan == 7).all()
        )
    first = pool.empty(100, dtype=torch.float32)
    address, view = first.data_ptr(), first[10:20]
    del first
    assert pool.empty(100, dtype=torch.float32).data_ptr() != address
    del view
    assert pool.empty(100, dtype=torch.float32).data_ptr() == address
    assert pool.empty(99, dtype=torch.float32).data_ptr() != address


def test_what_autograd_saved_is_still_lent() -> None:
    pool, weight = BufferPool(), torch.ones(50, requires_grad=True)
    loan = pool.empty(50, dtype=torch.float32).fill_(3)
    address, product = loan.data_ptr(), (loan * weight).sum()
    del loan
    other = pool.empty(50, dtype=torch.float32).fill_(-1)
    assert other.data_ptr() != address
    product.backward()
    assert weight.grad is not None and (weight.grad == 3).all()
    del product
    gc.collect()
    assert pool.empty(50, dtype=torch.float32).data_ptr() == address


def test_no_more_than_a_few_buffers_wait_and_a_pool_may_go_before_its_loans() -> None:
    pool = BufferPool()
    loans = [pool.empty(1000, dtype=torch.uint8) for _ in range(3 * MOST_IDLE)]
    assert len({loan.data_ptr() for loan in loans}) == 3 * MOST_IDLE
    del loans
    assert len(pool._idle[1000]) == MOST_IDLE
    loan = pool.empty(10, dtype=torch.uint8).fill_(5)
    del pool
    gc.collect()
    assert (loan == 5).all()
