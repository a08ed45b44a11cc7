"""The throughput of training (`Meter`), and the peak FLOP/s of a device, for MFU.

The peak is the dense value in a GPU's data sheet. For CPUs, and GPUs outside `SHEETS`, the peak is
measured with products of square matrices. All ranks measure at once, because they may share cores.
"""

import re
import resource
import time
from dataclasses import dataclass, field

import torch

from pretrain.models.layers.products import products
from pretrain.ranks.collectives import Moment

SHEETS = (
    # name as CUDA reports it, without NVIDIA, Tesla and GeForce; dense TFLOP/s, accumulated in fp32
    (r"A100-\S+|A100 80GB PCIe", {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (r"A30", {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3}),
    (r"A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"A10", {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    (r"RTX A5000", {"bf16": 111.1, "fp16": 111.1, "tf32": 55.6, "fp32": 27.8}),
    (r"RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"H100 80GB HBM3", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (r"H100 PCIe", {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    (r"H200", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (r"B200", {"bf16": 2250.0, "fp16": 2250.0}),
    (r"L4", {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3}),
    (r"L40S", {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    (r"V100-SXM2-\S+", {"fp16": 125.0, "fp32": 15.7}),
    (r"V100-PCIE-\S+", {"fp16": 112.0, "fp32": 14.0}),
    (r"T4", {"fp16": 65.0, "fp32": 8.1}),
    (r"RTX 3090", {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6}),
    (r"RTX 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
)
"""Dense peaks in TFLOP/s by GPU name and precision. A MIG part or a variant (RTX 4090 D) has
another name, so its peak is measured."""
MEASURE_S = 0.15


@dataclass(frozen=True)
class Peak:
    teraflops: float
    source: str

    def __str__(self) -> str:
        return f"{self.teraflops:.4g} per rank ({self.source})"


def find_peak(device: torch.device, *, precision: str, given: float | None) -> Peak:
    if given is not None:
        return Peak(given, "tracking.peak_teraflops")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        listed = listed_teraflops(name, precision=precision)
        if listed is not None:
            return Peak(listed, f"data sheet of {name}, dense {precision}")
    with products(in_tf32=precision == "tf32"):
        return measured_peak(device, precision=precision)


def listed_teraflops(name: str, *, precision: str) -> float | None:
    short = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", name)
    return next(
        (rates.get(precision) for pattern, rates in SHEETS if re.fullmatch(pattern, short)), None
    )


def measured_peak(device: torch.device, *, precision: str) -> Peak:
    """Return the speed of the fastest of several matrix products, after a warm-up. CPUs use fp32,
    because many CPUs need seconds for a product in bf16 or fp16."""
    on_gpu = device.type == "cuda"
    side, dtype = 1024, torch.float32
    if on_gpu:
        side = 8192
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, dtype)
    # random numbers, because some devices multiply equal numbers faster
    own = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(side, side, device=device, dtype=dtype, generator=own) for _ in range(2)
    )
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    best_s, deadline_s = float("inf"), time.monotonic() + MEASURE_S
    while best_s == float("inf") or time.monotonic() < deadline_s:
        if on_gpu:
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        torch.mm(left, right, out=out)
        if on_gpu:
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return Peak(2 * side**3 / best_s / 1e12, f"measured with products of {side} x {side} matrices")


@dataclass
class Meter:
    """The throughput of training. A step lasts from the end of the previous step to its own end.
    The clock restarts after an evaluation or a checkpoint."""

    global_batch_size: int
    flops_per_image: float
    """FLOP of the forward and backward pass, or 0 if unknown."""
    peak_teraflops: float
    """Sum of the peaks of all ranks."""
    device: torch.device
    _seconds: list[float] = field(default_factory=list)
    """Seconds of each step since the last reading."""
    _wait_s: float = 0.0
    _num_steps: int = -1
    """Number of steps of this attempt, without the first step."""
    _all_s: float = 0.0

    def restart(self) -> None:
        self._last = Moment(self.device)

    def count(self, ended: Moment, *, wait_s: float) -> None:
        step_s, self._last = ended.seconds_since(self._last), ended
        self._seconds.append(step_s)
        self._wait_s += wait_s
        self._num_steps += 1
        self._all_s += step_s if self._num_steps else 0.0

    @property
    def images_per_s(self) -> float | None:
        if self._num_steps <= 0:
            return None
        return self._num_steps * self.global_batch_size / max(self._all_s, 1e-9)

    def reading(self) -> dict[str, float]:
        """Return the throughput since the last reading, and this rank's peak memory in GiB, without
        waiting for the device."""
        elapsed_s = max(sum(self._seconds), 1e-9)
        images_per_s = len(self._seconds) * self.global_batch_size / elapsed_s
        teraflops = self.flops_per_image * images_per_s / 1e12
        # the peak may have been measured on a busy machine
        self.peak_teraflops = max(self.peak_teraflops, teraflops)
        found = {
            "usage/images_per_s": images_per_s,
            "usage/data_wait_fraction": self._wait_s / elapsed_s,
            "usage/peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        if self.flops_per_image:
            found |= {"usage/teraflops": teraflops, "usage/mfu": teraflops / self.peak_teraflops}
        if self.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            found["usage/peak_gpu_allocated_gb"] = allocated / 2**30
            found["usage/peak_gpu_reserved_gb"] = reserved / 2**30
        self._seconds, self._wait_s = [], 0.0
        return found
