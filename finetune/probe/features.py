"""The features of a split, plain or in augmented views: found on disk, or computed once and kept.

    FEATURES/NAME-KEY/
      features.npy     (N, D), in the split's order
      features.json    key, rows of a block, sha256 of each block of rows; written last

The key (cache.py) is the hash of everything that the numbers depend on. One file has all rows, so
any number of ranks finds the features that any other number has written.

Features are made on any number of ranks and nodes that share the directory:

1. The first rank creates a directory under a temporary name, a function of the key and the run
   directory, checks the free space, and creates the file of each missing view at its full size.
2. Each rank sends its blocks of images through the frozen model, writes them into their slices of
   the file and hashes them. Up to ten views are made together, so images are decoded once for them.
3. When all ranks are done, the first rank adds features.json and renames the directory. If another
   job was faster, its equal features stay.

A kill before step 3 leaves a temporary name. Nothing reads it, and the same command removes it.
An error of one rank ends all ranks. Before features are used, the ranks read all blocks once, each
rank its share, and compare them with their hashes. Every rank maps the table; none holds it.
B batch, D features, N samples, n chosen samples.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import DatasetError, Manifest
from data_prep.publish import make_directory, sync, write_json
from finetune.probe.cache import Cache
from finetune.probe.config import FeatureSettings
from finetune.session import Backbone, PatientGroup
from finetune.split import batches_of, view_of
from pretrain.augment.augmentation import Augmentation
from pretrain.checkpoints.files import FLUSHED_BYTES, Flusher, flush
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch
from pretrain.data.reader import ShardReader, reading
from pretrain.models.cost import forward_flops
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

LEAST, MOST = 512, 8192
"""Pictures of a forward pass, where settings give no number."""
VIEWS_AT_ONCE = 10
"""Made in one pass over the pictures; a kill costs at most so many."""
FACTS, VALUES = "features.json", "features.npy"
VISIBLE_WITHIN_S = 60.0
"""How long another node's file may stay unseen: network file systems remember what was not
there."""
Result = TypeVar("Result")


def undecodable(shard: str, key: str, *, dataset: str) -> DatasetError:
    remedy = f"leave it out with data_prep subset {dataset} --exclude"
    return DatasetError(shard, f"{key} does not decode", remedy, code="damaged")


class ElsewhereError(UserError):
    """Another rank prints what is wrong."""

    of_all_ranks = True


@dataclass(frozen=True)
class Table:
    """The features of a split in one view."""

    values_ND: Tensor
    """Memory-mapped."""
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def num_features(self) -> int:
        return self.values_ND.shape[1]

    def chunks(self, size: int) -> Iterator[Tensor]:
        """All rows in the split's order."""
        for part in torch.split(self.values_ND, size):
            PROGRESS.touch()
            yield part

    def gather(self, ids_n: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.values_ND, 0, ids_n, out=out)


