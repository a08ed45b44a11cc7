"""Whether the driver of a node's GPUs is new enough for torch's build of CUDA. Imports nothing that
must be installed."""

import re
from collections.abc import Mapping
from pathlib import Path

OLDEST = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Major version of CUDA -> the oldest driver that runs any minor version of it, as NVIDIA has
them."""
BUILD = "cu128"
"""For drivers of CUDA 12; for those of CUDA 11 torch has none any more."""


def known_driver(
    environment: Mapping[str, str], *, loaded: Path = Path("/proc/driver/nvidia/version")
) -> str | None:
    """Of the nodes with GPUs as site.env has it, otherwise of this node."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", loaded.read_text())
    except OSError:
        found = None
    return environment.get("CUDA_DRIVER") or (found[1] if found else None)


def cuda_of_torch(venv: Path) -> str | None:
    """Without an import of torch, which takes seconds; None: it is built without CUDA, or not
    there."""
    for path in venv.glob("lib/python3*/site-packages/torch/version.py"):
        if found := re.search(r"^cuda\b.*= *'([\d.]+)'", path.read_text(), flags=re.MULTILINE):
            return found[1]
    return None


def too_old(driver: str, cuda: str) -> tuple[str, str] | None:
    """What is wrong, and the remedy."""
    oldest = OLDEST.get(int(cuda.partition(".")[0]))
    if oldest is None or _number(driver) >= _number(oldest):
        return None
    remedy = f"make CUDA={BUILD}, or a newer driver"
    if _number(driver) < _number(OLDEST[12]):
        remedy = f"a newer driver: {OLDEST[12]} at least, for make CUDA={BUILD}"
    return f"its driver {driver} is older than {oldest}, which torch's CUDA {cuda} needs", remedy


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
