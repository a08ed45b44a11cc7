"""The pre-flight: whole ones of a few gloo ranks that stand for nodes, what each of them checks,
and who is blamed for what."""

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cluster import preflight
from cluster.preflight import check_node, check_scratch, in_child, judge, rounds
from pretrain.ranks.world import World
from tests.forked import begin, environments, wait

MODULE = "tests.cluster.test_preflight"


def rank(arguments: list[str], trouble: str) -> int:
    """The command on a rank; `trouble` is what its device or its network does."""
    right, reduce = preflight.multiply, preflight._all_reduce
    if trouble == "wrong":
        preflight.multiply = lambda a, b: right(a, b) + (torch.arange(a.shape[0]) == 77).to(a.dtype)
    if trouble == "hangs":
        preflight.multiply = lambda a, b: time.sleep(600) or right(a, b)
    if trouble == "short":
        preflight.LINK_TIMEOUT_S, preflight.MARGIN_S = 4.0, 2.0
    if trouble == "cut off":
        preflight.LINK_TIMEOUT_S, preflight.MARGIN_S = 4.0, 2.0
        preflight._all_reduce = lambda *words, **options: (
            time.sleep(600) or reduce(*words, **options)
        )
    return preflight.main(arguments)


def whole(
    place: Path,
    *,
    num_ranks: int,
    per_node: int = 1,
    troubles: Mapping[int, str],
    timeout_s: int = 60,
) -> Any:
    """Exit codes, output and lines of preflight.jsonl; a rank whose trouble is "absent" is not
    started."""
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


def test_sound_nodes_are_measured_and_nobody_is_named(tmp_path: Path) -> None:
    codes, output, lines, bad = whole(tmp_path, num_ranks=4, per_node=2, troubles={})
    assert codes == [0] * 4 and bad == {}, output
    assert [(line["rank"], line["node"], line["start"]) for line in lines] == [
        (0, "n1", 1), (1, "n1", 1), (2, "n2", 1), (3, "n2", 1),
    ]  # fmt: skip
    for line in lines:
        assert line["tflops"] > 0 and line["faults"] == [] and line["device"] == "CPU", line
        assert [*line["links"]] == [str(1 - line["rank"] // 2)] and min(
            line["links"].values()
        ) > 0, line
    assert [line.get("free_gb") is not None for line in lines] == [True, False, True, False]
    assert "n2" in output and "is bad" not in output


def test_a_gpu_that_errs_one_that_hangs_and_a_rank_that_never_comes_are_named(
    tmp_path: Path,
) -> None:
    codes, output, lines, bad = whole(
        tmp_path, num_ranks=4, troubles={1: "wrong", 2: "hangs", 3: "absent"}, timeout_s=8
    )
    assert codes == [3] * 3, output
    assert bad.pop("n4").startswith("rank 3 sent nothing within ") and bad == {
        "n2": "cpu: 128 of 16,384 entries of a torch.float32 product are wrong",
        "n3": "no answer from its CPU for 8 s",
    }
    assert all(f"preflight: {node} is bad: {why}\n" in output for node, why in bad.items()), output
    assert not any("links" in line for line in lines), "links among such nodes would hang"


def test_a_node_without_a_link_is_named_alone(tmp_path: Path) -> None:
    codes, output, _, bad = whole(
        tmp_path, num_ranks=4, troubles=dict.fromkeys(range(4), "short") | {1: "cut off"}
    )
    assert codes == [3] * 4 and bad == {"n2": "it reaches none of its neighbours"}, output


# ---- what a node checks
# -----------------------------------------------------------------------------------------------


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
        f"the scratch directory {tmp_path} cannot be used: No space left on device",
    ]
    with mock.patch.object(
        os, "statvfs", return_value=os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 0, 255))
    ):
        assert "GB free (threshold 1 GB)" in check_scratch(tmp_path)[1][0][1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".preflight")] == []


