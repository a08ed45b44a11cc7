"""nn.Linear whose products have aligned sizes while it trains; in evaluation (export, counting) it
is nn.Linear.

Matrix kernels read rows in whole vectors. Rows of 588, 2,687 or 487 numbers take slower ones: on an
AVX2 CPU (fp32) the three products of 588 -> 2,687 run at 0.64, of 487 -> 1,948 at 0.69 of the rate
of the next multiples of 8; tensor cores want 16 bytes, 8 bf16 numbers (not yet run on CUDA). So
zeros fill weights, biases and inputs up to a multiple of 8, inside the computation alone:
parameters and state_dict are as without, results are but for rounding. A hidden layer hands its
zeros on (`hands_zeros_on`): act(0) = 0 for every activation that a spec can name, and the next
weight has zero columns there.

The filled-up weights are made again in the backward pass rather than kept for it; ZeRO 3 gathers
the layer's own weights for both.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

SMALLEST = 64
"""Below it a product is too small for it to matter."""


def aligned(size: int) -> int:
    """What `size` is filled up to."""
    return -(-size // 8) * 8 if size >= SMALLEST else size


class Linear(nn.Linear):
    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool = True, hands_zeros_on: bool = False
    ):
        """`hands_zeros_on`: its output goes through an activation into another `Linear` and nowhere
        else."""
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.hands_zeros_on = hands_zeros_on

    def forward(self, x: Tensor) -> Tensor:
        inputs, outputs = aligned(self.in_features), aligned(self.out_features)
        given = x.shape[-1]
        needs_zeros = self.training and (inputs, outputs) != (self.in_features, self.out_features)
        # anything but these two sizes is for nn.Linear to refuse: cut off, a picture of another
        # size would pass
        if not (needs_zeros and given == self.in_features) and not (
            given == inputs != self.in_features
        ):
            return super().forward(x)
        given_out = outputs if self.hands_zeros_on else self.out_features
        y: Tensor = _FilledUp.apply(x, self.weight, self.bias, inputs, outputs, given_out)  # type: ignore[no-untyped-call]
        return y


class _FilledUp(torch.autograd.Function):
    """linear() of inputs, weight and bias with zeros up to `inputs` and `outputs`; the first
    `given_out` of what comes out.

    The gradient of the others is filled up in one copy: cut off outside, they would cost zeros of
    the whole size as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: int,
        outputs: int,
        given_out: int,
    ) -> Tensor:
        ctx.given, ctx.outputs, ctx.has_bias = x.shape[-1], outputs, bias is not None
        x = _widened(x, inputs)
        ctx.save_for_backward(x, weight)
        filled_bias = None if bias is None else pad(bias, (0, outputs - len(bias)))
        return linear(x, _filled(weight, inputs, outputs), filled_bias)[..., :given_out]

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
            of_x = (gradient @ filled)[..., : ctx.given].to(x.dtype)
        flat = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            # autocast multiplies in another precision than it was given
            of_weight = (flat.T @ x.flatten(0, -2).to(flat.dtype))[:rows, :columns].to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)[:rows].to(weight.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _widened(x: Tensor, size: int) -> Tensor:
    """With zeros at the end of each row; `pad` would write the whole twice."""
    missing = size - x.shape[-1]
    return torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], dim=-1) if missing else x


def _filled(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    return pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))
