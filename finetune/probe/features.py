"""The features of a split, plain or in augmented views: found on disk, or computed once and kept
there.

    FEATURES/NAME-KEY/
      rank-0000.npy ...   (rows, D): of each rank that computed them its rows, in the split's order
      features.json       what the key was made of, the rows of a block, and the sha256 of each file; written last

The key (cache.py) is the hash of everything that the numbers depend on. Ranks take blocks of rows
in turn (`Table` knows which row is in which file), so any number of ranks finds what any other
number has written.

How features come about, on any number of ranks and nodes that share the directory:

1. the first rank makes a directory under a temporary name, which is a function of the key and the
   run directory, and looks whether there is room for all rows;
2. every rank sends its pictures through the frozen model and writes its own file, which it hashes
   as it does, and syncs; views that are missing are made together, so that pictures are read and
   decoded once for several;
3. when all have, the first rank adds features.json and renames the directory. Another job may have
   been faster: what it published is the same, and stays.

A kill before 3 leaves a temporary name, which the same command removes when it begins again;
nothing reads it. An error of one rank is the end of all. Features are trusted when their files are
what features.json says. Ranks take the files in turn, and each file is read by one of them: what
one rank has written is read by one, however many there are, before any other goes on. Every rank
maps the whole table; none holds it.
B batch, D features, N samples.
"""  # noqa: E501 (a table)

import errno
import hashlib
import io
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
from data_prep.publish import make_directory, sha256_of, sync, write_json
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
FACTS = "features.json"
VISIBLE_WITHIN_S = 60.0
"""How long another node's file may stay unseen: network file systems remember what was not
there."""
Result = TypeVar("Result")


def undecodable(shard: str, key: str, *, dataset: str) -> DatasetError:
    remedy = f"leave it out with data_prep subset {dataset} --exclude"
    return DatasetError(
        f"{shard}: {key} does not decode, and a feature cannot be made up; {remedy}"
    )


class ElsewhereError(UserError):
    """Another rank prints what is wrong."""

    of_all_ranks = True