@pytest.mark.parametrize(
    ("environment", "visible", "kinds"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, ["gpus"]),
        ({"SLURM_GPUS_ON_NODE": "4"}, 0, ["no gpu"]),
        ({"SLURM_GPUS_ON_NODE": "4", "PREFLIGHT_GPUS": "ignore"}, 0, []),
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
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "PREFLIGHT_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        environment | {"NODE_SCRATCH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(preflight, "matmul_tflops", lambda device: 1.0)
    paths = [str(tmp_path), f"{tmp_path}/in21k/manifest.json"]
    first, second = (
        check_node(World(i, i, 2, num_local_ranks=2), paths, lambda doing: None) for i in (0, 1)
    )
    assert [kind for kind, _ in second["faults"]] == kinds, (
        "one rank of a node looks at directories"
    )
    assert first["faults"][0] == [
        f"not there {paths[1]}",
        f"{tmp_path}/in21k is not there: is its file system mounted?",
    ]


def test_what_hangs_dies_or_fails_is_an_answer() -> None:
    def hang(doing: Any) -> dict[str, Any]:
        doing("the disk")
        time.sleep(600)
        return {}

    def die(doing: Any) -> dict[str, Any]:
        doing("GPU 3")
        os.abort()

    assert in_child(hang, timeout_s=1) == {
        "faults": [["no answer", "no answer from the disk for 1 s"]]
    }
    assert in_child(die, timeout_s=20) == {
        "faults": [["died", "a process that used GPU 3 has died"]]
    }
    assert in_child(lambda doing: {"a": 1 // 0}, timeout_s=20)["faults"][0][0] == "not checked"


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 32])
@pytest.mark.parametrize("per_node", [1, 4])
def test_every_node_meets_its_neighbours_once_and_one_at_a_time(
    num_nodes: int, per_node: int
) -> None:
    found = rounds(num_nodes * per_node, per_node)
    for groups in found:
        members = [each for group in groups for each in group]
        assert len(members) == len(set(members)) > 0
    if per_node > 1:
        assert found.pop(0) == [
            list(range(first, first + 4)) for first in range(0, num_nodes * 4, 4)
        ]
    pairs = [pair for groups in found for pair in groups]
    assert all(a % per_node == b % per_node for a, b in pairs), "each rank meets its like"
    ring = [
        sorted({node, (node + 1) % num_nodes})
        for node in range({1: 0, 2: 1}.get(num_nodes, num_nodes))
    ]
    assert sorted(sorted({a // per_node, b // per_node}) for a, b in pairs) == sorted(
        per_node * ring
    )


# ---- who is blamed
# ----------------------------------------------------------------------------------------------------

GPU = "NVIDIA H100"


def figures(
    tflops: Sequence[float | None], *, device: str = GPU, **others: Any
) -> list[dict[str, Any]]:
    """One rank on each of n1, n2, ...; `others` by node."""
    return [
        {
            "rank": i,
            "node": f"n{i + 1}",
            "device": device,
            "tflops": rate,
            "faults": [],
            **others.get(f"n{i + 1}", {}),
        }
        for i, rate in enumerate(tflops)
    ]


FAULT = {
    kind: {"faults": [[kind, f"it has {kind}"]]}
    for kind in ("no gpu", "scratch", "not checked", "absent", "not there /d")
}


def linked(**rates: dict[str, float]) -> dict[str, Any]:
    return {node: {"links": links} for node, links in rates.items()}


@pytest.mark.parametrize(
    ("found", "bad", "warned"),
    [
        (figures([700, 690, 710]), {}, ""),
        (figures([700, 500, 710]), {"n2": "500 matmul TFLOP/s, 71% of the other nodes' median"}, ""),
        (figures([700, 600, 710]), {}, ""),  # 85 %
        (figures([700, 100]), {}, ""),  # of two either may be the exception
        (figures([700, 500, 710], device="CPU"), {}, "n2: 500 matmul"),  # shared with others
        (figures([700, 500, 710], n3={"device": "NVIDIA A100"}), {}, ""),
        (figures([1, 1, 1], n2=FAULT["scratch"]), {"n2": "it has scratch"}, ""),
        (figures([1, 1, 1], n1=FAULT["scratch"], n2=FAULT["scratch"]), {}, "2 of 3 nodes have this, so no node is blamed"),
        (figures([1, 1], n1=FAULT["no gpu"], n2=FAULT["no gpu"]), {"n1": "it has no gpu", "n2": "it has no gpu"}, ""),
        (figures([1, 1, 1], n2=FAULT["not checked"]), {}, "n2: it has not checked"),
        (figures([1], n1=FAULT["scratch"]), {"n1": "it has scratch"}, ""),
        (figures([1], n1=FAULT["not there /d"]), {}, "1 of 1 nodes"),
        (figures([1, 1, 1], n3=FAULT["not there /d"]), {"n3": "it has not there /d"}, ""),
        (figures([1, 1, 1], n3=FAULT["absent"]), {"n3": "it has absent"}, ""),
        (figures([1, 1, 1], **linked(n1={"1": 0, "2": 9}, n2={"0": 0, "2": 0}, n3={"1": 0, "0": 9})),
         {"n2": "it reaches none of its neighbours"}, ""),
        (figures([1, 1], **linked(n1={"1": 0}, n2={"0": 0})), {}, "2 of 2 nodes have this"),
        (figures([1] * 4, **linked(n1={"1": 2, "3": 9}, n2={"0": 2, "2": 2}, n3={"1": 2, "3": 9}, n4={"2": 9, "0": 9})),
         {"n2": "2 GB/s between nodes, 22% of the other nodes' median (threshold 50%)"}, ""),
    ],
)  # fmt: skip
def test_who_is_blamed(found: list[dict[str, Any]], bad: dict[str, str], warned: str) -> None:
    named, warnings = judge(found)
    assert named.keys() == bad.keys() and all(
        text in "; ".join(named[node]) for node, text in bad.items()
    ), named
    assert warned in " ".join(warnings) and bool(warned) == bool(warnings), warnings
