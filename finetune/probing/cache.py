"""Features on disk: one directory for each split and view, filled by many ranks, that appears whole or not at all. No torch here.

    FEATURES/NAME-KEY/
      features.npy     (N, D), row by row in the split's order
      labels.npy       (N,), int64
      features.json    what the key was made of, N, D, and the sha256 of both files; written last

The key is the hash of everything that the numbers depend on, so what is found under it is what would be computed.

How an entry comes about, on any number of ranks and nodes that share the directory:

1. the first rank lays out a directory under a temporary name, which is a function of the entry and the run directory, with room for
   all rows: a full disk is told now;
2. every rank writes its own rows, which are ranges that nobody else writes, with `pwrite`, and syncs them;
3. all ranks agree that they wrote N rows together: each row once;
4. the first rank adds labels and facts, and renames the directory. Another job may have been faster: what it published is
   the same, and stays.

A kill before 4 leaves a temporary name, which the same command removes when it begins again; nothing reads it. An entry is trusted
when the sizes and the hashes of its files are those of its facts: reading it for the hash costs what its first use would (the page
cache keeps it), at one to two GB/s.
"""

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

FEATURES, LABELS, FACTS = "features.npy", "labels.npy", "features.json"
VISIBLE_WITHIN_S = 60.0
"""How long another node's file may stay unseen: network file systems remember what was not there."""


class Facts(Settings):
    """features.json."""

    key: dict[str, Any]
    num_samples: int
    num_features: int
    sha256: dict[str, str]


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

    def fault(self) -> str | None:
        """What keeps it from being used; None for an entry that is whole; "" where there is none."""
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
        except (OSError, ValueError) as error:
            return str(error).splitlines()[0]
        return None

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
        return len(self.header) + self.num_samples * self.num_features * np.dtype(self.dtype).itemsize


class Writing:
    """An entry under way. `lay_out` and `publish` are the first rank's; `open`, `write` and `close` everybody's."""

    def __init__(self, entry: Entry, *, run_dir: Path):
        self.entry = entry
        writer = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:8]
        self.place = entry.root / f"{TEMPORARY_PREFIX}{entry.path.name}-{writer}"
        self._file: int | None = None

    def lay_out(self) -> None:
        """Step 1."""
        make_directory(self.entry.root)
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        try:
            with open(self.place / FEATURES, "wb") as file:
                file.write(self.entry.header)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, self.entry.num_bytes)
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
        while data:
            written = os.pwrite(self._file, data, place)
            place, data = place + written, data[written:]

    def close(self, *, is_good: bool) -> None:
        if self._file is not None:
            descriptor, self._file = self._file, None
            try:
                if is_good:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def publish(self, labels_N: NDArray[np.int64]) -> None:
        """Step 4."""
        np.save(self.place / LABELS, labels_N.astype("<i8"))
        entry, names = self.entry, (FEATURES, LABELS)
        facts = Facts(
            key=entry.key,
            num_samples=entry.num_samples,
            num_features=entry.num_features,
            sha256={name: sha256_of(self.place / name) for name in names},
        )
        write_json(self.place / FACTS, facts.model_dump(mode="json"))
        for path in (self.place / LABELS, self.place):
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
