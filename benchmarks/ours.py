"""Our code and its limits as contestants of loader.py, stores.py and prep.py.

`python ours.py NAME` answers requests (serving.py) as one of these contestants:

ours            batches from local or remote shards, augmented in the loader's threads, as in `pretrain train`
random copy     copies random rows of one tensor with the same pixels to one buffer
libjpeg-turbo   decodes the same JPEG bytes from memory on every core; photographs at half scale, like our drafts
four readers    reads the shards over four connections, to measure the throughput of the link
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import fsspec.implementations.http
import numpy as np
import simplejpeg
import torch
from serving import CACHE_GB, Passes, Task, serve

from data_prep.manifest import load_manifest
from pretrain.augment.augmentation import Augmentation, Normalization
from pretrain.config import AugmentSettings, ReadingSettings
from pretrain.data.datasets import Part
from pretrain.data.loader import Batches, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader, open_store

assert aiohttp, fsspec.implementations.http  # imported before the clock starts
PREFETCH, IDLE_S = 2, 0.02
"""Number of batches to prefetch (three buffers nearly fit into the CPU cache), and the pause in
seconds after which prefetched batches are dropped."""
BLOCKS = (512, 8)
"""Samples per block and blocks per window of the block shuffle."""
RECIPE = AugmentSettings(crop_scale=(0.4, 1.0), mixup_alpha=0.8)
NUM_CONNECTIONS = 4


class Loader:
    """Our loader as an endless iterator of batches. A pass has as many batches as the samples fill.
    Batches that were prefetched while other contestants ran are dropped."""

    def open(self, task: Task) -> Any:
        settings = ReadingSettings(
            dataset=task.url or task.shards, cache_dir=task.cache or None, cache_gb=CACHE_GB
        )
        directory = settings.directory
        manifest = load_manifest(directory)
        part = Part(directory, manifest, "train")
        reader = ShardReader([part], store=open_store(settings, [part]))
        num_samples = min(task.num_samples, reader.num_samples)
        augmentation = Augmentation(
            RECIPE,
            seed=0,
            image_size=task.image_size,
            normalization=Normalization(manifest.channel_mean, manifest.channel_std),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        is_augmented = task.kind == "recipe"
        batches: Batches[torch.Tensor] = training_batches(
            reader,
            Order(num_samples, 1, task.shuffle, *BLOCKS),
            BatchPlan(task.batch_size, task.batch_size, 1),
            rank=0,
            consumed=0,
            num_threads=task.cores,
            prefetch=PREFETCH,
            pin=False,
            finish=lambda batch: (
                augmentation.prepare(batch).images_BCHW if is_augmented else batch.images_BHWC
            ),
        )
        self.asked_s = time.perf_counter()
        return num_samples // task.batch_size, batches

    def batches(self, opened: Any) -> Iterator[torch.Tensor]:
        num_batches, batches = opened
        if time.perf_counter() - self.asked_s > IDLE_S:
            for _ in range(PREFETCH):
                next(batches)
        for _ in range(num_batches):
            batch = next(batches)
            self.asked_s = time.perf_counter()
            yield batch


class RandomCopy:
    """Copy random rows with threads of Python or of torch; `open` chooses the faster one."""

    def open(self, task: Task) -> Any:
        num_pixels = 3 * task.image_size**2
        rows = torch.empty(task.num_samples, num_pixels, dtype=torch.uint8)
        for number, (path, _) in enumerate(task.items()):
            data = bytearray(Path(path).read_bytes()[-num_pixels:])
            rows[number] = torch.frombuffer(data, dtype=torch.uint8)
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

    def batches(self, opened: Any) -> Iterator[torch.Tensor]:
        order, (copy, num_threads) = opened
        for ids in order:
            yield copy(ids, num_threads)

    def _seconds(self, order: Any, copy: Callable[..., object], num_threads: int) -> float:
        seconds = []
        for _ in range(3):
            began_s = time.perf_counter()
            for ids in order[:20]:
                copy(ids, num_threads)
            seconds.append(time.perf_counter() - began_s)
        return min(seconds)


class Decoder:
    """Decode with one process per core. A pass sends one message to each process."""

    def open(self, task: Task) -> Any:
        context, pipes = multiprocessing.get_context("fork"), []
        stored = [Path(path).read_bytes() for path, _ in task.items()]
        scale = 2 if task.kind == "photographs" else 1
        for rank in range(task.cores):
            here, there = context.Pipe()
            words = (stored[rank :: task.cores], scale, there)
            context.Process(target=decode_on_demand, args=words, daemon=True).start()
            pipes.append(here)
        return task, pipes

    def batches(self, opened: Any) -> Iterator[torch.Tensor]:
        task, pipes = opened
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        yield torch.empty(task.num_samples, 0)


def decode_on_demand(stored: list[bytes], scale: int, pipe: Any) -> None:
    sizes = [
        tuple(-(-side // scale) for side in simplejpeg.decode_jpeg_header(data)[:2])
        for data in stored
    ]
    buffers = {size: np.empty((*size, 3), np.uint8) for size in sizes}
    while True:
        pipe.recv()
        for data, size in zip(stored, sizes, strict=True):
            simplejpeg.decode_jpeg(
                data,
                "RGB",
                min_height=size[0],
                min_width=size[1],
                min_factor=1,
                buffer=buffers[size],
            )
        pipe.send(None)


class Readers:
    def open(self, task: Task) -> Any:
        return task

    def batches(self, opened: Any) -> Iterator[torch.Tensor]:
        task, address = opened, urlsplit(opened.url)
        names = [path.name for path in sorted(Path(task.shards).glob("train-*.tar"))]

        def read(own: list[str]) -> None:
            connection = HTTPConnection(address.netloc)
            for name in own:
                connection.request("GET", f"{address.path}/{name}")
                answer, buffer = connection.getresponse(), bytearray(1 << 20)
                while answer.readinto(buffer):
                    pass

        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            list(
                pool.map(read, [names[first::NUM_CONNECTIONS] for first in range(NUM_CONNECTIONS)])
            )
        yield torch.empty(task.num_samples, 0)


LOADERS = {
    "ours": Loader,
    "random copy": RandomCopy,
    "libjpeg-turbo": Decoder,
    "four readers": Readers,
}

if __name__ == "__main__":
    serve({"run": Passes(LOADERS[sys.argv[1]]()).run})
