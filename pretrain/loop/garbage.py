"""Run Python's garbage collection at the same steps on all ranks.

The automatic collection would run at another step on each rank, and the other ranks would wait.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pretrain.engine.step import span

COLLECT_EVERY_STEPS = 50


@contextmanager
def fixed_collection() -> Iterator[None]:
    """Turn automatic collection off inside the block. Later collections skip existing objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect(step: int, *, is_pause: bool) -> None:
    """Collect young objects every `COLLECT_EVERY_STEPS` steps, and all objects after a pause."""
    if is_pause or step % COLLECT_EVERY_STEPS == 0:
        with span("garbage collection"):
            gc.collect(2 if is_pause else 1)
