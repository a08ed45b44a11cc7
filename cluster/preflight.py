"""Check every node before training and name the bad ones: `python -m cluster.preflight JOB_DIR`.

Each rank runs this module.

1. A rank forks a child that touches GPU, disk and network. The rank itself only talks and waits,
   so a hung driver cannot silence it.
2. The rank sends its findings to rank 0 through a TCPStore. No process group is needed, so a rank
   that never starts delays nobody.
3. If no rank has a fault, all ranks do one all-reduce with a deadline.
4. Rank 0 prints a table, writes JOB_DIR/preflight.jsonl (one line per rank) and JOB_DIR/bad-nodes
   (NODE<TAB>reason), and sends the exit code to all ranks.

Every wait has a limit. A fault that most nodes share has a common cause, so it blames no node.
Exit codes: 0 no bad node, 3 bad nodes were named, 1 the check could not be made.
"""

import argparse
import ctypes
import datetime
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.driver import find_driver, outdated_driver
from cluster.slurm import in_columns
from pretrain.ranks.world import World, read_world

if TYPE_CHECKING:
    import torch

SOUND, FAILED, NAMED = 0, 1, 3
COMMON_FRACTION = 2 / 3
"""If this fraction of the nodes has the same fault, the cause is a setting or a shared disk."""
MIN_FREE_GB = 1.0
"""Free space that the scratch directory needs: compiled kernels take some hundred MB."""
ALL_REDUCE_TIMEOUT_S, MARGIN_S = 40.0, 15.0
"""NCCL takes up to ten seconds to connect. The margin covers the other rank's own timeout."""
PR_SET_PDEATHSIG = 1

Report = Callable[[str], None]
"""The child reports what it is about to touch, so a hang can be named."""
Findings = dict[str, Any]
"""rank, node, device, free_gb, gb_per_s and faults: a list of [kind, text]."""
CERTAIN = ("no gpu", "gpus", "gpu error", "wrong product", "no answer", "died", "scratch")
"""Kinds that blame the node of a one-node job; other kinds may be settings."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="preflight", description="Checks each node of a job.")
    parser.add_argument("job_dir", type=Path, metavar="JOB_DIR")
    parser.add_argument("--nodes", default="", help="the job's nodes, comma-separated, in order")
    parser.add_argument(
        "--read", action="append", default=[], metavar="PATH", help="every node must see this path"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings would bury the table
    try:
        timeout_s = float(os.environ.get("PREFLIGHT_TIMEOUT_S") or 60)
        return inspect_nodes(read_world(), options, timeout_s=timeout_s)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the store's rank 0 is gone
        print(f"preflight: could not be made: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return FAILED


def inspect_nodes(world: World, options: argparse.Namespace, *, timeout_s: float) -> int:
    """Check this rank's node and exchange the findings with rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def receive(key: str, *, within_s: float) -> Any:
        store.wait([key], datetime.timedelta(seconds=within_s))
        return json.loads(store.get(key))

    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    nodes = options.nodes.split(",") if options.nodes else [node]
    began_s = time.monotonic()
    import_s = 3 * timeout_s  # all ranks of a job read torch's hundreds of MB at once
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=world.is_first,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=import_s),
    )
    findings: Findings = {"rank": world.rank, "node": node, "faults": []}
    findings |= in_child(partial(check_node, world, options.read), timeout_s=timeout_s)
    store.set(f"found/{world.rank}", json.dumps(findings))
    all_found: list[Findings] = []
    if world.is_first:
        left_s = max(1.0, began_s + import_s + timeout_s - time.monotonic())
        all_found = gather(store, "found", world, nodes, timeout_s=left_s)
        is_clean = world.num_ranks > 1 and not any(each["faults"] for each in all_found)
        store.set("all-reduce", json.dumps(is_clean))
    all_reduce_s = ALL_REDUCE_TIMEOUT_S + 2 * MARGIN_S
    if receive("all-reduce", within_s=import_s + 2 * timeout_s + MARGIN_S):
        task = partial(all_reduce, world, findings.get("device") != "CPU")
        findings |= in_child(task, timeout_s=ALL_REDUCE_TIMEOUT_S + MARGIN_S)
        store.set(f"reduced/{world.rank}", json.dumps(findings))
        if world.is_first:
            all_found = gather(store, "reduced", world, nodes, timeout_s=all_reduce_s)
    if not world.is_first:
        code = int(receive("exit", within_s=all_reduce_s + 3 * MARGIN_S))
        store.set(f"bye/{world.rank}", "0")
        return code
    bad, warnings = judge(all_found)
    _write(options.job_dir, all_found, bad)
    print("\n".join(table(all_found, bad, warnings, took_s=time.monotonic() - began_s)), flush=True)
    code = NAMED if bad else SOUND
    store.set("exit", json.dumps(code))
    others = [f"bye/{rank}" for rank in range(1, world.num_ranks) if store.check([f"found/{rank}"])]
    with suppress(RuntimeError):  # the store ends with this process
        store.wait(others, datetime.timedelta(seconds=5))
    return code


