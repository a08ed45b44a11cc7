"""System metrics of a node have MLflow's names."""

import queue
import threading
import time
from pathlib import Path

import psutil
import pynvml
import pytest

from pretrain.ranks.world import World
from pretrain.tracking.node import NodeSampler, gpu_names, node_report


def test_a_sample_of_this_node_bears_mlflows_names(tmp_path: Path) -> None:
    values = NodeSampler(tmp_path).sample()
    assert 0 <= values["cpu_utilization_percentage"] <= 100
    assert 0 < values["system_memory_usage_megabytes"] < psutil.virtual_memory().total / 1e6
    assert 0 < values["system_memory_usage_percentage"] <= 100
    disk = psutil.disk_usage(str(tmp_path))
    whole = values["disk_usage_megabytes"] + values["disk_available_megabytes"]
    assert values["disk_available_megabytes"] > 0 and whole <= disk.total / 1e6
    assert values["network_transmit_megabytes"] >= 0 and values["network_receive_megabytes"] >= 0


def test_a_run_directory_that_is_gone_costs_its_disk_alone(tmp_path: Path) -> None:
    values = NodeSampler(tmp_path / "gone").sample()
    assert "cpu_utilization_percentage" in values and not [
        name for name in values if name.startswith("disk")
    ]


@pytest.mark.parametrize(
    ("num_listed", "visible", "expected"),
    [
        (0, None, ""),
        (2, None, "01"),
        (2, "1", "1"),
        (2, "1, 0", "10"),
        (2, "", ""),
        (2, "-1", ""),
        (2, "NoDevFiles", ""),
        (2, "1,5", "1"),
        (2, "-1,0", ""),
        (8, "GPU-3", "3"),
        (1, "MIG-0,MIG-0", "0"),
        (0, "GPU-3", ""),
    ],
)
def test_only_gpus_that_cuda_can_use_are_counted(
    monkeypatch: pytest.MonkeyPatch, num_listed: int, visible: str | None, expected: str
) -> None:
    def handle(number: int) -> int:
        if number in range(num_listed):
            return number
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlDeviceGetCount", lambda: num_listed)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByUUID", lambda uuid: handle(int(uuid[4:])))
    monkeypatch.setattr("pynvml.nvmlDeviceGetName", str)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu_names()) == expected


def test_a_driver_or_a_disk_that_hangs_holds_up_no_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, has_begun = queue.Queue[dict[str, float]](), threading.Event()

    class Hangs:
        def __init__(self, _run_dir: Path):
            has_begun.set()

        def sample(self) -> dict[str, float]:
            return answers.get()

    monkeypatch.setattr("pretrain.tracking.node.NodeSampler", Hangs)
    monkeypatch.setattr("pretrain.tracking.node.EVERY_S", 0.01)
    tell = node_report(World(2, 0, 4, num_local_ranks=2), tmp_path)
    assert has_begun.wait(20) and tell() == {}
    answers.put({"cpu": 1.0})
    said = [{}]
    deadline_s = time.monotonic() + 20
    while not said[-1] and time.monotonic() < deadline_s:
        said.append(tell())
        time.sleep(0.01)
    assert said[-1]["values"] == {"cpu": 1.0} and tell() == {}