@dataclass(frozen=True)
class FeatureMaker:
    """Makes tables of splits, for all ranks together: its methods are collective."""

    settings: FeatureSettings
    manifest: Manifest
    backbone: Backbone
    world: World
    device: torch.device
    group: PatientGroup = field(default_factory=PatientGroup)
    """Ranks are not done at the same time where they read and write."""

    @cached_property
    def cache(self) -> Cache:
        return Cache(self.settings, self.manifest, self.backbone)

    def tables(self, split: str, views: Sequence[int | None]) -> list[Table]:
        """Of a split in each of `views`; None is the plain pictures."""
        part = Part(self.settings.data.directory, self.manifest, split)
        places = {self.cache.place_of(split, view): view for view in views}
        with reading([part], self.settings.data, image_size=self.backbone.image_size) as reader:
            PROGRESS.mark(f"looking for features of {split}")
            missing = self._missing(list(places))
            for first in range(0, len(missing), VIEWS_AT_ONCE):
                PROGRESS.mark(f"computing features of {split}")
                self._compute(
                    reader,
                    split,
                    {place: places[place] for place in missing[first : first + VIEWS_AT_ONCE]},
                )
            if self.world.is_first and len(missing) < len(views):
                what = (
                    f"{len(views) - len(missing)} of {len(views)} views"
                    if len(views) > 1
                    else "features"
                )
                print(f"{split}: {what} found in {self.settings.features_place}")
            labels_N = torch.from_numpy(reader.labels.astype(np.int64))
            return [_table(place, labels_N) for place in places]

    @property
    def batch_size(self) -> int:
        """Of a forward pass on each rank. On a GPU one of a trillion operations, a few
        milliseconds: the host needs less to launch the next."""
        checkpoint, given = self.backbone.checkpoint, self.settings.feature_batch_size
        if given is not None or checkpoint is None or self.device.type != "cuda":
            return given or LEAST
        flops = forward_flops(
            checkpoint.card.model, num_classes=0, image_size=self.backbone.image_size
        )
        return min(MOST, max(LEAST, 2 ** round(math.log2(1e12 / flops)))) if flops else LEAST

    @cached_property
    def num_features(self) -> int:
        size = self.backbone.image_size
        with torch.no_grad():
            return self.backbone.extract(torch.zeros(1, 3, size, size, device=self.device)).shape[1]

    def _missing(self, places: Sequence[Path]) -> list[Path]:
        """Those that are not there, or not whole; ranks share the files; the first with a fault
        prints it."""
        rank, num_ranks = self.world.rank, self.world.num_ranks
        faults = [_fault(place, part=rank, num_parts=num_ranks) for place in places]
        finders_RM = torch.zeros(num_ranks, len(places))
        finders_RM[rank] = torch.tensor([float(fault is not None) for fault in faults])
        self.group.all_sum(finders_RM)
        for place, fault, before in zip(
            places, faults, finders_RM[:rank].any(dim=0).tolist(), strict=True
        ):
            if fault and not before:
                print(f"{place}: {fault}; its features are computed again", file=sys.stderr)
        return [
            place
            for place, is_missing in zip(places, finders_RM.any(dim=0).tolist(), strict=True)
            if is_missing
        ]

    @torch.no_grad()
    def _compute(self, reader: ShardReader, split: str, wanted: dict[Path, int | None]) -> None:
        world, block, num_features = self.world, self.batch_size, self.num_features
        dtype = np.dtype(self.settings.feature_dtype).newbyteorder("<")
        shape = (reader.num_samples, num_features)
        temporary = [self.cache.temporary_of(place) for place in wanted]
        files = [_File(directory, shape, dtype) for directory in temporary]
        num_bytes = reader.num_samples * num_features * dtype.itemsize * len(files)

        def lay_out() -> None:
            make_directory(self.settings.features_place)
            for file in files:
                shutil.rmtree(file.directory, ignore_errors=True)
            if num_bytes > shutil.disk_usage(self.settings.features_place).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for file in files:
                file.directory.mkdir()
                file.create()

        def write() -> list[dict[int, str]]:
            with ExitStack() as opened:
                for file in files:
                    opened.enter_context(file.opened())
                self._write_all(reader, files, list(wanted.values()), title=f"features of {split}")
                return [file.finish() for file in files]

        def publish() -> None:
            assert hashes is not None
            for number, (place, view) in enumerate(wanted.items()):
                of_rows: dict[int, str] = {}
                for of_rank in hashes:
                    of_rows |= of_rank[number]
                facts = {
                    "key": self.cache.key(split, view),
                    "rows_per_block": block,
                    "sha256": [of_rows[row] for row in range(0, reader.num_samples, block)],
                }
                _publish(files[number].directory, place, facts)

        try:
            self._together(lay_out, on_first=True)
            hashes = self.group.gather(self._together(write))
            self._together(publish, on_first=True)
        except Exception as error:
            if world.is_first:  # the others have closed their files
                for file in files:
                    shutil.rmtree(file.directory, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                lack = (
                    f"{self.settings.features_place} has no room for {num_bytes / 1e9:.3g} GB of"
                    f" features ({error.strerror})"
                )
                advice = (
                    "make room, name another features_dir, or set feature_dtype=float16 or fewer"
                    " views"
                )
                raise UserError("features_dir", lack, advice, code="no-space") from None
            raise

    def _together(self, work: Callable[[], Result], *, on_first: bool = False) -> Result | None:
        """What `work` returns on this rank (`on_first`: on the first alone), when all are done; an
        error of one ends all."""
        fault: Exception | None = None
        result: Result | None = None
        try:
            if self.world.is_first or not on_first:
                result = work()
        except Exception as error:  # noqa: BLE001 (whatever it is: the others wait for this rank below)
            fault = error
        if self.group.any_rank(fault is not None):
            raise fault or ElsewhereError(
                "features", "another rank failed", "see its message", code="another-rank"
            )
        return result

    def _write_all(
        self,
        reader: ShardReader,
        files: "Sequence[_File]",
        views: Sequence[int | None],
        *,
        title: str,
    ) -> None:
        """This rank's rows. On a GPU a batch is written while the next ones are computed."""
        augmentation = self.backbone.augmentation(
            self.cache.fed, seed=self.cache.seed, device=self.device
        )
        waiting: deque[Callable[[], None]] = deque()
        size = self.batch_size
        for batch in batches_of(
            reader, title=title, local_batch_size=size, world=self.world, device=self.device
        ):
            assert batch.mask_B is not None
            # masked, but in its place; padding, which is masked as well, repeats the last sample of
            # the split
            if batch.num_bad:
                in_place = batch.samples == batch.samples[0] + np.arange(len(batch.samples))
                ((shard, key),) = reader.names(batch.samples[in_place & ~batch.mask_B.numpy()][:1])
                raise undecodable(shard, key, dataset=self.settings.data.dataset)
            count = int(batch.mask_B.sum())  # padding is at the end
            for file, view in zip(files, views, strict=True) if count else ():
                PROGRESS.touch()
                waiting.append(self._start(batch, view, augmentation, file, count=count))
                while len(waiting) > 2:
                    waiting.popleft()()
        for finish in waiting:
            finish()

    def _start(
        self,
        batch: Batch,
        view: int | None,
        augmentation: Augmentation,
        file: "_File",
        *,
        count: int,
    ) -> Callable[[], None]:
        """Computes a batch; what is returned waits for it and writes it."""
        vectors = self.backbone.extract(view_of(batch, view, augmentation))[:count]
        vectors = vectors.to(getattr(torch, self.settings.feature_dtype))
        row = int(batch.samples[0])
        if not vectors.is_cuda:
            return lambda: file.write(vectors.numpy(), row)
        host = torch.empty_like(vectors, device="cpu", pin_memory=True).copy_(
            vectors, non_blocking=True
        )
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def finish() -> None:
            arrived.synchronize()
            file.write(host.numpy(), row)

        return finish


class _File:
    """The file of one view, into which each rank writes slices of rows and hashes them."""

    def __init__(self, directory: Path, shape: tuple[int, int], dtype: "np.dtype[Any]"):
        self.directory, self._shape, self._dtype = directory, shape, dtype
        self._hashes: dict[int, str] = {}
        """By first row."""
        self._flusher = Flusher(FLUSHED_BYTES)

    def create(self) -> None:
        """Create the file at its full size."""
        path = self.directory / VALUES
        np.lib.format.open_memmap(path, "w+", self._dtype, self._shape)

    @contextmanager
    def opened(self) -> Iterator[None]:
        values = np.lib.format.open_memmap(_seen(self.directory / VALUES), "r")
        self._start = values.offset
        with open(self.directory / VALUES, "r+b", buffering=0) as self._file:
            yield

    def write(self, rows_BD: NDArray[Any], first: int) -> None:
        """Write rows from number `first` on."""
        if not np.isfinite(rows_BD).all():
            is_half = self._dtype.itemsize == 2
            problem = "does not fit into float16" if is_half else "is not finite"
            fix = "set feature_dtype=float32" if is_half else "check the weights"
            rows = f"a feature of samples {first:,} to {first + len(rows_BD) - 1:,}"
            raise UserError("feature_dtype", f"{rows} {problem}", fix, code="not-finite")
        data = np.ascontiguousarray(rows_BD, self._dtype).reshape(-1).view(np.uint8).data
        self._hashes[first] = hashlib.sha256(data).hexdigest()
        self._flusher.wrote(len(data), self._file.fileno())
        offset = self._start + first * self._shape[1] * self._dtype.itemsize
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def finish(self) -> dict[int, str]:
        """Return the hashes of this rank's slices by first row, when the disk has them."""
        flush(self._file.fileno())
        return self._hashes


def _publish(temporary: Path, place: Path, facts: dict[str, Any]) -> None:
    write_json(temporary / FACTS, facts)
    sync(temporary)
    try:
        os.rename(temporary, place)
    except OSError:  # there is one
        if _fault(place) is None:
            shutil.rmtree(temporary)
            return
        shutil.rmtree(place, ignore_errors=True)
        os.rename(temporary, place)
    sync(place.parent)


def _fault(place: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """What keeps features from being used; None where they are whole; "" where there are none. Only
    a part of the blocks is read: `num_parts` readers see all of them."""
    if not place.exists():
        return ""
    try:
        facts = json.loads((place / FACTS).read_text())
        hashes, block = list(facts["sha256"]), int(facts["rows_per_block"])
    except OSError as error:
        return str(error)
    except (ValueError, KeyError, TypeError):
        return f"{FACTS} is damaged"
    try:
        values_ND = np.load(place / VALUES, mmap_mode="r")
        blocks = list(enumerate(hashes))[part::num_parts]
        is_whole = len(hashes) == -(-len(values_ND) // block)
        for number, expected in blocks if is_whole else ():
            PROGRESS.touch()
            rows = values_ND[number * block : (number + 1) * block]
            is_whole = is_whole and hashlib.sha256(rows).hexdigest() == expected
        return None if is_whole else f"{VALUES} has changed"
    except OSError as error:
        return str(error)
    except ValueError:
        return f"{VALUES} has changed"


def _table(place: Path, labels_N: Tensor) -> Table:
    # writing to the mapped rows changes nothing on disk
    values_ND = torch.from_numpy(np.load(_seen(place / VALUES), mmap_mode="c"))
    assert len(values_ND) == len(labels_N), (place, len(labels_N))
    return Table(values_ND, labels_N)


def _seen(path: Path) -> Path:
    """The path, when this node sees it."""
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            remedy = "name a features_dir that all nodes share"
            raise UserError(
                str(path),
                "another node wrote it, and this node does not see it",
                remedy,
                code="missing-path",
            )
        sorted(
            path.parent.parent.iterdir()
        )  # network file systems look again when a directory is opened
        time.sleep(0.05)
    return path
