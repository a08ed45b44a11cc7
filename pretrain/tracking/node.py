"""What a node is doing while it trains: CPU, memory, disk, network, GPUs, under the names that MLflow's System metrics tab knows.

sampler = NodeSampler(run_dir)
tracker.sample_system(sampler.sample)       # on the first rank's node: a thread, every 10 s
report=node_report(world, run_dir)          # on another node's first rank: with its heartbeat, which the first rank receives

GPUs' figures are the driver's own, from libnvidia-ml, which comes with it: no further dependency, and no CUDA context.
"""

import ctypes
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pretrain.ranks.world import World

EVERY_S = 10.0


class NodeSampler:
    """One per node. Network figures are totals since the first sample; the CPU's share is that since the sample before."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._nvml = open_nvml()
        self._sent_at_first, self._received_at_first = _network()
        self._network_before, self._network_before_s = _network(), time.monotonic()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> dict[str, float]:
        """Without a prefix; what the node does not know is left out."""
        memory = psutil.virtual_memory()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
        }
        return values | self._disk() | self._traffic() | (gpu_values(self._nvml) if self._nvml else {})

    def _disk(self) -> dict[str, float]:
        """Of the file system that the run directory is on."""
        try:
            disk = psutil.disk_usage(str(self._run_dir))
        except OSError:
            return {}
        return {
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
        }

    def _traffic(self) -> dict[str, float]:
        sent, received = _network()
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._network_before_s, 1e-9)
        values = {
            "network_transmit_megabytes": (sent - self._sent_at_first) / 1e6,
            "network_receive_megabytes": (received - self._received_at_first) / 1e6,
            "network_transmit_megabytes_per_s": (sent - self._network_before[0]) / 1e6 / elapsed_s,
            "network_receive_megabytes_per_s": (received - self._network_before[1]) / 1e6 / elapsed_s,
        }
        self._network_before, self._network_before_s = (sent, received), now_s
        return values


def node_name(world: World) -> str | None:
    """What stands before a node's figures where there are several."""
    return None if world.is_one_node else platform.node()


def node_report(world: World, run_dir: Path) -> Callable[[], dict[str, Any]]:
    """What this rank reports with its beats: now and then the figures of its node, if it is the first rank there.

    They come from a thread of its own: a file system or a driver that hangs must not make a rank look frozen.
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
    """(bytes sent, bytes received) by all interfaces but loopback."""
    counters = psutil.net_io_counters(pernic=True)
    others = [counter for name, counter in counters.items() if name != "lo"]
    return sum(each.bytes_sent for each in others), sum(each.bytes_recv for each in others)


# ---- GPUs ---------------------------------------------------------------------------------------------------------------

LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_OF_THE_CHIP = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


@dataclass(frozen=True)
class GpuReading:
    """None: the driver does not know (a part of a GPU, for instance, has no utilisation)."""

    utilization_percent: int | None
    memory_used: int | None
    memory_total: int | None
    power_mw: int | None
    temperature_c: int | None


class Nvml:
    def __init__(self, library: Any):
        self._library, count = library, c_uint()
        library.nvmlDeviceGetCount_v2(byref(count))
        handles = [(c_void_p(), number) for number in range(count.value)]
        self._handles = [handle for handle, number in handles if library.nvmlDeviceGetHandleByIndex_v2(number, byref(handle)) == 0]

    def read(self) -> list[GpuReading]:
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: c_void_p) -> GpuReading:
        library, use, memory = self._library, _Utilization(), _Memory()
        power, temperature = c_uint(), c_uint()
        has_use = library.nvmlDeviceGetUtilizationRates(handle, byref(use)) == 0
        has_memory = library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        has_power = library.nvmlDeviceGetPowerUsage(handle, byref(power)) == 0
        has_heat = library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_THE_CHIP, byref(temperature)) == 0
        return GpuReading(
            utilization_percent=use.gpu if has_use else None,
            memory_used=memory.used if has_memory else None,
            memory_total=memory.total if has_memory else None,
            power_mw=power.value if has_power else None,
            temperature_c=temperature.value if has_heat else None,
        )


def open_nvml(path: str = LIBRARY) -> Nvml | None:
    """None where there is no driver, or no GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    try:
        library = ctypes.CDLL(path)
        return Nvml(library) if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def gpu_values(nvml: Nvml) -> dict[str, float]:
    values: dict[str, float] = {}
    for number, gpu in enumerate(nvml.read()):
        figures = {
            "utilization_percentage": gpu.utilization_percent,
            "memory_usage_megabytes": gpu.memory_used / 1e6 if gpu.memory_used is not None else None,
            "memory_usage_percentage": (
                100 * gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None
            ),
            "power_usage_watts": gpu.power_mw / 1e3 if gpu.power_mw is not None else None,
            "temperature_celsius": gpu.temperature_c,
        }
        values |= {f"gpu_{number}_{name}": float(value) for name, value in figures.items() if value is not None}
    return values
