"""What `prep.py` compares with, run by an interpreter that has the peers: one contestant per call,
its seconds on the last line.

    python prep_peers.py NAME FILES OUT NUM_WORKERS

Every peer turns the same files into 64-pixel squares (decode in full, central square, antialiased
resize) and writes them with their labels. The clock starts after the imports and the listing of the
files; starting worker processes is inside it.
"""

import io
import multiprocessing
import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SIZE = 64
CHUNK = 500
Item = tuple[str, int]


def listing(files: Path) -> list[Item]:
    classes = sorted(entry.name for entry in os.scandir(files))
    return [
        (f"{files}/{name}/{file}", label)
        for label, name in enumerate(classes)
        for file in sorted(entry.name for entry in os.scandir(files / name))
    ]


def with_cv2(path: str) -> np.ndarray:
    import cv2

    cv2.setNumThreads(1)
    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    small = cv2.resize(
        image[top : top + side, left : left + side], (SIZE, SIZE), interpolation=cv2.INTER_AREA
    )
    return cv2.cvtColor(small, cv2.COLOR_BGR2RGB)


def with_pil(path: str) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box))


def write_tar(job: tuple[str, list[Item], Callable[[str], np.ndarray]]) -> None:
    """As img2dataset's workers do: one shard per job, picture and label beside each other."""
    out, items, read = job
    with tarfile.open(out, "w") as archive:
        for number, (path, label) in enumerate(items):
            for extension, data in (
                ("ppm", b"P6\n64 64\n255\n" + read(path).tobytes()),
                ("cls", b"%d" % label),
            ):
                info = tarfile.TarInfo(f"{number:09d}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def tars(read: Callable[[str], np.ndarray], items: list[Item], out: Path, num_workers: int) -> None:
    jobs = [
        (f"{out}/{start:09d}.tar", items[start : start + CHUNK], read)
        for start in range(0, len(items), CHUNK)
    ]
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        for _ in pool.imap_unordered(write_tar, jobs):
            pass


class Indexed:
    def __init__(self, items: list[Item]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.items[index]
        return with_cv2(path), label


def ffcv(items: list[Item], out: Path, num_workers: int) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(out / "data.beton"), fields, num_workers=num_workers).from_indexed_dataset(
        Indexed(items)
    )


def write_mds(job: tuple[str, list[Item]]) -> None:
    from streaming import MDSWriter

    out, items = job
    columns = {"image": f"ndarray:uint8:{SIZE},{SIZE},3", "label": "int"}
    with MDSWriter(out=out, columns=columns, hashes=["sha1"]) as writer:
        for path, label in items:
            writer.write({"image": with_cv2(path), "label": label})


def mosaic(items: list[Item], out: Path, num_workers: int) -> None:
    """One writer per process, into directories that are merged, as its documentation says."""
    from streaming.base.util import merge_index

    jobs = [(str(out / str(rank)), items[rank::num_workers]) for rank in range(num_workers)]
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        pool.map(write_mds, jobs)
    merge_index(str(out), keep_local=True)


def to_sample(item: Item) -> dict[str, object]:
    return {"image": with_cv2(item[0]), "label": item[1]}


def litdata(items: list[Item], out: Path, num_workers: int) -> None:
    from litdata import optimize

    optimize(
        to_sample,
        items,
        str(out),
        chunk_bytes="64MB",
        num_workers=num_workers,
        start_method="fork",
        verbose=False,
    )


def decode_share(job: tuple[list[tuple[bytes, int, int]], object]) -> float:
    import simplejpeg

    images, barrier = job
    barrier.wait()  # type: ignore[attr-defined]
    began_s = time.perf_counter()
    for data, height, width in images:
        simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=1)
    return time.perf_counter() - began_s


def limit(items: list[Item], num_workers: int, scale: int) -> float:
    """libjpeg-turbo alone on bytes that are in memory, a process per core; the seconds of the
    slowest."""
    import simplejpeg

    images = []
    for path, _ in items:
        data = Path(path).read_bytes()
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        images.append((data, -(-height // scale), -(-width // scale)))
    half = simplejpeg.decode_jpeg(
        images[0][0], "RGB", min_height=images[0][1], min_width=images[0][2], min_factor=1
    )
    assert half.shape[:2] == images[0][1:], "this is not the scale"
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(num_workers), context.Queue()
    processes = [
        context.Process(
            target=lambda share: results.put(decode_share((share, barrier))),
            args=(images[rank::num_workers],),
        )
        for rank in range(num_workers)
    ]
    for process in processes:
        process.start()
    seconds = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return max(seconds)


def main() -> None:
    name, files, out, num_workers = (
        sys.argv[1],
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        int(sys.argv[4]),
    )
    items = listing(files)
    out.mkdir(parents=True)
    if name.startswith("limit"):
        print(f"\n{limit(items, num_workers, int(name.removeprefix('limit')))}")
        return
    import cv2  # noqa: F401
    import PIL.Image  # noqa: F401

    if name in ("ffcv", "litdata", "mosaic"):
        __import__({"ffcv": "ffcv.writer", "litdata": "litdata", "mosaic": "streaming"}[name])
    began_s = time.perf_counter()
    if name in ("pil", "cv2"):
        tars(with_pil if name == "pil" else with_cv2, items, out, num_workers)
    else:
        {"ffcv": ffcv, "mosaic": mosaic, "litdata": litdata}[name](items, out, num_workers)
    print(f"\n{time.perf_counter() - began_s}")


if __name__ == "__main__":
    main()
