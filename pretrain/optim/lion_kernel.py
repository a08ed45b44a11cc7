"""Lion as one Triton kernel. The kernel reads weight, gradient and momentum, and writes weight,
momentum and the model's working weight.

The results equal `lion.guarded` and the CPU loop bit for bit. Only lion.py imports this file,
because torch for CPUs comes without Triton.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def lion_kernel(  # type: ignore[no-untyped-def]
    weights,
    gradients,
    momenta,
    copies,
    share_at,
    size,
    kept_share,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    BLOCK: tl.constexpr,
):
    share = tl.load(share_at)
    if tl.abs(share) < float("inf"):  # otherwise skip the step; the host does not wait
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        gradient = tl.load(gradients + at, inside).to(tl.float32) * share
        weight, momentum = tl.load(weights + at, inside), tl.load(momenta + at, inside)
        way = tl.fma(gradient, rest1, momentum * beta1)
        sign = tl.where(way > 0, 1.0, tl.where(way < 0, -1.0, 0.0))
        momentum = tl.fma(gradient, rest2, momentum * beta2)
        weight = tl.fma(sign, -lr, weight * kept_share)
        weight = tl.fma(momentum, 0.0, weight)  # makes the weight NaN if momentum is not finite
        tl.store(momenta + at, momentum, inside)
        tl.store(weights + at, weight, inside)
        tl.store(copies + at, weight.to(copies.dtype.element_ty), inside)


def step_on_device(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    copy: Tensor,
    share: Tensor,
    group: dict[str, Any],
) -> None:
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    size = gradient.numel()  # the rest is padding
    numbers = (1 - lr * decay, lr, beta1, 1 - beta1, beta2, 1 - beta2)
    lion_kernel[(triton.cdiv(size, BLOCK),)](
        weight, gradient, momentum, copy, share, size, *numbers, BLOCK, num_warps=8
    )
