"""The data of a run brought to its nodes' own disks before training reads it: one rank of each node
copies, all others wait.

What is trained on is the same: manifest and order stay those of the dataset, and only the place of
shards and indices changes (__init__.py). Whatever goes wrong with the disk, training goes on with
the dataset where it is, and the log says so.
"""

import os
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.progress import in_words, progress
from data_prep.remote import StoppedError
from pretrain.data.datasets import TrainingData
from pretrain.data.store.directory import File, NoRoomError, StoreError, tar_of
from pretrain.data.store.store import NUM_THREADS, ShardStore
from pretrain.ranks.collectives import on_all_ranks
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

Files = dict[Path, list[File]]
"""Directory of a dataset -> what training reads of it."""


def staged(
    data: TrainingData, *, world: World, device: torch.device, stop: StopFlag
) -> TrainingData:
    """Called by all ranks; returns when every node has what it can have. The copies stay as long as
    the result lives."""
    if data.settings.stage_dir is None:
        return data
    directory, files = Path(data.settings.stage_dir), files_of(data)
    PROGRESS.mark("staging the data")

    def work() -> ShardStore | None:
        return _filled(directory, files, stop=stop) if world.local_rank == 0 else None

    store = on_all_ranks(
        work,
        device=device,
        failed="data.stage_dir: the data could not be staged for another rank; see its message",
    )
    PROGRESS.mark("starting")
    held = set[Path]()
    with suppress(StoreError, OSError):  # the first rank of the node has reported it
        store = store or _open(directory)
        held = {
            dataset for dataset, of_dataset in files.items() if store.hold_all_there(of_dataset)
        }
    place = store.directory if store else None
    return replace(
        data,
        parts=tuple(
            replace(part, staged=place if part.directory in held else None) for part in data.parts
        ),
    )


def files_of(data: TrainingData) -> Files:
    """Remote shards have a store of their own; their indices are in the dataset."""
    found: defaultdict[Path, dict[str, File]] = defaultdict(dict)
    for part in data.read_parts:
        for shard in part.content.shards:
            if shard.num_samples:
                index = part.directory / shard.index_file
                files = [
                    File(
                        str(index),
                        f"{shard.index_sha256}.npy",
                        index.stat().st_size,
                        shard.index_sha256,
                    )
                ]
                files += [] if shard.is_remote else [tar_of(shard, part.directory)]
                found[part.directory] |= {file.name: file for file in files}
    return {directory: list(files.values()) for directory, files in found.items()}


def _open(directory: Path) -> ShardStore:
    """Below `data.stage_dir`, which may be everybody's."""
    return ShardStore(
        directory / f"shards-{os.getuid()}", setting="data.stage_dir", max_bytes=None, storage={}
    )


def _filled(directory: Path, files: Files, *, stop: StopFlag) -> ShardStore | None:
    """The store of this node, which holds the datasets that it has room for; None: there can be
    none."""
    store = None
    for dataset, of_dataset in files.items():
        try:
            store = store or _open(directory)
            _hold(store, of_dataset, stop=stop)
        except StoppedError:
            break
        except (StoreError, OSError) as error:
            warning = (
                f"WARNING: data.stage_dir on {platform.node()}: {error}; training reads {dataset}"
                " where it is"
            )
            print(warning, file=sys.stderr, flush=True)
    return store


def _hold(store: ShardStore, files: Sequence[File], *, stop: StopFlag) -> None:
    """All files, or StoreError. Without room for all there stays no copy that nobody reads: a disk
    that we leave full would fail others. After any other fault the next start goes on with what is
    whole."""
    directory = store.directory
    with directory.room():
        needed = sum(file.num_bytes for file in files if not directory.is_there(file))
        missing = directory.make_room(files)
    try:
        if missing:
            fits = (
                f"{needed / 1e9:,.3g} GB will not fit, {(needed - missing) / 1e9:,.3g} GB are free"
                " or can be freed"
            )
            raise NoRoomError(f"{directory.path}: {fits}")
        _copy(store, files, num_bytes=needed, stop=stop)
    except StoreError as error:
        with directory.room():
            directory.let_go(files)
            if isinstance(error, NoRoomError):
                directory.remove_unread(files)
        raise


def _copy(store: ShardStore, files: Sequence[File], *, num_bytes: int, stop: StopFlag) -> None:
    """Several at once: hashing, reading and writing let go of Python's lock. The first error ends
    them all, and so does `stop`."""
    where, began_s = f"{store.directory.path.parent} ({platform.node()})", time.monotonic()
    copied, counting, has_failed = 0, threading.Lock(), threading.Event()

    def moves(more: int) -> None:
        nonlocal copied
        if has_failed.is_set() or stop.raised_by is not None:
            raise StoppedError
        PROGRESS.touch()
        with counting:
            copied += more
            line.advance(copied // 1_000_000 - line.done)

    title, total = f"staging {_gb(num_bytes)} to {where}", -(-num_bytes // 1_000_000)
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="staging")
    with progress(title, total=total, unit="MB", enabled=total > 0) as line:
        try:
            for held in as_completed(
                [
                    threads.submit(store.hold, file, waits_for_room=False, moves=moves)
                    for file in files
                ]
            ):
                held.result()
        except BaseException:
            has_failed.set()
            raise
        finally:
            threads.shutdown(cancel_futures=True)
    if copied:
        took_s = max(time.monotonic() - began_s, 1e-3)
        rate = f"{copied / took_s / 1e6:,.0f} MB/s"
        print(f"staged {_gb(copied)} to {where} in {in_words(took_s)}, {rate}", flush=True)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3g} MB"
