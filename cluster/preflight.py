"""Check every node before training and name the bad ones: `python -m cluster.preflight JOB_DIR`.

Each rank runs this module.

1. Rank 0 forks a process, the judge, that collects all findings. The judge uses neither GPU nor
   disk, so a hung driver cannot block it.
2. Each rank sends the name of a check before the check runs, and finally the findings, through a
   TCPStore. An alarm kills a rank that hangs. The judge waits up to 3 x PREFLIGHT_TIMEOUT_S for
   ranks to start.
3. If there are several ranks and none has a fault, they do two all-reduces with a deadline.
4. A fault that most nodes share blames none of them.
5. The judge prints a summary and writes JOB_DIR/preflight.jsonl (one line per rank) and
   JOB_DIR/bad-nodes (NODE<TAB>reason).

Every wait has a limit. Exit codes of the judge: 0 no bad node, 3 bad nodes were named, 1 the checks
could not run.
"""

import argparse
import datetime
import errno
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.ranks.world import World, read_world

if TYPE_CHECKING:
    import torch

SOUND, FAILED, NAMED = 0, 1, 3
COMMON_FRACTION = 2 / 3
"""Smallest fraction of nodes with the same fault (except "no gpu") at which no node is blamed. A
setting or a shared disk is then the likely cause."""
MIN_FREE_GB = 1.0
"""Free GB that the scratch directory needs, because compiled kernels take some hundred MB."""
ALL_REDUCE_TIMEOUT_S, MARGIN_S = 40.0, 15.0
"""Deadline of the all-reduce, and a margin for the timeouts of other ranks, in seconds. NCCL takes
up to ten seconds to connect."""

