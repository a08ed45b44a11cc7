"""Collect garbage at the same steps on all ranks.

Python collects when its own counters are full. Each rank would do that at another step, and the
other ranks would wait.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pretrain.engine.step import span

COLLECT_EVERY_STEPS = 50


@contextmanager
def fixed_collection() -> Iterator[None]:
    """Turn automatic collection off. Existing objects are not checked again."""
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
