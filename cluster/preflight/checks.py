"""What a rank can find out alone about its GPU, directories and network settings. Runs in the worker, for all of it may hang.

A fault is half a sentence: "n2 is bad: ..." stands before it.
"""

import errno
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cluster.preflight.figures import (
    CPU,
    GPU_ERROR,
    GPUS,
    INTERFACE,
    NO_GPU,
    SCRATCH,
    SCRATCH_PLACE,
    SHARED,
    UNCHECKED,
    WRONG_PRODUCT,
    Disk,
    Fault,
    Figures,
)
from cluster.preflight.worker import Tell
from pretrain.ranks.world import World

PRODUCT_SIZE = 128
"""Of the product with a known answer. With entries of -1, 0 and 1 every partial sum is exact, in bf16 too."""
GPU_MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1024
"""Of the timed product: about 2 ms on a current GPU, 50 ms on a core."""
MATMUL_S = 1.0
"""How long products are timed: a GPU's clock falls within tenths of a second if it is too hot or short of power."""
ROUND_S = 0.1
"""Products are timed in rounds of this length; the median round counts, as others use the machine too."""
MANIFEST = "manifest.json"
"""The file of a dataset by which we look for it; what is missing is the dataset's directory, more often."""
DISK_TEST_BYTES = 16 * 2**20
OF_THE_DISK = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EUCLEAN)
"""Errors that a disk makes; others (no such place, no permission) are often those of a setting."""


def check_node(
    world: World,
    *,
    node: str,
    scratch: str,
    shared: Sequence[str],
    read: Sequence[str] = (),
    tell: Tell,
    environment: Mapping[str, str] = os.environ,
) -> Figures:
    """What a rank finds out alone. The first rank of a node writes to the disks, and looks for what is to be read, for all."""
    faults, disks = missing_interfaces(environment), dict[str, Any]()
    if world.local_rank == 0:
        tell(f"the directory {scratch}")
        disks["scratch"], error = check_directory(Path(scratch))
        if error is not None:
            kind = SCRATCH if error.errno in OF_THE_DISK else SCRATCH_PLACE
            faults.append(Fault(kind, f"the scratch directory {scratch} cannot be used: {error.strerror}"))
        written = []
        for path in shared:
            tell(f"the directory {path}", f"{SHARED} {path}")  # a server that stalls is no node's fault
            disk, error = check_directory(Path(path))
            written.append(disk)
            if error is not None:
                faults.append(Fault(f"{SHARED} {path}", f"{path} cannot be used: {error.strerror}"))
        disks["shared"] = tuple(written)
        for path in read:
            tell(path, f"{SHARED} {path}")
            unread = cannot_be_read(Path(path))
            if unread is not None:
                faults.append(Fault(f"{SHARED} {path}", unread))
    tell("its GPUs")
    device, missing = find_device(world, environment)
    num_threads = int(environment.get("OMP_NUM_THREADS") or world.num_cores)
    faults += missing
    if device is not None:
        tell(f"GPU {device.index}" if device.type == "cuda" else "its CPU")
    name, tflops = measure_device(device, faults, num_threads) if device is not None else ("", None)
    return Figures(
        rank=world.rank,
        node=node,
        local_rank=world.local_rank,
        num_local_ranks=world.num_local_ranks,
        device=name,
        matmul_tflops=tflops,
        faults=tuple(faults),
        **disks,
    )


# ---- the device ------------------------------------------------------------------------------------------------------


def expected_gpus(environment: Mapping[str, str]) -> int:
    """What SLURM has given to this process; a list for each task goes before the node's number. PREFLIGHT_GPUS=ignore: nothing
    is expected, for a run that is meant for the CPUs of nodes with GPUs."""
    if environment.get("PREFLIGHT_GPUS") == "ignore":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    return len([word for word in visible.split(",") if word and word not in ("-1", "NoDevFiles")])


def find_device(world: World, environment: Mapping[str, str]) -> tuple[torch.device | None, list[Fault]]:
    """The device that training will use, if there are as many as promised. Without a promise what is visible counts."""
    expected, visible = expected_gpus(environment), torch.cuda.device_count()
    if visible == 0 < expected:
        why = "see nvidia-smi there" if torch.version.cuda else "this torch is built without CUDA: sh install.sh"
        meant = "to train on its CPUs set PREFLIGHT_GPUS=ignore"
        return None, [Fault(NO_GPU, f"none of its {expected} GPUs is visible to torch; {why} ({meant})")]
    if visible < expected:
        return None, [
            Fault(GPUS, f"{visible} GPUs are visible, {expected} were given to the job; see nvidia-smi there")
        ]
    if 0 < visible <= world.local_rank:
        text = f"local rank {world.local_rank} has no GPU, {visible} are visible; start one rank per GPU, each of which sees all"
        return None, [Fault(UNCHECKED, text)]
    return (torch.device("cuda", world.local_rank) if visible else torch.device("cpu")), []


