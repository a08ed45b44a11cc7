"""Measures every node before training, and names those that would spoil it: `python -m
cluster.preflight JOB_DIR`, one per rank.

1. Each rank forks a process that touches GPU and disk; the rank itself only talks and waits, so
   that nothing that hangs can
silence it.
2. It sends its figures, as JSON, to rank 0 (a TCPStore without a process group: a rank that never
   comes holds up nobody).
3. If these are sound, links are measured: within each node, then each node with both its neighbours
   in a ring.
4. Rank 0 compares each node with the median of the others, prints a table, writes
   JOB_DIR/preflight.jsonl (a line for each rank)
and JOB_DIR/bad-nodes (NODE<TAB>reason), and sends all ranks their exit code.

Every wait has a limit, so each rank ends, whatever the others do. What most nodes have is not the
nodes' fault, and names nobody. Exit codes: 0 sound, or nothing that can be pinned on a node; 3 a
bad node was named; anything else: it could not be made.

Long because what a node measures, sends and is judged by is one program that runs alone.
"""

import argparse
import ctypes
import datetime
import errno
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.driver import known_driver, too_old
from cluster.slurm import in_columns
from pretrain.ranks.world import World, read_world

if TYPE_CHECKING:
    import torch

SOUND, FAILED, NAMED = 0, 1, 3
MIN_MATMUL_SHARE, MIN_LINK_SHARE = 0.8, 0.5
"""Of the median. GPUs of one model differ by a few percent, links that share switches by a third;
what is throttled, or has fallen back to TCP, differs by far more."""
MIN_NODES = 3
"""That a job must have before rates are judged: of two, either may be the exception."""
COMMON_SHARE = 2 / 3
"""Of the nodes. What so many have comes from outside: a wrong setting, the installation, a shared
disk."""
MIN_FREE_GB = 1.0
"""In the scratch directory: compiled kernels take some hundred MB, and a disk that full is rarely
ours alone."""
LINK_TIMEOUT_S, MARGIN_S = 40.0, 15.0
"""For one group of ranks; NCCL takes up to ten seconds to connect. And what a rank waits beyond the
time that another may take."""
PR_SET_PDEATHSIG = 1

Task = Callable[[Callable[[str], None]], dict[str, Any]]
Figures = dict[str, Any]
"""rank, node, device, tflops, free_gb, links (number of the other node -> GB/s, 0 where none came
about), faults: [kind, text]."""
CERTAIN = (
    "no gpu",
    "gpus",
    "gpu error",
    "wrong product",
    "no answer",
    "died",
    "scratch",
    "link within the node",
)
"""What names the node of a job with one node, where nothing can be compared. The rest may be
settings or the installation."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="preflight", description="Measures each node of a job; bad ones: JOB_DIR/bad-nodes."
    )
    parser.add_argument("job_dir", type=Path, metavar="JOB_DIR")
    parser.add_argument(
        "--nodes",
        default="",
        help="of the job, with commas between: where ranks are that never come",
    )
    parser.add_argument(
        "--read",
        action="append",
        default=[],
        metavar="PATH",
        help="what every node must see (repeatable)",
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # rank 0 reports what is amiss; torch's warnings would bury it
    try:
        return inspect(
            read_world(), options, timeout_s=float(os.environ.get("PREFLIGHT_TIMEOUT_S") or 60)
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # torch's store raises RuntimeError when rank 0 is gone
        print(f"preflight: could not be made: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return FAILED


def inspect(world: World, options: argparse.Namespace, *, timeout_s: float) -> int:
    """The pre-flight from one rank's point of view."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def receive(key: str, *, within_s: float) -> Any:
        store.wait([key], datetime.timedelta(seconds=within_s))
        return json.loads(store.get(key))

    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    nodes = options.nodes.split(",") if options.nodes else [node]
    began_s, come_s = (
        time.monotonic(),
        3 * timeout_s,
    )  # importing torch is hundreds of MB, which a whole job reads at once
    address, port, patience = (
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        datetime.timedelta(seconds=come_s),
    )
    store = TCPStore(
        address, port, is_master=world.is_first, wait_for_workers=False, timeout=patience
    )
    groups = rounds(world.num_ranks, world.num_local_ranks)
    links_s = len(groups) * (LINK_TIMEOUT_S + 2 * MARGIN_S)
    figures = {"rank": world.rank, "node": node, "faults": []}
    figures |= in_child(lambda doing: check_node(world, options.read, doing), timeout_s=timeout_s)
    store.set(f"found/{world.rank}", json.dumps(figures))
    if world.is_first:
        found = gather(
            store,
            "found",
            world,
            nodes,
            timeout_s=max(1.0, began_s + come_s + timeout_s - time.monotonic()),
        )
        store.set("measure-links", json.dumps(all(not each["faults"] for each in found)))
    if receive("measure-links", within_s=come_s + 2 * timeout_s + MARGIN_S) and groups:
        measured = measure_links(world, groups, on_gpu=figures.get("device", "CPU") != "CPU")
        figures["faults"] += measured.pop("faults")
        store.set(f"links/{world.rank}", json.dumps(figures | measured))
        if world.is_first:
            found = gather(store, "links", world, nodes, timeout_s=links_s)
    if not world.is_first:
        code = int(receive("exit", within_s=links_s + 3 * MARGIN_S))
        store.set(f"bye/{world.rank}", "0")
        return code
    bad, warnings = judge(found)
    _write(options.job_dir, found, bad)
    print("\n".join(report(found, bad, warnings, took_s=time.monotonic() - began_s)), flush=True)
    code = NAMED if bad else SOUND
    store.set("exit", json.dumps(code))
    came = [f"bye/{rank}" for rank in range(1, world.num_ranks) if store.check([f"found/{rank}"])]
    with suppress(RuntimeError):  # the store goes with this process
        store.wait(came, datetime.timedelta(seconds=5))
    return code


