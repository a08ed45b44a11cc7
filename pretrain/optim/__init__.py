"""Optimizers with decoupled weight decay for each parameter group."""

from pretrain.optim.build import build_optimizer, counts_steps, parameter_groups, set_lr
from pretrain.optim.lion import Lion

__all__ = ["Lion", "build_optimizer", "counts_steps", "parameter_groups", "set_lr"]
