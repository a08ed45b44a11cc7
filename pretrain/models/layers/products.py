"""Which products and convolutions of fp32 numbers a GPU may round to TF32 (ten bits, several times
as quick). On CPUs it changes nothing. Unasked torch rounds convolutions, and no other products.

torch has its switches for the whole process, and the thread that augments multiplies while the
model does: who needs them one way holds them, and who needs them the other way waits, so that no
result depends on who came first.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SWITCH = threading.RLock()


@contextmanager
def products(*, in_tf32: bool) -> Iterator[None]:
    """Of what is launched inside; behind it the switches stand as before."""
    with _SWITCH:
        # not `fp32_precision`: whoever asks for the older name after it was set gets an error, and
        # torch's compiler does
        switches: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
        before = [each.allow_tf32 for each in switches]
        for each in switches:
            each.allow_tf32 = in_tf32
        try:
            yield
        finally:
            for each, its in zip(switches, before, strict=True):
                each.allow_tf32 = its
