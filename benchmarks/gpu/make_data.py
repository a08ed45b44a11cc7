"""A raw dataset as large as the time allows: `make_data.py OUT [--pictures 98304] [--classes 11230]
[--size 64]`, in the project.

Smooth noise in class folders (PPM), then the real `data_prep build`. Nothing is done where OUT is
finished already.
"""

import argparse
import os
import subprocess
import sys
import time
from multiprocessing import Pool
from pathlib import Path

import numpy as np


def write_some(job: tuple[str, int, int, int, int]) -> None:
    root, first, count, classes, size = job
    rng = np.random.default_rng(first)
    coarse = rng.integers(0, 256, (count, size // 8, size // 8, 3), dtype=np.uint8)
    for number, picture in enumerate(coarse, start=first):
        pixels = np.repeat(np.repeat(picture, 8, axis=0), 8, axis=1) // 2 + rng.integers(
            0, 128, (size, size, 3), dtype=np.uint8
        )
        path = f"{root}/class-{number % classes:05d}/{number:07d}.ppm"
        with open(path, "wb") as file:
            file.write(b"P6\n%d %d\n255\n" % (size, size) + pixels.tobytes())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pictures", type=int, default=98_304)
    parser.add_argument("--classes", type=int, default=11_230)
    parser.add_argument("--size", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if (options.out / "manifest.json").exists():
        print(f"{options.out} is there")
        return
    files, began_s = Path(f"{options.out}-files"), time.monotonic()
    for number in range(options.classes):
        (files / f"class-{number:05d}").mkdir(parents=True, exist_ok=True)
    jobs = [
        (str(files), first, min(512, options.pictures - first), options.classes, options.size)
        for first in range(0, options.pictures, 512)
    ]
    with Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(write_some, jobs, chunksize=1)
    drawn_s = time.monotonic() - began_s
    words = [
        f"source.path={files}",
        "source.val_share=0.12",
        f"image_size={options.size}",
        "encoding=raw",
        "samples_per_shard=4096",
    ]
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "build",
        "--source",
        "folder",
        "--out",
        str(options.out),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-400:], done.stderr[-800:] if done.returncode else "")
    print(
        f"{options.pictures:,} pictures drawn in {drawn_s:.0f} s, packed in"
        f" {time.monotonic() - began_s - drawn_s:.0f} s"
    )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
