"""Build the optimizer of a config. Parameters with the same weight decay and learning rate are one
group.

Weight decay is decoupled. It applies to matrices (dense or sparse), or to all parameters if
decay=all. Default betas come from the optimizer's paper.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from data_prep.errors import UserError
from pretrain.config import OptimizerSettings
from pretrain.optim.lion import Lion


def counts_steps(optimizer: Any) -> bool:
    """Return True if the optimizer's state contains a step number (`step`) that a restore must
    set."""
    return isinstance(optimizer, torch.optim.AdamW)


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    groups = parameter_groups(model, settings)
    match settings.name:
        case "lion":
            return Lion(groups, lr=settings.lr, betas=settings.betas or (0.9, 0.99))
        case "adamw":
            return torch.optim.AdamW(
                groups, lr=settings.lr, betas=settings.betas or (0.9, 0.999), fused=True
            )
        case "sgd":
            return DecoupledSgd(
                groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov
            )


class DecoupledSgd(torch.optim.SGD):
    """SGD whose weight decay skips the momentum: w -= lr wd w, then torch's step without decay."""

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float, nesterov: bool):
        groups = [
            group | {"decoupled_decay": group.pop("weight_decay"), "weight_decay": 0.0}
            for group in params
        ]
        super().__init__(
            groups, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, fused=True
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        is_skipped = getattr(self, "found_inf", None)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            kept: Any = 1 - group["lr"] * group["decoupled_decay"]
            if is_skipped is not None:
                kept = torch.where(is_skipped > 0, 1.0, kept)
                # torch would not initialize the buffers in a skipped first step
                for weight in weights if group["momentum"] else ():
                    self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
            if weights and group["decoupled_decay"]:
                torch._foreach_mul_(weights, kept)
        super().step(closure)


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Return a group for each pair of weight decay (on or off) and `lr_scale`. `set_lr` multiplies
    the learning rate by `lr_scale`."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    known: dict[str, int] = getattr(model, "layers", dict)()
    layers = {name: known.get(name, _layer(name)) for name, _ in model.named_parameters()}
    num_layers = 1 + max(layers.values())
    if num_layers == 1 and settings.layer_decay < 1:
        raise UserError(
            "optimizer.layer_decay",
            f"{settings.layer_decay} is not valid, because the model has no sequence of blocks",
            "remove it",
            code="conflict",
        )
    for name, parameter in model.named_parameters():
        # each layer has `layer_decay` times the learning rate of the next layer
        layer = num_layers - 1 if name.startswith("norm") else layers[name]
        scale = float(settings.layer_decay ** (num_layers - 1 - layer))
        if name.startswith("head."):
            scale = settings.head_lr_scale
        # `values` are the entries of a SparseLinear; a ViT excludes its position embeddings
        is_matrix = parameter.ndim >= 2 or name.endswith(".values")
        is_decayed = is_matrix and name not in getattr(model, "no_weight_decay", set)()
        groups.setdefault((settings.decay == "all" or is_decayed, scale), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "lr_scale": scale,
        }
        for (decayed, scale), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def _layer(name: str) -> int:
    found = re.search(r"(?:^|\.)blocks\.(\d+)\.", name)
    return int(found[1]) + 1 if found else 0


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
