"""Common code of all benchmarks: `--quick`, rounds, tables of medians and ratios, the environment
of peers, and the machine.

A benchmark measures all contestants (our code, peers and limits) in every round, because the speed
of a shared machine drifts. A result is the median over rounds of the ratio within a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from serving import PeerError

T = TypeVar("T")
Rates = dict[str, list[float]]
HERE = Path(__file__).parent
DATA = HERE / ".data"
"""Folder for the datasets of benchmarks. Git ignores this folder."""
PEERS = (
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
FFCV = "ffcv==1.0.2"
"""Requirement of FFCV. Its build needs a compiler and libraries: apt-get install libturbojpeg0-dev
libopencv-dev pkg-config."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes: under two minutes on 2 cores"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="smallest sizes, to check that the code runs; ignore the figures",
    )


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    add_sizes(parser)
    return parser.parse_args()


def sized(options: argparse.Namespace, *, full: T, quick: T, dry: T) -> T:
    """Return `dry` with --dry-run, `quick` with --quick, otherwise `full`."""
    return dry if options.dry_run else quick if options.quick else full


def peer_python() -> Path:
    """Return a Python interpreter with the peers' packages. The first call makes benchmarks/.venv.
    A peer whose package is missing fails later and has no row."""
    environment = HERE / ".venv"
    python, record = environment / "bin" / "python", environment / "packages.txt"
    wanted = "\n".join((*PEERS, FFCV))
    if not record.exists() or record.read_text() != wanted:
        uv = [sys.executable, "-m", "uv", "--quiet"]
        install = [*uv, "--no-config", "pip", "install", "--python", str(python)]
        subprocess.run([*uv, "venv", "--clear", str(environment)], check=True)
        if subprocess.run([*install, *PEERS], check=False).returncode:
            for peer in PEERS:  # at least one is not available
                subprocess.run([*install, peer], check=False)
        subprocess.run([*install, FFCV], check=False)
        record.write_text(wanted)
    return python


def rates(
    contestants: dict[str, Callable[[], float | tuple[float, float]]],
    *,
    rounds: int,
    warm_ups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    peers: Collection[str] = (),
) -> Rates:
    """Return units per second of every contestant, one value per round after the warm-ups. A
    contestant returns units, or (units, seconds). A peer that fails has no row."""
    found: Rates = {name: [] for name in contestants}
    for number in range(rounds + warm_ups):
        for name in list(found):
            began_s = clock()
            try:
                done = contestants[name]()
            except PeerError as failure:
                if name not in peers:
                    raise
                print(f"{name}: the peer failed and gets no row ({failure})", flush=True)
                del found[name]
                continue
            units, took_s = done if isinstance(done, tuple) else (done, clock() - began_s)
            if number >= warm_ups:
                found[name].append(units / took_s)
    return found


def repeated(
    work: Callable[[], object], *, times: int = 1, units: float = 1.0
) -> Callable[[], float]:
    """Return a contestant that runs `work` `times` times, waits for the GPU, and returns the number
    of units: `times` x `units`."""
    import torch

    def run() -> float:
        for _ in range(times):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return times * units

    return run


def ratio(found: Rates, name: str, against: str) -> float:
    """Return the median over rounds of `name`'s rate divided by `against`'s rate."""
    return statistics.median(a / b for a, b in zip(found[name], found[against], strict=True))


def ratios(found: Rates, name: str, against: Iterable[str]) -> str:
    return ", ".join(
        f"{ratio(found, name, each):.2f} x {each}" for each in against if each in found
    )


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text, then the machine, the commit and the load."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=132).print(table)
    print(f"{machine()}, commit {commit()}, load {os.getloadavg()[0]:.1f}", flush=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def report(title: str, found: Rates, *, unit: str, against: str, headline: str) -> None:
    rows = [
        (
            name,
            *(f"{each:,.0f}" for each in (statistics.median(values), min(values), max(values))),
            f"{ratio(found, name, against):.1%}",
        )
        for name, values in found.items()
    ]
    print_table(title, ("", f"median {unit}", "min", "max", f"of {against}"), rows)
    print(headline, flush=True)


def keep(figures: dict[str, float]) -> None:
    """Append the numbers to the file $BENCHMARK_FIGURES, which benchmarks/gpu.py reads."""
    with open(os.environ.get("BENCHMARK_FIGURES", os.devnull), "a") as file:
        print(json.dumps(figures), file=file)


def machine() -> str:
    import torch

    from pretrain.tracking.node import cpu_name

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores, no GPU"


def commit() -> str:
    """Return the commit, or the environment variable COMMIT for a copy without git. Changes of
    docs/measured.md are ignored, because benchmarks write to it."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/measured.md")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")
