"""The pre-flight's files and lists, and whole pre-flights of a few gloo ranks that are told that they are nodes."""

import datetime
import errno
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cluster.preflight import checks, links, records
from cluster.preflight.__main__ import main
from cluster.preflight.figures import SHARED, SILENT, Disk, Fault, Figures
from cluster.preflight.links import BETWEEN, stages
from cluster.preflight.nodes import expand, homes, placed_by_slurm
from cluster.preflight.worker import NoAnswerError, Worker
from pretrain.ranks.world import World
from tests.forked import begin, environments, wait

MODULE = "tests.cluster.test_preflight"


# ---- whole pre-flights -----------------------------------------------------------------------------------------------


def rank(arguments: list[str], trouble: str) -> int:
    """The command on a rank, with small products; `trouble` is what its device does."""
    from cluster.preflight import inspection

    checks.MATMUL_S, checks.ROUND_S, checks.CPU_MATMUL_SIZE, checks.DISK_TEST_BYTES = 0.05, 0.01, 128, 2**20
    links.ROUNDS_S, links.MESSAGE_BYTES["gloo"] = 0.01, 2**16
    right = checks.product
    if trouble == "wrong":
        checks.product = lambda a, b: right(a, b) + (torch.arange(a.shape[0]) == 77).to(a.dtype)
    if trouble == "hangs":
        checks.product = lambda a, b: time.sleep(600) or right(a, b)
    if trouble.startswith("short stages"):
        links.LINK_TIMEOUT_S = inspection.LINK_TIMEOUT_S = 8.0
        inspection.MARGIN_S, inspection.STAGE_S = 2.0, 12.0
    if trouble.endswith("dies"):
        inspection.measure_group = lambda **_: os.kill(os.getppid(), signal.SIGKILL)
    return main(arguments)


def preflight(place: Path, *words: str, num_ranks: int, per_node: int = 1, troubles: Mapping[int, str]) -> Any:
    """Exit codes, output and lines of preflight.jsonl; a rank whose trouble is "absent" is not started."""
    shared = {
        "LOCAL_WORLD_SIZE": str(per_node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{num_ranks // per_node}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_ranks // per_node})",
        "NODE_SCRATCH": str(place / "scratch"),
    }
    output, processes = place / "output", []
    for number, environment in enumerate(environments(num_ranks, **shared)):
        node = {"LOCAL_RANK": str(number % per_node), "SLURMD_NODENAME": f"n{number // per_node + 1}"}
        arguments = [str(place / "job"), "--fleet", str(place / "fleet.jsonl"), *words]
        if troubles.get(number) != "absent":
            trouble = troubles.get(number, "")
            call = (f"{MODULE}:rank", arguments, trouble)
            processes.append(begin(*call, environment=environment | node, output=output))  # type: ignore[arg-type]
    codes = wait(processes, timeout_s=90, grace_s=60)
    lines = [json.loads(line) for line in (place / "job/preflight.jsonl").read_text().splitlines()]
    return codes, output.read_text(), lines


def test_sound_nodes_are_measured_and_nobody_is_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    codes, output, lines = preflight(tmp_path, "--check-dir", str(runs), num_ranks=4, per_node=2, troubles={})
    assert codes == [0] * 4, output
    assert [(line["rank"], line["node"], line["exit"]) for line in lines] == [
        (0, "n1", 0),
        (1, "n1", 0),
        (2, "n2", 0),
        (3, "n2", 0),
    ]
    for line in lines:
        assert line["matmul_tflops"] > 0 and line["node_gb_per_s"] > 0 and line["world_gb_per_s"] > 0, line
        assert line["faults"] == []
    assert [list(line["link_gb_per_s"]) for line in lines] == [["n2"], ["n2"], ["n1"], ["n1"]]
    assert lines[0]["link_gb_per_s"]["n2"] > 0
    assert all(abs(line["clock_s"]) < 2 and line["scratch"]["free_gb"] > 0 for line in lines[::2])
    assert lines[2]["shared"][0]["write_mb_per_s"] > 0 and lines[3]["shared"] == []
    assert not (tmp_path / "job/bad-nodes").exists() and "n2" in output and "is bad" not in output
    assert {(each.node, each.local_rank) for each in records.read_fleet(tmp_path / "fleet.jsonl")} == {
        ("n1", 0),
        ("n1", 1),
        ("n2", 0),
        ("n2", 1),
    }
    assert list(runs.iterdir()) == []


def test_a_gpu_that_errs_one_that_hangs_and_a_rank_that_never_comes_are_named(tmp_path: Path) -> None:
    troubles = {1: "wrong", 2: "hangs", 3: "absent"}
    codes, output, lines = preflight(tmp_path, "--timeout-s", "20", "--come-s", "18", num_ranks=4, troubles=troubles)
    assert codes == [3] * 3, output
    bad = dict(line.split("\t") for line in (tmp_path / "job/bad-nodes").read_text().splitlines())
    assert bad == {
        "n2": "cpu: 128 of 16,384 entries of a torch.float32 product are wrong",
        "n3": "no answer from its CPU for 20 s",
        "n4": "rank 3 did not come within 18 s",
    }
    assert all(f"preflight: {node} is bad: {why}\n" in output for node, why in bad.items()), output
    assert [line["exit"] for line in lines] == [3] * 4
    assert all(line["link_gb_per_s"] == {} for line in lines), "links among such nodes would hang"


def test_a_node_that_dies_while_links_are_measured_is_named_alone(tmp_path: Path) -> None:
    troubles = dict.fromkeys(range(4), "short stages") | {1: "short stages, dies"}
    codes, output, lines = preflight(tmp_path, num_ranks=4, troubles=troubles)
    assert sorted(codes) == [-signal.SIGKILL, 3, 3, 3], output
    assert (tmp_path / "job/bad-nodes").read_text() == "n2\tfell silent during the measurement between nodes\n"
    assert [list(line["link_gb_per_s"]) for line in lines] == [["n2", "n4"], [], ["n4"], ["n3", "n1"]], "not again n2"


def test_the_others_name_the_node_of_a_rank_0_that_never_comes(tmp_path: Path) -> None:
    codes, output, _ = preflight(tmp_path, "--timeout-s", "1", num_ranks=3, troubles={0: "absent"})
    assert codes == [3, 3], output
    (line,) = (tmp_path / "job/bad-nodes").read_text().splitlines()
    assert line.startswith("n1\trank 0 of the pre-flight gives no answer"), line


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_told_with_its_reason(tmp_path: Path) -> None:
    disk, error = checks.check_directory(tmp_path / "new")
    assert error is None and disk.write_mb_per_s and disk.free_gb and list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    disk, error = checks.check_directory(tmp_path / "file" / "scratch")
    assert error is not None and error.errno == errno.ENOTDIR and disk == Disk(str(tmp_path / "file/scratch"))
    with mock.patch.object(Path, "read_bytes", return_value=b"else"):
        _, error = checks.check_directory(tmp_path)
    assert error is not None and error.errno in checks.OF_THE_DISK
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "fsync", side_effect=full):
        assert checks.check_directory(tmp_path)[1] is full
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".preflight")] == []


