"""The update of ZeRO stages 1 and 2 on the device: norm, clipping, guard, optimizer, working
weights. The host waits for nothing.

The engine calls it instead of DeepSpeed's own step, which reads two numbers on the host, computes
the norm in fp64, and passes over gradients and weights four times more than needed. Backward passes
and the reduction stay DeepSpeed's.

1. The reduction has left this rank's share of the averaged gradients, for each flat shard a row of
   pieces.
2. The norm of all shards: one exchange of one number between the ranks.
3. `share`, which gradients are multiplied by: 1, less where clipping acts, NaN where the norm is
   not finite, on all ranks alike.
4. The optimizer steps the shards, or, where the share is not finite, leaves every bit of them and
   of its state. LION does so in one pass that writes the working weights, too; others are asked as
   torch's GradScaler asks: `grad_scale`, `found_inf`.
5. The working weights are gathered.
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
    """Elsewhere DeepSpeed updates: fp16 needs its loss scale, offload its copies, stage 3 its
    gathers."""
    return (
        settings.zero_stage in (1, 2)
        and settings.offload == "none"
        and settings.precision != "fp16"
    )


class ShardedUpdate:
    norm: Tensor
    """Of the last step's gradients on all ranks, before clipping."""

    def __init__(self, zero: Any, *, clip_norm: float, world: World):
        """`zero`: what `deepspeed.initialize` returned; its parameters keep their gradients at
        stage 1 on one rank."""
        self._zero, self._plain, self._clip_norm, self._world = (
            zero,
            zero.optimizer,
            clip_norm,
            world,
        )
        self._shards: list[Tensor] = zero.single_partition_of_fp32_groups
        self._copies: list[Tensor] = [
            parts[world.rank] for parts in zero.parallel_partitioned_bit16_groups
        ]
        self._keeps_gradients = world.num_ranks == 1 and not zero.partition_gradients

    @torch.no_grad()
    def step(self) -> None:
        pieces = [self._pieces(number) for number in range(len(self._shards))]
        self.norm = self._norm(pieces)
        # as DeepSpeed clips
        limit = (
            ((self.norm + 1e-6) / self._clip_norm).clamp(min=1)
            if self._clip_norm
            else torch.ones_like(self.norm)
        )
        share = torch.where(self.norm.isfinite(), 1 / limit, torch.nan)
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
        zero.micro_step_id = -1  # as before a step's first micro-batch

    def _pieces(self, number: int) -> list[Tensor]:
        """Of a shard's gradients, one after the other, from its first element on; what they leave
        is padding."""
        if self._keeps_gradients:
            parameters = self._zero.round_robin_bit16_groups[number]
            gradients = [self._zero.get_param_gradient_attribute(each) for each in parameters]
            return [
                (torch.zeros_like(each) if gradient is None else gradient).reshape(-1)
                for each, gradient in zip(parameters, gradients, strict=True)
            ]
        found = self._zero.averaged_gradients[number]
        whole = getattr(
            found, "flat_partition", None
        )  # in bf16 they are added up in fp32, in one row
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
