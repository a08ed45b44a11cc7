"""Memory of batches that is used again: fresh memory costs a page fault every 4 KB, as much as filling it does.

A tensor on loan keeps its memory for as long as anything refers to it, views and autograd's graph included; then the memory goes
back to the pool by itself. Pinned memory is torch's own affair: its allocator does the same, and knows of copies under way.
"""

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_IDLE = 8
"""Buffers of one size that wait in the pool; more are given back to the system."""
_STORED_AS = {torch.bfloat16: torch.uint16}
"""numpy has no name for these."""


class BufferPool:
    """May be used by several threads."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=MOST_IDLE))

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        idle = self._idle[num_bytes]
        try:
            memory = idle.pop()
        except IndexError:
            memory = np.empty(num_bytes, np.uint8)
        loan = memory.view()
        weakref.finalize(loan, idle.append, memory).atexit = False
        return torch.from_numpy(loan).view(_STORED_AS.get(dtype, dtype)).view(dtype).view(shape)
