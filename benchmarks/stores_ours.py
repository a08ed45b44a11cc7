"""Our loader, and the link alone, as contestants of `stores.py`; run by our own interpreter.

ours    a dataset's directory or URL -> index, shards by the store's read-ahead into a bounded cache -> batches, block shuffle
plain   the same shards by four connections into memory, and no more: what the link gives at all
"""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import fsspec.implementations.http
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.serving import Contestant, Task, serve
from data_prep.manifest import load_manifest
from pretrain.config import ReadingSettings
from pretrain.data.datasets import Part
from pretrain.data.loader import Batches, as_stored, training_batches
from pretrain.data.order import BatchPlan, Order
from pretrain.data.reader import ShardReader, open_store

assert aiohttp, fsspec.implementations.http  # imports are no part of a pass
NUM_CONNECTIONS = 4


class Ours(Contestant):
    def __init__(self, variable: str):
        self.variable = variable

    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        cache, cache_gb = os.environ["STORES_CACHE"], float(os.environ["STORES_CACHE_GB"])
        settings = ReadingSettings(
            dataset=os.environ[self.variable], cache_dir=f"{cache}/ours", cache_gb=cache_gb
        )
        part = Part(settings.directory, load_manifest(settings.directory), "train")
        reader = ShardReader([part], store=open_store(settings, [part]))
        block, window = json.loads(os.environ["STORES_BLOCKS"])
        plan = BatchPlan(task.batch_size, task.batch_size, 1)
        batches: Batches[Any] = training_batches(
            reader,
            Order(reader.num_samples, 1, "block", block, window),
            plan,
            rank=0,
            consumed=0,
            num_threads=task.cores,
            prefetch=4,
            pin=False,
            finish=as_stored,
        )
        return task, batches

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        task, batches = loader
        for _ in range(task.num_samples // task.batch_size):
            yield next(batches).images_BHWC


class Plain(Contestant):
    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        return task

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        task, address = loader, urlsplit(os.environ["STORES_URL"])
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


if __name__ == "__main__":
    serve({"store": Ours("STORES_URL"), "local": Ours("STORES_LOCAL"), "plain": Plain()})
