"""What these tests build from and compare: pictures made by hand, folders of classes, all the bytes
of a directory."""

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
from tests.moments import Strike
from tests.moments import wait_until as wait_until  # noqa: PLC0414 (for those who take the rest from here)

LOCK = ".lock"


def picture(*, seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Soft random colors: like a photograph, it survives JPEG and resizing."""
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
    data = cv2.imencode(
        ".webp",
        np.asarray(image)[..., [2, 1, 0, 3][: len(image.mode)]],
        [cv2.IMWRITE_WEBP_QUALITY, 101],
    )
    return bytes(data[1])


def packed_tiff(
    image: Image.Image, pack: Callable[[bytes], bytes], compression: int, **options: Any
) -> bytes:
    """`image` as a TIFF of three compressed strips, whatever PIL was built with; its tags are those
    of the plain one."""
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
    """By tarfile, the folder first."""
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
    """`counts[class]` different pictures in each class folder."""
    numbers = ((name, number) for name, count in counts.items() for number in range(count))
    return write_files(
        root,
        {
            f"{name}/{number:03d}.jpg": encoded(picture(seed=seed))
            for seed, (name, number) in enumerate(numbers)
        },
    )


def build(source: Path | str, out: Path, *overrides: str) -> int:
    """The exit code of the real command on a folder of classes."""
    words = [
        f"source.path={source}",
        "image_size=16",
        "num_workers=1",
        "source.val_fraction=0",
        *overrides,
    ]
    return main(["build", "--source", "folder", "--out", str(out), *words])


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As if the tool itself had written it so: sealed again."""
    path = directory / MANIFEST_NAME
    tree = unsealed(json.loads(path.read_bytes()))
    change(tree)
    write_json(path, sealed(tree))
    for of_wids in directory.glob("*-wids.json"):  # which lists the shards as they were
        of_wids.unlink()


def replace_index(
    directory: Path, rows: np.ndarray, *, split: str = "train", shard: int = 0
) -> None:
    """As if the tool itself had written it so."""
    stored = load_manifest(directory).splits[split].shards[shard]
    np.save(directory / stored.index_file, rows)
    digest = sha256_of(directory / stored.index_file)
    change_manifest(
        directory, lambda tree: tree["splits"][split]["shards"][shard].update(index_sha256=digest)
    )


def fork() -> int:
    """As os.fork, which warns of threads; a child of ours needs none of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@dataclass(frozen=True)
class Child:
    """`data_prep WORDS` by one worker in a process forked from this one, which need not import
    anything anew."""

    pid: int
    log: Path

    def wait(self) -> int:
        """The exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def ended_well(self) -> bool:
        assert self.wait() == 0, self.said()
        return True

    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def forked(log: Path, *words: str, prepare: Callable[[], object] = lambda: None) -> Iterator[Child]:
    """The child prepares itself, runs, and writes what it reports to `log`; it ends with the
    block."""
    log.write_text("")
    pid = fork()
    if pid == 0:
        code = 99
        try:
            os.closerange(3, 1024)  # or it would hold the locks that this process holds
            sys.stdout = sys.stderr = open(log, "a", buffering=1)
            prepare()
            code = main([*words, "num_workers=1"])
        finally:
            os._exit(code)
    try:
        yield Child(pid, log)
    finally:
        with suppress(ChildProcessError):  # it has been waited for
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@contextmanager
def held_at_work(mark: Path, *words: str) -> Iterator[None]:
    """`data_prep WORDS`, held between its plan and its first shard for the length of the block;
    then it has to finish."""
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
    """`data_prep WORDS` in a process group of its own; whatever is left of the group ends with the
    block."""
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
    """Everything that stands below `root`, but for locks."""
    found = {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"a directory"
        for path in sorted(root.rglob("*"))
        if path.name != LOCK
    }
    assert found, f"{root} is empty"
    return found
