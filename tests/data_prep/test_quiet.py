"""Warnings are held back in the blocks of all threads, and are as they were after the last one."""

import threading
import warnings

import pytest

from data_prep.images.quiet import without_warnings


def test_overlapping_blocks_of_two_threads_leave_the_filters_as_they_were() -> None:
    before = list(warnings.filters)
    entered, leave = threading.Event(), threading.Event()

    def second() -> None:
        with without_warnings():
            entered.set()
            leave.wait(10)
            warnings.warn("held back", stacklevel=1)

    thread = threading.Thread(target=second)
    with without_warnings():
        thread.start()
        assert entered.wait(10)
    warnings.warn("held back, too: the other thread is inside", stacklevel=1)
    leave.set()
    thread.join()
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
