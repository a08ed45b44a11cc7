"""A packed dataset and the loader over it, for tests that name only what they are about."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.manifest import load_manifest
from pretrain.data.loader import Batches, as_stored, training_batches
from pretrain.data.order import BatchPlan, Line
from pretrain.data.reader import ShardReader, open_split
from tests.data_prep.samples import build


def packed(source: Path | str, out: Path, *words: str) -> Path:
    assert build(source, out, *words) == 0
    return out


def opened(dataset: Path, split: str = "train", **how: Any) -> ShardReader:
    return open_split(dataset, load_manifest(dataset), split, **how)


def loaded(reader: ShardReader, order: Line, plan: BatchPlan, **more: Any) -> Batches[Any]:
    """The micro-batches of rank 0 from the beginning on, by two threads, as they are stored, but
    for what `more` says."""
    settings = {
        "rank": 0,
        "consumed": 0,
        "num_threads": 2,
        "prefetch": 2,
        "pin": False,
        "finish": as_stored,
    }
    return training_batches(reader, order, plan, **settings | more)  # type: ignore[arg-type]


@contextmanager
def few_files() -> Iterator[None]:
    """This process may open no more than six files besides those that it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 6, hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
