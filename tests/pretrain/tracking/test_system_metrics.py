"""A node's figures bear MLflow's names; those of GPUs come from the driver's library, here from one
made for the test."""

import queue
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pretrain.ranks.world import World
from pretrain.tracking.node import NodeSampler, node_report, open_nvml, shared_kind

DRIVER = r"""
#include <string.h>
typedef struct { unsigned int gpu, memory; } use_t;
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    static int devices[2] = {0, 1}; *handle = &devices[index]; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, use_t *use) {
    if (*(int *)handle) return 3;  /* as a part of a GPU does: not supported */
    use->gpu = 87; use->memory = 12; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    memory->total = 80000000000ULL; memory->used = *(int *)handle ? 20000000000ULL : 60000000000ULL;
    memory->free = memory->total - memory->used; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts) { *milliwatts = 412500; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned int *degrees) {
    if (sensor != 0) return 2; *degrees = 61; return 0; }
"""


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


def test_the_file_system_of_a_path_is_that_of_the_nearest_mount() -> None:
    kinds = {"/": "ext4", "/home": "nfs4", "/home/scratch": "xfs", "/work": "lustre"}
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    found = {
        place: shared_kind(Path(place), mounts=lambda all: mounts)
        for place in ("/home/me/runs", "/home/scratch/runs", "/work", "/homes")
    }
    assert found == {
        "/home/me/runs": "nfs4",
        "/home/scratch/runs": None,
        "/work": "lustre",
        "/homes": None,
    }
    assert shared_kind(Path("runs")) is None  # by what this machine says itself


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


def test_gpus_tell_what_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = open_nvml(str(library))
    assert nvml is not None
    assert nvml.values() == {
        "gpu_0_utilization_percentage": 87,
        "gpu_0_memory_usage_megabytes": 60_000,
        "gpu_0_memory_usage_percentage": 75,
        "gpu_0_power_usage_watts": 412.5,
        "gpu_0_temperature_celsius": 61,
        "gpu_1_memory_usage_megabytes": 20_000,
        "gpu_1_memory_usage_percentage": 25,
        "gpu_1_power_usage_watts": 412.5,
        "gpu_1_temperature_celsius": 61,
    }


def test_a_node_without_a_driver_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert open_nvml(str(tmp_path / "none.so")) is None
