"""Optimizers and their parameter groups. Weight decay is decoupled and falls on matrices only, sparse ones included."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pretrain.config import OptimizerSettings


class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): w -= lr (sign(b1 m + (1 - b1) g) + wd w), then m = b2 m + (1 - b2) g.

    sign(0) is 0, so a weight without gradient and momentum stays where it is (fused kernels of others move it).
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
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
            beta1, beta2 = group["betas"]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            updates = torch._foreach_mul(momenta, beta1)
            torch._foreach_add_(updates, gradients, alpha=1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_mul_(momenta, beta2)
            torch._foreach_add_(momenta, gradients, alpha=1 - beta2)


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Groups by (decayed or not) x (head or body); `lr_scale` is what `set_lr` multiplies with."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((_is_decayed(model, name, parameter), name.startswith("head.")), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "lr_scale": settings.head_lr_scale if is_head else 1.0,
        }
        for (decayed, is_head), parameters in sorted(groups.items())
    ]


def _is_decayed(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Entries of matrices, also the `values` of a `SparseLinear`; not what the model excepts (a ViT its position embeddings)."""
    is_of_matrix = parameter.ndim >= 2 or name.endswith(".values")
    return is_of_matrix and name not in getattr(model, "no_weight_decay", set)()


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    groups = parameter_groups(model, settings)
    match settings.name:
        case "lion":
            return Lion(groups, lr=settings.lr, betas=settings.betas or (0.9, 0.99))
        case "adamw":
            return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas or (0.9, 0.999), fused=True)
        case "sgd":
            return DecoupledSgd(groups, lr=settings.lr, momentum=settings.momentum)


class DecoupledSgd(torch.optim.SGD):
    """Nesterov SGD whose weight decay does not pass through the momentum."""

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


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
