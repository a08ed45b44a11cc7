"""Switch TF32 on or off for fp32 matrix products and convolutions on a GPU. TF32 has a 10-bit
mantissa and is much faster.

torch's switches are global, but augmentation and model run in different threads at the same time. A
lock lets only one thread at a time set the switches and launch kernels.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SWITCH = threading.RLock()


@contextmanager
def products(*, in_tf32: bool) -> Iterator[None]:
    """Set the TF32 switches for all kernels launched in the block, then restore them."""
    with _SWITCH:
        # not `fp32_precision`: after it is set, torch's compiler fails to read the older name
        switches: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
        before = [each.allow_tf32 for each in switches]
        for each in switches:
            each.allow_tf32 = in_tf32
        try:
            yield
        finally:
            for each, its in zip(switches, before, strict=True):
                each.allow_tf32 = its
