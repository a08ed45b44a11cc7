"""Optimizers: one file each, and which parameters they treat alike. Weight decay is decoupled in
all of them, per group."""

from pretrain.optim.build import build_optimizer, counts_steps, parameter_groups, set_lr
from pretrain.optim.lamb import Lamb
from pretrain.optim.lion import Lion

__all__ = ["Lamb", "Lion", "build_optimizer", "counts_steps", "parameter_groups", "set_lr"]