@pytest.mark.parametrize(("stalled", "kind"), [("scratch", SILENT), ("runs", f"{SHARED} {{}}/runs")])
def test_a_stall_of_a_shared_directory_is_no_hang_of_the_node(tmp_path: Path, stalled: str, kind: str) -> None:
    looks = itertools.count()

    def stall(directory: Path) -> Any:
        if directory.name == stalled:
            (tmp_path / "stalls").touch()
            time.sleep(600)
        return Disk(str(directory)), None

    def now_s() -> float:
        """No time passes until it stalls, and what it has said before was read."""
        return 1.0 if (tmp_path / "stalls").exists() and next(looks) > 1 else 0.0

    def check(_: object, tell: Any) -> dict[str, Any]:
        places = {"scratch": str(tmp_path / "scratch"), "shared": [str(tmp_path / "runs")]}
        return checks.check_node(World(0, 0, 1), node="n1", tell=tell, environment={}, **places).as_json()

    worker, clock = Worker(check), SimpleNamespace(monotonic=now_s, sleep=time.sleep)
    patches = mock.patch.object(checks, "check_directory", stall), mock.patch("cluster.preflight.worker.time", clock)
    with patches[0], patches[1], pytest.raises(NoAnswerError) as caught:
        worker.ask({}, timeout_s=1, meanwhile=lambda: None)
    text = f"no answer from the directory {tmp_path / stalled} for 1 s"
    assert caught.value.fault == Fault(kind.format(tmp_path), text)