def gather(
    store: Any, topic: str, world: World, nodes: Sequence[str], *, timeout_s: float
) -> list[Figures]:
    """Of all ranks; one that has sent nothing in time has that as its fault."""
    with suppress(RuntimeError):
        store.wait(
            [f"{topic}/{rank}" for rank in range(world.num_ranks)],
            datetime.timedelta(seconds=timeout_s),
        )
    found = []
    for rank in range(world.num_ranks):
        if store.check([f"{topic}/{rank}"]):
            found.append(json.loads(store.get(f"{topic}/{rank}")))
        elif (
            len(nodes) * world.num_local_ranks == world.num_ranks
        ):  # one node is filled after the other
            fault = [
                "absent" if topic == "found" else "no answer",
                f"rank {rank} sent nothing within {timeout_s:.0f} s",
            ]
            found.append(
                {"rank": rank, "node": nodes[rank // world.num_local_ranks], "faults": [fault]}
            )
    return found


def in_child(task: Task, *, timeout_s: float) -> dict[str, Any]:
    """What a forked process returns. A hung driver, file system or collective hangs that one, in
    the kernel even: then, or if it dies or fails, the answer is a fault. The parent has imported
    torch and used nothing of it: CUDA does not survive a fork.
    """
    ours, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            answer = task(theirs.send)
        except Exception as error:  # noqa: BLE001 (whatever it is, rank 0 must know of it)
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            answer = {"faults": [["not checked", reason]]}
        with suppress(OSError):
            theirs.send(answer)
        os._exit(0)
    theirs.close()
    deadline_s, last = time.monotonic() + timeout_s, "its start"
    found: dict[str, Any] = {}
    try:
        while not found and ours.poll(max(0.0, deadline_s - time.monotonic())):
            message = ours.recv()
            last, found = (message, found) if isinstance(message, str) else (last, message)
        silent = ["no answer", f"no answer from {last} for {timeout_s:g} s"]
    except EOFError:
        silent = ["died", f"a process that used {last} has died"]
    # It gives the GPU's memory back before training asks for it. Killed, it is not waited for: a
    # driver may never let it go.
    grace_s = time.monotonic() + 5.0 * bool(found)
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() >= grace_s:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    return found or {"faults": [silent]}


# ---- one's own node: in the child
# -------------------------------------------------------------------------------------


def check_node(world: World, read: Sequence[str], doing: Callable[[str], None]) -> dict[str, Any]:
    """The first rank of a node looks at the directories for all of them."""
    import torch

    found: dict[str, Any] = {"faults": []}
    faults: list[list[str]] = found["faults"]
    if world.local_rank == 0:
        scratch = os.environ.get("NODE_SCRATCH") or "/tmp"
        doing(f"the directory {scratch}")
        found["free_gb"], fault = check_scratch(Path(scratch))
        faults += fault
        for path in read:
            doing(path)
            missing = (
                Path(path).parent
                if path.endswith("/manifest.json") and not Path(path).parent.exists()
                else path
            )
            if not Path(path).exists():
                faults.append(
                    [f"not there {path}", f"{missing} is not there: is its file system mounted?"]
                )
    doing("its GPUs")
    expected, visible = expected_gpus(os.environ), torch.cuda.device_count()
    if visible < expected:
        driver = known_driver({})
        old = too_old(driver, torch.version.cuda) if driver and torch.version.cuda else None
        why = "; ".join(old) if old else "see nvidia-smi there"
        why = (
            why
            if torch.version.cuda or torch.version.hip
            else "this torch is built without CUDA: make CUDA=lock"
        )
        text = (
            f"{visible or 'none'} of its {expected} GPUs visible to torch; {why}"
            " (PREFLIGHT_GPUS=ignore trains on CPUs)"
        )
        return found | {"faults": [*faults, ["gpus" if visible else "no gpu", text]]}
    gpu = world.gpu(visible)
    on_gpu, device = (
        gpu is not None,
        torch.device("cpu") if gpu is None else torch.device("cuda", gpu),
    )
    doing(f"GPU {gpu}" if on_gpu else "its CPU")
    if not on_gpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or world.num_cores))
    try:
        found["device"] = torch.cuda.get_device_name(device) if on_gpu else "CPU"
        wrong = wrong_product(device)
        faults += [["wrong product", wrong]] if wrong else []
        found["tflops"] = matmul_tflops(device)
    except RuntimeError as error:  # what CUDA reports, memory that cannot be had included
        faults.append(["gpu error", f"{device}: {str(error).strip().partition(chr(10))[0]}"])
    return found


