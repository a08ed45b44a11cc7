"""A built dataset and its loader, with defaults for tests."""

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
    """Return rank 0's micro-batches from the beginning as stored, by two threads. `more` changes
    these settings."""
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
    """Limit this process to six more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 6, hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
