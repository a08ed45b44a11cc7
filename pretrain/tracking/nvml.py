"""The driver's own figures of its GPUs, from libnvidia-ml, which comes with it: no further dependency, and no CUDA context."""

import ctypes
import os
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_OF_THE_CHIP = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


@dataclass(frozen=True)
class GpuReading:
    """None: this GPU does not tell (a part of one, for instance, has no utilisation)."""

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
        self._handles = [
            handle for handle, number in handles if library.nvmlDeviceGetHandleByIndex_v2(number, byref(handle)) == 0
        ]

    def read(self) -> list[GpuReading]:
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: c_void_p) -> GpuReading:
        library, use, memory = self._library, _Utilization(), _Memory()
        power, temperature = c_uint(), c_uint()
        tells_use = library.nvmlDeviceGetUtilizationRates(handle, byref(use)) == 0
        tells_memory = library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        tells_power = library.nvmlDeviceGetPowerUsage(handle, byref(power)) == 0
        tells_heat = library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_THE_CHIP, byref(temperature)) == 0
        return GpuReading(
            utilization_percent=use.gpu if tells_use else None,
            memory_used=memory.used if tells_memory else None,
            memory_total=memory.total if tells_memory else None,
            power_mw=power.value if tells_power else None,
            temperature_c=temperature.value if tells_heat else None,
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