def expected_gpus(environment: Mapping[str, str]) -> int:
    """That SLURM has given to this process. PREFLIGHT_GPUS=ignore: none, for a run on the CPUs of
    nodes with GPUs."""
    if environment.get("PREFLIGHT_GPUS") == "ignore":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    return len([word for word in visible.split(",") if word and word not in ("-1", "NoDevFiles")])


def check_scratch(directory: Path) -> tuple[float | None, list[list[str]]]:
    """Writes a file and removes it: GB that are free, and the fault if there is one. A wrong
    setting of NODE_SCRATCH has another kind than a bad disk, which is certain."""
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
        of_the_disk = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EUCLEAN)
        kind = "scratch" if error.errno in of_the_disk else "place of scratch"
        return None, [[kind, f"the scratch directory {directory} cannot be used: {error.strerror}"]]
    free_gb = round(space.f_bavail * space.f_frsize / 1e9, 2)
    if free_gb < MIN_FREE_GB:
        return free_gb, [
            ["scratch", f"{directory} has {free_gb:.2g} GB free (threshold {MIN_FREE_GB:g} GB)"]
        ]
    return free_gb, []


def wrong_product(device: "torch.device") -> str | None:
    """Of a product that integer arithmetic knows: with entries of -1, 0 and 1 every partial sum is
    exact, in bf16 too."""
    import torch

    size = 128
    numbers = torch.arange(size * size).reshape(size, size)
    a, b = numbers * 7 % 3 - 1, (numbers * 5 + 1) % 11 % 3 - 1
    exact = (a[:, :, None] * b[None, :, :]).sum(1)
    for dtype in (torch.float32, torch.bfloat16):
        got = multiply(a.to(device, dtype), b.to(device, dtype)).cpu().to(torch.int64)
        if not torch.equal(got, exact):
            count = int((got != exact).sum())
            return (
                f"{device}: {count:,} of {exact.numel():,} entries of a {dtype} product are wrong"
            )
    return None


def multiply(a: "torch.Tensor", b: "torch.Tensor") -> "torch.Tensor":
    return a @ b


