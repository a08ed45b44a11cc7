"""What every benchmark shares: `--quick`, rounds taken in turn, a table of medians and ratios,
where and on what it ran.

A benchmark measures all its contestants in one run, one round after the other, because a shared
machine drifts; what counts is the ratio within a round, and its median over the rounds. Peers are
installed into an environment of the benchmark's own.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")
HERE = Path(__file__).parent
DATA = HERE / ".data"
"""Datasets that benchmarks make for themselves; ignored by git."""


PEERS = (
    "ffcv==1.0.2",
    "litdata==0.2.76",
    "mosaicml-streaming==0.10.0",
    "numpy==2.4.6",
    "opencv-python-headless==5.0.0.93",
    "pillow==13.0.0",
    "simplejpeg==1.9.0",
    "torch==2.11.0",
    "torchvision==0.26.0",
    "webdataset==1.0.2",
)
"""All packages that a peer may need. Versions are exact, so that a figure names what it was
measured against."""
FFCV_NEEDS = "apt-get install libturbojpeg0-dev libopencv-dev pkg-config"


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes: under two minutes on 2 cores"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="smallest sizes, to check that it runs: ignore its figures",
    )


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    add_sizes(parser)
    return parser.parse_args()


def sized(options: argparse.Namespace, *, full: T, quick: T, dry: T) -> T:
    """The value for the requested size."""
    return dry if options.dry_run else quick if options.quick else full


def peer_python() -> tuple[Path, set[str]]:
    """An interpreter with the peers, and the packages that could not be installed. The first call
    makes benchmarks/.venv."""
    environment = HERE / ".venv"
    python, record = environment / "bin" / "python", environment / "packages.txt"
    if record.exists() and record.read_text() == "\n".join(PEERS):
        return python, set()
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--clear", str(environment)], check=True)

    def install(*packages: str) -> bool:
        command = [*uv, "--no-config", "pip", "install", "--python", str(python), *packages]
        return subprocess.run(command, check=False).returncode == 0

    missing = set()
    if not install(*PEERS):  # one peer must not cost the others their rows
        missing = {package for package in PEERS if not install(package, "numpy==2.4.6")}
    record.write_text("\n".join(package for package in PEERS if package not in missing))
    names = {package.partition("==")[0] for package in missing}
    if "ffcv" in names:
        print(f"FFCV: could not be installed. It needs: {FFCV_NEEDS}")
    return python, names


def rates(
    contestants: dict[str, Callable[[], float | tuple[float, float]]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Units per second of every contestant, one measurement per round; each call returns how many
    units it did, with the seconds that count if these are not all of it."""
    for run in contestants.values():
        run()  # warm-up, not counted
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            began_s = clock()
            done = run()
            units, took_s = done if isinstance(done, tuple) else (done, clock() - began_s)
            found[name].append(units / took_s)
    return found


def ratio(found: dict[str, list[float]], name: str, against: str) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(found[name], found[against], strict=True))


def report(
    title: str, found: dict[str, list[float]], *, unit: str, against: str, headline: str
) -> None:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for column in ("", f"median {unit}", "min", "max", f"of {against}"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, values in found.items():
        share = f"{ratio(found, name, against):.1%}"
        table.add_row(
            name,
            f"{statistics.median(values):,.0f}",
            f"{min(values):,.0f}",
            f"{max(values):,.0f}",
            share,
        )
    Console(width=120).print(table)
    print(f"{machine()}, commit {commit()}")
    print(headline)


def keep(figures: dict[str, float]) -> None:
    """For benchmarks/gpu.py, which says in what file."""
    place = Path(os.environ.get("BENCHMARK_FIGURES", os.devnull))
    place.write_text(
        json.dumps((json.loads(place.read_text()) if place.is_file() else {}) | figures)
    )


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores, no GPU"


def commit() -> str:
    """COMMIT says it where a copy runs that is no checkout. The page that figures are written into
    makes no commit another."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/measured.md")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")
