"""The optimizer of a config. The betas that a config leaves out are those of the optimizer's paper."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pretrain.config import OptimizerSettings
from pretrain.optim.groups import parameter_groups
from pretrain.optim.lamb import Lamb
from pretrain.optim.lion import Lion
from pretrain.optim.sgd import DecoupledSgd


def counts_steps(optimizer: Any) -> bool:
    """Whether its state has, beside tensors as large as the weights, a `step`, which a checkpoint's restorer must set."""
    return isinstance(optimizer, torch.optim.AdamW | Lamb)


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    groups = parameter_groups(model, settings)
    match settings.name:
        case "lion":
            return Lion(groups, lr=settings.lr, betas=settings.betas or (0.9, 0.99))
        case "adamw":
            return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas or (0.9, 0.999), fused=True)
        case "lamb":
            return Lamb(groups, lr=settings.lr, betas=settings.betas or (0.9, 0.999))
        case "sgd":
            return DecoupledSgd(groups, lr=settings.lr, momentum=settings.momentum)
