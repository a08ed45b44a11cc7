"""Compare the driver of the GPUs with torch's CUDA build, with the standard library only."""

import re
from collections.abc import Mapping
from pathlib import Path

OLDEST = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Major version of CUDA -> the oldest driver that runs any of its minor versions (NVIDIA)."""
BUILD = "cu128"
"""torch's build for drivers of CUDA 12. torch no longer has one for CUDA 11."""


def find_driver(
    environment: Mapping[str, str], *, loaded: Path = Path("/proc/driver/nvidia/version")
) -> str | None:
    """Return CUDA_DRIVER of site.env, or else the driver that this node has loaded."""
    if "CUDA_DRIVER" in environment:
        return environment["CUDA_DRIVER"]
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", loaded.read_text())
    except OSError:
        return None
    return found[1] if found else None


def cuda_of_torch(venv: Path) -> str | None:
    """Return torch's CUDA version without the seconds of an import; None without CUDA."""
    for path in venv.glob("lib/python3*/site-packages/torch/version.py"):
        if found := re.search(r"^cuda\b.*= *'([\d.]+)'", path.read_text(), flags=re.MULTILINE):
            return found[1]
    return None


def outdated_driver(driver: str, cuda: str) -> tuple[str, str] | None:
    """Return problem and fix if the driver is too old, otherwise None."""
    oldest = OLDEST.get(int(cuda.partition(".")[0]))
    if oldest is None or _parts(driver) >= _parts(oldest):
        return None
    fix = f"make CUDA={BUILD}, or a newer driver"
    if _parts(driver) < _parts(OLDEST[12]):
        fix = f"a newer driver: {OLDEST[12]} at least, for make CUDA={BUILD}"
    return f"its driver {driver} is older than {oldest}, which torch's CUDA {cuda} needs", fix


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
