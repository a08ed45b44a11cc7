"""Features on disk: one directory for each split and view, filled by many ranks, that appears whole or not at all. No torch here.

    FEATURES/NAME-KEY/
      features.npy     (N, D), row by row in the split's order
      labels.npy       (N,), int64
      checksums.npy    of each block of rows (checksums.py)
      features.json    what the key was made of, N, D, rows of a block, and the sha256 of the two small files; written last

The key is the hash of everything that the numbers depend on, so what is found under it is what would be computed.

How an entry comes about, on any number of ranks and nodes that share the directory:

1. the first rank lays out a directory under a temporary name, which is a function of the entry and the run directory, with room for
   all rows: a disk without room is told now;
2. every rank writes its own blocks of rows, which nobody else writes, with `pwrite`, hashes them as it does, and syncs them;
3. all ranks agree that they wrote N rows together, each row once, and put their checksums together;
4. the first rank adds checksums, labels and facts, and renames the directory. Another job may have been faster: what it published
   is the same, and stays.

A kill before 4 leaves a temporary name, which the same command removes when it begins again; nothing reads it. An entry is trusted
when its size, its blocks and its small files are what its facts say: ranks share the reading, at one to two GB/s each, which is
what its first use would cost (the page cache keeps it).
"""

import errno
import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.publish import TEMPORARY_PREFIX, hash_of_json, make_directory, sha256_of, sync, write_json
from data_prep.settings import Settings, UserError
from finetune.probe.checksums import Blocks, digest_of
from pretrain.checkpoints.files import FLUSHED_BYTES, Flusher, flush

FEATURES, LABELS, CHECKSUMS, FACTS = "features.npy", "labels.npy", "checksums.npy", "features.json"
_RANKS_OF_A_NODE = 8
"""They write one file, and a flush waits for what all of them have written."""
VISIBLE_WITHIN_S = 60.0
"""How long another node's file may stay unseen: network file systems remember what was not there."""


class Facts(Settings):
    """features.json."""

    key: dict[str, Any]
    num_samples: int
    num_features: int
    rows_per_block: int
    sha256: dict[str, str]
    """Of labels and checksums."""