def matmul_tflops(device: "torch.device") -> float:
    """Of a second of products in rounds of 0.1 s, of which the median counts: others use the
    machine, too, and the clock of a GPU that is too hot falls within tenths of a second."""
    import torch

    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")

    def round_s(count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            multiply(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    round_s(1)  # chooses a kernel
    count, took_s = max(1, round(0.1 / round_s(1))), list[float]()
    while sum(took_s) < 1.0:
        took_s.append(round_s(count))
    return float(f"{2 * size**3 * count / statistics.median(took_s) / 1e12:.4g}")


# ---- links
# --------------------------------------------------------------------------------------------------


def rounds(num_ranks: int, num_local: int) -> list[list[list[int]]]:
    """Groups of ranks that measure at the same time, none in two of them: the ranks of each node;
    then each node with both its neighbours in a ring, all its ranks at once, for each may have a
    network card of its own."""
    nodes = [
        list(range(first, min(first + num_local, num_ranks)))
        for first in range(0, num_ranks, num_local)
    ]
    pairs = list(zip(nodes, nodes[1:] + nodes[:1], strict=True)) if len(nodes) > 2 else []
    pairs = [(nodes[0], nodes[1])] if len(nodes) == 2 else pairs
    even = len(pairs) - len(pairs) % 2
    found = [[node for node in nodes if len(node) > 1]]
    for chosen in (pairs[0:even:2], pairs[1:even:2], pairs[even:]):
        found.append([list(ranks) for pair in chosen for ranks in zip(*pair, strict=False)])
    return [groups for groups in found if groups]


def measure_links(world: World, groups: list[list[list[int]]], *, on_gpu: bool) -> dict[str, Any]:
    """`links`: the other node -> GB/s; a fault where the ranks of the own node do not reach each
    other."""
    found: dict[str, Any] = {"links": {}, "faults": []}
    for number, chosen in enumerate(groups):
        group = next((ranks for ranks in chosen if world.rank in ranks), None)
        if group is None:
            continue
        task = partial(_all_reduce, world=world, group=group, name=f"round-{number}", on_gpu=on_gpu)
        answer = in_child(task, timeout_s=LINK_TIMEOUT_S + MARGIN_S)
        others = {rank // world.num_local_ranks for rank in group} - {
            world.rank // world.num_local_ranks
        }
        if others:
            found["links"][str(others.pop())] = answer.get("gb_per_s", 0.0)
        elif "gb_per_s" not in answer:
            reason = answer["faults"][0][1]
            found["faults"].append(
                ["link within the node", f"its ranks do not reach each other: {reason}"]
            )
    return found


def _all_reduce(
    doing: Callable[[str], None], *, world: World, group: list[int], name: str, on_gpu: bool
) -> dict[str, Any]:
    """`gb_per_s`: what each rank must send, by the second. The group is a world of its own for a
    moment, on rank 0's store: a link that does not come about fails its two nodes, and nobody
    else."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = (
        "1"  # a timeout is then an error here, not the end of the process
    )
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    doing("its network")
    gpu = world.gpu(torch.cuda.device_count()) if on_gpu else None
    backend, device = (
        ("gloo", torch.device("cpu")) if gpu is None else ("nccl", torch.device("cuda", gpu))
    )
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=LINK_TIMEOUT_S)
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    store = PrefixStore(f"{name}/{min(group)}", shared)
    distributed.init_process_group(
        backend, store=store, rank=group.index(world.rank), world_size=len(group), timeout=timeout
    )
    size = (128 if on_gpu else 4) * 2**20
    message = torch.zeros(size // 4, device=device)
    # Connects. Only a wait heeds the limit: torch passes over TORCH_NCCL_BLOCKING_WAIT for calls
    # that return when they are done.
    distributed.all_reduce(message, async_op=True).wait(timeout)
    took_s = []
    for _ in range(6):
        began_s = time.perf_counter()
        distributed.all_reduce(message)
        if on_gpu:
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    distributed.destroy_process_group()
    rate = 2 * (len(group) - 1) / len(group) * size / statistics.median(took_s) / 1e9
    return {"gb_per_s": float(f"{rate:.4g}")}


# ---- rank 0
# --------------------------------------------------------------------------------------------------


def judge(found: Sequence[Figures]) -> tuple[dict[str, list[str]], list[str]]:
    """Node -> what is wrong with it, and warnings: a pure function of the figures of all ranks."""
    nodes = list(dict.fromkeys(each["node"] for each in found))
    faults = list(
        dict.fromkeys((each["node"], kind, text) for each in found for kind, text in each["faults"])
    )
    for node in nodes:  # of one that is gone its neighbours have lost one link, it has lost both
        rates = [
            rate
            for each in found
            if each["node"] == node
            for rate in each.get("links", {}).values()
        ]
        faults += (
            [(node, "link", "it reaches none of its neighbours")]
            if rates and not any(rates)
            else []
        )
    faults += _slow(found, name="tflops", what="matmul TFLOP/s", min_share=MIN_MATMUL_SHARE)
    faults += _slow(found, name="link", what="GB/s between nodes", min_share=MIN_LINK_SHARE)
    bad: dict[str, list[str]] = {}
    warnings = []
    for kind in dict.fromkeys(kind for _, kind, _ in faults):
        same = [(node, text) for node, other, text in faults if other == kind]
        troubled = len({node for node, _ in same})
        is_common = (
            troubled >= COMMON_SHARE * len(nodes) and kind != "no gpu"
        )  # training would begin on their CPUs
        if is_common and not (len(nodes) == 1 and kind in CERTAIN):
            warnings.append(
                f"{troubled} of {len(nodes)} nodes have this, so no node is blamed: {same[0][1]}"
                f" ({same[0][0]})"
            )
        elif kind in ("not checked", "slow CPU"):
            warnings += [f"{node}: {text}" for node, text in same]
        else:
            for node, text in same:
                bad.setdefault(node, []).append(text)
    return bad, warnings


def _slow(
    found: Sequence[Figures], *, name: str, what: str, min_share: float
) -> list[tuple[str, str, str]]:
    """Each node's worst rank against the median of the other nodes' medians: its own figure never
    counts."""
    values: dict[str, list[float]] = {}
    devices = {each.get("device") for each in found}
    for each in found:
        value = (
            max(each.get("links", {}).values(), default=None) if name == "link" else each.get(name)
        )
        if value:
            values.setdefault(each["node"], []).append(value)
    if len(values) < MIN_NODES or len(devices) != 1:
        return []
    slow = []
    for node, own in values.items():
        share = min(own) / statistics.median(
            statistics.median(theirs) for other, theirs in values.items() if other != node
        )
        if share < min_share:
            kind = (
                "slow CPU" if devices == {"CPU"} else f"slow {name}"
            )  # CPUs are shared with others
            slow.append(
                (
                    node,
                    kind,
                    (
                        f"{min(own):.3g} {what}, {share:.0%} of the other nodes' median (threshold"
                        f" {min_share:.0%})"
                    ),
                )
            )
    return slow


def report(
    found: Sequence[Figures],
    bad: Mapping[str, Sequence[str]],
    warnings: Sequence[str],
    *,
    took_s: float,
) -> list[str]:
    """A line for each node (its worst rank), then each trouble in a line of its own."""
    rows = [
        ("node", "device", "matmul TFLOP/s", "between nodes GB/s", "scratch GB free", "verdict")
    ]
    for node in dict.fromkeys(each["node"] for each in found):
        ranks = [each for each in found if each["node"] == node]
        cells = [
            min((each[name] for each in ranks if each.get(name) is not None), default=None)
            for name in ("tflops", "free_gb")
        ]
        link = min(
            (max(each["links"].values()) for each in ranks if each.get("links")), default=None
        )
        figures = ["-" if value is None else f"{value:.3g}" for value in (cells[0], link, cells[1])]
        rows.append(
            (node, str(ranks[0].get("device", "-")), *figures, "bad" if node in bad else "sound")
        )
    lines = [
        f"preflight: {len(rows) - 1} nodes, {len(found)} ranks, {took_s:.0f} s",
        *in_columns(rows),
    ]
    lines += [f"preflight: warning: {text}" for text in warnings]
    return lines + [f"preflight: {node} is bad: {'; '.join(texts)}" for node, texts in bad.items()]


def _write(job_dir: Path, found: Sequence[Figures], bad: Mapping[str, Sequence[str]]) -> None:
    job_dir.mkdir(parents=True, exist_ok=True)
    about = {
        "start": int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1,
        "time": round(time.time(), 1),
    }
    with open(job_dir / "preflight.jsonl", "a") as log:
        log.writelines(json.dumps(about | each) + "\n" for each in found)
    with open(job_dir / "bad-nodes", "a") as names:
        names.writelines(
            f"{node}\t{' '.join('; '.join(texts).split())}\n" for node, texts in sorted(bad.items())
        )


if __name__ == "__main__":
    sys.exit(main())
