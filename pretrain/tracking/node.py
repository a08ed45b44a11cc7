"""Metrics of a node: CPU, memory, disk, network, GPUs, under the names of MLflow's System metrics
tab.

    sampler = NodeSampler(run_dir)
    tracker.sample_system(sampler.sample)       # first rank's node: a thread, every 10 s
    report=node_report(world, run_dir)          # other nodes: sent with the heartbeats

GPU metrics come from NVML, without a CUDA context.
"""

import os
import platform
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pynvml

from pretrain.ranks.world import World

EVERY_S = 10.0


class NodeSampler:
    """Sampler of one node. Network totals count from the start of the sampler. Network rates and
    CPU use are averages since the previous sample."""

    def __init__(self, run_dir: Path):
        self._run_dir, self._gpus = run_dir, open_gpus()
        self._first_traffic = self._traffic = _network()
        self._traffic_s = time.monotonic()
        psutil.cpu_percent()  # the first call only starts the measurement

    def sample(self) -> dict[str, float]:
        """Return the metrics without a prefix. Metrics that the node lacks are skipped."""
        memory = psutil.virtual_memory()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
        }
        with suppress(OSError):  # from the file system of the run directory
            disk = psutil.disk_usage(str(self._run_dir))
            values["disk_usage_percentage"] = disk.percent
            values["disk_usage_megabytes"] = disk.used / 1e6
            values["disk_available_megabytes"] = disk.free / 1e6
        traffic, now_s = _network(), time.monotonic()
        elapsed_s = max(now_s - self._traffic_s, 1e-9)
        for name, now, before, first in zip(
            ("transmit", "receive"), traffic, self._traffic, self._first_traffic, strict=True
        ):
            values[f"network_{name}_megabytes"] = (now - first) / 1e6
            values[f"network_{name}_megabytes_per_s"] = (now - before) / 1e6 / elapsed_s
        self._traffic, self._traffic_s = traffic, now_s
        return values | gpu_values(self._gpus)


def node_name(world: World) -> str | None:
    """Return the prefix of a node's metrics, or None if there is one node."""
    return None if world.is_one_node else platform.node()


def node_report(world: World, run_dir: Path) -> Callable[[], dict[str, Any]]:
    """Return the `report` function of the watchdog's beats. On the first rank of each node except
    the first node, it returns the node's metrics.

    A separate thread samples the metrics: a file system or driver that hangs must not make a rank
    look frozen.
    """
    if world.is_one_node or world.is_first or world.local_rank:
        return dict
    fresh: deque[dict[str, Any]] = deque(maxlen=1)

    def sample() -> None:
        sampler = NodeSampler(run_dir)
        while True:
            time.sleep(EVERY_S)
            fresh.append({"node": platform.node(), "values": sampler.sample()})

    def report() -> dict[str, Any]:
        try:
            return fresh.pop()
        except IndexError:
            return {}

    threading.Thread(target=sample, name="system-metrics", daemon=True).start()
    return report


def _network() -> tuple[int, int]:
    """Return (bytes sent, bytes received) by all interfaces except loopback."""
    counters = psutil.net_io_counters(pernic=True)
    others = [counter for name, counter in counters.items() if name != "lo"]
    return sum(each.bytes_sent for each in others), sum(each.bytes_recv for each in others)


# ---- GPUs


def open_gpus() -> list[Any]:
    """Return NVML's handles of the node's GPUs, or an empty list if this process can use none."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [*map(pynvml.nvmlDeviceGetHandleByIndex, range(count))] if num_usable(count) else []
    except pynvml.NVMLError:
        return []


def gpu_names() -> list[str]:
    """Return the names of the node's GPUs, or an empty list if the driver has lost one."""
    try:
        return [pynvml.nvmlDeviceGetName(gpu) for gpu in open_gpus()]
    except pynvml.NVMLError:
        return []


def usable_gpus() -> list[str]:
    """Return a name for each GPU that this process can use."""
    names = gpu_names()
    return names[: num_usable(len(names))]


def num_usable(num_gpus: int) -> int:
    """Return how many of the node's GPUs this process can use. CUDA ignores CUDA_VISIBLE_DEVICES
    from the first invalid name on (-1, or SLURM's NoDevFiles)."""
    indices = [*map(str, range(num_gpus))]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(indices)).split(",")
    valid = takewhile(
        lambda name: name in indices or name.startswith(("GPU-", "MIG-")), map(str.strip, names)
    )
    return min(num_gpus, len([*valid]))


def cpu_name() -> str:
    found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()  # ARM's cpuinfo has no name


def describe_hardware() -> str:
    """Return the GPUs of this node, or its processor, for example 8 x NVIDIA H100 80GB HBM3."""
    gpus = [f"{count} x {name}" for name, count in Counter(gpu_names()).items()]
    return ", ".join(gpus) or f"{cpu_name()}, {os.cpu_count()} cores"


def gpu_values(gpus: list[Any]) -> dict[str, float]:
    """Return the metrics of the GPUs. Metrics that the driver lacks are skipped (a MIG instance has
    no utilization)."""
    values = dict[str, float]()
    for number, gpu in enumerate(gpus):
        prefix = f"gpu_{number}_"
        with suppress(pynvml.NVMLError):
            use = pynvml.nvmlDeviceGetUtilizationRates(gpu)
            values[prefix + "utilization_percentage"] = use.gpu
        with suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            values[prefix + "memory_usage_megabytes"] = memory.used / 1e6
            values[prefix + "memory_usage_percentage"] = 100 * memory.used / memory.total
        with suppress(pynvml.NVMLError):
            values[prefix + "power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        with suppress(pynvml.NVMLError):
            values[prefix + "temperature_celsius"] = pynvml.nvmlDeviceGetTemperature(
                gpu, pynvml.NVML_TEMPERATURE_GPU
            )
    return values
