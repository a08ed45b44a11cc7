"""Writes a dataset of ours in the formats of the peers of `loader.py`: the same pictures, the same
order, the same JPEG bytes.

    python loader_formats.py NAME TASK_AS_JSON

Run by the peers' interpreter. Stock webdataset reads our shards as they are, ImageFolder the files
that they were built from.
"""

import json
import multiprocessing
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from serving import Task

Stored = tuple[bytes, int]


def stored(task: Task) -> Iterator[Stored]:
    """(bytes as stored, label) of every sample, in the order of the shards."""
    count = 0
    for path in sorted(Path(task.shards).glob("train-*.tar")):
        with tarfile.open(path) as tar:
            image = b""
            for member in tar:
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith((".ppm", ".jpg")):
                    image = data
                if not member.name.endswith(".cls"):
                    continue
                yield image, int(data)
                count += 1
                if count == task.num_samples:
                    return


def pixels(data: bytes, size: int) -> np.ndarray:
    """Of a binary PPM: its last bytes."""
    return np.frombuffer(data, np.uint8, offset=len(data) - 3 * size * size).reshape(size, size, 3)


class Indexed:
    """What FFCV's writer takes. For JPEG it hands out pictures that carry their stored bytes (see
    `ffcv`)."""

    def __init__(self, task: Task):
        self.task, self.samples = task, list(stored(task))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        data, label = self.samples[index]
        size = self.task.image_size
        if self.task.kind != "jpeg":
            return pixels(data, size), label
        import ffcv.fields.rgb_image as module

        # FFCV would compress the pixels once more: it is given the bytes that the others have
        module.encode_jpeg = lambda image, quality: np.frombuffer(data, np.uint8)
        return np.zeros((size, size, 3), np.uint8), label


def ffcv(task: Task, out: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    mode = "jpg" if task.kind == "jpeg" else "raw"
    fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
    DatasetWriter(str(out / "data.beton"), fields, num_workers=task.cores).from_indexed_dataset(
        Indexed(task)
    )


def mosaic(task: Task, out: Path) -> None:
    from streaming import MDSWriter

    size = task.image_size
    image = "bytes" if task.kind == "jpeg" else f"ndarray:uint8:{size},{size},3"
    with MDSWriter(out=str(out), columns={"image": image, "label": "int"}) as writer:
        for data, label in stored(task):
            writer.write(
                {"image": data if task.kind == "jpeg" else pixels(data, size), "label": label}
            )


def litdata(task: Task, out: Path) -> None:
    from litdata import optimize

    multiprocessing.set_start_method("fork", force=True)
    samples = Indexed(task)
    global _to_sample  # noqa: PLW0603 (litdata sends the function by name)

    def _to_sample(index: int) -> dict[str, object]:
        data, label = samples.samples[index]
        return {
            "image": data if task.kind == "jpeg" else pixels(data, task.image_size),
            "label": label,
        }

    optimize(
        _to_sample,
        list(range(len(samples))),
        str(out),
        chunk_bytes="16MB",
        num_workers=task.cores,
        start_method="fork",
        verbose=False,
    )


def main() -> None:
    name, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    out = Path(task.peers) / f"{name}-{task.num_samples}"
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    {"ffcv": ffcv, "mosaic": mosaic, "litdata": litdata}[name](task, temporary)
    temporary.rename(out)


if __name__ == "__main__":
    main()