def test_what_will_be_read_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model.json").touch()
    (tmp_path / "mount").mkdir()
    paths = [
        str(tmp_path / name)
        for name in ("run", "run/model.json", "mount", "mount/in21k/manifest.json", "run/manifest.json")
    ]
    kept = {"scratch": str(tmp_path / "scratch"), "shared": (), "read": paths, "environment": {"OMP_NUM_THREADS": "1"}}
    with mock.patch.object(checks, "measure_device", return_value=("CPU", 1.0)):
        first, second = (checks.check_node(World(i, i, 2), node="n1", tell=lambda *_: None, **kept) for i in (0, 1))
    assert {fault.kind.removeprefix(f"{SHARED} "): fault.text for fault in first.faults} == {
        paths[2]: f"{tmp_path}/mount is empty: is its file system mounted?",
        paths[3]: f"{tmp_path}/mount/in21k is not there: is its file system mounted?",
        paths[4]: f"{tmp_path}/run/manifest.json is not there: is its file system mounted?",
    }
    assert second.faults == (), "one rank of a node is enough"
    stale = OSError(errno.ESTALE, "Stale file handle")
    with mock.patch("builtins.open", side_effect=stale):
        assert checks.cannot_be_read(Path(paths[1])) == f"{paths[1]} cannot be read: Stale file handle"


@pytest.mark.parametrize(
    ("environment", "visible", "kinds"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, 4, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, ["gpus"]),
        ({"SLURM_GPUS_ON_NODE": "4"}, 0, ["no gpu"]),
        ({"SLURM_GPUS_ON_NODE": "4", "PREFLIGHT_GPUS": "ignore"}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "2", "SLURM_GPUS_ON_NODE": "4"}, 1, ["unchecked"]),  # a rank for each GPU sees one
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": ""}, 0, []),
    ],
)
def test_as_many_gpus_are_visible_as_slurm_gave(environment: dict[str, str], visible: int, kinds: list[str]) -> None:
    with mock.patch.object(torch.cuda, "device_count", return_value=visible):
        device, faults = checks.find_device(World(1, 1, 2, num_local_ranks=2), environment)
    assert [fault.kind for fault in faults] == kinds
    assert (str(device) if device else None) == (None if kinds else "cuda:1" if visible else "cpu")


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "ib,lo", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "ib0", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("GLOO_SOCKET_IFNAME", "lo,ib0", False),
    ],
)
def test_interfaces_that_a_node_lacks(variable: str, value: str, fits: bool) -> None:
    with mock.patch.object(socket, "if_nameindex", return_value=[(1, "lo"), (2, "eth0")]):
        texts = [fault.text for fault in checks.missing_interfaces({variable: value})]
    assert len(texts) == (0 if fits else 1) and all(f"{variable}={value}" in text and "eth0" in text for text in texts)


# ---- files and lists -------------------------------------------------------------------------------------------------


