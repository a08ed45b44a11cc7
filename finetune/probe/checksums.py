"""Checksums of a table that many ranks write: one for each block of its rows, made by whoever wrote it. No torch here.

A block is what a rank writes at a time, so it is hashed while it is at hand, and nobody reads the table again to publish it. When
an entry is found, ranks share its blocks. Digests are numbers, 0 where another rank has them: their sum over ranks is all of them.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.ranks.hangs import PROGRESS

_NUMBERS = 4
"""int64 of a sha256."""


@dataclass(frozen=True)
class Blocks:
    num_rows: int
    rows_per_block: int

    @property
    def count(self) -> int:
        return -(-self.num_rows // self.rows_per_block)

    def empty(self) -> NDArray[np.int64]:
        return np.zeros((self.count, _NUMBERS), np.int64)

    def number(self, start: int, count: int) -> int:
        """Of the block that these rows are."""
        number, rest = divmod(start, self.rows_per_block)
        assert not rest and count == min(self.rows_per_block, self.num_rows - start), (start, count)
        return number

    def share(self, part: int, num_parts: int) -> range:
        """The blocks that one of so many readers reads: side by side."""
        first, end = (self.count * each // num_parts for each in (part, part + 1))
        return range(first, end)

    def first_changed(
        self, path: Path, digests: NDArray[np.int64], *, header: int, bytes_per_row: int, blocks: range
    ) -> int | None:
        """The first of `blocks` whose bytes in the file are not those that were written."""
        size = self.rows_per_block * bytes_per_row
        with open(path, "rb") as file:
            file.seek(header + blocks.start * size)
            for number in blocks:
                PROGRESS.touch()
                if not np.array_equal(digest_of(file.read(size)), digests[number]):
                    return number
        return None


def digest_of(data: Any) -> NDArray[np.int64]:
    return np.frombuffer(hashlib.sha256(data).digest(), "<i8").astype(np.int64)
