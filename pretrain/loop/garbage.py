"""Garbage collection at the same steps on all ranks."""

import gc
from types import TracebackType

from pretrain.engine.step import span

COLLECT_EVERY_STEPS = 50


class Collector:
    """Use it as a context manager around the steps: automatic collection is off within the block.

    Python collects when its own counters are full. Each rank would do that at another step, and
    all other ranks would wait for it.
    """

    def __enter__(self) -> "Collector":
        self._was_enabled, self._has_frozen = gc.isenabled(), False
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def end_step(self, step: int, *, is_pause: bool) -> None:
        """Collect young objects every `COLLECT_EVERY_STEPS` steps, and all objects after an
        evaluation or a checkpoint (`is_pause`). Objects that exist after the first step are not
        looked at again."""
        is_first, self._has_frozen = not self._has_frozen, True
        if is_pause or is_first or step % COLLECT_EVERY_STEPS == 0:
            with span("garbage collection"):
                gc.collect(2 if is_pause or is_first else 1)
        if is_first:
            gc.freeze()
