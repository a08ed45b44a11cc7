"""Inputs of these tests: synthetic images, folders of classes, and the files of a directory."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from data_prep.build import build as build_room
from data_prep.build import tasks
from data_prep.cli import main
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.publish import sealed, sha256_of, unsealed, write_json
from tests.moments import Strike, wait_until

LOCK = ".lock"


def picture(*, seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Return soft random colors: like a photograph, they survive JPEG and resizing."""
    knots = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(knots).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def webp(image: Image.Image) -> bytes:
    """Return a lossless WebP, even if PIL was built without WebP."""
    data = cv2.imencode(
        ".webp",
        np.asarray(image)[..., [2, 1, 0, 3][: len(image.mode)]],
        [cv2.IMWRITE_WEBP_QUALITY, 101],
    )
    return bytes(data[1])


def packed_tiff(
    image: Image.Image, pack: Callable[[bytes], bytes], compression: int, **options: Any
) -> bytes:
    """Return `image` as a TIFF of three compressed strips, even if PIL has no such compression. It
    has the tags of the uncompressed TIFF."""
    plain = Image.open(io.BytesIO(encoded(image, "TIFF", strip_size=1 << 30, **options)))
    directory, (offset,), (length,) = plain.tag_v2, plain.tag_v2[273], plain.tag_v2[279]
    rows, row = -(-image.height // 3), length // image.height
    pixels = plain.fp.getvalue()[offset : offset + length]
    packed = [pack(pixels[at : at + rows * row]) for at in range(0, length, rows * row)]
    starts = np.cumsum([0, *(len(strip) for strip in packed)])[:-1]
    directory[259], directory[278], directory[273], directory[279] = (
        compression,
        rows,
        tuple(starts),
        tuple(map(len, packed)),
    )
    return plain.tag_v2._get_ifh() + directory.tobytes(8) + b"".join(packed)


def tar_of(
    files: dict[str, bytes] | list[tuple[str, bytes]],
    *,
    kind: int = tarfile.GNU_FORMAT,
    folder: str = "",
    owner: str = "",
) -> bytes:
    """Return a tar by tarfile; the folder is its first member."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=kind, encoding="utf-8", errors="surrogateescape"
    ) as archive:
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
    """Write `counts[class]` different images into each class folder."""
    numbers = ((name, number) for name, count in counts.items() for number in range(count))
    return write_files(
        root,
        {
            f"{name}/{number:03d}.jpg": encoded(picture(seed=seed))
            for seed, (name, number) in enumerate(numbers)
        },
    )


def build(source: Path | str, out: Path, *overrides: str) -> int:
    """Run the real `build` on a folder of classes. Return its exit code."""
    words = [
        f"source.path={source}",
        "image_size=16",
        "num_workers=1",
        "source.val_fraction=0",
        *overrides,
    ]
    return main(["build", "--source", "folder", "--out", str(out), *words])


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and seal it, as if the program had written it."""
    path = directory / MANIFEST_NAME
    tree = unsealed(json.loads(path.read_bytes()))
    change(tree)
    write_json(path, sealed(tree))
    for of_wids in directory.glob("*-wids.json"):  # it lists the shards before the change
        of_wids.unlink()


def replace_index(directory: Path, rows: np.ndarray, *, shard: int = 0) -> None:
    """Replace an index of the split train, as if the program had written it."""
    stored = load_manifest(directory).splits["train"].shards[shard]
    np.save(directory / stored.index_file, rows)
    digest = sha256_of(directory / stored.index_file)
    change_manifest(
        directory, lambda tree: tree["splits"]["train"]["shards"][shard].update(index_sha256=digest)
    )


def fork() -> int:
    """Call os.fork without its warning about threads, which these child processes do not need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@dataclass(frozen=True)
class Child:
    """`data_prep WORDS` with one worker in a process forked from this one, without new imports."""

    pid: int
    log: Path

    def wait(self) -> int:
        """Return the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def ended_well(self) -> bool:
        assert self.wait() == 0, self.said()
        return True

    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def forked(log: Path, *words: str, prepare: Callable[[], object] = lambda: None) -> Iterator[Child]:
    """Run a child process until the end of the block: it calls `prepare`, runs the command, and
    logs its output to `log`."""
    log.write_text("")
    pid = fork()
    if pid == 0:
        code = 99
        try:
            os.closerange(3, 1024)  # otherwise the child would hold this process's locks
            sys.stdout = sys.stderr = open(log, "a", buffering=1)
            prepare()
            code = main([*words, "num_workers=1"])
        finally:
            os._exit(code)
    try:
        yield Child(pid, log)
    finally:
        with suppress(ChildProcessError):  # another call has waited for it
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@contextmanager
def held_at_work(mark: Path, *words: str) -> Iterator[None]:
    """Pause `data_prep WORDS` between its plan and its first shard during the block. The command
    must then finish."""
    write_shards = build_room.write_shards

    def held(*arguments: Any) -> Any:
        mark.touch()
        while mark.exists():
            time.sleep(0.01)
        return write_shards(*arguments)

    def prepare() -> None:
        build_room.write_shards = tasks.write_shards = held

    with forked(mark.with_suffix(".log"), *words, prepare=prepare) as child:
        wait_until(lambda: mark.exists() or "data_prep: " in child.said())
        yield
        mark.unlink()
        assert child.ended_well()


@contextmanager
def started(*words: str, strike: Strike | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start `data_prep WORDS` in its own process group, which ends with the block."""
    program = ("data_prep",) if strike is None else ("tests.moments", "data_prep")
    environment = os.environ | ({} if strike is None else strike.environment)
    process = subprocess.Popen(
        [sys.executable, "-m", *program, *words],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def files_of(root: Path) -> dict[str, bytes]:
    """Return the contents of all files below `root`, without locks."""
    found = {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"a directory"
        for path in sorted(root.rglob("*"))
        if path.name != LOCK
    }
    assert found, f"{root} is empty"
    return found
