"""Build a raw dataset of smooth noise: `make_data.py OUT [--images 98304] [--classes 11230] [--size 64]`."""

import argparse
import os
import subprocess
import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np

PER_JOB = 512


def write_images(job: tuple[str, int, int, int]) -> None:
    root, first, num_classes, size = job
    rng = np.random.default_rng(first)
    coarse = rng.integers(0, 128, (PER_JOB, size // 8, size // 8, 3), dtype=np.uint8)
    for number, blocks in enumerate(coarse, start=first):
        noise = rng.integers(0, 128, (size, size, 3), dtype=np.uint8)
        pixels = blocks.repeat(8, axis=0).repeat(8, axis=1) + noise
        path = Path(f"{root}/class-{number % num_classes:05d}/{number:07d}.ppm")
        path.write_bytes(b"P6\n%d %d\n255\n" % (size, size) + pixels.tobytes())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=98_304)
    parser.add_argument("--classes", type=int, default=11_230)
    parser.add_argument("--size", type=int, default=64)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    files = Path(f"{options.out}-files")
    if (options.out / "manifest.json").exists():
        return 0
    for number in range(options.classes):
        (files / f"class-{number:05d}").mkdir(parents=True, exist_ok=True)
    firsts = range(0, options.images, PER_JOB)
    with Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(
            write_images, [(str(files), first, options.classes, options.size) for first in firsts]
        )
    command = [sys.executable, "-m", "data_prep", "build", "--source", "folder", "--out", str(options.out)]  # fmt: skip
    settings = [f"source.path={files}", "source.val_share=0.12", f"image_size={options.size}", "encoding=raw", "samples_per_shard=4096"]  # fmt: skip
    return subprocess.run([*command, *settings], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