def gather(
    store: Any, topic: str, world: World, nodes: Sequence[str], *, timeout_s: float
) -> list[Findings]:
    """Return the findings of all ranks; a rank that sent nothing in time has a fault."""
    keys = [f"{topic}/{rank}" for rank in range(world.num_ranks)]
    with suppress(RuntimeError):
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    found = []
    for rank, key in enumerate(keys):
        if store.check([key]):
            found.append(json.loads(store.get(key)))
        elif len(nodes) * world.num_local_ranks == world.num_ranks:  # ranks fill node after node
            kind = "absent" if topic == "found" else "no answer"
            fault = [kind, f"rank {rank} sent nothing within {timeout_s:.0f} s"]
            node = nodes[rank // world.num_local_ranks]
            found.append({"rank": rank, "node": node, "faults": [fault]})
    return found


def in_child(task: Callable[[Report], Findings], *, timeout_s: float) -> Findings:
    """Return the findings of a forked process, or a fault if it hangs, dies or fails.

    The parent has imported torch but used nothing of it: CUDA does not survive a fork.
    """
    ours, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            answer = task(theirs.send)
        except Exception as error:  # noqa: BLE001 (rank 0 must know of any error)
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            answer = {"faults": [["not checked", reason]]}
        with suppress(OSError):
            theirs.send(answer)
        os._exit(0)
    theirs.close()
    deadline_s, last = time.monotonic() + timeout_s, "its start"
    found: Findings = {}
    try:
        while not found and ours.poll(max(0.0, deadline_s - time.monotonic())):
            message = ours.recv()
            last, found = (message, found) if isinstance(message, str) else (last, message)
        silent = ["no answer", f"no answer from {last} for {timeout_s:g} s"]
    except EOFError:
        silent = ["died", f"a process that used {last} has died"]
    # The child must release the GPU's memory before training needs it. A killed child is not waited
    # for: a driver may never release it.
    grace_s = time.monotonic() + 5.0 * bool(found)
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() >= grace_s:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    return found or {"faults": [silent]}


# ---- in the child


def check_node(world: World, read: Sequence[str], report: Report) -> Findings:
    """Check GPUs and their arithmetic; a node's first rank also checks directories for all."""
    import torch

    found: Findings = {"faults": []}
    faults: list[list[str]] = found["faults"]
    if world.local_rank == 0:
        scratch = os.environ.get("NODE_SCRATCH") or "/tmp"
        report(f"the directory {scratch}")
        found["free_gb"], fault = check_scratch(Path(scratch))
        faults += fault
        for path in map(Path, read):
            report(str(path))
            if not path.exists():
                is_dataset = path.name == "manifest.json" and not path.parent.exists()
                missing = path.parent if is_dataset else path
                text = f"{missing} is missing: is its file system mounted?"
                faults.append([f"missing {path}", text])
    report("its GPUs")
    expected, visible = expected_gpus(os.environ), torch.cuda.device_count()
    if visible < expected:
        if torch.version.cuda or torch.version.hip:
            driver = find_driver({})
            cuda = torch.version.cuda
            outdated = outdated_driver(driver, cuda) if driver and cuda else None
            why = "; ".join(outdated) if outdated else "see nvidia-smi on the node"
        else:
            why = "this torch is built without CUDA: make CUDA=lock"
        seen = f"{visible or 'none'} of its {expected} GPUs visible to torch"
        text = f"{seen}; {why} (PREFLIGHT_GPUS=ignore trains on CPUs)"
        return found | {"faults": [*faults, ["gpus" if visible else "no gpu", text]]}
    gpu = world.gpu(visible)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    report("its CPU" if gpu is None else f"GPU {gpu}")
    if gpu is None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or world.num_cores))
    try:
        found["device"] = "CPU" if gpu is None else torch.cuda.get_device_name(device)
        wrong = wrong_product(device)
        faults += [["wrong product", wrong]] if wrong else []
    except RuntimeError as error:  # any CUDA error, including no memory
        faults.append(["gpu error", f"{device}: {str(error).strip().partition(chr(10))[0]}"])
    return found


def expected_gpus(environment: Mapping[str, str]) -> int:
    """Return the GPUs that SLURM gave this process; none if PREFLIGHT_GPUS=ignore."""
    if environment.get("PREFLIGHT_GPUS") == "ignore":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    return len([word for word in visible.split(",") if word and word not in ("-1", "NoDevFiles")])


