"""Optimizers: one file each, and which parameters they treat alike. Weight decay is decoupled in
all of them, per group."""

from pretrain.optim.build import build_optimizer, counts_steps, parameter_groups, set_lr
from pretrain.optim.lion import Lion

__all__ = ["Lion", "build_optimizer", "counts_steps", "parameter_groups", "set_lr"]
