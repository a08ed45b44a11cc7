"""Imports and compiled code of every training's first step, loaded once in the server that forks
ranks (see forked.py)."""

import deepspeed.comm.mori
import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import torch

import pretrain.cli  # noqa: F401
from pretrain.augment.crops import whole_boxes
from pretrain.augment.on_cpu import crop
from pretrain.optim.lion import in_one_pass

# code that numba has compiled, from its cache
crop(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), whole_boxes(1, 8), size=4)
in_one_pass(
    *[[torch.zeros(8)] for _ in range(3)], {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
)