def test_the_fleets_file_is_read_past_cut_foreign_and_old_lines(tmp_path: Path) -> None:
    path, new = (
        tmp_path / "fleet.jsonl",
        Figures(0, "n1", 0, device="H100", matmul_tflops=700.4, faults=(Fault("a", "b"),)),
    )
    records.append_to_fleet(path, [new])
    line = json.loads(path.read_text())
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=31)
    foreign: list[object] = [
        line | {"node": "old", "time": old.isoformat()},
        line | {"node": "no time", "time": "yesterday"},
        line | {"node": "words", "matmul_tflops": "fast"},
        [line],
        {},
        7,
    ]
    with open(path, "a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in foreign) + "\x00\xff\n" + json.dumps(line)[:40])
    linked = Figures(1, "n1", 0, device="H100", link_gb_per_s={"n2": 40.0})
    records.append_to_fleet(path, [linked, Figures(2, "n2", 0, device="H100", matmul_tflops=690)])
    first, second = sorted(records.read_fleet(path), key=lambda each: each.node)
    assert (first.node, first.matmul_tflops, first.best_link) == ("n1", 700.4, 40.0), "the newest of each kind"
    assert (second.node, second.matmul_tflops, second.faults) == ("n2", 690, ())
    records.append_to_fleet(path, [Figures(0, "n1", 0, device="H200", matmul_tflops=800)])
    assert {each.best_link for each in records.read_fleet(path)} == {None}, "another device has a history of its own"
    assert records.read_fleet(tmp_path / "none") == []


def test_parts_of_nodes_leave_no_bandwidth_in_the_fleets_file_and_do_not_hide_that_of_whole_ones(
    tmp_path: Path,
) -> None:
    path, whole = tmp_path / "fleet.jsonl", Figures(0, "n1", 0, 8, "H100", matmul_tflops=700, node_gb_per_s=400)
    records.append_to_fleet(path, [whole])
    records.append_to_fleet(path, [Figures(0, "n1", 0, 2, "H100", matmul_tflops=690, node_gb_per_s=90)], is_part=True)
    found = {each.num_local_ranks: (each.matmul_tflops, each.node_gb_per_s) for each in records.read_fleet(path)}
    assert found == {8: (700, 400), 2: (690, None)}


def test_the_commands_words_reach_the_inspection(tmp_path: Path) -> None:
    words = ["--read", "a/manifest.json", "--read", "b", "--check-dir", "runs", "--part-of-node", "--timeout-s", "50"]
    with mock.patch("cluster.preflight.inspection.Inspection") as inspection, mock.patch.dict(os.environ):
        inspection.return_value.run.return_value = 3
        assert main([str(tmp_path), *words]) == 3 == main([str(tmp_path), "--come-s", "7"])
    given, plain = (call.args[1] for call in inspection.call_args_list)
    assert (given.read, given.shared, given.is_part) == (("a/manifest.json", "b"), ("runs",), True)
    assert (given.timeout_s, given.come_s, plain.come_s) == (50, 150, 7) and given.lead_s > 50 + 150
    assert (plain.read, plain.is_part) == ((), False)


def test_a_rank_that_comes_too_late_finds_how_its_start_ended_and_no_other(tmp_path: Path) -> None:
    def start(restart: int) -> records.Start:
        words = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": str(restart)}
        return records.Start(tmp_path, words)

    start(0).write(found=[Figures(0, "n1", 0)], bad={"n2": ["slow\tlink", "hot"]}, code=3)
    assert (start(0).outcome(), start(1).outcome()) == (3, None)
    assert (tmp_path / "bad-nodes").read_text() == "n2\tslow link; hot\n"
    assert (records.named_before(tmp_path), records.named_before(tmp_path / "none")) == ({"n2"}, set())
    assert start(0).name_unheard("n1", reason="silent", code=4) == 3
    assert start(1).name_unheard("n1", reason="silent", code=3) == start(1).name_unheard("n1", reason="me too", code=3)
    assert (tmp_path / "bad-nodes").read_text() == "n2\tslow link; hot\nn1\tsilent\n"
    by_address = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    before = records.Start(tmp_path, by_address)
    before.write(found=(), bad={}, code=0)
    assert (before.outcome(), records.Start(tmp_path, by_address).outcome()) == (0, None), (
        "torchrun's port is always one"
    )


def test_host_lists() -> None:
    assert expand("n[1-3,5],m07") == ["n1", "n2", "n3", "n5", "m07"]
    assert expand("r[0-1]n[08-10]x,login") == [f"r{r}n{n}x" for r in "01" for n in ("08", "09", "10")] + ["login"]
    assert expand("") == []


def test_the_node_of_a_rank_that_never_came_is_known_from_slurm() -> None:
    words = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    placed = placed_by_slurm(5, words)
    assert placed == ["n1", "n1", "n2", "n2", "n3"] and placed_by_slurm(6, words) == [] == placed_by_slurm(5, {})
    assert homes(5, seen={0: "n1", 1: "n1"}, by_slurm=placed) == dict(enumerate(placed))
    elsewhere = {0: "n1", 1: "n2", 2: "n1", 4: "n2"}  # not one node after the other
    assert homes(5, seen=elsewhere, by_slurm=placed) == elsewhere | {3: "n3"}
    assert homes(5, seen={0: "n2"}, by_slurm=placed) == {0: "n2"}


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 32])
@pytest.mark.parametrize("per_node", [1, 4])
def test_every_node_meets_its_neighbours_once_and_one_at_a_time(num_nodes: int, per_node: int) -> None:
    node_of = {rank: f"n{rank // per_node}" for rank in range(num_nodes * per_node)}
    found = stages(node_of)
    groups = [pair for stage in found if stage.kind == BETWEEN for pair in stage.groups]
    assert all(a % per_node == b % per_node for a, b in groups), "each rank meets its like"
    pairs = [{node_of[rank] for rank in pair} for pair in groups]
    ring = [{f"n{node}", f"n{(node + 1) % num_nodes}"} for node in range(num_nodes if num_nodes > 2 else 1)]
    assert sorted(map(sorted, pairs)) == sorted(per_node * sorted(map(sorted, ring)))
    for stage in found:
        members = [rank for group in stage.groups for rank in group]
        assert len(members) == len(set(members)) > 0
    assert found[-1].groups == (tuple(node_of),) and (found[0].kind != BETWEEN) == (per_node > 1)
    assert stages({0: "n1"}) == []
