"""Our loader, and the limits that it is held against, as contestants of `loader.py`; run by our own
interpreter.

ours            shards -> loader, augmented in its threads: what `pretrain train` does before its step
random copy     the same bytes in one tensor in memory, random rows of it into one buffer
libjpeg-turbo   the same JPEG bytes in memory, decoded one after another into one picture's buffer, on every core
"""

import multiprocessing
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.serving import Contestant, Task, serve
from data_prep.manifest import load_manifest
from pretrain.augment.augmentation import Augmentation, Normalisation
from pretrain.config import AugmentSettings
from pretrain.data.loader import Batches, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import open_split

PREFETCH, IDLE_S = 2, 0.02
"""Batches (three buffers go round then, which the cores' cache nearly holds), and how long a pause
says that others had a turn."""
RECIPE = AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8)


class Ours(Contestant):
    """One endless line of batches; a pass is as many as make up the samples. What was fetched ahead
    while others had their turn is thrown away, uncounted, when ours begins."""

    def open(self, task: Task, state: Any = None) -> Any:
        self.manifest = load_manifest(Path(task.shards))
        reader = open_split(Path(task.shards), self.manifest, "train")
        order = Order(
            min(task.num_samples, reader.num_samples), 1
        )  # of fewer than there are: that of a smaller split
        augmentation = self._augmentation(task)
        batches: Batches[torch.Tensor] = training_batches(
            reader,
            order,
            BatchPlan(task.batch_size, task.batch_size, 1),
            rank=0,
            consumed=state or 0,
            num_threads=task.cores,
            prefetch=PREFETCH,
            pin=False,
            finish=lambda batch: (
                augmentation.prepare(batch).images_BCHW if augmentation else batch.images_BHWC
            ),
        )
        self.asked_s = time.perf_counter()
        return task, batches

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        task, batches = loader
        if time.perf_counter() - self.asked_s > IDLE_S:
            for _ in range(PREFETCH):
                next(batches)
        for _ in range(task.num_samples // task.batch_size):
            batch = next(batches)
            self.asked_s = time.perf_counter()
            yield batch

    def state(self, loader: Any, num_consumed: int) -> Any:  # noqa: ARG002
        return num_consumed

    def _augmentation(self, task: Task) -> Augmentation | None:
        if task.kind != "recipe":
            return None
        return Augmentation(
            RECIPE,
            seed=0,
            image_size=task.image_size,
            normalisation=Normalisation(self.manifest.channel_mean, self.manifest.channel_std),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )


def members(task: Task) -> Iterator[bytes]:
    """The pictures of the dataset as they are stored."""
    count = 0
    for path in sorted(Path(task.shards).glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".ppm", ".jpg")):
                    stored = tar.extractfile(member)
                    assert stored is not None
                    yield stored.read()
                    count += 1
                    if count == task.num_samples:
                        return


class RandomCopy(Contestant):
    """Threads of Python or of torch, whichever is faster: tried when it is opened."""

    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        num_pixels = 3 * task.image_size**2
        rows = torch.empty(task.num_samples, num_pixels, dtype=torch.uint8)
        for number, data in enumerate(members(task)):
            rows[number] = torch.frombuffer(bytearray(data[-num_pixels:]), dtype=torch.uint8)
        order = torch.randperm(task.num_samples, generator=torch.Generator().manual_seed(0)).split(
            task.batch_size
        )
        buffer = torch.empty(task.batch_size, num_pixels, dtype=torch.uint8)
        pool = ThreadPoolExecutor(task.cores)

        def by_torch(ids: torch.Tensor, num_threads: int) -> torch.Tensor:
            torch.set_num_threads(num_threads)
            return torch.index_select(rows, 0, ids, out=buffer)

        def by_python(ids: torch.Tensor, num_threads: int) -> torch.Tensor:
            torch.set_num_threads(1)
            parts = zip(ids.chunk(num_threads), buffer.chunk(num_threads), strict=True)
            list(pool.map(lambda part: torch.index_select(rows, 0, part[0], out=part[1]), parts))
            return buffer

        ways = [
            (copy, number) for copy in (by_torch, by_python) for number in range(1, task.cores + 1)
        ]
        return order, min(ways, key=lambda way: self._seconds(order, *way))

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        order, (copy, num_threads) = loader
        for ids in order:
            if len(ids) == len(order[0]):
                yield copy(ids, num_threads)

    def _seconds(self, order: Any, copy: Callable[..., object], num_threads: int) -> float:
        seconds = []
        for _ in range(3):
            began_s = time.perf_counter()
            for ids in order[:20]:
                copy(ids, num_threads)
            seconds.append(time.perf_counter() - began_s)
        return min(seconds)


class DecoderAlone(Contestant):
    """A process per core, all at work on their share of the bytes at the same time; a pass hands
    out only counts."""

    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        context = multiprocessing.get_context("fork")
        stored = list(members(task))
        pipes = []
        for rank in range(task.cores):
            here, there = context.Pipe()
            context.Process(
                target=decode_on_demand, args=(stored[rank :: task.cores], there), daemon=True
            ).start()
            pipes.append(here)
        return task, pipes

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        task, pipes = loader
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        yield torch.empty(task.num_samples, 0)


def decode_on_demand(stored: list[bytes], pipe: Any) -> None:
    height, width = simplejpeg.decode_jpeg_header(stored[0])[:2]
    buffer = np.empty((height, width, 3), np.uint8)
    while True:
        pipe.recv()
        for data in stored:
            simplejpeg.decode_jpeg(data, "RGB", buffer=buffer)
        pipe.send(None)


if __name__ == "__main__":
    serve({"ours": Ours(), "random copy": RandomCopy(), "libjpeg-turbo": DecoderAlone()})
