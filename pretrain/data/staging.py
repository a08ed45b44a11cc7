"""`data.stage_dir`: copy the shards of a run to each node's own disk before training reads them.

One rank of each node copies all files into a `ShardStore`. The other ranks wait. Then every rank
locks the copies against removal. Training reads the same samples in the same order as without
staging. If a node cannot stage the data, its ranks read the original files, and a warning gives the
reason.
"""

import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.progress import ProgressLine, in_words
from data_prep.remote import StoppedError
from pretrain.data.datasets import TrainingData
from pretrain.data.store import NUM_THREADS, File, ShardStore, StoreError, tar_of
from pretrain.ranks.collectives import on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

LOOK_S = 0.5


def stage_data(
    data: TrainingData, *, world: World, device: torch.device, stop: StopFlag
) -> TrainingData:
    """Copy the shards to this node, and return the data with the paths of the copies. All ranks
    call this. The copies are kept as long as the returned object exists."""
    if data.settings.stage_dir is None:
        return data
    files, directory = files_to_stage(data, world), Path(data.settings.stage_dir)

    def open_store() -> ShardStore | None:
        try:
            path = directory / f"shards-{os.getuid()}"
            store = ShardStore(path, setting="data.stage_dir", max_bytes=None, storage={})
            if world.local_rank == 0:
                _copy(store, files, stop)
            return store
        except StoppedError:  # the training loop handles the stop flag
            pass
        except (StoreError, OSError) as error:
            if world.local_rank == 0:
                warning = f"WARNING: data.stage_dir on {platform.node()}: {error}"
                print(f"{warning} Training reads the original files.", file=sys.stderr, flush=True)
        return None

    PROGRESS.mark("staging the data")
    store = on_all_ranks(open_store, device=device, field="data.stage_dir")
    PROGRESS.mark("starting")
    if store is None or not store.hold_present(files):
        return data
    names = frozenset(file.name for file in files)
    staged = [replace(part, staged=store, staged_files=names) for part in data.parts]
    return replace(data, parts=tuple(staged))


def files_to_stage(data: TrainingData, world: World) -> list[File]:
    """Return the files that this node reads: all indices, the local shards that its ranks train on,
    and the local shards of the evaluation. Remote shards have their own cache."""
    evaluated, files = data.eval_part(), dict[str, File]()
    tars = list(data.shards_of(world.node_ranks, num_ranks=world.num_ranks))
    if evaluated is not None:
        tars += [(evaluated, shard) for shard in evaluated.content.shards if shard.num_samples]
    for part in data.read_parts:
        for shard in part.content.shards:
            if shard.num_samples:
                index, sha256 = part.directory / shard.index_file, shard.index_sha256
                name = f"{sha256}.npy"
                files[name] = File(str(index), name, index.stat().st_size, sha256)
    for part, shard in tars:
        if not shard.is_remote:
            file = tar_of(shard, part.directory)
            files[file.name] = file
    return list(files.values())


def _copy(store: ShardStore, files: Sequence[File], stop: StopFlag) -> None:
    absent = [file for file in files if not store.hold_present([file])]
    if not absent:
        return
    store.make_room(absent)
    num_bytes = sum(file.num_bytes for file in absent)
    size = f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3g} MB"
    place, began_s = f"{store.path.parent} ({platform.node()})", time.monotonic()
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="staging")
    seen = store.num_written
    pending = {threads.submit(store.hold, file, waits_for_room=False) for file in absent}
    try:
        with ProgressLine(f"staging {size} to {place}", total=len(absent), unit="files") as line:
            while pending:
                done, pending = wait(pending, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
                for each in done:
                    each.result()
                line.advance(len(done))
                if done or store.num_written != seen:
                    seen = store.num_written
                    PROGRESS.touch()
                if stop.raised_by is not None:
                    store.close()
    finally:
        threads.shutdown(cancel_futures=True)
    took_s = max(time.monotonic() - began_s, 1e-3)
    rate = f"{num_bytes / took_s / 1e6:,.0f} MB/s"
    print(f"staged {size} to {place} in {in_words(took_s)}, {rate}", flush=True)