@dataclass(frozen=True)
class Table:
    """The features of a split in one view. Block b of the rows is in file b mod the number of
    files."""

    files: tuple[Tensor, ...]
    """Memory-mapped, (rows, D) each."""
    labels_N: Tensor
    rows_per_block: int = 1

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def num_features(self) -> int:
        return self.files[0].shape[1]

    def chunks(self, size: int) -> Iterator[Tensor]:
        """All rows in the split's order."""
        for ids in torch.split(torch.arange(len(self)), size):
            PROGRESS.touch()
            yield self.files[0][ids[0] : ids[-1] + 1] if len(self.files) == 1 else self.gather(ids)

    def gather(self, ids_n: Tensor, *, out: Tensor | None = None) -> Tensor:
        if len(self.files) == 1:
            return torch.index_select(self.files[0], 0, ids_n, out=out)
        found_nD = (
            torch.empty(len(ids_n), self.num_features, dtype=self.files[0].dtype)
            if out is None
            else out
        )
        block_n = ids_n // self.rows_per_block
        row_n = block_n // len(self.files) * self.rows_per_block + ids_n % self.rows_per_block
        for number, file in enumerate(self.files):
            (places,) = (block_n % len(self.files) == number).nonzero(as_tuple=True)
            found_nD[places] = file[row_n[places]]
        return found_nD


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
        rounds, rest = divmod(
            reader.num_samples, block * world.num_ranks
        )  # ranks take blocks in turn
        shape = (rounds * block + min(block, max(0, rest - world.rank * block)), num_features)
        temporary = [self.cache.temporary_of(place) for place in wanted]
        files = [_File(directory, shape, dtype, rank=world.rank) for directory in temporary]
        num_bytes = reader.num_samples * num_features * dtype.itemsize * len(files)

        def lay_out() -> None:
            make_directory(self.settings.features_place)
            for file in files:
                shutil.rmtree(file.directory, ignore_errors=True)
            if num_bytes > shutil.disk_usage(self.settings.features_place).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for file in files:
                file.directory.mkdir()

        def write() -> list[str]:
            with ExitStack() as opened:
                for file in files:
                    opened.enter_context(file.opened())
                self._write_all(reader, files, list(wanted.values()), title=f"features of {split}")
                return [file.finish() for file in files]

        def publish() -> None:
            assert hashes is not None
            for number, (place, view) in enumerate(wanted.items()):
                of_files = {_name(rank): of_rank[number] for rank, of_rank in enumerate(hashes)}
                facts = {
                    "key": self.cache.key(split, view),
                    "rows_per_block": block,
                    "sha256": of_files,
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
                raise UserError(f"features_dir: {lack}; {advice}") from None
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
            raise fault or ElsewhereError("features: another rank could not go on; see its message")
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
        if not vectors.is_cuda:
            return lambda: file.write(vectors.numpy())
        host = torch.empty_like(vectors, device="cpu", pin_memory=True).copy_(
            vectors, non_blocking=True
        )
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def finish() -> None:
            arrived.synchronize()
            file.write(host.numpy())

        return finish


class _File:
    """One rank's file of one view: written from the beginning to the end, and hashed on the way."""

    def __init__(
        self, directory: Path, shape: tuple[int, int], dtype: "np.dtype[Any]", *, rank: int
    ):
        self.directory, self._shape, self._dtype, self._rank = directory, shape, dtype, rank
        self._digest, self._num_rows, self._flusher = hashlib.sha256(), 0, Flusher(FLUSHED_BYTES)

    @contextmanager
    def opened(self) -> Iterator[None]:
        header = io.BytesIO()
        facts = {"descr": self._dtype.str, "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(header, facts)
        with open(_seen(self.directory) / _name(self._rank), "wb", buffering=0) as self._file:
            self._put(header.getbuffer())
            yield

    def write(self, rows_BD: NDArray[Any]) -> None:
        """The next rows."""
        first, end = self._num_rows, self._num_rows + len(rows_BD)
        if not np.isfinite(rows_BD).all():
            is_half = self._dtype.itemsize == 2
            words = (
                "beyond what float16 holds; set feature_dtype=float32" if is_half else "not finite"
            )
            raise UserError(
                f"features: of rows {first:,} to {end - 1:,} of rank {self._rank} some are {words}"
            )
        self._put(np.ascontiguousarray(rows_BD, self._dtype).reshape(-1).view(np.uint8).data)
        self._num_rows = end

    def finish(self) -> str:
        """Its sha256, when the disk has it."""
        assert self._num_rows == self._shape[0], (self._num_rows, self._shape)
        flush(self._file.fileno())
        return self._digest.hexdigest()

    def _put(self, data: memoryview) -> None:
        self._digest.update(data)
        self._flusher.wrote(len(data), self._file.fileno())
        while data:
            data = data[self._file.write(data) :]


def _name(rank: int) -> str:
    return f"rank-{rank:04d}.npy"


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
    a part of the files is read: `num_parts` readers see all of them."""
    if not place.exists():
        return ""
    try:
        facts = json.loads((place / FACTS).read_text())
        hashes, _ = facts["sha256"], int(facts["rows_per_block"])
        for name, expected in sorted(hashes.items())[part::num_parts]:
            if sha256_of(place / name, after_each_piece=PROGRESS.touch) != expected:
                return f"{name} has changed"
    except OSError as error:
        return str(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{FACTS} is damaged"
    return None


def _table(place: Path, labels_N: Tensor) -> Table:
    facts = json.loads(_seen(place / FACTS).read_text())
    # writing to them would change nothing on disk
    files = [
        torch.from_numpy(np.load(_seen(place / name), mmap_mode="c"))
        for name in sorted(facts["sha256"])
    ]
    assert sum(map(len, files)) == len(labels_N), (place, len(labels_N))
    return Table(tuple(files), labels_N, facts["rows_per_block"])


def _seen(path: Path) -> Path:
    """The path, when this node sees it."""
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            remedy = "name a features_dir that all nodes share"
            raise UserError(
                f"{path}: was written by another node, and this one does not see it; {remedy}"
            )
        sorted(
            path.parent.parent.iterdir()
        )  # network file systems look again when a directory is opened
        time.sleep(0.05)
    return path
