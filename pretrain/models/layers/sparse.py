"""Linear layers in which each connection exists with probability p, fixed at initialization.

`masked` is a dense matrix times a mask; `sparse` stores only the connections: values and positions.

For one seed, both kinds of layers have the same connections and weights, and each loads the state
dict of the other. The state dict has the pattern: `mask`, or `row_starts` and `columns`. The
number of connections is random, so loading may resize `values`: create the optimizer afterwards. On
the meta device, a sparse layer has the expected number of connections, round(p x size).

A pattern has M rows (outputs) and N columns (inputs) in compressed sparse rows: `starts` (M + 1)
and `columns` (one per connection) are int32. Time and memory grow with the number of connections,
except for `dense`.

Two operators compute y = W x and its gradients. torch's compiler and FLOP counter know them.
Vectors are columns (N, B), B batch, so the kernels run along the batch. The transposed pattern has
starts, columns, and the position of each value in W. The gradient of x is a product with W^T.

    forward             y_MB = W x_NB                                       2 B floating-point operations per connection
    gradient of x       W^T dy_MB                                           2 B
    gradient of values  row i of dy times row j of x, at connections only   2 B

The kernels are torch's (MKL on a CPU, cuSPARSE on CUDA). Half precision is computed in fp32. Second
derivatives are not supported.
"""  # noqa: E501 (a table)

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils.flop_counter import register_flop_formula

from data_prep.errors import UserError

if TYPE_CHECKING:  # the import takes half a second, and only init_gain needs it
    from scipy.sparse import csr_matrix

MOST_CONNECTIONS = 2**31 - 1
SMALL = 32
"""Largest side of a matrix for which a dense singular value decomposition is cheap."""
DRAWN_TOGETHER = 2**20
"""Expected number of connections per draw, to limit memory."""


@dataclass(frozen=True)
class Connections:
    """Pattern of connections: output i has the inputs columns[row_starts[i] : row_starts[i + 1]],
    ascending."""

    row_starts: Tensor
    columns: Tensor
    num_inputs: int

    @property
    def rows(self) -> Tensor:
        """Return the row (output) of every connection (int64)."""
        counts = self.row_starts.diff()
        numbers = torch.arange(len(counts), device=counts.device)
        return numbers.repeat_interleave(counts, output_size=len(self.columns))

    def dense(self, values: Tensor) -> Tensor:
        """Return the (M, N) matrix with zeros for absent connections."""
        shape = (self.row_starts.shape[0] - 1, self.num_inputs)
        places = self.rows * self.num_inputs + self.columns
        return values.new_zeros(shape).flatten().scatter(0, places, values).reshape(shape)

    def mask(self) -> Tensor:
        return self.dense(torch.ones_like(self.columns, dtype=torch.bool))

    def matrix(self, values: Tensor) -> "csr_matrix":
        from scipy.sparse import csr_matrix

        parts = (
            values.detach().double().cpu().numpy(),
            self.columns.cpu().numpy(),
            self.row_starts.cpu().numpy(),
        )
        return csr_matrix(parts, shape=(len(self.row_starts) - 1, self.num_inputs))

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row starts, columns, order) of the transposed pattern. The transposed matrix has
        the values `values[order]`."""
        order = torch.sort(self.columns, stable=True).indices
        counts = torch.bincount(self.columns, minlength=self.num_inputs)
        return _starts(counts), self.rows[order].int(), order.int()

    def check(self, prefix: str) -> None:
        """Raise UserError if a loaded pattern is not valid. The kernels do not check patterns."""
        starts, count, fault = self.row_starts, len(self.columns), None
        if starts[0] != 0 or starts[-1] != count or (starts.diff() < 0).any():
            fault = f"row_starts do not rise from 0 to the {count} connections"
        elif count and not 0 <= self.columns.min() <= self.columns.max() < self.num_inputs:
            fault = f"columns are not between 0 and {self.num_inputs - 1}"
        if fault is not None:
            raise UserError(
                prefix[:-1],
                f"the weights are damaged: {fault}",
                "copy the weights again, or use other weights",
                code="damaged",
            )


def connections_of(mask_MN: Tensor) -> Connections:
    return Connections(_starts(mask_MN.sum(1)), mask_MN.nonzero()[:, 1].int(), mask_MN.shape[1])


def draw_connections(num_inputs: int, *, num_outputs: int, density: float) -> Connections:
    """Draw a pattern, some rows at a time. Each connection exists with probability `density`."""
    num_together = max(1, int(DRAWN_TOGETHER / (density * num_inputs)))
    counts, columns = [], []
    for first in range(0, num_outputs, num_together):
        num_rows = min(num_together, num_outputs - first)
        places = _draw_places(num_rows * num_inputs, density=density)
        counts.append(torch.bincount(places // num_inputs, minlength=num_rows))
        columns.append((places % num_inputs).int())
    return Connections(_starts(torch.cat(counts)), torch.cat(columns), num_inputs)


def _draw_places(size: int, *, density: float) -> Tensor:
    """Draw ascending positions below `size`, on the CPU. The gaps between them are geometrically
    distributed."""
    if density == 1:
        return torch.arange(size, device="cpu")
    num_gaps = int(size * density + 6 * (size * density) ** 0.5 + 16)
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    while places[-1] <= size:
        gaps = (
            torch.empty(num_gaps, dtype=torch.int64, device="cpu")
            .geometric_(density)
            .clamp_(max=size + 1)
        )
        places = torch.cat([places, places[-1] + gaps.cumsum(0)])
    places = places[1:] - 1  # the first gap is at least 1
    return places[: int(torch.searchsorted(places, size))]


def _starts(counts: Tensor) -> Tensor:
    starts = pad(counts.cumsum(0), (1, 0))
    if starts[-1] > MOST_CONNECTIONS:
        raise UserError(
            "model.density",
            f"one layer has {int(starts[-1])} connections, more than {MOST_CONNECTIONS}",
            "use a smaller density or width",
            code="bad-value",
        )
    return starts.int()


def largest_singular_value(matrix: "csr_matrix") -> float:
    """Use Lanczos' method with a fixed start vector. Only small matrices become dense."""
    from scipy.sparse.linalg import svds

    rows, columns = np.unique(matrix.nonzero()[0]), np.unique(matrix.indices)
    kept = matrix[rows][:, columns]
    if min(kept.shape) <= SMALL:
        return float(np.linalg.norm(kept.toarray(), 2)) if kept.nnz else 0.0
    return float(
        svds(kept, k=1, tol=1e-9, v0=np.ones(min(kept.shape)), return_singular_vectors=False)[0]
    )


