"""Features of a split, in plain or augmented views. They are computed once and kept on disk.

    FEATURES/NAME-KEY/
      features.npy     (N, D), in the split's order
      features.json    key, rows per block, sha256 of each block of rows; written last

The key (cache.py) is a hash of all facts that the features depend on, not of the number of ranks.
All ranks and nodes share the directory:

1. The first rank creates a temporary directory with a file of full size for each missing view.
2. Each rank computes the features of its images, and writes and hashes its rows. Up to ten views
   share the decoded images.
3. When all ranks have finished, the first rank adds features.json and renames the directory. If
   another job has published these features first, its directory is kept.

A kill before step 3 leaves a temporary directory, which the same command removes. An error on one
rank ends all ranks. Before features are used, each rank checks the hashes of its fraction of the
blocks. Shapes: B batch, D features, N samples, n chosen samples.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest
from data_prep.publish import make_directory, sync, write_json
from finetune.probe.cache import Cache
from finetune.probe.config import KnnSettings, ProbeSettings
from finetune.session import Backbone, PatientGroup, open_backbone
from finetune.split import batches_of, view_of
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.files import Flusher, flush
from pretrain.data.datasets import Part
from pretrain.data.reader import ShardReader, reading
from pretrain.models.cost import forward_flops
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

LEAST, MOST = 512, 8192
"""Smallest and largest default batch size."""
VIEWS_AT_ONCE = 10
"""Number of views that are computed together. A kill loses at most this many views."""
FACTS, VALUES = "features.json", "features.npy"
VISIBLE_WITHIN_S = 60.0
"""Seconds to wait for a network file system to show a file of another node."""


def undecodable(shard: str, key: str, *, dataset: str) -> DatasetError:
    fix = (
        'write {"path": SOURCE PATH OF THE IMAGE} to FILE, and run'
        f" data_prep subset {dataset} --out NEW --exclude FILE"
    )
    return DatasetError(shard, f"{key} does not decode", fix, code="damaged")


class ElsewhereError(UserError):
    """Error on another rank. The other rank prints the problem."""

    of_all_ranks = True


@dataclass(frozen=True)
class Table:
    """Features and labels of a split in one view."""

    values_ND: Tensor
    """Features of all samples, memory-mapped."""
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def num_features(self) -> int:
        return self.values_ND.shape[1]

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield all rows in blocks, in the split's order."""
        for part in torch.split(self.values_ND, size):
            PROGRESS.touch()
            yield part

    def gather(self, ids_n: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.values_ND, 0, ids_n, out=out)


