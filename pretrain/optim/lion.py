"""Lion, with sign(0) = 0 and no way for a gradient that is not a number to hide.

On a CPU in fp32 it is one pass over memory, compiled (`lion_on_cpu.py`), elsewhere torch's operations on many tensors at once; both
give the same bits, which are those of the plain lines in the docstring with fused multiply-adds, as torch and timm compute them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

try:
    from pretrain.optim import lion_on_cpu
except ImportError:  # a platform that numba does not know
    lion_on_cpu = None  # type: ignore[assignment]


class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): w -= lr (sign(b1 m + (1 - b1) g) + wd w), then m = b2 m + (1 - b2) g.

    sign(0) is 0, so a weight without gradient and momentum stays where it is (fused kernels of others move it). A gradient that
    is not finite makes its weight NaN: torch's sign(NaN) is 0, and the weight would silently never move again.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a closure is never used here"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [weight.grad for weight in weights]
            for weight in weights:
                if "exp_avg" not in self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            momenta: list[Tensor] = [self.state[weight]["exp_avg"] for weight in weights]
            on_cpu = lion_on_cpu is not None and lion_on_cpu.takes([*weights, *gradients, *momenta])
            (lion_on_cpu.update if on_cpu else update)(weights, gradients, momenta, group)


def update(weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], group: dict[str, Any]) -> None:
    """On any device."""
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    if lr * weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    updates = torch._foreach_mul(momenta, beta1)
    torch._foreach_add_(updates, gradients, alpha=1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_add_(weights, updates, alpha=-lr)
    torch._foreach_mul_(momenta, beta2)
    torch._foreach_add_(momenta, gradients, alpha=1 - beta2)
    torch._foreach_add_(weights, momenta, alpha=0)  # nothing, unless the momentum is not finite