def check_scratch(directory: Path) -> tuple[float | None, list[list[str]]]:
    """Write and remove a file; return the free GB and the fault, if there is one.

    A wrong NODE_SCRATCH has another kind ("place of scratch") than a bad disk, which is certain.
    """
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
        return None, [[kind, f"the scratch directory {directory} cannot be used: {error.strerror}"]]
    free_gb = round(space.f_bavail * space.f_frsize / 1e9, 2)
    if free_gb >= MIN_FREE_GB:
        return free_gb, []
    text = f"{directory} has {free_gb:.2g} GB free (threshold {MIN_FREE_GB:g} GB)"
    return free_gb, [["scratch", text]]


def wrong_product(device: "torch.device") -> str | None:
    """Compare a product with integer arithmetic: with entries -1, 0 and 1 all sums are exact."""
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


def all_reduce(world: World, on_gpu: bool, report: Report) -> Findings:
    """Do one all-reduce over all ranks; return the GB/s that this rank had to send."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a timeout raises instead of ending the process
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    report("the network")
    gpu = world.gpu(torch.cuda.device_count()) if on_gpu else None
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is not None:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=ALL_REDUCE_TIMEOUT_S)
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    distributed.init_process_group(
        "gloo" if gpu is None else "nccl",
        store=PrefixStore("all-reduce", shared),
        rank=world.rank,
        world_size=world.num_ranks,
        timeout=timeout,
    )
    size = (4 if gpu is None else 128) * 2**20
    message = torch.ones(size // 4, device=device)
    distributed.all_reduce(message, async_op=True).wait(timeout)  # connects
    began_s = time.perf_counter()
    distributed.all_reduce(message, async_op=True).wait(timeout)
    total = float(message.double().mean())  # also waits for the GPU
    took_s = time.perf_counter() - began_s
    distributed.destroy_process_group()
    if total != world.num_ranks**2:
        text = (
            f"an all-reduce over {world.num_ranks} ranks gives {total:g} for {world.num_ranks**2}"
        )
        return {"faults": [["wrong sum", text]]}
    sent = 2 * (world.num_ranks - 1) / world.num_ranks * size
    return {"gb_per_s": float(f"{sent / took_s / 1e9:.3g}")}


# ---- on rank 0


def judge(found: Sequence[Findings]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the reasons against each bad node, and warnings, from the findings of all ranks."""
    num_nodes = len({each["node"] for each in found})
    faults: dict[str, dict[tuple[str, str], None]] = {}
    for each in found:
        for kind, text in each["faults"]:
            faults.setdefault(kind, {})[each["node"], text] = None
    bad: dict[str, list[str]] = {}
    warnings = []
    for kind, same in faults.items():
        num_hit = len({node for node, _ in same})
        # without GPUs training would begin on the CPUs, so "no gpu" always blames
        is_common = num_hit >= COMMON_FRACTION * num_nodes and kind != "no gpu"
        if is_common and not (num_nodes == 1 and kind in CERTAIN):
            node, text = next(iter(same))
            hit = f"{num_hit} of {num_nodes} nodes have this, so no node is blamed"
            warnings.append(f"{hit}: {text} ({node})")
        elif kind == "not checked":
            warnings += [f"{node}: {text}" for node, text in same]
        else:
            for node, text in same:
                bad.setdefault(node, []).append(text)
    return bad, warnings


def table(
    found: Sequence[Findings],
    bad: Mapping[str, Sequence[str]],
    warnings: Sequence[str],
    *,
    took_s: float,
) -> list[str]:
    """Return a line for each node, then a line for each problem."""
    rows = [("node", "device", "all-reduce GB/s", "scratch GB free", "verdict")]
    for node in dict.fromkeys(each["node"] for each in found):
        ranks = [each for each in found if each["node"] == node]
        cells = []
        for name in ("gb_per_s", "free_gb"):
            values = [each[name] for each in ranks if each.get(name) is not None]
            cells.append(f"{min(values):.3g}" if values else "-")
        verdict = "bad" if node in bad else "sound"
        rows.append((node, str(ranks[0].get("device", "-")), *cells, verdict))
    head = f"preflight: {len(rows) - 1} nodes, {len(found)} ranks, {took_s:.0f} s"
    lines = [head, *in_columns(rows), *(f"preflight: warning: {text}" for text in warnings)]
    return lines + [f"preflight: {node} is bad: {'; '.join(texts)}" for node, texts in bad.items()]


def _write(job_dir: Path, found: Sequence[Findings], bad: Mapping[str, Sequence[str]]) -> None:
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