@dataclass(frozen=True)
class Entry:
    """One split in one view, as it is or will be on disk."""

    root: Path
    name: str
    """In words; the key tells entries apart."""
    key: dict[str, Any]
    num_samples: int
    num_features: int
    dtype: Literal["float32", "float16"]

    @property
    def path(self) -> Path:
        return self.root / f"{self.name}-{hash_of_json(self.key)[:16]}"

    def fault(self, *, part: int = 0, num_parts: int = 1) -> str | None:
        """What keeps it from being used; None for an entry that is whole; "" where there is none. Only a part of its rows is read:
        `num_parts` readers see all of them."""
        if not self.path.exists():
            return ""
        try:
            facts = Facts.model_validate_json((self.path / FACTS).read_text())
            if facts.key != self.key:
                return f"{FACTS} is of another key"
            if (self.path / FEATURES).stat().st_size != self.num_bytes:
                return f"{FEATURES} was cut"
            for name, expected in facts.sha256.items():
                if sha256_of(self.path / name) != expected:
                    return f"{name} has changed"
            digests, blocks = np.load(self.path / CHECKSUMS), Blocks(self.num_samples, facts.rows_per_block)
            changed = blocks.first_changed(
                self.path / FEATURES,
                digests,
                header=len(self.header),
                bytes_per_row=self.bytes_per_row,
                blocks=blocks.share(part, num_parts),
            )
        except (OSError, ValueError) as error:
            return str(error).splitlines()[0]
        return None if changed is None else f"{FEATURES} has changed (from row {changed * facts.rows_per_block:,} on)"

    def read(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """(features, labels), memory-mapped; writing to them would change nothing on disk."""
        features, labels = (np.load(_seen(self.path / name), mmap_mode="c") for name in (FEATURES, LABELS))
        assert features.shape == (self.num_samples, self.num_features) and labels.shape == (self.num_samples,)
        return features, labels

    @property
    def header(self) -> bytes:
        """Of an npy file of version 1.0, filled up with spaces to a multiple of 64 bytes."""
        shape = f"({self.num_samples}, {self.num_features})"
        words = (
            f"{{'descr': '{np.dtype(self.dtype).newbyteorder('<').str}', 'fortran_order': False, 'shape': {shape}, }}"
        )
        length = -(-(10 + len(words) + 1) // 64) * 64 - 10
        return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + words.ljust(length - 1).encode() + b"\n"

    @property
    def num_bytes(self) -> int:
        """Of features.npy."""
        return len(self.header) + self.num_samples * self.bytes_per_row

    @property
    def bytes_per_row(self) -> int:
        return self.num_features * np.dtype(self.dtype).itemsize


class Writing:
    """An entry under way. `lay_out` and `publish` are the first rank's; `open`, `write` (a block) and `close` everybody's."""

    def __init__(self, entry: Entry, *, run_dir: Path, rows_per_block: int):
        self.entry, self.blocks = entry, Blocks(entry.num_samples, rows_per_block)
        self.digests = self.blocks.empty()
        """Of the blocks that this rank has written."""
        writer = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:8]
        self.place = entry.root / f"{TEMPORARY_PREFIX}{entry.path.name}-{writer}"
        self._file: int | None = None
        self._flusher = Flusher(FLUSHED_BYTES // _RANKS_OF_A_NODE)

    def lay_out(self) -> None:
        """Step 1."""
        make_directory(self.entry.root)
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        try:
            with open(self.place / FEATURES, "wb") as file:
                file.write(self.entry.header)
                file.flush()
                if self.entry.num_bytes > shutil.disk_usage(self.place).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                file.truncate(self.entry.num_bytes)  # posix_fallocate writes all of it where it is not supported
        except OSError:
            shutil.rmtree(self.place, ignore_errors=True)
            raise

    def open(self) -> None:
        self._file = os.open(_seen(self.place / FEATURES), os.O_WRONLY)

    def write(self, rows_BD: NDArray[Any], *, start: int) -> None:
        """Step 2, for the rows from `start` on."""
        assert self._file is not None and rows_BD.shape[1] == self.entry.num_features
        assert start + len(rows_BD) <= self.entry.num_samples
        stored = np.ascontiguousarray(rows_BD, np.dtype(self.entry.dtype).newbyteorder("<"))
        place, data = len(self.entry.header) + start * stored.strides[0], stored.reshape(-1).view(np.uint8).data
        self.digests[self.blocks.number(start, len(rows_BD))] = digest_of(data)
        while data:
            written = os.pwrite(self._file, data, place)
            place, data = place + written, data[written:]
        self._flusher.wrote(stored.nbytes, self._file)

    def close(self, *, is_good: bool) -> None:
        if self._file is not None:
            descriptor, self._file = self._file, None
            try:
                if is_good:
                    flush(descriptor)
            finally:
                os.close(descriptor)

    def publish(self, labels_N: NDArray[np.int64], digests: NDArray[np.int64]) -> None:
        """Step 4, with the digests of all ranks."""
        assert digests.any(axis=1).all()
        np.save(self.place / LABELS, labels_N.astype("<i8"))
        np.save(self.place / CHECKSUMS, digests.astype("<i8"))
        entry, names = self.entry, (LABELS, CHECKSUMS)
        facts = Facts(
            key=entry.key,
            num_samples=entry.num_samples,
            num_features=entry.num_features,
            rows_per_block=self.blocks.rows_per_block,
            sha256={name: sha256_of(self.place / name) for name in names},
        )
        write_json(self.place / FACTS, facts.model_dump(mode="json"))
        for path in (*(self.place / name for name in names), self.place):
            sync(path)
        try:
            os.rename(self.place, entry.path)
        except OSError:  # there is one
            if entry.fault() is None:
                self.discard()
                return
            shutil.rmtree(entry.path, ignore_errors=True)
            os.rename(self.place, entry.path)
        sync(entry.root)

    def discard(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)


def no_room(root: Path, entries: list[Entry], error: OSError) -> UserError:
    gigabytes = sum(entry.num_bytes for entry in entries) / 1e9
    return UserError(
        f"features_dir: {root} has no room for {gigabytes:.3g} GB of features ({error.strerror}); make room, name another "
        "features_dir, or set feature_dtype=float16 or fewer views"
    )


def _seen(path: Path) -> Path:
    """The path, when this node sees it."""
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise UserError(
                f"{path}: was written by the first rank, and this node does not see it; name a features_dir that all nodes share"
            )
        sorted(path.parent.parent.iterdir())  # network file systems look again when a directory is opened
        time.sleep(0.05)
    return path
