"""What a run tells of its speed: sums between two readings, and one reading in figures and in words."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pretrain.loop.evaluate import Scores


@dataclass
class Meter:
    """Sums since the last reading; evaluation and checkpoints begin a new one, so a speed is that of training alone."""

    global_batch_size: int
    flops_per_image: float
    """Of the forward pass; backward is twice that."""
    peak_teraflops: float
    """Of all ranks together."""
    device: torch.device
    _steps: int = 0
    _wait_s: float = 0.0
    _started_s: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
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
        teraflops = 3 * self.flops_per_image * images_per_s / 1e12
        self.peak_teraflops = max(self.peak_teraflops, teraflops)  # what was measured on a busy machine may be too low
        found = {
            "speed/images_per_s": images_per_s,
            "speed/teraflops": teraflops,
            "speed/mfu": teraflops / self.peak_teraflops,
            "speed/data_wait_share": self._wait_s / elapsed_s,
        }
        self.restart()
        return found | memory(self.device)


def memory(device: torch.device) -> dict[str, float]:
    """The most that this rank has held so far, in GB (2^30); asking waits for no device."""
    values = {"memory/peak_rss_gb": peak_rss_gb()}
    if device.type == "cuda":
        values["memory/peak_gpu_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        values["memory/peak_gpu_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    return values


def peak_rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_words(reading: dict[str, float], scores: Scores | None) -> str:
    """What stands behind the steps of the progress line."""
    parts = [f"epoch {reading['train/epoch']:.1f}"] if "train/epoch" in reading else []
    if "train/loss" in reading:
        parts.append(f"loss {reading['train/loss']:.3f}")
    if scores is not None:
        parts.append(f"top-1 {100 * scores.top1:.1f} %")
    if "speed/images_per_s" in reading:
        parts += [f"{reading['speed/images_per_s']:,.0f} images/s", f"MFU {100 * reading['speed/mfu']:.0f} %"]
    return "  ".join(parts)
