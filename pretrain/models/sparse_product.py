"""y = W x for a sparse W whose pattern is fixed and whose values are learnt: two operators known to torch's compiler and counters.

W has M rows (outputs) and N columns (inputs) in compressed rows: `starts` (M + 1) and `columns` (one per connection) are int32, the
values follow them. Vectors are columns (N, B), B batch: the kernels then run along the batch. The transposed pattern (its starts,
its columns, the place of each of its values among those of W) makes the gradient of x such a product, too, instead of a scatter.

    forward             y_MB = W x_NB                                       2 B floating-point operations per connection
    gradient of x       W^T dy_MB                                           2 B
    gradient of values  row i of dy times row j of x, at connections alone  2 B

The kernels are torch's (MKL on a CPU, cuSPARSE on CUDA, not yet run there). Half precision is computed in fp32 inside. There are no
second derivatives.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

with warnings.catch_warnings():  # once per process torch says that compressed rows are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64), torch.empty(0), size=(1, 1))


@torch.library.custom_op("wide_mlps::sparse_product", mutates_args=())
def sparse_product(
    values: Tensor,
    starts: Tensor,
    columns: Tensor,
    transposed: Sequence[Tensor],  # noqa: ARG001  (the backward's)
    x_NB: Tensor,
) -> Tensor:
    """`transposed`: (starts, columns, order) of W^T, or nothing where no gradient is asked for."""
    matrix = _compressed_rows(_computed(values), starts, columns, num_columns=len(x_NB))
    y_MB: Tensor = matrix @ _computed(x_NB).to(matrix.dtype)
    return y_MB.to(x_NB.dtype)


@sparse_product.register_fake
def _(_values: Tensor, starts: Tensor, _columns: Tensor, _transposed: Sequence[Tensor], x_NB: Tensor) -> Tensor:
    return x_NB.new_empty(starts.shape[0] - 1, x_NB.shape[1])


@torch.library.custom_op("wide_mlps::sampled_product", mutates_args=())
def sampled_product(left_MB: Tensor, right_NB: Tensor, starts: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    """left right^T at the connections alone, as values `like` these."""
    pattern = _compressed_rows(_computed(like), starts, columns, num_columns=len(right_NB))
    left, right = _computed(left_MB).to(pattern.dtype), _computed(right_NB).to(pattern.dtype)
    sampled: Tensor = torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0)
    return sampled.values().to(like.dtype)


@sampled_product.register_fake
def _(_left_MB: Tensor, _right_NB: Tensor, _starts: Tensor, _columns: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like)


for _device in ("cpu", "cuda"):  # or autocast reaches the products inside, for which there is no bf16
    sparse_product.register_autocast(_device, torch.float32)
    sampled_product.register_autocast(_device, torch.float32)


def _computed(tensor: Tensor) -> Tensor:
    """In a type that torch's sparse kernels have everywhere."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return wide.contiguous()


def _compressed_rows(values: Tensor, starts: Tensor, columns: Tensor, *, num_columns: int) -> Tensor:
    size = (len(starts) - 1, num_columns)
    return torch.sparse_csr_tensor(starts, columns, values, size=size, check_invariants=False)


def _keep(ctx: Any, inputs: tuple[Any, ...], **_output: Any) -> None:
    values, starts, columns, transposed, x_NB = inputs
    ctx.save_for_backward(values, starts, columns, *transposed, x_NB)


def _backward(ctx: Any, gradient_MB: Tensor) -> tuple[Tensor | None, None, None, list[None], Tensor | None]:
    values, starts, columns, transposed_starts, transposed_columns, order, x_NB = ctx.saved_tensors
    of_values = of_x = None
    gradient_MB = gradient_MB.contiguous()
    if ctx.needs_input_grad[0]:
        of_values = sampled_product(gradient_MB, x_NB, starts, columns, values)
    if ctx.needs_input_grad[-1]:
        of_x = sparse_product(values.index_select(0, order), transposed_starts, transposed_columns, [], gradient_MB)
    return of_values, None, None, [None, None, None], of_x


sparse_product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula([torch.ops.wide_mlps.sparse_product])
def _product_flops(values: Any, *others: Any, **_: Any) -> int:
    num_connections, (_num_inputs, batch) = values[0], others[3]
    return int(2 * num_connections * batch)


@register_flop_formula([torch.ops.wide_mlps.sampled_product])
def _sampled_flops(left: Any, *others: Any, **_: Any) -> int:
    num_connections, (_num_outputs, batch) = others[3][0], left
    return int(2 * num_connections * batch)
