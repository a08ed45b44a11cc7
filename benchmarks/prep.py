"""Throughput from a folder of photographs to shards, compared with other writers and libjpeg-turbo.

    .venv/bin/python benchmarks/prep.py [--quick | --dry-run]

Files are JPEGs of about 400 pixels, 4:2:0, quality 90, about 33 kB (images.py), in class folders
and in the page cache. All contestants convert them to raw 64-pixel squares on all cores:

  ours           `data_prep build` with index, hashes, statistics, manifest, fsync; JPEG drafts if possible
  ours, full     the same with draft=false: every JPEG decoded at full scale, like the peers
  the peers      DatasetWriter (FFCV), MDSWriter (MosaicML), optimize (litdata), and tars like img2dataset (peers.py)
  libjpeg-turbo  only decodes the bytes in memory, a process per core, at half scale like our drafts

The clock starts after the imports of a contestant, and includes the start of its worker processes.
Failed and missing peers have no row.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from frame import DATA, HERE, arguments, peer_python, rates, ratio, ratios, report, sized
from images import CORES, image_files
from serving import Answer, Server, Task

import data_prep.build.build  # before the clock
import data_prep.cli

PEERS = ("cv2 -> tars", "PIL -> tars", "FFCV", "MosaicML streaming", "litdata")
OUT = DATA / "prep-out"
NUM_NAMES = 6
"""Number of files with the same image, to have many files of few images."""
LIMIT = "libjpeg-turbo"
SERVE_BUILD = f"""
import sys
sys.path.append({str(HERE)!r})
from prep import build
from serving import serve
serve({{"build": build}})
"""
"""Code of the build process. It is a string, because worker processes import a main file."""


def photographs(num_different: int) -> Task:
    folder = DATA / f"photographs-{num_different}"
    files = image_files(folder, num_different, size=None, num_names=NUM_NAMES)
    return Task("photographs", str(files), num_different * NUM_NAMES, 64, 1, CORES)


def build(task: Task, *, out: str, settings: list[str]) -> Answer:
    words = ["build", "--source", "folder", "--out", out, f"source.path={task.files}", *settings]
    began_s = time.perf_counter()
    assert data_prep.cli.main(words) == 0
    return {"seconds": time.perf_counter() - began_s}


def ours(task: Task, *settings: str) -> Callable[[], tuple[float, float]]:
    return lambda: written((sys.executable, "-c", SERVE_BUILD), task, "build", settings=settings)


def written(
    command: tuple[str | Path, ...], task: Task, do: str, **words: object
) -> tuple[float, float]:
    """Write OUT in a new process; return (files, seconds)."""
    shutil.rmtree(OUT, ignore_errors=True)
    with Server(*command) as server:
        return task.num_samples, server.ask(do, task, out=str(OUT), **words)["seconds"]


def peak_memory_mb(files: str) -> float:
    """Return the peak of the total PSS of our build's processes in MB, measured ten times a second.
    PSS is private pages and a fraction of shared pages."""
    shutil.rmtree(OUT, ignore_errors=True)
    words = ["build", "--source", "folder", "--out", str(OUT), f"source.path={files}"]
    build = subprocess.Popen(
        [sys.executable, "-m", "data_prep", *words],
        cwd=HERE.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = 0
    while build.poll() is None:
        tree = psutil.Process(build.pid)
        try:
            processes = (tree, *tree.children(recursive=True))
            peak = max(peak, sum(each.memory_full_info().pss for each in processes))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        time.sleep(0.1)
    assert build.returncode == 0
    return peak / 1e6


def main() -> None:
    options = arguments(__doc__ or "")
    num_different, rounds = sized(options, full=(3000, 3), quick=(500, 1), dry=(80, 1))
    task, smaller = photographs(num_different), photographs(num_different // 4)
    kilobytes = np.mean([len(Path(path).read_bytes()) for path, _ in task.items()]) / 1000
    python = peer_python()
    with Server(sys.executable, HERE / "ours.py", LIMIT) as decoder:
        decoder.ask("run", task)  # reads the files

        def limit() -> tuple[float, float]:
            answer = decoder.ask("run", task)
            return answer["count"], answer["seconds"]

        def peer(name: str) -> Callable[[], tuple[float, float]]:
            return lambda: written((python, HERE / "peers.py", name), task, "write")

        contestants: dict[str, Callable[[], float | tuple[float, float]]] = {
            "ours": ours(task),
            "ours, full": ours(task, "draft=false"),
            "ours, 1 worker": ours(task, "num_workers=1"),
            **{name: peer(name) for name in PEERS},
            LIMIT: limit,
        }
        found = rates(contestants, rounds=rounds, warm_ups=0, peers=PEERS)
    fastest = max(
        found.keys() & {*PEERS}, default="ours", key=lambda name: statistics.median(found[name])
    )
    few_mb, many_mb = peak_memory_mb(smaller.files), peak_memory_mb(task.files)
    shutil.rmtree(OUT, ignore_errors=True)
    report(
        f"{task.num_samples:,} files, {kilobytes:.0f} kB, -> 64 px, {CORES} cores, {rounds} rounds",
        found,
        unit="images/s",
        against=LIMIT,
        headline=(
            f"data_prep build: {ratio(found, 'ours', fastest):.2f} x the fastest peer ({fastest}),"
            f" {ratio(found, 'ours', LIMIT):.0%} of libjpeg-turbo's decode at the same scale,"
            f" {CORES} workers {ratio(found, 'ours', 'ours, 1 worker'):.2f} x one;"
            f" {ratios(found, 'ours', PEERS)}"
        ),
    )
    print(
        f"peak memory of our build, all processes: {few_mb:,.0f} MB for"
        f" {smaller.num_samples:,} files, {many_mb:,.0f} MB for all"
    )


if __name__ == "__main__":
    main()
