"""What these tests build from and compare: pictures made by hand, folders of classes, all the bytes of a directory."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from data_prep.cli import main
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.publish import sealed, sha256_of, unsealed, write_json
from tests.moments import Strike
from tests.moments import wait_until as wait_until  # noqa: PLC0414 (for those who take the rest from here)

LOCK = ".lock"


def picture(*, seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Soft random colours: like a photograph, it survives JPEG and resizing."""
    knots = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(knots).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def webp(image: Image.Image) -> bytes:
    """Lossless, whatever PIL was built with."""
    data = cv2.imencode(".webp", np.asarray(image)[..., [2, 1, 0, 3][: len(image.mode)]], [cv2.IMWRITE_WEBP_QUALITY, 101])
    return bytes(data[1])


def tar_of(
    files: dict[str, bytes] | list[tuple[str, bytes]], *, kind: int = tarfile.GNU_FORMAT, folder: str = "", owner: str = ""
) -> bytes:
    """By tarfile, the folder first."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind, encoding="utf-8", errors="surrogateescape") as archive:
        if folder:
            info = tarfile.TarInfo(folder)
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        for name, data in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size, info.uname = len(data), owner
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_classes(root: Path, counts: dict[str, int]) -> Path:
    """`counts[class]` different pictures in each class folder."""
    numbers = ((name, number) for name, count in counts.items() for number in range(count))
    return write_files(
        root, {f"{name}/{number:03d}.jpg": encoded(picture(seed=seed)) for seed, (name, number) in enumerate(numbers)}
    )


def build(source: Path | str, out: Path, *overrides: str) -> int:
    """The exit code of the real command on a folder of classes."""
    words = [f"source.path={source}", "image_size=16", "num_workers=1", *overrides]
    return main(["build", "--source", "folder", "--out", str(out), *words])


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As if the tool itself had written it so: sealed again."""
    path = directory / MANIFEST_NAME
    tree = unsealed(json.loads(path.read_bytes()))
    change(tree)
    write_json(path, sealed(tree))


def replace_index(directory: Path, rows: np.ndarray, *, split: str = "train", shard: int = 0) -> None:
    """As if the tool itself had written it so."""
    stored = load_manifest(directory).splits[split].shards[shard]
    np.save(directory / stored.index_file, rows)
    digest = sha256_of(directory / stored.index_file)
    change_manifest(directory, lambda tree: tree["splits"][split]["shards"][shard].update(index_sha256=digest))


def started(*words: str, strike: Strike | None = None) -> AbstractContextManager[subprocess.Popen[str]]:
    """`data_prep WORDS` in a process group of its own; whatever is left of the group ends with the block."""
    if strike is None:
        return _running(sys.executable, "-m", "data_prep", *words)
    return _running(sys.executable, "-m", "tests.moments", "data_prep", *words, **strike.environment)


HELD = """
import sys, time
from pathlib import Path
from data_prep.cli import main
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.publish import sealed, sha256_of, unsealed, write_json
from data_prep.build import build, tasks
write_shards, mark = build.write_shards, Path(sys.argv[1])

def held(*args, **kwargs):
    mark.touch()
    while mark.exists():
        time.sleep(0.01)
    return write_shards(*args, **kwargs)

build.write_shards = tasks.write_shards = held
sys.exit(main(sys.argv[2:]))
"""


@contextmanager
def held_at_work(mark: Path, *words: str) -> Iterator[None]:
    """`data_prep WORDS`, held between its plan and its first shard for the length of the block; then it has to finish."""
    with _running(sys.executable, "-c", HELD, str(mark), *words) as process:
        wait_until(mark.exists, lives=lambda: process.poll() is None)
        yield
        mark.unlink()
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said


@contextmanager
def _running(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def files_of(root: Path) -> dict[str, bytes]:
    """Everything that stands below `root`, but for locks."""
    found = {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"a directory"
        for path in sorted(root.rglob("*"))
        if path.name != LOCK
    }
    assert found, f"{root} is empty"
    return found
