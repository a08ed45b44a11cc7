"""Which products of fp32 numbers a GPU may round to TF32 (ten bits, several times as quick). On CPUs it changes nothing.

torch has one switch for the whole process, and the thread that augments multiplies while the model does: who needs it one way holds
it, and who needs it the other way waits, so that no result depends on who came first.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SWITCH = threading.RLock()


@contextmanager
def products(*, in_tf32: bool) -> Iterator[None]:
    """Of what is launched inside; behind it the switch stands as before."""
    with _SWITCH:
        # not `fp32_precision`: whoever asks for the older name after it was set gets an error, and torch's compiler does
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = in_tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
