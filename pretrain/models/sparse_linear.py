"""Linear layers of which each connection exists with probability p, fixed at the start: `masked` (a dense matrix times a mask) and
`sparse` (the values of the connections that exist, and where they are).

One seed gives both the same connections and weights, and both load a state dict of either. The pattern is in the state dict
(`mask`; `row_starts` and `columns`), so a checkpoint is right whatever was drawn before it was loaded. The number of connections is
random, hence loading may resize `values`: make the optimizer afterwards.

On the meta device nothing is drawn, and a sparse layer has the expected number of connections, round(p x size).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pretrain.models.connections import Connections, connections_of, draw_connections, draw_mask
from pretrain.models.sparse_product import sparse_product

IN_MASKED, IN_SPARSE = ("weight", "mask"), ("values", "row_starts", "columns")
"""Entries of a state dict; the pattern may also come without the weights, which an engine may hold elsewhere."""


class MaskedLinear(nn.Module):
    """(M * W) x + b. Where M is 0, W starts at 0 and gets no gradient, so that no optimizer moves it."""

    mask: Tensor

    def __init__(self, num_inputs: int, *, num_outputs: int, density: float, variance: float):
        super().__init__()
        self.in_features, self.out_features = num_inputs, num_outputs
        self.weight = nn.Parameter(torch.zeros(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.register_buffer("mask", torch.ones(num_outputs, num_inputs, dtype=torch.bool))
        if not self.mask.is_meta:
            mask = draw_mask(num_inputs, num_outputs=num_outputs, density=density)
            values = _draw_values(int(mask.sum()), variance=variance)
            self.mask.copy_(mask)
            self.weight.data.masked_scatter_(self.mask, values.to(self.weight.device))

    def forward(self, x_BN: Tensor) -> Tensor:
        return linear(x_BN, torch.where(self.mask, self.weight, 0.0), self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if all(f"{prefix}{name}" in state_dict for name in IN_SPARSE):
            values, starts, columns = (state_dict.pop(f"{prefix}{name}") for name in IN_SPARSE)
            connections = Connections(starts, columns, self.in_features)
            _refuse_faults(connections, prefix)
            state_dict[f"{prefix}weight"] = connections.dense(values)
            state_dict[f"{prefix}mask"] = connections.dense(torch.ones_like(values, dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *args)


class SparseLinear(nn.Module):
    """W x + b with a sparse W. `values` are entries of a matrix, and decayed like them (`pretrain/optim.py`)."""

    row_starts: Tensor
    columns: Tensor
    column_starts: Tensor
    rows: Tensor
    order: Tensor

    def __init__(self, num_inputs: int, *, num_outputs: int, density: float, variance: float):
        super().__init__()
        self.in_features, self.out_features = num_inputs, num_outputs
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        device = self.bias.device
        if self.bias.is_meta:
            count = round(density * num_inputs * num_outputs)
            starts, columns = (torch.empty(size, dtype=torch.int32) for size in (num_outputs + 1, count))
            connections, values = Connections(starts, columns, num_inputs), torch.empty(count)
        else:
            connections = draw_connections(num_inputs, num_outputs=num_outputs, density=density)
            values = _draw_values(len(connections.columns), variance=variance)
        self.values = nn.Parameter(values.to(device))
        self.register_buffer("row_starts", connections.row_starts.to(device))
        self.register_buffer("columns", connections.columns.to(device))
        for name in ("column_starts", "rows", "order"):
            self.register_buffer(name, None, persistent=False)
        self._transpose()

    @property
    def connections(self) -> Connections:
        return Connections(self.row_starts, self.columns, self.in_features)

    def dense_weight(self) -> Tensor:
        return self.connections.dense(self.values)

    def forward(self, x_BN: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():  # ONNX has no sparse product
            return linear(x_BN, self.dense_weight(), self.bias)
        pattern_of_transpose = [self.column_starts, self.rows, self.order]
        y_MB = sparse_product(self.values, self.row_starts, self.columns, pattern_of_transpose, x_BN.T.contiguous())
        y_BM: Tensor = y_MB.T.contiguous() + self.bias
        return y_BM

    def _transpose(self) -> None:
        if self.columns.is_meta:
            self.column_starts = self.columns.new_empty(self.in_features + 1)
            self.rows, self.order = torch.empty_like(self.columns), torch.empty_like(self.columns)
        else:
            self.column_starts, self.rows, self.order = self.connections.transposed()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if all(f"{prefix}{name}" in state_dict for name in IN_MASKED):
            weight, mask = (state_dict.pop(f"{prefix}{name}") for name in IN_MASKED)
            found = connections_of(mask)
            of_sparse = (weight[mask], found.row_starts, found.columns)
            state_dict.update({f"{prefix}{name}": value for name, value in zip(IN_SPARSE, of_sparse, strict=True)})
        values, starts, columns = (state_dict.get(f"{prefix}{name}") for name in IN_SPARSE)
        if starts is not None and columns is not None:
            _refuse_faults(Connections(starts, columns, self.in_features), prefix)
            if len(columns) != len(self.columns):
                assert values is not None, f"{prefix[:-1]}: another pattern, and no values for it"
                self.columns, self.values.data = (
                    self.columns.new_empty(len(columns)),
                    self.values.new_empty(len(values)),
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._transpose()


def _draw_values(count: int, *, variance: float) -> Tensor:
    values: Tensor = torch.randn(count, device="cpu") * variance**0.5
    return values


def _refuse_faults(connections: Connections, prefix: str) -> None:
    fault = connections.fault()
    if fault is not None:
        raise ValueError(f"{prefix[:-1]}: {fault}; the weights are damaged, copy them again or use others")