with warnings.catch_warnings():  # once per process torch warns that compressed rows are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(
        torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64), torch.empty(0), size=(1, 1)
    )


@torch.library.custom_op("wide_mlps::sparse_product", mutates_args=())
def sparse_product(
    values: Tensor,
    starts: Tensor,
    columns: Tensor,
    transposed: Sequence[Tensor],  # noqa: ARG001  (for the backward pass)
    x_NB: Tensor,
) -> Tensor:
    """Return W x. `transposed` is (starts, columns, order) of W^T, or empty without gradients."""
    matrix = _compressed_rows(values, starts, columns, num_columns=len(x_NB))
    y_MB: Tensor = matrix @ _computed(x_NB).to(matrix.dtype)
    return y_MB.to(x_NB.dtype)


@sparse_product.register_fake
def _(
    _values: Tensor, starts: Tensor, _columns: Tensor, _transposed: Sequence[Tensor], x_NB: Tensor
) -> Tensor:
    return x_NB.new_empty(starts.shape[0] - 1, x_NB.shape[1])


@torch.library.custom_op("wide_mlps::sampled_product", mutates_args=())
def sampled_product(
    left_MB: Tensor, right_NB: Tensor, starts: Tensor, columns: Tensor, like: Tensor
) -> Tensor:
    """Return the entries of left right^T at the connections, in the dtype of `like`."""
    pattern = _compressed_rows(like, starts, columns, num_columns=len(right_NB))
    left, right = _computed(left_MB).to(pattern.dtype), _computed(right_NB).to(pattern.dtype)
    sampled: Tensor = torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0)
    return sampled.values().to(like.dtype)


@sampled_product.register_fake
def _(
    _left_MB: Tensor, _right_NB: Tensor, _starts: Tensor, _columns: Tensor, like: Tensor
) -> Tensor:
    return torch.empty_like(like)


for _device in ("cpu", "cuda"):  # torch's sparse products do not support bf16
    sparse_product.register_autocast(_device, torch.float32)
    sampled_product.register_autocast(_device, torch.float32)


