"""Memory on loan: never handed out while anybody can see it, and handed out again when nobody can."""

import gc

import pytest
import torch

from pretrain.data.loader import MOST_IDLE, BufferPool


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_a_loan_is_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    loan = BufferPool().empty(3, 4, 5, dtype=dtype)
    assert loan.shape == (3, 4, 5) and loan.dtype == dtype and loan.is_contiguous()
    loan.fill_(7)
    assert (loan == 7).all()


def test_memory_comes_back_when_the_last_view_of_it_is_gone() -> None:
    pool = BufferPool()
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


def test_no_more_than_a_few_buffers_wait() -> None:
    pool = BufferPool()
    loans = [pool.empty(1000, dtype=torch.uint8) for _ in range(3 * MOST_IDLE)]
    assert len({loan.data_ptr() for loan in loans}) == 3 * MOST_IDLE
    del loans
    assert len(pool._idle[1000]) == MOST_IDLE


def test_a_pool_may_go_before_its_loans() -> None:
    pool = BufferPool()
    loan = pool.empty(10, dtype=torch.uint8).fill_(5)
    del pool
    gc.collect()
    assert (loan == 5).all()
