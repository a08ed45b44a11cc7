"""What a node is doing while it trains: CPU, memory, disk, network, GPUs, under the names that
MLflow's System metrics tab knows.

sampler = NodeSampler(run_dir)
tracker.sample_system(sampler.sample)       # on the first rank's node: a thread, every 10 s
report=node_report(world, run_dir)          # on another node's first rank: with its heartbeat, which the first rank receives

GPUs' figures are the driver's own, from libnvidia-ml, which comes with it: no further dependency,
and no CUDA context.
"""  # noqa: E501 (a table)

import ctypes
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import psutil

from pretrain.ranks.world import World

EVERY_S = 10.0


class NodeSampler:
    """One per node. Network figures are totals since the first sample; the CPU's share is that
    since the sample before."""

    def __init__(self, run_dir: Path):
        self._run_dir, self._nvml = run_dir, open_nvml()
        self._first_traffic = self._traffic = _network()
        self._traffic_s = time.monotonic()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> dict[str, float]:
        """Without a prefix; what the node does not know is left out."""
        memory = psutil.virtual_memory()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
        }
        with suppress(OSError):  # of the file system that the run directory is on
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
        return values | (self._nvml.values() if self._nvml else {})


def node_name(world: World) -> str | None:
    """What stands before a node's figures where there are several."""
    return None if world.is_one_node else platform.node()


def node_report(world: World, run_dir: Path) -> Callable[[], dict[str, Any]]:
    """What this rank reports with its beats: now and then the figures of its node, if it is the
    first rank there.

    They come from a thread of its own: a file system or a driver that hangs must not make a rank
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


SHARED = ("nfs", "nfs4", "lustre", "beegfs", "cifs", "smb3", "9p", "fuse.sshfs")
"""File systems of many nodes on which SQLite's locks are known to be slow or to stay on one
node."""


def shared_kind(path: Path, *, mounts: Callable[..., Any] = psutil.disk_partitions) -> str | None:
    """The kind of the path's file system, if it is one of those."""
    whole = path.absolute()
    above = [mount for mount in mounts(all=True) if whole.is_relative_to(mount.mountpoint)]
    kind = str(max(above, key=lambda mount: len(mount.mountpoint)).fstype) if above else ""
    return kind if kind in SHARED else None


def _network() -> tuple[int, int]:
    """(bytes sent, bytes received) by all interfaces but loopback."""
    counters = psutil.net_io_counters(pernic=True)
    others = [counter for name, counter in counters.items() if name != "lo"]
    return sum(each.bytes_sent for each in others), sum(each.bytes_recv for each in others)


# ---- GPUs
# --------------------------------------------------------------------------------------------------

LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_OF_THE_CHIP = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class Nvml:
    def __init__(self, library: Any):
        self._library, count = library, c_uint()
        library.nvmlDeviceGetCount_v2(byref(count))
        handles = [(c_void_p(), number) for number in range(count.value)]
        self._handles = [
            handle
            for handle, number in handles
            if library.nvmlDeviceGetHandleByIndex_v2(number, byref(handle)) == 0
        ]

    def values(self) -> dict[str, float]:
        """Without what the driver does not know: a part of a GPU, for instance, has no
        utilisation."""
        library, values = self._library, dict[str, float]()
        for number, handle in enumerate(self._handles):
            use, memory, power_mw, temperature_c = _Utilization(), _Memory(), c_uint(), c_uint()
            prefix = f"gpu_{number}_"
            if library.nvmlDeviceGetUtilizationRates(handle, byref(use)) == 0:
                values[prefix + "utilization_percentage"] = use.gpu
            if library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0 and memory.total:
                values[prefix + "memory_usage_megabytes"] = memory.used / 1e6
                values[prefix + "memory_usage_percentage"] = 100 * memory.used / memory.total
            if library.nvmlDeviceGetPowerUsage(handle, byref(power_mw)) == 0:
                values[prefix + "power_usage_watts"] = power_mw.value / 1e3
            if (
                library.nvmlDeviceGetTemperature(
                    handle, _TEMPERATURE_OF_THE_CHIP, byref(temperature_c)
                )
                == 0
            ):
                values[prefix + "temperature_celsius"] = temperature_c.value
        return values


def open_nvml(path: str = LIBRARY) -> Nvml | None:
    """None where there is no driver, or no GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    try:
        library = ctypes.CDLL(path)
        return Nvml(library) if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
