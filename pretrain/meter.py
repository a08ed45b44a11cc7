"""How fast training is: sums since the last reading, on the host's clock."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Meter:
    global_batch_size: int
    flops_per_image: float
    """Of the forward pass."""
    _steps: int = 0
    _wait_s: float = 0.0
    _started_s: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Leaves out what has nothing to do with training's own speed."""
        self._steps, self._wait_s, self._started_s = 0, 0.0, time.monotonic()

    def count(self) -> None:
        self._steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For data."""
        asked_s = time.monotonic()
        yield
        self._wait_s += time.monotonic() - asked_s

    def reading(self) -> dict[str, float]:
        """Since the last one."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        images_per_s = self._steps * self.global_batch_size / elapsed_s
        found = {
            "speed/images_per_s": images_per_s,
            "speed/teraflops": 3 * self.flops_per_image * images_per_s / 1e12,
            "speed/data_wait_share": self._wait_s / elapsed_s,
            "memory/peak_rss_gb": peak_rss_gb(),
        }
        self.restart()
        return found


def peak_rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
