"""Threads that work side by side, each on one core."""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch


def num_cpu_threads(device: torch.device) -> int | None:
    """How many of a rank's threads share a sum, which is rounded as they share it: of one number alone, the same bits. None where a
    GPU computes."""
    return torch.get_num_threads() if device.type == "cpu" else None


def lone_threads(number: int, *, pin: bool) -> ThreadPoolExecutor:
    """Each works alone: were torch to split every gather over all cores once more, the threads would hinder each other."""
    device = torch.cuda.current_device() if pin else None
    started, before = threading.Barrier(number + 1), torch.get_num_threads()

    def settle() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # pinned memory would open a context on the first GPU, for every rank
            torch.get_num_threads()  # or the thread would take the number of the process when torch first works in it
            torch.set_num_threads(1)  # of this thread, and of threads that begin from here on
            started.wait()
        except BaseException:
            started.abort()  # nobody waits for who cannot come
            raise

    pool, settling = ThreadPoolExecutor(number, thread_name_prefix="loader"), deque[Future[None]]()
    try:
        for _ in range(number):
            settling.append(pool.submit(settle))
        started.wait()
    except BaseException:
        started.abort()
        pool.shutdown()
        for error in [future.exception() for future in settling]:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error from None
        raise
    finally:
        torch.set_num_threads(before)
    return pool