def measure_device(device: torch.device, faults: list[Fault], num_threads: int) -> tuple[str, float | None]:
    """Its name and its rate; `faults` are added to."""
    name = f"{CPU} x{num_threads}"
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            name = torch.cuda.get_device_name(device)
        wrong = wrong_product(device)
        if wrong is not None:
            faults.append(Fault(WRONG_PRODUCT, wrong))
        tflops, repeats = matmul_tflops(device)
        if not repeats:
            faults.append(Fault(WRONG_PRODUCT, f"{device}: the same product gave two results under load"))
        return name, tflops
    except RuntimeError as error:  # what CUDA reports, memory that cannot be had included
        faults.append(Fault(GPU_ERROR, f"{device}: {str(error).strip().partition(chr(10))[0]}"))
        return name, None


def wrong_product(device: torch.device) -> str | None:
    """A product whose answer integer arithmetic on the CPU knows; None if the device agrees."""
    a = torch.arange(PRODUCT_SIZE * PRODUCT_SIZE).reshape(PRODUCT_SIZE, PRODUCT_SIZE) * 7 % 3 - 1
    b = (torch.arange(PRODUCT_SIZE * PRODUCT_SIZE).reshape(PRODUCT_SIZE, PRODUCT_SIZE) * 5 + 1) % 11 % 3 - 1
    exact = (a[:, :, None] * b[None, :, :]).sum(1)
    for dtype in (torch.float32, torch.bfloat16):
        got = product(a.to(device, dtype), b.to(device, dtype)).cpu().to(torch.int64)
        if not torch.equal(got, exact):
            count = int((got != exact).sum())
            return f"{device}: {count:,} of {exact.numel():,} entries of a {dtype} product are wrong"
    return None


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def matmul_tflops(device: torch.device) -> tuple[float, bool]:
    """The rate, and whether the first and the last product are equal to the bit."""
    on_gpu = device.type == "cuda"
    size, dtype = (GPU_MATMUL_SIZE, torch.bfloat16) if on_gpu else (CPU_MATMUL_SIZE, torch.float32)
    numbers = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randint(-8, 9, (size, size), generator=numbers, dtype=torch.int8, device=device).to(dtype) for _ in "ab"
    )
    last = torch.empty(size, size, dtype=dtype, device=device)

    def round_s(count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b, out=last)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    round_s(1)  # chooses a kernel
    first = last.clone()
    count = max(1, round(ROUND_S / round_s(1)))
    rounds: list[float] = []
    while sum(rounds) < MATMUL_S:
        rounds.append(round_s(count))
    return 2 * size**3 * count / statistics.median(rounds) / 1e12, torch.equal(first, last)


# ---- directories -----------------------------------------------------------------------------------------------------


def check_directory(directory: Path) -> tuple[Disk, OSError | None]:
    """Writes, reads back and removes a file."""
    content = os.urandom(2**20) * (DISK_TEST_BYTES // 2**20)
    path = directory / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        try:
            with open(path, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                took_s = time.perf_counter() - began_s
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read it from the disk, not from memory
            if path.read_bytes() != content:
                raise OSError(errno.EIO, "it gave other bytes back than were written")
        finally:
            with suppress(OSError):
                path.unlink()
        space = os.statvfs(directory)
    except OSError as error:
        return Disk(str(directory)), error
    free_gb = space.f_bavail * space.f_frsize / 1e9
    return Disk(str(directory), round(len(content) / took_s / 1e6, 1), round(free_gb, 2)), None


def cannot_be_read(path: Path) -> str | None:
    """Why; None if it can be. Nobody means to read an empty directory: it is where a file system is not mounted."""
    try:
        if path.is_dir():
            return None if any(path.iterdir()) else f"{path} is empty: is its file system mounted?"
        with open(path, "rb") as file:
            file.read(1)
        return None
    except FileNotFoundError:
        missing = path.parent if path.name == MANIFEST and not path.parent.exists() else path
        return f"{missing} is not there: is its file system mounted?"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


# ---- settings --------------------------------------------------------------------------------------------------------


def missing_interfaces(environment: Mapping[str, str]) -> list[Fault]:
    """NCCL takes beginnings of names (=NAME for the whole name, ^NAME for all others), gloo whole names."""
    have = [name for _, name in socket.if_nameindex()]
    faults = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        if not value or value.startswith("^"):
            continue
        is_whole = variable.startswith("GLOO") or value.startswith("=")
        wanted = value.removeprefix("=").split(",")
        fits = [any(name == want if is_whole else name.startswith(want) for name in have) for want in wanted]
        if not (all(fits) if variable.startswith("GLOO") else any(fits)):
            text = (
                f"{variable}={value}, but its interfaces are {', '.join(have)}; set the right one in cluster/site.env"
            )
            faults.append(Fault(INTERFACE, text))
    return faults