Findings = dict[str, Any]
"""Findings of a rank: rank, node, device, free_gb, gb_per_s and faults (a list of [kind, text])."""
Steps = Iterator[str | Findings]
"""Checks of a rank. The iterator yields the name of each check before the check runs, so that a
hanging check is known. Finally it yields the findings."""
CERTAIN = ("no gpu", "gpus", "gpu error", "wrong product", "no answer", "scratch")
"""Kinds of faults for which a one-node job blames its node. Settings can cause other kinds."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="preflight", description="Check each node of a job.")
    parser.add_argument("job_dir", type=Path, metavar="JOB_DIR")
    parser.add_argument("--nodes", default="", help="nodes of the job, comma-separated")
    parser.add_argument(
        "--read", action="append", default=[], metavar="PATH", help="path that every node can read"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings would hide the summary
    try:
        timeout_s, world = float(os.environ.get("PREFLIGHT_TIMEOUT_S") or 60), read_world()
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        is_judge = world.is_first and os.fork() > 0
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=is_judge,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=3 * timeout_s),
        )
        if is_judge:
            return judge_nodes(world, store, options, timeout_s=timeout_s)
        return check_rank(world, store, options.read, timeout_s=timeout_s)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the store's rank 0 is gone
        print(
            f"preflight: the checks could not run: {str(error).partition(chr(10))[0]}",
            file=sys.stderr,
        )
        return FAILED


def check_rank(world: World, store: Any, read: Sequence[str], *, timeout_s: float) -> int:
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    findings: Findings = {"rank": world.rank, "node": node, "faults": []}
    store.set(f"touches/{world.rank}", "its start")
    follow(check_node(world, read), findings, store, timeout_s=timeout_s)
    store.set(f"checked/{world.rank}", json.dumps(findings))
    store.wait(["is_sound"], datetime.timedelta(seconds=5 * timeout_s))
    if json.loads(store.get("is_sound")):
        steps = all_reduce(world, on_gpu=findings.get("device") != "CPU")
        follow(steps, findings, store, timeout_s=ALL_REDUCE_TIMEOUT_S + MARGIN_S)
        store.set(f"reduced/{world.rank}", json.dumps(findings))
    store.set(f"left/{world.rank}", "")
    return SOUND


def follow(steps: Steps, findings: Findings, store: Any, *, timeout_s: float) -> None:
    """Run the checks and add their results to `findings`. SIGALRM ends a process that hangs, even
    in driver code."""
    signal.alarm(math.ceil(timeout_s))
    try:
        for step in steps:
            if isinstance(step, str):
                store.set(f"touches/{findings['rank']}", step)
            else:
                findings |= step
    except Exception as error:  # noqa: BLE001 (the judge must know of any error)
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        findings["faults"].append(["not checked", reason])
    signal.alarm(0)


def judge_nodes(world: World, store: Any, options: argparse.Namespace, *, timeout_s: float) -> int:
    began_s = time.monotonic()
    nodes = options.nodes.split(",") if options.nodes else [socket.gethostname()]
    every = [f"touches/{rank}" for rank in range(world.num_ranks)]
    with suppress(RuntimeError):  # slow: all ranks read torch's hundreds of MB at once
        store.wait(every, datetime.timedelta(seconds=3 * timeout_s))
    found = gather(store, "checked", world, nodes, timeout_s=timeout_s)
    faults = {kind for each in found for kind, _ in each["faults"]}
    is_sound = world.num_ranks > 1 and faults <= {"idle gpus"}
    store.set("is_sound", json.dumps(is_sound))
    if is_sound:
        limit_s = ALL_REDUCE_TIMEOUT_S + MARGIN_S
        found = gather(store, "reduced", world, nodes, timeout_s=limit_s)
    bad, warnings = judge(found)
    record(options.job_dir, found, bad)
    lines = [summary(found, took_s=time.monotonic() - began_s)]
    lines += [f"preflight: warning: {text}" for text in warnings]
    lines += [f"preflight: {node} is bad: {'; '.join(texts)}" for node, texts in bad.items()]
    print(*lines, sep="\n", flush=True)
    with suppress(RuntimeError):  # the store ends with this process
        heard = [rank for rank in range(world.num_ranks) if store.check([f"checked/{rank}"])]
        store.wait([f"left/{rank}" for rank in heard], datetime.timedelta(seconds=5))
    return NAMED if bad else SOUND


def gather(
    store: Any, topic: str, world: World, nodes: Sequence[str], *, timeout_s: float
) -> list[Findings]:
    """Return the findings of all ranks. A rank without findings after the timeout gets a fault."""
    began = [rank for rank in range(world.num_ranks) if store.check([f"touches/{rank}"])]
    with suppress(RuntimeError):
        store.wait([f"{topic}/{rank}" for rank in began], datetime.timedelta(seconds=timeout_s + 1))
    found = []
    for rank in range(world.num_ranks):
        if store.check([f"{topic}/{rank}"]):
            found.append(json.loads(store.get(f"{topic}/{rank}")))
        else:
            fault = ["absent", f"rank {rank} has not started"]
            if rank in began:
                touched = store.get(f"touches/{rank}").decode()
                fault = ["no answer", f"no answer from {touched} for {timeout_s:g} s"]
            node = nodes[rank // world.num_local_ranks]  # ranks fill node after node
            found.append({"rank": rank, "node": node, "faults": [fault]})
    return found


# ---- on every rank


def check_node(world: World, read: Sequence[str]) -> Steps:
    """Check the GPU and its arithmetic. The first rank of a node also checks the directories."""
    import torch

    found: Findings = {"faults": []}
    faults: list[list[str]] = found["faults"]
    if world.local_rank == 0:
        scratch = os.environ.get("NODE_SCRATCH") or "/tmp"
        yield f"the directory {scratch}"
        found["free_gb"], fault = check_scratch(Path(scratch))
        faults += fault
        for path in map(Path, read):
            yield str(path)
            if not path.exists():
                missing = path if path.parent.exists() else path.parent
                text = f"{missing} does not exist: its file system may not be mounted"
                faults.append([f"missing {path}", text])
    yield "its GPUs"
    expected, visible = expected_gpus(os.environ), torch.cuda.device_count()
    if visible < expected:
        seen = f"torch sees {visible or 'none'} of its {expected} GPUs"
        text = f"{seen}; see nvidia-smi on the node (PREFLIGHT=0 skips all checks)"
        faults.append(["gpus" if visible else "no gpu", text])
        yield found
        return
    if not expected and visible > world.num_local_ranks:
        used = f"the job uses {world.num_local_ranks} of {visible} GPUs"
        text = f"{used}: request GPUs (SBATCH_GPUS_PER_NODE), or set RANKS_PER_NODE"
        faults.append(["idle gpus", text])
    device = device_of(world, visible)
    yield "its CPU" if device.type == "cpu" else f"GPU {device.index}"
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or world.num_cores))
    try:
        found["device"] = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        wrong = wrong_product(device)
        faults += [["wrong product", wrong]] if wrong else []
    except RuntimeError as error:  # any CUDA error, including out of memory
        faults.append(["gpu error", f"{device}: {str(error).strip().partition(chr(10))[0]}"])
    yield found


def device_of(world: World, num_gpus: int) -> "torch.device":
    import torch

    gpu = world.gpu(num_gpus)
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def expected_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that SLURM gave to this process."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    return len([word for word in visible.split(",") if word and word not in ("-1", "NoDevFiles")])


def check_scratch(directory: Path) -> tuple[float | None, list[list[str]]]:
    """Write and remove a file in the scratch directory. Return the free GB, and the fault if there
    is one. A wrong NODE_SCRATCH has the kind "place of scratch", because it is a setting; a bad
    disk blames the node."""
    path = directory / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:
                file.write(os.urandom(2**20))
                file.flush()
                os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)
        space = os.statvfs(directory)
    except OSError as error:
        disk_errors = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EUCLEAN)
        kind = "scratch" if error.errno in disk_errors else "place of scratch"
        return None, [[kind, f"{directory} (NODE_SCRATCH) cannot be used: {error.strerror}"]]
    free_gb = round(space.f_bavail * space.f_frsize / 1e9, 2)
    if free_gb >= MIN_FREE_GB:
        return free_gb, []
    text = f"{directory} has {free_gb:.2g} GB free, less than {MIN_FREE_GB:g} GB"
    return free_gb, [["scratch", text]]


def wrong_product(device: "torch.device") -> str | None:
    """Return an error if a matrix product differs from integer arithmetic. The entries are -1, 0
    and 1, so all sums are exact."""
    import torch

    size = 128
    numbers = torch.arange(size * size).reshape(size, size)
    a, b = numbers * 7 % 3 - 1, (numbers * 5 + 1) % 11 % 3 - 1
    exact = (a[:, :, None] * b[None, :, :]).sum(1)
    for dtype in (torch.float32, torch.bfloat16):
        got = multiply(a.to(device, dtype), b.to(device, dtype)).cpu().to(torch.int64)
        if not torch.equal(got, exact):
            wrong = f"{int((got != exact).sum()):,} of {exact.numel():,}"
            return f"{device}: {wrong} entries of a {dtype} product are wrong"
    return None


def multiply(a: "torch.Tensor", b: "torch.Tensor") -> "torch.Tensor":
    return a @ b


def all_reduce(world: World, *, on_gpu: bool) -> Steps:
    """Do an all-reduce over all ranks. Yield the GB/s that this rank sends, and a fault if the sum
    is wrong."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a timeout raises instead of ending the process
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    yield "the network"
    device = device_of(world, torch.cuda.device_count() if on_gpu else 0)
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=ALL_REDUCE_TIMEOUT_S)
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("all-reduce", shared),
        rank=world.rank,
        world_size=world.num_ranks,
        timeout=timeout,
    )
    size = (128 if on_gpu else 4) * 2**20
    message = torch.ones(size // 4, device=device)
    distributed.all_reduce(message, async_op=True).wait(timeout)  # the first call connects
    began_s = time.perf_counter()
    distributed.all_reduce(message, async_op=True).wait(timeout)
    total = float(message.double().mean())  # also waits for the GPU
    took_s = time.perf_counter() - began_s
    distributed.destroy_process_group()
    if total != world.num_ranks**2:
        text = f"an all-reduce of {world.num_ranks} ranks gives {total:g}, not {world.num_ranks**2}"
        yield {"faults": [["wrong sum", text]]}
    sent = 2 * (world.num_ranks - 1) / world.num_ranks * size
    yield {"gb_per_s": float(f"{sent / took_s / 1e9:.3g}")}


# ---- in the judge


def judge(found: Sequence[Findings]) -> tuple[dict[str, list[str]], list[str]]:
    """Return bad nodes with reasons, and warnings, from the findings of all ranks."""
    num_nodes = len({each["node"] for each in found})
    nodes_of: dict[str, dict[str, str]] = {}  # kind -> node -> text
    for each in found:
        for kind, text in each["faults"]:
            nodes_of.setdefault(kind, {}).setdefault(each["node"], text)
    bad: dict[str, list[str]] = {}
    warnings = []
    for kind, same in nodes_of.items():
        # "no gpu" always blames its nodes, because training would begin on their CPUs
        is_common = len(same) >= COMMON_FRACTION * num_nodes and kind != "no gpu"
        if is_common and not (num_nodes == 1 and kind in CERTAIN):
            node, text = next(iter(same.items()))
            hit = f"{len(same)} of {num_nodes} nodes have this fault, so no node is blamed"
            warnings.append(f"{hit}: {text} ({node})")
        elif kind in ("not checked", "idle gpus"):
            warnings += [f"{node}: {text}" for node, text in same.items()]
        else:
            for node, text in same.items():
                bad.setdefault(node, []).append(text)
    return bad, warnings


def summary(found: Sequence[Findings], *, took_s: float) -> str:
    """Return one line with the slowest network and the fullest disk."""
    parts = [f"preflight: {len({each['node'] for each in found})} nodes, {len(found)} ranks"]
    parts.append(f"{took_s:.0f} s")
    for name, text in (("gb_per_s", "GB/s in an all-reduce"), ("free_gb", "GB of scratch free")):
        if values := [(each[name], each["node"]) for each in found if each.get(name)]:
            least, node = min(values)
            parts.append(f"at least {least:.3g} {text} ({node})")
    return ", ".join(parts)


def record(job_dir: Path, found: Sequence[Findings], bad: Mapping[str, Sequence[str]]) -> None:
    job_dir.mkdir(parents=True, exist_ok=True)
    attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1
    about = {"start": attempt, "time": round(time.time(), 1)}
    with open(job_dir / "preflight.jsonl", "a") as log:
        log.writelines(json.dumps(about | each) + "\n" for each in found)
    with open(job_dir / "bad-nodes", "a") as names:
        for node, texts in sorted(bad.items()):
            names.write(f"{node}\t{' '.join('; '.join(texts).split())}\n")


if __name__ == "__main__":
    sys.exit(main())
