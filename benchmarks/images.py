"""Make images for benchmarks, and datasets of these images with `data_prep build`.

    .venv/bin/python benchmarks/images.py OUT [--images 98304] [--classes 11230] [--size 64]

The command builds a raw dataset. Images are noise with the spectrum of photographs.
"""

import argparse
import os
import shutil
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from frame import DATA
from PIL import Image

from data_prep.cli import main as data_prep

CORES = len(os.sched_getaffinity(0))
SAMPLES_PER_SHARD = 512
"""Samples per shard: few, so that a batch takes few samples from each of many shards, as in a large
dataset."""
STEEPNESS = 1.6


def photograph(number: int, height: int, width: int) -> Image.Image:
    """Return a noise image whose amplitude falls with frequency, as in photographs. Brightness
    varies more than color."""
    generator = np.random.default_rng(number)
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


def write_file(path: Path, size: int | None, num_names: int) -> None:
    number = int(path.stem)
    shape = (size, size) if size else ((300, 400), (400, 300), (400, 400))[number % 3]
    photograph(number, *shape).save(path, quality=90)  # JPEG: 4:2:0, like most photographs
    for name in range(1, num_names):
        os.link(path, path.with_stem(f"{path.stem}-{name}"))


def image_files(
    folder: Path,
    count: int,
    *,
    size: int | None,
    suffix: str = ".jpg",
    num_classes: int = 10,
    num_names: int = 1,
) -> Path:
    """Write images to class folders, each image under `num_names` file names. Without a size,
    images have about 400 pixels per side."""
    if not folder.exists():
        temporary = folder.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        classes = [temporary / f"class-{number:05d}" for number in range(num_classes)]
        for each in classes:
            each.mkdir(parents=True)
        paths = [classes[n % num_classes] / f"{n:07d}{suffix}" for n in range(count)]
        with Pool(CORES) as pool:
            pool.starmap(write_file, [(path, size, num_names) for path in paths], chunksize=100)
        temporary.rename(folder)
    return folder


def folder_dataset(
    out: Path, count: int, *, size: int, suffix: str = ".ppm", num_classes: int = 10
) -> Path:
    """Build a dataset of training images only, with raw pixels or the original JPEG bytes."""
    files = image_files(
        Path(f"{out}-files"), count, size=size, suffix=suffix, num_classes=num_classes
    )
    encoding = "raw" if suffix == ".ppm" else "keep"
    per_shard = min(SAMPLES_PER_SHARD, count // 8)  # each worker of a peer needs a shard
    words = [f"source.path={files}", "source.val_fraction=0", f"image_size={size}"]
    words += [f"encoding={encoding}", f"samples_per_shard={per_shard}"]
    assert data_prep(["build", "--source", "folder", "--out", str(out), *words]) == 0
    return out


def shapes_dataset(size: int, per_class: int, *, num_val: int = 1, encoding: str = "raw") -> Path:
    out = DATA / f"shapes-{size}-{per_class}-{num_val}-{encoding}"
    words = [f"source.num_train_per_class={per_class}", f"source.num_val_per_class={num_val}"]
    words += [f"source.image_size={size}", f"image_size={size}", f"encoding={encoding}"]
    assert data_prep(["build", "--source", "synthetic", "--out", str(out), *words]) == 0
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=98_304)
    parser.add_argument("--classes", type=int, default=11_230)
    parser.add_argument("--size", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    folder_dataset(options.out, options.images, size=options.size, num_classes=options.classes)
