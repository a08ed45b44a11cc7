"""Joining the ranks of a `finetune` command: accelerate, told what it does not find out by itself."""

import datetime

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from pretrain.world import World


def start_accelerator(world: World, *, precision: str = "fp32", timeout_s: float = 600.0) -> Accelerator:
    """Without a GPU accelerate must be told so, or each rank would silently work alone."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout_s)),
            # or every forward pass would send all permutations and masks; `average_over_ranks` does what is needed
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    if accelerator.num_processes != world.num_ranks:
        raise RuntimeError(
            f"accelerate sees {accelerator.num_processes} processes of {world.num_ranks}; unset ACCELERATE_* variables"
        )
    return accelerator
