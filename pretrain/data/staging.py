"""The data of a run brought to its nodes' own disks before training reads it: one rank of each node copies, all others wait.

What is trained on is the same: manifest and order stay those of the dataset, and only the place of shards and indices
changes. Whatever goes wrong with the disk, training goes on with the dataset where it lies.
"""

import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from data_prep.manifest import Manifest
from data_prep.progress import ProgressLine, in_words, progress
from pretrain.data.datasets import Part, TrainingData
from pretrain.data.stage_area import StageArea, StageError, Stopped, Wanted, index_name, tar_name
from pretrain.ranks.collectives import any_rank
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World

_LOOK_S = 0.2


@dataclass
class _Dataset:
    manifest: Manifest
    directory: Path
    wanted: dict[str, Wanted] = field(default_factory=dict)


def staged(data: TrainingData, *, world: World, device: torch.device, stop: StopFlag) -> TrainingData:
    """Called by all ranks; returns when every node has what it can have. The copies stay as long as the result lives."""
    if data.settings.stage_dir is None:
        return data
    PROGRESS.mark("staging the data")
    root, datasets = Path(data.settings.stage_dir), _datasets_of(data)
    copier = _Copier(root, list(datasets.values()), stop=stop)
    if world.local_rank == 0:
        copier.start()
    _wait(copier, device=device)
    PROGRESS.mark("starting")
    area = StageArea(root)
    copies = {key: area.take(key, list(each.wanted.values())) for key, each in datasets.items()}
    return replace(data, parts=tuple(replace(part, staged=copies[part.manifest.content_hash]) for part in data.parts))


def _wait(copier: "_Copier", *, device: torch.device) -> None:
    """The line is its node's, and begins when there is something to copy."""
    line: ProgressLine | None = None
    with ExitStack() as stack:
        while any_rank(copier.is_alive(), device=device):
            time.sleep(_LOOK_S)
            copied, total = copier.megabytes()
            if total and line is None:
                line = stack.enter_context(progress(copier.title, total=total, unit="MB"))
            if line is not None:
                line.total = total
                line.advance(copied - line.done)
    if copier.defect is not None:
        raise copier.defect
    if copier.megabytes()[1]:
        print(copier.result(), flush=True)


def _datasets_of(data: TrainingData) -> dict[str, _Dataset]:
    """What training reads of each, by the hash of its content."""
    found: dict[str, _Dataset] = {}
    for part in data.read_parts:
        dataset = found.setdefault(part.manifest.content_hash, _Dataset(part.manifest, part.directory))
        dataset.wanted |= {file.name: file for file in _files_of(part)}
    return found


def _files_of(part: Part) -> Iterator[Wanted]:
    """Remote shards have a cache of their own; their indices lie in the dataset."""
    for shard in part.content.shards:
        if not shard.num_samples:
            continue
        index = part.directory / shard.index_file
        yield Wanted(index, index_name(shard), index.stat().st_size, shard.index_sha256)
        if not shard.is_remote:
            yield Wanted(part.directory / shard.file, tar_name(shard), shard.num_bytes, shard.sha256)


class _Copier(threading.Thread):
    """Fills the stage area of its node, dataset by dataset, and tells its user how it goes."""

    def __init__(self, root: Path, datasets: list[_Dataset], *, stop: StopFlag):
        super().__init__(name="staging", daemon=True)
        self._root, self._datasets, self._stop_flag = root, datasets, stop
        self._lock = threading.Lock()
        self._total_bytes = self._copied_bytes = 0
        self._began_s = 0.0
        self.defect: Exception | None = None

    def run(self) -> None:
        area = StageArea(
            self._root,
            stops=lambda: self._stop_flag.raised_by is not None,
            begins=self._begins,
            moves=self._moves,
        )
        try:
            for dataset in self._datasets:
                try:
                    area.fill(dataset.manifest, list(dataset.wanted.values()))
                except StageError as error:
                    self._warn(dataset, str(error))
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 (of our own making: it belongs to the main thread)
            self.defect = error

    @property
    def title(self) -> str:
        return f"staging {_gb(self._total_bytes)} to {self._root} ({platform.node()})"

    def megabytes(self) -> tuple[int, int]:
        """(copied, of how many)"""
        return self._copied_bytes // 1_000_000, -(-self._total_bytes // 1_000_000)

    def result(self) -> str:
        """Or how far it came."""
        took_s = max(time.monotonic() - self._began_s, 1e-3)
        rate = f"{self._copied_bytes / took_s / 1e6:,.0f} MB/s"
        copied, total = _gb(self._copied_bytes), _gb(self._total_bytes)
        much = copied if self._copied_bytes == self._total_bytes else f"{copied} of {total}"
        return f"staged {much} to {self._root} ({platform.node()}) in {in_words(took_s)}, {rate}"

    def _begins(self, num_bytes: int) -> None:
        self._began_s = self._began_s or time.monotonic()
        self._total_bytes += num_bytes

    def _moves(self, num_bytes: int) -> None:
        with self._lock:
            self._copied_bytes += num_bytes

    def _warn(self, dataset: _Dataset, why: str) -> None:
        print(
            f"WARNING: data.stage_dir on {platform.node()}: {why}; training reads {dataset.directory} where it lies",
            file=sys.stderr,
            flush=True,
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3g} MB"
