"""The update of ZeRO stages 1 and 2 on the device, without waits of the host.

The engine calls this update instead of DeepSpeed's step, which waits for the device twice and makes
four more passes over memory.

1. DeepSpeed's reduction has left the averaged gradients of each flat shard as a list of tensors.
2. The ranks exchange one number to compute the norm over all shards.
3. The gradients are multiplied by `share`. `share` is 1 (less with clipping), or NaN if the norm
   is not finite.
4. The optimizer steps the shards. If `share` is not finite, nothing changes. Lion also writes
   the working weights. Other optimizers get `grad_scale` and `found_inf`, as torch's GradScaler
   passes them.
5. The ranks gather the working weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config import EngineSettings
from pretrain.engine.step import norm_of
from pretrain.optim import Lion
from pretrain.ranks.world import World


def updates_on_device(settings: EngineSettings) -> bool:
    """Return True at stages 1 and 2 without fp16 (loss scale) and offload."""
    is_plain = settings.offload == "none" and settings.precision != "fp16"
    return is_plain and settings.zero_stage in (1, 2)


class ShardedUpdate:
    norm: Tensor
    """Gradient norm of the last step over all ranks, before clipping."""

    def __init__(self, zero: Any, *, clip_norm: float, world: World):
        """`zero`: the optimizer that `deepspeed.initialize` returned."""
        self._zero, self._plain = zero, zero.optimizer
        self._clip_norm, self._world = clip_norm, world
        self._shards: list[Tensor] = zero.single_partition_of_fp32_groups
        self._copies: list[Tensor] = [
            parts[world.rank] for parts in zero.parallel_partitioned_bit16_groups
        ]
        self._keeps_gradients = world.num_ranks == 1 and not zero.partition_gradients

    @torch.no_grad()
    def step(self) -> None:
        pieces = [self._pieces(number) for number in range(len(self._shards))]
        self.norm = self._norm(pieces)
        excess = torch.ones_like(self.norm)
        if self._clip_norm:
            excess = ((self.norm + 1e-6) / self._clip_norm).clamp(min=1)
        share = torch.where(self.norm.isfinite(), 1 / excess, torch.nan)
        if isinstance(self._plain, Lion):
            self._plain.step_shards(pieces, self._copies, share)
        else:
            self._step_plainly(pieces, share)
        zero = self._zero
        for whole, copy in zip(zero.bit16_groups_flat, self._copies, strict=True):
            if self._world.num_ranks > 1:
                dist.all_gather_into_tensor(whole, copy, group=zero.dp_process_group)
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        zero.micro_step_id = -1  # its value before a step's first micro-batch

    def _pieces(self, number: int) -> list[Tensor]:
        """Return the gradient of a shard as consecutive flat tensors, without padding."""
        if self._keeps_gradients:
            parameters = self._zero.round_robin_bit16_groups[number]
            gradients = [self._zero.get_param_gradient_attribute(each) for each in parameters]
            return [
                (torch.zeros_like(each) if gradient is None else gradient).reshape(-1)
                for each, gradient in zip(parameters, gradients, strict=True)
            ]
        found = self._zero.averaged_gradients[number]
        whole = getattr(found, "flat_partition", None)  # the fp32 sum of bf16 gradients
        return [whole] if whole is not None else [each.reshape(-1) for each in found]

    def _norm(self, pieces: Sequence[Sequence[Tensor]]) -> Tensor:
        square = norm_of([piece for row in pieces for piece in row]).square()
        if self._world.num_ranks > 1:
            dist.all_reduce(square, group=self._zero.dp_process_group)
        return square.sqrt()

    def _step_plainly(self, pieces: Sequence[Sequence[Tensor]], share: Tensor) -> None:
        for shard, row in zip(self._shards, pieces, strict=True):
            rest = shard.numel() - sum(piece.numel() for piece in row)
            shard.grad = torch.cat([*row, row[0].new_zeros(rest)]).to(shard.dtype)
        self._plain.found_inf = share.isnan().float()
        self._plain.grad_scale = torch.where(share.isnan(), 1.0, 1 / share)
        self._plain.step()
        for shard, copy in zip(self._shards, self._copies, strict=True):
            shard.grad = None
            copy.copy_(shard)
