"""Which inputs each output is connected to: drawn at random, in compressed rows, transposed, as a dense matrix.

M outputs (rows), N inputs (columns). The cost of everything but `dense` is that of the connections that exist, so a layer of
150,528 x 150,528 with one connection in 10,000 takes a second. Indices are int32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_CONNECTIONS = 2**31 - 1
DRAWN_TOGETHER = 2**20
"""Connections per draw: what bounds the memory that drawing takes."""


@dataclass(frozen=True)
class Connections:
    """The inputs of output i are columns[row_starts[i] : row_starts[i + 1]], ascending."""

    row_starts: Tensor
    columns: Tensor
    num_inputs: int

    @property
    def rows(self) -> Tensor:
        """The output of every connection (int64), by steps that do not depend on the data and that ONNX knows."""
        starts = self.row_starts[1:-1].long()
        steps = torch.zeros(self.columns.shape[0] + 1, dtype=torch.int64, device=starts.device)
        return steps.scatter_add(0, starts, torch.ones_like(starts)).cumsum(0)[:-1]

    def dense(self, values: Tensor) -> Tensor:
        """(M, N), zero where there is no connection."""
        num_outputs = self.row_starts.shape[0] - 1
        places = self.rows * self.num_inputs + self.columns
        flat = values.new_zeros(num_outputs * self.num_inputs).scatter(0, places, values)
        return flat.reshape(num_outputs, self.num_inputs)

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row starts, columns, order) of the transposed pattern, whose values are values[order]."""
        order = torch.sort(self.columns, stable=True).indices
        counts = torch.bincount(self.columns, minlength=self.num_inputs)
        return _starts(counts), self.rows[order].int(), order.int()

    def fault(self) -> str | None:
        """What is wrong with a pattern from a file: the kernels that read it look at nothing."""
        starts, count = self.row_starts, len(self.columns)
        if starts[0] != 0 or starts[-1] != count or (starts.diff() < 0).any():
            return f"row_starts do not rise from 0 to the {count} connections"
        if count and not 0 <= self.columns.min() <= self.columns.max() < self.num_inputs:
            return f"columns name inputs outside 0 ... {self.num_inputs - 1}"
        return None


def connections_of(mask_MN: Tensor) -> Connections:
    return Connections(_starts(mask_MN.sum(1)), mask_MN.nonzero()[:, 1].int(), mask_MN.shape[1])


def draw_connections(num_inputs: int, *, num_outputs: int, density: float) -> Connections:
    """Each connection with probability `density`."""
    counts, columns = [], []
    for rows, places in _draws(num_inputs, num_outputs=num_outputs, density=density):
        counts.append(torch.bincount(places // num_inputs, minlength=len(rows)))
        columns.append((places % num_inputs).int())
    return Connections(_starts(torch.cat(counts)), torch.cat(columns), num_inputs)


def draw_mask(num_inputs: int, *, num_outputs: int, density: float) -> Tensor:
    """The same connections from the same state of the generator, as a mask."""
    mask_MN = torch.zeros(num_outputs, num_inputs, dtype=torch.bool, device="cpu")
    for rows, places in _draws(num_inputs, num_outputs=num_outputs, density=density):
        mask_MN[rows.start : rows.stop].view(-1)[places] = True
    return mask_MN


def _draws(num_inputs: int, *, num_outputs: int, density: float) -> Iterator[tuple[range, Tensor]]:
    """Some rows after the other: their numbers, and the places of their connections among all of their places."""
    num_together = max(1, int(DRAWN_TOGETHER / (density * num_inputs)))
    for first in range(0, num_outputs, num_together):
        rows = range(first, min(first + num_together, num_outputs))
        yield rows, _draw_places(len(rows) * num_inputs, density=density)


def _draw_places(size: int, *, density: float) -> Tensor:
    """Ascending places among `size`, by the gaps between them, which are geometric; from torch's generator of the CPU."""
    if density == 1:
        return torch.arange(size, device="cpu")
    num_gaps = int(size * density + 6 * (size * density) ** 0.5 + 16)
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    while places[-1] <= size:
        gaps = torch.empty(num_gaps, dtype=torch.int64, device="cpu").geometric_(density).clamp_(max=size + 1)
        places = torch.cat([places, places[-1] + gaps.cumsum(0)])
    places = places[1:] - 1  # the first gap is at least 1
    return places[: int(torch.searchsorted(places, size))]


def _starts(counts: Tensor) -> Tensor:
    starts = pad(counts.cumsum(0), (1, 0))
    if starts[-1] > MOST_CONNECTIONS:
        raise ValueError(
            f"model.density: leaves {int(starts[-1])} connections in one layer, more than {MOST_CONNECTIONS}; "
            "take a smaller density or width"
        )
    return starts.int()
