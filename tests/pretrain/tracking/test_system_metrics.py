"""System metrics of a node have MLflow's names."""

import queue
import threading
import time
from pathlib import Path

import psutil
import pytest

from pretrain.ranks.world import World
from pretrain.tracking.node import NodeSampler, gpu_names, node_report, usable_gpus


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
        (0, None, 0),
        (2, None, 2),
        (2, "0", 1),
        (2, "1, 0", 2),
        (2, "", 0),
        (2, "-1", 0),
        (2, "NoDevFiles", 0),
        (2, "1,5", 1),  # the second name is invalid
        (2, "-1,0", 0),
        (8, "GPU-3af", 1),
        (1, "MIG-a,MIG-b", 1),  # a process sees one part of a GPU
        (0, "GPU-3af", 0),
    ],
)
def test_gpus_that_a_process_can_use_are_counted(
    monkeypatch: pytest.MonkeyPatch, num_listed: int, visible: str | None, expected: int
) -> None:
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlDeviceGetCount", lambda: num_listed)
    for name in ("HandleByIndex", "Name"):
        monkeypatch.setattr(f"pynvml.nvmlDeviceGet{name}", str)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(usable_gpus()) == expected
    assert len(gpu_names()) == (num_listed if expected else 0)


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
