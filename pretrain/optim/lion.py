"""The Lion optimizer.

In fp32 on a CPU a step is one compiled loop that reads or writes 5 numbers per weight. torch's
operations move 17 to 20 numbers per weight. All implementations give the same bits.

A training step of B-6/Wi-256 or B-12/Wi-1024 (batch 128, one thread) takes 0.50-0.59 of the time
without this loop at ZeRO 1. At ZeRO 0 the ratio is 0.73-0.82.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from pretrain.compiled import Compiled

Floats = NDArray[np.float32]

SMALLEST_PART = 1 << 18
"""Smallest number of weights per thread."""


class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): w -= lr (sign(b1 m + (1 - b1) g) + wd w), then m =
    b2 m + (1 - b2) g.

    A gradient that is not finite makes its weight NaN, because with torch's sign(NaN) = 0 the
    weight would never move again.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Lion does not support a closure"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [weight.grad for weight in weights]
            for weight in weights:
                if "exp_avg" not in self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            momenta: list[Tensor] = [self.state[weight]["exp_avg"] for weight in weights]
            update = (
                in_one_pass if suit_one_pass([*weights, *gradients, *momenta]) else by_operations
            )
            update(weights, gradients, momenta, group)

    @torch.no_grad()
    def step_shards(
        self, gradients: Sequence[Sequence[Tensor]], copies: Sequence[Tensor], share: Tensor
    ) -> None:
        """Step the ZeRO shard of each group, without waiting for the device.

        `gradients`: for each shard, its gradient as consecutive tensors in any precision. `copies`:
        tensors that also get the new weights. Gradients are multiplied by `share`. If `share` is
        not finite, nothing changes.
        """
        for group, pieces, copy in zip(self.param_groups, gradients, copies, strict=True):
            (weight,) = group["params"]
            if "exp_avg" not in self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            momentum = self.state[weight]["exp_avg"]
            if suit_one_pass([weight, momentum, copy, *pieces]):
                sizes = [piece.numel() for piece in pieces]
                rows = [each[: sum(sizes)].split(sizes) for each in (weight, momentum, copy)]
                in_one_pass(rows[0], pieces, rows[1], group, copies=rows[2], share=share)
                continue
            gradient = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
            if suits_kernel(weight):
                from pretrain.optim.lion_kernel import step_on_device

                step_on_device(weight, gradient, momentum, copy, share, group)
            else:
                guarded(weight, gradient, momentum, share, group)
                copy.copy_(weight)


def guarded(
    weight: Tensor, gradient: Tensor, momentum: Tensor, share: Tensor, group: dict[str, Any]
) -> None:
    """Compute lion_kernel.py's step with torch operations. If `share` is not finite, change
    nothing."""
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    weight, momentum = (each[: gradient.numel()] for each in (weight, momentum))  # without padding
    is_good, gradient = share.isfinite(), gradient.float() * share
    way = torch.sign((momentum * beta1).add_(gradient, alpha=1 - beta1))
    torch.where(is_good, (momentum * beta2).add_(gradient, alpha=1 - beta2), momentum, out=momentum)
    weight.mul_(torch.where(is_good, 1 - lr * weight_decay, 1.0)).sub_(
        way.mul_(torch.where(is_good, lr, 0.0))
    )
    weight.add_(torch.where(is_good, momentum, 0.0), alpha=0)


def by_operations(
    weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], group: dict[str, Any]
) -> None:
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    if lr * weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    updates = torch._foreach_mul(momenta, beta1)
    torch._foreach_add_(updates, gradients, alpha=1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_add_(weights, updates, alpha=-lr)
    torch._foreach_mul_(momenta, beta2)
    torch._foreach_add_(momenta, gradients, alpha=1 - beta2)
    torch._foreach_add_(weights, momenta, alpha=0)  # non-finite momenta make weights NaN


# ---- the compiled pass


def suit_one_pass(tensors: list[Tensor]) -> bool:
    return all(
        tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
        for tensor in tensors
    )


def suits_kernel(weight: Tensor) -> bool:
    return weight.device.type == "cuda"


def in_one_pass(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    group: dict[str, Any],
    *,
    copies: Sequence[Tensor] = (),
    share: Tensor | None = None,
) -> None:
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    taken = 1.0 if share is None else share.numpy()[()]
    if not np.isfinite(taken):
        return
    numbers = np.array(
        [1 - lr * weight_decay, lr, beta1, 1 - beta1, beta2, 1 - beta2, taken], np.float32
    )
    parts = []
    for together in zip(weights, gradients, momenta, *[copies] * bool(copies), strict=True):
        rows: list[Floats] = [tensor.detach().view(-1).numpy() for tensor in together]
        size = max(SMALLEST_PART, -(-len(rows[0]) // torch.get_num_threads()))
        parts += [
            [row[start : start + size] for row in rows] for start in range(0, len(rows[0]), size)
        ]
    num_threads = min(
        torch.get_num_threads(), len(parts), sum(len(part[0]) for part in parts) // SMALLEST_PART
    )
    if num_threads < 2:
        for part in parts:
            _update(numbers, *part)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(_update, numbers, *part) for part in parts]:
            done.result()


@intrinsic  # type: ignore[untyped-decorator]
def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001 (numba's signature)
    """Return a * b + c, rounded once, like torch's `add` with `alpha`."""
    return a(a, b, c), lambda _context, builder, _signature, values: builder.fma(*values)


# results of fast math would depend on the compiler
@partial(Compiled, options={"nogil": True, "error_model": "numpy"})
def _update(
    numbers: Floats,
    weights: Floats,
    gradients: Floats,
    momenta: Floats,
    copies: Floats | None = None,
) -> None:
    kept_share, lr, beta1, rest1, beta2, rest2, share = numbers
    zero, one = np.float32(0), np.float32(1)
    for i in range(weights.shape[0]):
        gradient, momentum = gradients[i] * share, momenta[i]
        update = _fma(rest1, gradient, momentum * beta1)
        sign = one if update > zero else (-one if update < zero else zero)
        momentum = _fma(rest2, gradient, momentum * beta2)
        momenta[i] = momentum
        weight = _fma(zero, momentum, _fma(-lr, sign, weights[i] * kept_share))
        weights[i] = weight
        if copies is not None:
            copies[i] = weight
