"""The pictures of `loader.py`: made by code, built into shards of ours, then written in every
peer's format. Once."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from multiprocessing import Pool
from pathlib import Path

from frame import DATA, HERE
from prep import photograph
from serving import PeerFailed, Task

CORES = len(os.sched_getaffinity(0))
NUM_CLASSES = 10
SAMPLES_PER_SHARD = 512
"""As in a large dataset, a batch takes few samples from each of many shards."""
QUALITY = 90


def make_file(job: tuple[Path, int, int, bool]) -> None:
    directory, number, size, as_jpeg = job
    image = photograph(number, shape=(size, size))
    stem = directory / f"class-{number % NUM_CLASSES}" / f"{number:06d}"
    if as_jpeg:
        image.save(
            stem.with_suffix(".jpg"), quality=QUALITY
        )  # PIL's default is 4:2:0, as most photographs are
    else:
        stem.with_suffix(".ppm").write_bytes(b"P6\n%d %d\n255\n" % (size, size) + image.tobytes())


def dataset(kind: str, *, num_samples: int, image_size: int) -> tuple[Path, Path]:
    """(shards, files): raw shards of PPM files, or shards that keep the bytes of JPEG files."""
    root = DATA / f"images-{kind}-{image_size}-{num_samples}"
    files, shards = root / "files", root / "shards"
    if not files.exists():
        temporary = root / "files.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        for number in range(NUM_CLASSES):
            (temporary / f"class-{number}").mkdir(parents=True)
        jobs = [(temporary, number, image_size, kind == "jpeg") for number in range(num_samples)]
        with Pool(CORES) as pool:
            pool.map(make_file, jobs, chunksize=100)
        temporary.rename(files)
    if not (shards / "manifest.json").exists():
        encoding = "keep" if kind == "jpeg" else "raw"
        per_shard = min(
            SAMPLES_PER_SHARD, num_samples // 8
        )  # each worker of a peer needs a shard, in a dry run, too
        words = [
            f"image_size={image_size}",
            f"encoding={encoding}",
            f"samples_per_shard={per_shard}",
        ]
        words.append("source.val_share=0")  # all images are training images, for every contestant
        command = [
            sys.executable,
            "-m",
            "data_prep",
            "build",
            "--source",
            "folder",
            "--out",
            str(shards),
        ]
        subprocess.run(
            [*command, f"source.path={files}", *words],
            cwd=HERE.parent,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return shards, files


def in_format_of(peer: str, task: Task, python: Path) -> None:
    """Writes the peer's own files where there are none yet."""
    if (Path(task.peers) / f"{peer}-{task.num_samples}").exists():
        return
    command = [str(python), str(HERE / "loader_formats.py"), peer, json.dumps(asdict(task))]
    environment = {**os.environ, "LITDATA_DISABLE_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise PeerFailed(f"{peer}: its files could not be written\n{done.stderr[-3000:]}")