@dataclass(frozen=True)
class FeatureMaker:
    """Find or compute tables of features. All ranks must call the methods together."""

    settings: ProbeSettings | KnnSettings
    manifest: Manifest
    backbone: Backbone
    world: World
    device: torch.device
    group: PatientGroup = field(default_factory=PatientGroup)

    @classmethod
    def open(
        cls,
        settings: ProbeSettings | KnnSettings,
        manifest: Manifest,
        checkpoint: Checkpoint | None,
        world: World,
        device: torch.device,
    ) -> "FeatureMaker":
        backbone = open_backbone(
            checkpoint,
            manifest,
            image_size=settings.data.image_size,
            device=device,
            channel_stats=settings.channel_stats,
            precision=settings.feature_precision,
        )
        return cls(settings, manifest, backbone, world, device)

    @cached_property
    def cache(self) -> Cache:
        return Cache(self.settings, self.manifest, self.backbone)

    def tables(self, split: str, views: Sequence[int | None]) -> list[Table]:
        """Return a table of the split for each view. None means the plain images."""
        part = Part(self.settings.data.directory, self.manifest, split)
        places = {self.cache.place_of(split, view): view for view in views}
        with reading([part], self.settings.data, image_size=self.backbone.image_size) as reader:
            PROGRESS.mark(f"looking for features of {split}")
            missing = self._missing(list(places))
            for first in range(0, len(missing), VIEWS_AT_ONCE):
                PROGRESS.mark(f"computing features of {split}")
                group = missing[first : first + VIEWS_AT_ONCE]
                self._compute(reader, split, {place: places[place] for place in group})
            if self.world.is_first and len(missing) < len(views):
                found = f"{len(views) - len(missing)} of {len(views)} views"
                what = "features" if len(views) == 1 else found
                print(f"{split}: {what} found in {self.settings.features_place}")
            labels_N = torch.from_numpy(reader.labels.astype(np.int64))
        # copy-on-write: changes of the rows never reach the disk
        values = [np.load(_visible(place / VALUES), mmap_mode="c") for place in places]
        return [Table(torch.from_numpy(values_ND), labels_N) for values_ND in values]

    @property
    def batch_size(self) -> int:
        """Number of images in a forward pass on each rank.

        On a GPU, a pass of the default size needs about 10^12 operations, which take longer than
        launching the next pass.
        """
        checkpoint, given = self.backbone.checkpoint, self.settings.feature_batch_size
        if given is not None or checkpoint is None or self.device.type != "cuda":
            return given or LEAST
        size = self.backbone.image_size
        flops = forward_flops(checkpoint.card.model, num_classes=0, image_size=size)
        return min(MOST, max(LEAST, 2 ** round(math.log2(1e12 / flops)))) if flops else LEAST

    @cached_property
    def num_features(self) -> int:
        size = self.backbone.image_size
        with torch.no_grad():
            return self.backbone.extract(torch.zeros(1, 3, size, size, device=self.device)).shape[1]

    def _missing(self, places: Sequence[Path]) -> list[Path]:
        """Return the directories without complete features. Each rank checks its fraction of the
        blocks."""
        rank, num_ranks = self.world.rank, self.world.num_ranks
        is_bad = torch.tensor([not _is_complete(place, rank, num_ranks) for place in places])
        num_bad = self.group.all_sum(is_bad.float()).tolist()
        missing = [place for place, count in zip(places, num_bad, strict=True) if count]
        if self.world.is_first:
            for place in filter(Path.exists, missing):
                print(f"{place} is damaged; the features are computed again", file=sys.stderr)
        return missing

    @torch.no_grad()
    def _compute(self, reader: ShardReader, split: str, wanted: dict[Path, int | None]) -> None:
        place, is_first = self.settings.features_place, self.world.is_first
        dtype = np.dtype(self.settings.feature_dtype).newbyteorder("<")
        shape = (reader.num_samples, self.num_features)
        num_bytes = math.prod(shape) * dtype.itemsize * len(wanted)
        files = [_File(self.cache.temporary_of(each) / VALUES, dtype, shape) for each in wanted]
        try:
            with self._together():
                if is_first:
                    make_directory(place)
                    for file in files:
                        shutil.rmtree(file.path.parent, ignore_errors=True)
                    if num_bytes > shutil.disk_usage(place).free:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    for file in files:
                        file.path.parent.mkdir()
                        np.lib.format.open_memmap(file.path, "w+", dtype, shape)
            with self._together(), ExitStack() as opened:
                for file in files:
                    opened.enter_context(file.opened())
                self._write(reader, files, list(wanted.values()), title=f"features of {split}")
                for file in files:
                    file.flush()
            hashes = self.group.gather([file.hashes for file in files])
            with self._together():
                for number, (each, view) in enumerate(wanted.items() if hashes else ()):
                    of_rows = {k: v for of_rank in hashes or () for k, v in of_rank[number].items()}
                    facts = {
                        "key": self.cache.key(split, view),
                        "rows_per_block": self.batch_size,
                        "sha256": [of_rows[row] for row in sorted(of_rows)],
                    }
                    _publish(files[number].path.parent, each, facts)
        except Exception as error:
            for file in files if is_first else ():  # the other ranks have closed their files
                shutil.rmtree(file.path.parent, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                problem = f"{place} has no room for {num_bytes / 1e9:.3g} GB ({error.strerror})"
                fix = "free some space, choose another features_dir, or set feature_dtype=float16"
                raise UserError("features_dir", problem, fix, code="no-space") from None
            raise

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Wait for all ranks at the end of the block. Raise an error of one rank on all ranks."""
        fault: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the other ranks wait for this one below)
            fault = error
        if self.group.any_rank(fault is not None):
            raise fault or ElsewhereError(
                "features", "another rank failed", "see its error message", code="another-rank"
            )

    def _write(
        self,
        reader: ShardReader,
        files: "Sequence[_File]",
        views: Sequence[int | None],
        *,
        title: str,
    ) -> None:
        """Compute and write this rank's rows. A GPU computes ahead while rows are written."""
        settings, size, device = self.settings, self.batch_size, self.device
        augmentation = self.backbone.augmentation(
            self.cache.augment, seed=settings.seed, device=device
        )
        waiting: deque[tuple[_File, int, Tensor, torch.cuda.Event | None]] = deque()
        for batch in batches_of(
            reader, title=title, local_batch_size=size, world=self.world, device=device
        ):
            assert batch.mask_B is not None
            if batch.num_bad:  # the mask hides bad images and padding (the last repeated)
                in_place = batch.samples == batch.samples[0] + np.arange(len(batch.samples))
                ((shard, key),) = reader.names(batch.samples[in_place & ~batch.mask_B.numpy()][:1])
                raise undecodable(shard, key, dataset=settings.data.dataset)
            count, first = int(batch.mask_B.sum()), int(batch.samples[0])  # padding is at the end
            for file, view in zip(files, views, strict=True) if count else ():
                PROGRESS.touch()
                vectors = self.backbone.extract(view_of(batch, view, augmentation))[:count]
                vectors, event = vectors.to(getattr(torch, settings.feature_dtype)), None
                if vectors.is_cuda:
                    host = torch.empty_like(vectors, device="cpu", pin_memory=True)
                    vectors, event = host.copy_(vectors, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                waiting.append((file, first, vectors, event))
                while len(waiting) > 2:
                    _write_rows(*waiting.popleft())
        for each in waiting:
            _write_rows(*each)


@dataclass
class _File:
    """Features file of one view. Each rank writes and hashes its slices of rows."""

    path: Path
    dtype: "np.dtype[Any]"
    shape: tuple[int, int]
    hashes: dict[int, str] = field(default_factory=dict)
    """Hash of each slice that this rank wrote, by the number of its first row."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._start = np.lib.format.open_memmap(_visible(self.path), "r").offset
        self._flusher = Flusher()
        with open(self.path, "r+b") as self._file:
            yield

    def write(self, rows_BD: "np.ndarray[Any, Any]", first: int) -> None:
        """Write and hash rows, from row `first` on. Fail if a value is not finite."""
        if not np.isfinite(rows_BD).all():
            is_half = self.dtype.itemsize == 2
            problem = "does not fit into float16" if is_half else "is not finite"
            fix = "set feature_dtype=float32" if is_half else "check the weights for NaN"
            rows = f"a feature of samples {first:,} to {first + len(rows_BD) - 1:,}"
            raise UserError("feature_dtype", f"{rows} {problem}", fix, code="not-finite")
        data = rows_BD.astype(self.dtype, copy=False).tobytes()
        self.hashes[first] = hashlib.sha256(data).hexdigest()
        self._file.seek(self._start + first * self.shape[1] * self.dtype.itemsize)
        self._file.write(data)
        self._flusher.wrote(len(data), self._file.fileno())

    def flush(self) -> None:
        """Wait until all rows are on the disk."""
        self._file.flush()
        flush(self._file.fileno())


def _write_rows(file: _File, first: int, rows_BD: Tensor, event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
    file.write(rows_BD.numpy(), first)


def _publish(temporary: Path, place: Path, facts: dict[str, Any]) -> None:
    write_json(temporary / FACTS, facts)
    sync(temporary)
    if place.exists() and not _is_complete(place):
        shutil.rmtree(place, ignore_errors=True)
    try:
        os.rename(temporary, place)
    except OSError:
        if not place.exists():
            raise
        shutil.rmtree(temporary)  # another job was faster
    sync(place.parent)


def _is_complete(place: Path, part: int = 0, num_parts: int = 1) -> bool:
    """True if each block matches its hash. Only the blocks part, part + num_parts, ... are read."""
    try:
        facts = json.loads((place / FACTS).read_text())
        hashes, block = list(facts["sha256"]), int(facts["rows_per_block"])
        values_ND = np.load(place / VALUES, mmap_mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return False
    for number in range(part, len(hashes), num_parts):
        PROGRESS.touch()
        rows = values_ND[number * block : (number + 1) * block]
        if hashlib.sha256(rows).hexdigest() != hashes[number]:
            return False
    return len(hashes) == -(-len(values_ND) // block)


def _visible(path: Path) -> Path:
    """Wait until this node sees the path, and return it. Fail after VISIBLE_WITHIN_S."""
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            problem = "another node wrote this file, but this node does not see it"
            fix = "choose a features_dir that all nodes share"
            raise UserError(str(path), problem, fix, code="missing-path")
        sorted(path.parent.parent.iterdir())  # refreshes a network file system
        time.sleep(0.05)
    return path