def _computed(tensor: Tensor) -> Tensor:
    """Convert to a type that all sparse kernels of torch support."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return wide.contiguous()


def _compressed_rows(
    values: Tensor, starts: Tensor, columns: Tensor, *, num_columns: int
) -> Tensor:
    size = (len(starts) - 1, num_columns)
    return torch.sparse_csr_tensor(
        starts, columns, _computed(values), size=size, check_invariants=False
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], **_output: Any) -> None:
    values, starts, columns, transposed, x_NB = inputs
    ctx.save_for_backward(values, starts, columns, *transposed, x_NB)


def _backward(
    ctx: Any, gradient_MB: Tensor
) -> tuple[Tensor | None, None, None, list[None], Tensor | None]:
    values, starts, columns, transposed_starts, transposed_columns, order, x_NB = ctx.saved_tensors
    of_values, of_x, gradient_MB = None, None, gradient_MB.contiguous()
    if ctx.needs_input_grad[0]:
        of_values = sampled_product(gradient_MB, x_NB, starts, columns, values)
    if ctx.needs_input_grad[-1]:
        of_x = sparse_product(
            values.index_select(0, order), transposed_starts, transposed_columns, [], gradient_MB
        )
    return of_values, None, None, [None, None, None], of_x


sparse_product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula([torch.ops.wide_mlps.sparse_product])
def _product_flops(
    values: Any, _starts: Any, _columns: Any, _transposed: Any, x_NB: Any, **_: Any
) -> int:
    return int(2 * values[0] * x_NB[1])


@register_flop_formula([torch.ops.wide_mlps.sampled_product])
def _sampled_flops(
    left_MB: Any, _right: Any, _starts: Any, _columns: Any, like: Any, **_: Any
) -> int:
    return int(2 * like[0] * left_MB[1])


IN_MASKED, IN_SPARSE = ("weight", "mask"), ("values", "row_starts", "columns")
"""State-dict entries of each storage. An engine may load the pattern without the weights."""


class MaskedLinear(nn.Module):
    """(M * W) x + b. Entries of W with M = 0 start at 0 and get no gradient."""

    mask: Tensor

    def __init__(self, num_inputs: int, *, num_outputs: int, density: float, variance: float):
        super().__init__()
        self.in_features, self.out_features = num_inputs, num_outputs
        self.weight = nn.Parameter(torch.zeros(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.register_buffer("mask", torch.ones(num_outputs, num_inputs, dtype=torch.bool))
        if not self.mask.is_meta:
            connections = draw_connections(num_inputs, num_outputs=num_outputs, density=density)
            self.mask.copy_(connections.mask())
            self.weight.data.copy_(connections.dense(_draw_values(connections, variance=variance)))
        self.register_load_state_dict_pre_hook(_to_masked)  # type: ignore[no-untyped-call]

    def matrix(self) -> "csr_matrix":
        return connections_of(self.mask).matrix(self.weight[self.mask])

    def forward(self, x_BN: Tensor) -> Tensor:
        return linear(x_BN, torch.where(self.mask, self.weight, 0.0), self.bias)


class SparseLinear(nn.Module):
    """W x + b with a sparse W. `values` get weight decay like a matrix (optim/build.py)."""

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
            values = torch.empty(round(density * num_inputs * num_outputs))
            connections = Connections(
                torch.empty(num_outputs + 1, dtype=torch.int32), values.int(), num_inputs
            )
        else:
            connections = draw_connections(num_inputs, num_outputs=num_outputs, density=density)
            values = _draw_values(connections, variance=variance)
        self.values = nn.Parameter(values.to(device))
        self.register_buffer("row_starts", connections.row_starts.to(device))
        self.register_buffer("columns", connections.columns.to(device))
        for name in ("column_starts", "rows", "order"):
            self.register_buffer(name, None, persistent=False)
        self.transpose()
        self.register_load_state_dict_pre_hook(_to_sparse)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(lambda layer, _: layer.transpose())  # type: ignore[no-untyped-call]

    @property
    def connections(self) -> Connections:
        return Connections(self.row_starts, self.columns, self.in_features)

    def matrix(self) -> "csr_matrix":
        return self.connections.matrix(self.values)

    def dense_weight(self) -> Tensor:
        return self.connections.dense(self.values)

    def forward(self, x_BN: Tensor) -> Tensor:
        transposed = [self.column_starts, self.rows, self.order]
        y_MB = sparse_product(
            self.values, self.row_starts, self.columns, transposed, x_BN.T.contiguous()
        )
        y_BM = y_MB.T.contiguous()
        return y_BM if self.bias is None else y_BM + self.bias

    def transpose(self) -> None:
        if self.columns.is_meta:
            self.column_starts = self.columns.new_empty(self.in_features + 1)
            self.rows, self.order = torch.empty_like(self.columns), torch.empty_like(self.columns)
        else:
            self.column_starts, self.rows, self.order = self.connections.transposed()


def _to_masked(
    layer: MaskedLinear, state_dict: dict[str, Tensor], prefix: str, *_unused: object
) -> None:
    if all(f"{prefix}{name}" in state_dict for name in IN_SPARSE):
        values, starts, columns = (state_dict.pop(f"{prefix}{name}") for name in IN_SPARSE)
        connections = Connections(starts, columns, layer.in_features)
        connections.check(prefix)
        state_dict[f"{prefix}weight"] = connections.dense(values)
        state_dict[f"{prefix}mask"] = connections.mask()


def _to_sparse(
    layer: SparseLinear, state_dict: dict[str, Tensor], prefix: str, *_unused: object
) -> None:
    """Convert the entries of a masked layer in a state dict, and resize this layer to the loaded
    pattern."""
    if all(f"{prefix}{name}" in state_dict for name in IN_MASKED):
        weight, mask = (state_dict.pop(f"{prefix}{name}") for name in IN_MASKED)
        pattern = connections_of(mask)
        of_sparse = (weight[mask], pattern.row_starts, pattern.columns)
        for name, value in zip(IN_SPARSE, of_sparse, strict=True):
            state_dict[f"{prefix}{name}"] = value
    values, starts, columns = (state_dict.get(f"{prefix}{name}") for name in IN_SPARSE)
    if starts is not None and columns is not None:
        Connections(starts, columns, layer.in_features).check(prefix)
        if len(columns) != len(layer.columns):
            assert values is not None, f"{prefix[:-1]}: a new pattern needs values"
            layer.columns = layer.columns.new_empty(len(columns))
            layer.values.data = layer.values.new_empty(len(values))


def _draw_values(connections: Connections, *, variance: float) -> Tensor:
    return torch.randn(len(connections.columns), device="cpu") * variance**0.5
