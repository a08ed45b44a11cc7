"""`data.stage_dir`: copy the shards of a run to each node's own disk before training reads them.

One rank of each node copies all files into a `ShardStore`; the other ranks wait, and then every
rank holds the copies. Order and content of the training are the same. If a dataset cannot be
staged, training reads it in place, and a warning says why.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.progress import in_words, progress
from data_prep.remote import StoppedError
from pretrain.data.datasets import Part, TrainingData
from pretrain.data.store import NUM_THREADS, File, NoRoomError, ShardStore, StoreError, tar_of
from pretrain.ranks.collectives import on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

LOOK_S = 0.5


def staged(
    data: TrainingData, *, world: World, device: torch.device, stop: StopFlag
) -> TrainingData:
    """Return the data with its copies on this node. All ranks call this. The copies stay as long as
    the result lives."""
    if data.settings.stage_dir is None:
        return data
    files, store = staged_files(data), None
    with _warns(world, "the data"):
        directory = Path(data.settings.stage_dir) / f"shards-{os.getuid()}"
        store = ShardStore(directory, setting="data.stage_dir", max_bytes=None, storage={})

    def work() -> None:
        for dataset in files if store is not None and world.local_rank == 0 else ():
            with _warns(world, str(dataset)):
                _copy(store, files[dataset], stop)

    PROGRESS.mark("staging the data")
    failed = "data.stage_dir: the data could not be staged for another rank; see its message"
    on_all_ranks(work, device=device, failed=failed)
    PROGRESS.mark("starting")
    held = {dataset for dataset in files if store and store.hold_present(files[dataset])}
    parts = tuple(
        replace(part, staged=store if part.directory in held else None) for part in data.parts
    )
    return replace(data, parts=parts)


def staged_files(data: TrainingData) -> dict[Path, list[File]]:
    """Return the files that training reads, by dataset: indices and local shards. Remote shards
    have their own store."""
    files: dict[Path, dict[str, File]] = {}
    for part in data.read_parts:
        of_dataset = files.setdefault(part.directory, {})
        for file in _files_of(part):
            of_dataset[file.name] = file
    return {directory: list(by_name.values()) for directory, by_name in files.items()}


def _files_of(part: Part) -> list[File]:
    files = []
    for shard in part.content.shards:
        if shard.num_samples:
            index, sha256 = part.directory / shard.index_file, shard.index_sha256
            files.append(File(str(index), f"{sha256}.npy", index.stat().st_size, sha256))
            if not shard.is_remote:
                files.append(tar_of(shard, part.directory))
    return files


@contextmanager
def _warns(world: World, source: str) -> Iterator[None]:
    """Turn an error of staging into a warning, which one rank of the node prints."""
    try:
        yield
    except StoppedError:  # training sees the stop flag
        pass
    except (StoreError, OSError) as error:
        if world.local_rank == 0:
            warning = f"WARNING: data.stage_dir on {platform.node()}: {error}"
            print(f"{warning} Training reads {source} in place.", file=sys.stderr, flush=True)


def _copy(store: ShardStore, files: Sequence[File], stop: StopFlag) -> None:
    absent = [file for file in files if not store.hold_present([file])]
    num_bytes = sum(file.num_bytes for file in absent)
    if missing := store.make_room(absent):
        problem = f"{_gb(num_bytes)} do not fit, only {_gb(num_bytes - missing)} can be freed"
        fix = "free disk space, or choose another data.stage_dir"
        raise NoRoomError(str(store.path), problem, fix, code="no-space")
    if not absent:
        return
    place, began_s = f"{store.path.parent} ({platform.node()})", time.monotonic()
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="staging")
    title, seen = f"staging {_gb(num_bytes)} to {place}", None
    pending = {threads.submit(store.hold, file, waits_for_room=False): file for file in absent}
    try:
        with progress(title, total=len(absent), unit="files") as line:
            while pending:
                done, _ = wait(pending, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
                for each in done:
                    each.result()
                    del pending[each]
                line.advance(len(done))
                if (moved := [store.progress(file) for file in pending.values()]) != seen:
                    seen = moved
                    PROGRESS.touch()
                if stop.raised_by is not None:
                    store.close()
    finally:
        threads.shutdown(cancel_futures=True)
    took_s = max(time.monotonic() - began_s, 1e-3)
    rate = f"{num_bytes / took_s / 1e6:,.0f} MB/s"
    print(f"staged {_gb(num_bytes)} to {place} in {in_words(took_s)}, {rate}", flush=True)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3g} MB"
