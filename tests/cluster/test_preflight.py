"""The pre-flight with a few gloo ranks as nodes: the checks of each rank, and the nodes that are
blamed."""

import errno
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cluster import preflight
from cluster.preflight import check_node, check_scratch, judge
from pretrain.ranks.world import World
from tests.forked import begin, environments, wait

MODULE = "tests.cluster.test_preflight"


def rank(arguments: list[str], trouble: str) -> int:
    """Run the command on a rank. `trouble` is the fault of its device or network."""
    right = preflight.multiply
    if trouble == "wrong":
        preflight.multiply = lambda a, b: right(a, b) + (torch.arange(a.shape[0]) == 77).to(a.dtype)
    if trouble == "hangs":
        preflight.multiply = lambda a, b: time.sleep(600) or right(a, b)
    if trouble == "fails":
        preflight.multiply = lambda a, b: a[1 // 0]
    if trouble in ("short", "cut off"):
        preflight.ALL_REDUCE_TIMEOUT_S, preflight.MARGIN_S = 4.0, 2.0
    if trouble == "cut off":
        preflight.all_reduce = lambda world, on_gpu: map(time.sleep, [600])
    return preflight.main(arguments)


def whole(
    place: Path,
    *,
    num_ranks: int,
    per_node: int = 1,
    troubles: Mapping[int, str],
    timeout_s: int = 60,
) -> Any:
    """Return exit codes, output and lines of preflight.jsonl. Ranks with the trouble "absent" are
    not started."""
    nodes = [f"n{number + 1}" for number in range(num_ranks // per_node)]
    shared = {
        "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_SCRATCH": str(place / "scratch"),
        "PREFLIGHT_TIMEOUT_S": str(timeout_s),
    }
    output, processes = place / "output", []
    for number, environment in enumerate(environments(num_ranks, **shared)):
        node = {"LOCAL_RANK": str(number % per_node), "SLURMD_NODENAME": nodes[number // per_node]}
        call = (
            f"{MODULE}:rank",
            [str(place / "job"), "--nodes", ",".join(nodes)],
            troubles.get(number, ""),
        )
        if call[2] != "absent":
            processes.append(begin(*call, environment=environment | node, output=output))  # type: ignore[arg-type]
    codes = wait(processes, timeout_s=150, grace_s=90)
    lines = [json.loads(line) for line in (place / "job/preflight.jsonl").read_text().splitlines()]
    bad = dict(line.split("\t") for line in (place / "job/bad-nodes").read_text().splitlines())
    return codes, output.read_text(), lines, bad


@pytest.mark.processes
def test_sound_nodes_are_measured_and_nobody_is_named(tmp_path: Path) -> None:
    codes, output, lines, bad = whole(tmp_path, num_ranks=4, per_node=2, troubles={})
    assert codes == [0] * 4 and bad == {}, output
    assert [(line["rank"], line["node"], line["start"]) for line in lines] == [
        (0, "n1", 1), (1, "n1", 1), (2, "n2", 1), (3, "n2", 1),
    ]  # fmt: skip
    for line in lines:
        assert line["gb_per_s"] > 0 and line["faults"] == [] and line["device"] == "CPU", line
    assert [line.get("free_gb") is not None for line in lines] == [True, False, True, False]
    assert "2 nodes, 4 ranks" in output and "is bad" not in output


@pytest.mark.processes
def test_a_gpu_that_errs_one_that_hangs_and_a_rank_that_never_comes_are_named(
    tmp_path: Path,
) -> None:
    troubles = {1: "wrong", 2: "hangs", 3: "absent", 4: "fails"}
    codes, output, lines, bad = whole(tmp_path, num_ranks=5, troubles=troubles, timeout_s=8)
    assert codes == [3, 0, -signal.SIGALRM, 0], output
    assert bad == {
        "n2": "cpu: 128 of 16,384 entries of a torch.float32 product are wrong",
        "n3": "no answer from its CPU for 8 s",
        "n4": "rank 3 has not started",
    }
    assert "preflight: warning: n5: ZeroDivisionError: " in output
    assert all(f"preflight: {node} is bad: {why}\n" in output for node, why in bad.items()), output
    assert not any("gb_per_s" in line for line in lines), "an all-reduce with them would hang"


@pytest.mark.processes
def test_a_node_that_hangs_in_the_all_reduce_is_named_alone(tmp_path: Path) -> None:
    codes, output, _, bad = whole(
        tmp_path, num_ranks=4, troubles=dict.fromkeys(range(4), "short") | {0: "cut off"}
    )
    assert codes == [3, 0, 0, 0], output
    assert bad == {"n1": "no answer from its CPU for 6 s"}


# ---- checks of a node


def test_a_directory_that_cannot_be_written_is_reported_with_its_reason(tmp_path: Path) -> None:
    free_gb, faults = check_scratch(tmp_path / "new")
    assert free_gb and faults == [] and list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    assert [kind for kind, _ in check_scratch(tmp_path / "file/scratch")[1]] == ["place of scratch"]
    with mock.patch.object(
        os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")
    ):
        (fault,) = check_scratch(tmp_path)[1]
    assert fault == [
        "scratch",
        f"{tmp_path} (NODE_SCRATCH) cannot be used: No space left on device",
    ]
    with mock.patch.object(
        os, "statvfs", return_value=os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 0, 255))
    ):
        assert "GB free, less than 1 GB" in check_scratch(tmp_path)[1][0][1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".preflight")] == []


@pytest.mark.parametrize(
    ("environment", "visible", "kinds"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, ["gpus"]),
        ({"SLURM_GPUS_ON_NODE": "4"}, 0, ["no gpu"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": ""}, 0, []),
    ],
)
def test_as_many_gpus_are_visible_as_slurm_gave_and_what_is_read_is_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    visible: int,
    kinds: list[str],
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        environment | {"NODE_SCRATCH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    paths = [str(tmp_path), f"{tmp_path}/in21k/manifest.json"]
    (*_, first), (*_, second) = (
        check_node(World(i, i, 2, num_local_ranks=2), paths) for i in (0, 1)
    )
    assert isinstance(first, dict) and isinstance(second, dict)
    assert [kind for kind, _ in second["faults"]] == kinds, (
        "one rank of a node looks at directories"
    )
    assert first["faults"][0] == [
        f"missing {paths[1]}",
        f"{tmp_path}/in21k does not exist: its file system may not be mounted",
    ]


# ---- excluded nodes


def findings(*kinds: str) -> list[dict[str, Any]]:
    """Return the findings of one rank on each of n1, n2, ...: a kind of fault, or ""."""
    return [
        {"rank": i, "node": f"n{i + 1}", "faults": [[kind, f"it has {kind}"]] if kind else []}
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("found", "bad", "is_warned"),
    [
        (findings("", "", ""), [], False),
        (findings("", "scratch", ""), ["n2"], False),
        (findings("scratch", "scratch", ""), [], True),  # two thirds: a common cause
        (findings("no gpu", "no gpu"), ["n1", "n2"], False),  # training would begin on CPUs
        (findings("", "not checked", ""), [], True),
        (findings("scratch"), ["n1"], False),
        (findings("missing /d"), [], True),  # on one node: may be a setting
        (findings("", "", "missing /d"), ["n3"], False),
        (findings("", "", "absent"), ["n3"], False),
        (findings("not checked", "no answer", "not checked", "not checked"), ["n2"], True),
    ],
)
def test_who_is_blamed(found: list[dict[str, Any]], bad: list[str], is_warned: bool) -> None:
    named, warnings = judge(found)
    assert [*named] == bad and bool(warnings) == is_warned, (named, warnings)
