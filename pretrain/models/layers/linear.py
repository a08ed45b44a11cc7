"""nn.Linear whose matrix products have aligned sizes during training. In evaluation (export, FLOP
counts) it is nn.Linear.

Products of unaligned sizes are slower. On an AVX2 CPU in fp32, a layer 592 -> 2,688 has 1.6 times
the throughput of a layer 588 -> 2,687. The computation therefore pads weights, biases and inputs
with zeros to a multiple of 8. Parameters and the state dict stay the same, and results differ by
rounding only.

A hidden layer can keep the zeros in its output (`hands_zeros_on`). act(0) = 0 for every activation
of a spec, and the next weight has zero columns for these entries. The backward pass pads the
weights again and stores no padded copy.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

SMALLEST = 64
"""Smallest size that is padded."""


def aligned(size: int) -> int:
    return -(-size // 8) * 8 if size >= SMALLEST else size


class Linear(nn.Linear):
    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool = True, hands_zeros_on: bool = False
    ):
        """`hands_zeros_on`: keep the padding of the output. Only an activation and another `Linear`
        may follow."""
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.hands_zeros_on = hands_zeros_on

    def forward(self, x: Tensor) -> Tensor:
        inputs, outputs = aligned(self.in_features), aligned(self.out_features)
        size = x.shape[-1]
        needs_zeros = self.training and (inputs, outputs) != (self.in_features, self.out_features)
        # nn.Linear raises an error for any other size of x
        if not (needs_zeros and size == self.in_features) and not (
            size == inputs != self.in_features
        ):
            return super().forward(x)
        num_returned = outputs if self.hands_zeros_on else self.out_features
        y: Tensor = _Padded.apply(x, self.weight, self.bias, inputs, outputs, num_returned)  # type: ignore[no-untyped-call]
        return y


class _Padded(torch.autograd.Function):
    """Compute linear(), padded with zeros to `inputs` and `outputs`. Return the first
    `num_returned` outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: int,
        outputs: int,
        num_returned: int,
    ) -> Tensor:
        ctx.size, ctx.outputs, ctx.has_bias = x.shape[-1], outputs, bias is not None
        x = _widened(x, inputs)
        ctx.save_for_backward(x, weight)
        filled_bias = None if bias is None else pad(bias, (0, outputs - len(bias)))
        return linear(x, _filled(weight, inputs, outputs), filled_bias)[..., :num_returned]

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        rows, columns = weight.shape
        of_x, of_weight, of_bias = None, None, None
        gradient = _widened(gradient, ctx.outputs)
        if ctx.needs_input_grad[0]:
            filled = _filled(weight.to(gradient.dtype), x.shape[-1], gradient.shape[-1])
            of_x = (gradient @ filled)[..., : ctx.size].to(x.dtype)
        flat = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            # autocast multiplies in another precision than x has
            of_weight = (flat.T @ x.flatten(0, -2).to(flat.dtype))[:rows, :columns].to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)[:rows].to(weight.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _widened(x: Tensor, size: int) -> Tensor:
    """Append zeros to each row. `pad` would write all entries twice."""
    missing = size - x.shape[-1]
    return torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], dim=-1) if missing else x


def _filled(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    return pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))
