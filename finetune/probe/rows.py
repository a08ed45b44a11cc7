"""Batches of standardized features on the device, with a column of ones for the bias.

A table is a memory-mapped file with the features of one view. Tables that fit are copied to the
GPU. Batches of other tables are gathered from the file. For a GPU, a thread gathers one batch in
advance.

Shapes: B batch, D features, E = D + 1 padded to a multiple of 8, N rows of a table, n chosen rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune.probe.features import Table
from pretrain.data.order import Ids
from pretrain.ranks.hangs import PROGRESS

CHUNK = 8192
"""Default number of rows of a batch."""
ROOM_SHARE = 0.7
"""Fraction of a GPU's free memory for tables. Heads and gradients need the rest."""


class Standard(NamedTuple):
    """Standardization of features: (x - mean) / std."""

    mean_D: Tensor
    std_D: Tensor

    @staticmethod
    def none(num_features: int) -> "Standard":
        return Standard(torch.zeros(num_features), torch.ones(num_features))

    @staticmethod
    def of(parts: Iterable[Tensor], *, num_features: int) -> "Standard":
        """Compute mean and deviation in one pass, in double precision. Constant features are not
        scaled."""
        count, mean = 0, torch.zeros(num_features, dtype=torch.float64)
        squares = torch.zeros_like(mean)
        for part in parts:
            values = part.double()
            own, size = values.mean(dim=0), len(values)
            change = own - mean
            squares = (
                squares
                + (values - own).square().sum(dim=0)
                + change.square() * (count * size / (count + size))
            )
            mean, count = mean + change * (size / (count + size)), count + size
        std = squares.div(max(1, count - 1)).sqrt()
        floor = 1e-6 * max(1e-30, float(std.max()))
        return Standard(mean.float(), torch.where(std > floor, std, torch.ones_like(std)).float())


def filled_width(num_features: int) -> int:
    """Return E: number of features, plus bias and padding."""
    return -(-(num_features + 1) // 8) * 8


class OnDevice:
    """Copies of tables on the device, if they fit."""

    def __init__(self, device: torch.device, *, room: float | None = None):
        """`room`: memory for copies in bytes (default: a fraction of the free memory at the first
        copy)."""
        self.device, self._room = device, room
        self._placed: dict[int, tuple[Table, Tensor]] = {}
        """Table and its copy, by the id of the table. The id stays unique while the table is
        referenced."""

    def of(self, table: Table) -> Tensor | None:
        """Return the copy of the table on the device; None if it does not fit."""
        if id(table) not in self._placed:
            if self._room is None:
                self._room = ROOM_SHARE * torch.cuda.mem_get_info(self.device)[0]
            num_bytes = table.values_ND.nbytes
            if num_bytes > self._room:
                return None
            self._room -= num_bytes
            placed = torch.empty(
                len(table), table.num_features, dtype=table.values_ND.dtype, device=self.device
            )
            for number, part in enumerate(table.chunks(CHUNK)):
                placed[number * CHUNK :][: len(part)] = part.to(self.device)
            self._placed[id(table)] = table, placed
        return self._placed[id(table)][1]


class Rows(ABC):
    """Chosen rows of a split, standardized."""

    def __init__(
        self,
        labels_N: Tensor,
        *,
        standard: Standard,
        device: torch.device,
        chosen_n: Tensor | None = None,
    ):
        self.device, self.num_features = device, len(standard.mean_D)
        self._chosen_n = torch.arange(len(labels_N)) if chosen_n is None else chosen_n
        self.labels_n = labels_N[self._chosen_n].to(device)
        self.num_rows, self.width = len(self._chosen_n), filled_width(self.num_features)
        self._mean_D, self._scale_D = standard.mean_D.to(device), (1 / standard.std_D).to(device)
        self._buffer_BE = torch.zeros(0, self.width, device=device)

    def epoch(self, view: int, order_n: Ids, *, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x_BE, labels_B) in the given order. The next batch overwrites x_BE."""
        order = torch.from_numpy(order_n)
        labels_n = self.labels_n[order.to(self.device, non_blocking=True)]
        batches = torch.split(self._chosen_n[order], batch_size)
        for values_BD, labels_B in zip(
            self._gathered(view, batches), torch.split(labels_n, batch_size), strict=True
        ):
            PROGRESS.touch()
            yield self._finished(values_BD), labels_B

    def chunks(self, *, size: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0, np.arange(self.num_rows), batch_size=size)

    def _finished(self, values_BD: Tensor) -> Tensor:
        if len(self._buffer_BE) < len(values_BD):
            self._buffer_BE = torch.zeros(len(values_BD), self.width, device=self.device)
            self._buffer_BE[:, self.num_features] = 1
        x_BE = self._buffer_BE[: len(values_BD)]
        torch.sub(values_BD, self._mean_D, out=x_BE[:, : self.num_features]).mul_(self._scale_D)
        return x_BE

    @abstractmethod
    def _gathered(self, view: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the features (B, D) of each batch of indices on the device."""


class TableRows(Rows):
    """Rows of tables. Each view has its own table; all tables have the same labels."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        standard: Standard,
        device: torch.device,
        chosen_n: Tensor | None = None,
        on_device: OnDevice | None = None,
    ):
        super().__init__(tables[0].labels_N, standard=standard, device=device, chosen_n=chosen_n)
        self._tables, self._on_device = tables, on_device or OnDevice(device)

    def _gathered(self, view: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        table = self._tables[view]
        if self.device.type != "cuda":
            for ids in batches:
                yield table.gather(ids)
            return
        placed_ND = self._on_device.of(table)
        if placed_ND is not None:
            for ids in torch.split(torch.cat(list(batches)).to(self.device), len(batches[0])):
                yield torch.index_select(placed_ND, 0, ids)
            return

        def gather(ids: Tensor) -> Tensor:
            pinned = torch.empty(
                len(ids), table.num_features, dtype=table.values_ND.dtype, pin_memory=True
            )
            return table.gather(ids, out=pinned)

        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(gather, batches[0])
            for following in [*batches[1:], None]:
                pinned = ahead.result()
                if following is not None:
                    ahead = pool.submit(gather, following)
                yield pinned.to(self.device, non_blocking=True)
