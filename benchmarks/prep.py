"""How fast does a folder of photographs become shards? Against other writers, and against
libjpeg-turbo's decode alone.

    .venv/bin/python benchmarks/prep.py [--quick | --dry-run]

Files: JPEGs of about 400 pixels, 4:2:0, quality 90, about 33 kB, made by code (noise with the
spectrum of photographs) in class folders; all are read before anything is measured. Everybody makes
raw 64-pixel squares of them on all cores. Contestants:
  ours           `data_prep build`: with index, hashes, statistics, manifest, fsync; drafts where it may
  ours, full     the same with draft=false: every JPEG decoded in full, as the peers do
  cv2, PIL tars  a process pool that decodes with cv2 (or PIL) and writes tars, as img2dataset does
  FFCV, mosaic, litdata   DatasetWriter, MDSWriter (one per process), optimize; all with cv2, the faster decoder
  limits         libjpeg-turbo alone, a process per core, bytes in memory, nothing resized or written: at half scale (what our
                 drafts of these files are decoded at) and in full
The clock is in the process that does the work, after its imports; starting worker processes is
inside it, for everyone. A peer that cannot be installed, or fails, has no row.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import psutil
from frame import DATA, HERE, arguments, peer_python, ratio, report, sized
from PIL import Image

PEERS = {
    "cv2 tars": ("cv2", "opencv-python-headless"),
    "PIL tars": ("pil", "pillow"),
    "FFCV": ("ffcv", "ffcv"),
    "mosaic": ("mosaic", "mosaicml-streaming"),
    "litdata": ("litdata", "litdata"),
    "limit, half": ("limit2", "simplejpeg"),
    "limit, full": ("limit1", "simplejpeg"),
}
"""What each is in prep_peers.py, and the package that it needs."""
CORES = len(os.sched_getaffinity(0))
OUT = DATA / "prep-out"
NUM_CLASSES, NUM_LINKS = 10, 6
STEEPNESS = 1.6


def photograph(number: int, *, shape: tuple[int, int] | None = None) -> Image.Image:
    """Noise whose amplitude falls with frequency; brightness varies more than colour. `shape` is
    (height, width)."""
    generator = np.random.default_rng(number)
    height, width = shape or ((300, 400), (400, 300), (400, 400))[number % 3]
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    planes = []
    for spread in (55, 14, 14):
        plane = np.fft.irfft2(
            generator.standard_normal((*frequency.shape, 2)) @ (1, 1j) / frequency**STEEPNESS,
            (height, width),
        )
        planes.append(plane / plane.std() * spread)
    y, cb, cr = planes
    rgb = np.stack([y + 1.4 * cr, y - 0.34 * cb - 0.71 * cr, y + 1.77 * cb], axis=-1) + 125
    return Image.fromarray(rgb.clip(0, 255).astype(np.uint8))


def make_file(job: tuple[Path, int]) -> None:
    directory, number = job
    path = directory / f"class-{number % NUM_CLASSES}" / f"{number:06d}.jpg"
    photograph(number).save(path, quality=90)
    for link in range(1, NUM_LINKS):
        os.link(path, path.with_stem(f"{path.stem}-{link}"))


def photographs(num_different: int) -> Path:
    """`num_different` pictures, each under several names: what is measured needs many files, not
    many pictures."""
    directory = DATA / f"photographs-{num_different}"
    if not directory.exists():
        temporary = directory.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        for number in range(NUM_CLASSES):
            (temporary / f"class-{number}").mkdir(parents=True)
        with Pool(CORES) as pool:
            pool.map(
                make_file, [(temporary, number) for number in range(num_different)], chunksize=20
            )
        temporary.rename(directory)
    return directory


def ours(files: Path, *settings: str, num_workers: int = CORES) -> Callable[[], float]:
    words = [
        "build",
        "--source",
        "folder",
        "--out",
        str(OUT),
        f"source.path={files}",
        f"num_workers={num_workers}",
    ]
    code = (
        "import sys, time; from data_prep.cli import main; import data_prep.build.build; began_s ="
        " time.perf_counter(); code = main(sys.argv[1:]); print(); print(time.perf_counter() -"
        " began_s); sys.exit(code)"
    )
    return lambda: seconds_of([sys.executable, "-c", code, *words, *settings])


def seconds_of(command: list[str]) -> float:
    shutil.rmtree(OUT, ignore_errors=True)
    run = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(command)}\n{run.stderr[-2000:]}")
    return float(run.stdout.splitlines()[-1])


def peak_memory_mb(files: Path) -> float:
    """Of our build, all its processes together: the private pages and a share of the common ones,
    looked at ten times a second."""
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
        tree, now = psutil.Process(build.pid), 0
        try:
            for process in (tree, *tree.children(recursive=True)):
                now += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        peak = max(peak, now)
        time.sleep(0.1)
    assert build.returncode == 0
    return peak / 1e6


def main() -> None:
    options = arguments(__doc__ or "")
    num_different, rounds = sized(options, full=(3000, 3), quick=(500, 1), dry=(80, 1))
    files, more_files = photographs(num_different), photographs(num_different // 4)
    num_bytes = [path.stat().st_size for path in sorted(files.rglob("*.jpg")) if path.read_bytes()]
    python, missing = peer_python()
    able = [name for name, (_, package) in PEERS.items() if package not in missing]
    runs = {
        "ours": ours(files),
        "ours, full": ours(files, "draft=false"),
        **({} if CORES == 1 else {"ours, 1 worker": ours(files, num_workers=1)}),
    }
    for name in able:
        command = [
            str(python),
            str(HERE / "prep_peers.py"),
            PEERS[name][0],
            str(files),
            str(OUT),
            str(CORES),
        ]
        runs[name] = lambda command=command: seconds_of(command)  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in list(found):
            try:
                found[name].append(len(num_bytes) / runs[name]())
            except SystemExit as failure:
                if name not in PEERS or name.startswith("limit"):
                    raise
                print(
                    f"{name}: no row, since it failed:"
                    f" {str(failure).strip().splitlines()[-1][-200:]}",
                    flush=True,
                )
                del found[name]
                able.remove(name)
    peers = [name for name in able if not name.startswith("limit")]
    fastest = max(peers, key=lambda name: statistics.median(found[name]))
    headline = (
        f"data_prep build: {ratio(found, 'ours', fastest):.2f} x the fastest peer ({fastest}), "
        f"{ratio(found, 'ours', 'limit, half'):.0%} of libjpeg-turbo's decode at the same scale"
    )
    if CORES > 1:
        headline += f", {CORES} workers {ratio(found, 'ours', 'ours, 1 worker'):.2f} x one"
    few, many = peak_memory_mb(more_files), peak_memory_mb(files)
    title = (
        f"{len(num_bytes):,} files, {np.mean(num_bytes) / 1000:.0f} kB, -> 64 px, {CORES} cores,"
        f" {rounds} rounds"
    )
    report(title, found, unit="images/s", against="limit, half", headline=headline)
    print(
        f"peak memory of our build, all processes: {few:,.0f} MB for {len(num_bytes) // 4:,} files,"
        f" {many:,.0f} MB for all"
    )
    print(", ".join(f"{ratio(found, 'ours', name):.2f} x {name}" for name in peers))
    for name in sorted(set(PEERS) - set(able)):
        print(f"{name}: not run")
    shutil.rmtree(OUT, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
