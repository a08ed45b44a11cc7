"""Nesterov SGD whose weight decay does not pass through the momentum."""

from collections.abc import Iterable
from typing import Any

import torch


class DecoupledSgd(torch.optim.SGD):
    """w -= lr wd w, then torch's own step without decay: m = momentum m + g, w -= lr (g + momentum m)."""

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float):
        groups = [group | {"decoupled_decay": group.pop("weight_decay"), "weight_decay": 0.0} for group in params]
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights and group["decoupled_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["decoupled_decay"])
        super().step(closure)
