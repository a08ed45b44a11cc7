"""Read and write DeepSpeed's sharded state (fp32 weights, optimizer state, averages) as complete
tensors by parameter name.

This file depends on one private part of DeepSpeed: the flat tensors that the wrapped optimizer
updates, and the positions of parameters in them. The file works for every stage, with and without
offload, and does not import deepspeed.

Reading: the first rank gathers the ranks' shards in pieces, and copies the pieces into (pinned)
host memory. The other ranks need no extra memory. Writing: each rank takes its own elements out of
the complete tensors, without communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.optim import counts_steps
from pretrain.optim.segments import Layout, Segment, cut_across, cut_each
from pretrain.ranks.world import World

_GATHERED_ELEMENTS = 2**26
"""Number of elements on the first rank's device during a gather: one piece from each rank."""


class ShardedState:
    def __init__(
        self, module: nn.Module, optimizer: Any, *, stage: int, world: World, device: torch.device
    ):
        """`optimizer`: the optimizer that `deepspeed.initialize` returned."""
        self.stage, self.world, self.device, self._optimizer = stage, world, device, optimizer
        self.plain: Any = optimizer if stage == 0 else optimizer.optimizer
        """The caller's optimizer, without DeepSpeed's wrapper."""
        named = list(module.named_parameters())
        self._names = [name for name, _ in named]
        self._shapes = [tuple(getattr(each, "ds_shape", each.shape)) for _, each in named]
        numbers = {id(each): number for number, (_, each) in enumerate(named)}
        self.layouts = dict(self._layouts(numbers))
        """Layout of each flat tensor that the optimizer updates."""

    # ---- the private layout

    def _layouts(self, numbers: Mapping[int, int]) -> Iterator[tuple[Tensor, Layout]]:
        ranks, zero = self.world.num_ranks, self._optimizer
        if self.stage == 0:
            for group in self.plain.param_groups:
                for each in group["params"]:
                    yield each, ((Segment(numbers[id(each)], 0, each.numel()),),) * ranks
        elif self.stage == 3:
            for tensor, parameters in zip(
                zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True
            ):
                numels = [(numbers[id(each)], each.ds_numel) for each in parameters]
                yield tensor, cut_each(numels, num_ranks=ranks)
        else:
            for number, tensor in enumerate(zero.single_partition_of_fp32_groups):
                in_order = zip(
                    zero.round_robin_bit16_groups[number],
                    zero.round_robin_bit16_offsets[number],
                    strict=True,
                )
                placed = [
                    Segment(numbers[id(each)], offset, each.numel()) for each, offset in in_order
                ]
                yield tensor, cut_across(placed, shard_size=tensor.numel(), num_ranks=ranks)

    @torch.no_grad()
    def refresh_working_weights(self) -> None:
        """Update the model's working weights (low-precision or gathered) from the fp32 shards."""
        zero = self._optimizer
        if self.stage in (1, 2):
            zero.update_lp_params()
        elif self.stage == 3:
            zero._partition_all_parameters()  # gathered weights are out of date
            for number in range(len(self.layouts)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
            if len(zero.persistent_parameters) > 0:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def forget_gradients(self) -> None:
        """Drop the gradients of a skipped step. Otherwise DeepSpeed 0.19.8, with offload and fp32
        accumulation, would add the next gradients to them."""
        if self.stage in (1, 2):
            self._optimizer.averaged_gradients.update(
                dict.fromkeys(self._optimizer.averaged_gradients)
            )

    # ---- the optimizer's state

    def weights(self) -> list[Tensor]:
        return list(self.layouts)

    def kinds(self) -> list[str]:
        """Return the names of the optimizer's state tensors, for example exp_avg. All ranks return
        the same names."""
        found = set[str]()
        for tensor in self.layouts:
            state = self.plain.state.get(tensor, {})
            found |= {
                kind
                for kind, value in state.items()
                if torch.is_tensor(value) and value.shape == tensor.shape
            }
        return sorted(found)

    def of_kind(self, kind: str) -> list[Tensor]:
        return [self.plain.state[tensor][kind] for tensor in self.layouts]

    def create(self, kinds: Sequence[str], *, num_updates: int) -> None:
        """Create zeros for the optimizer's state, as the optimizer's first step would. A restore
        then overwrites the zeros."""
        counts = counts_steps(self.plain)
        for tensor in self.layouts:
            state = self.plain.state[tensor]
            for kind in kinds:
                state.setdefault(kind, torch.zeros_like(tensor, requires_grad=False))
            if counts and num_updates:
                state["step"] = torch.tensor(float(num_updates), device=tensor.device)

    # ---- complete tensors

    @torch.no_grad()
    def read(self, kinds: Mapping[str, Sequence[Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return {kind: {name: complete tensor on the host}} on the first rank, after one wait for
        the device. Other ranks get {kind: {}}."""
        whole_of = {kind: self._read_one(shards) for kind, shards in kinds.items()}
        if self.world.is_first and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return whole_of if self.world.is_first else {kind: {} for kind in kinds}

    def _read_one(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        if not self.world.is_first:
            for shard in shards if self.stage else ():
                for piece in self._pieces(shard):
                    dist.gather(piece, None, dst=0)
            return {}
        on_gpu = self.device.type == "cuda"
        found = {
            name: torch.empty(shape, pin_memory=on_gpu)
            for name, shape in zip(self._names, self._shapes, strict=True)
        }
        rows = [found[name].view(-1) for name in self._names]
        for layout, shard in zip(self.layouts.values(), shards, strict=True):
            offset = 0
            for piece in self._pieces(shard) if self.stage else [shard.detach().view(-1)]:
                for rank, held in enumerate(self._gathered(piece)):
                    _copy_out(held, offset, layout[rank], rows)
                offset += piece.numel()
        return found

    def _pieces(self, shard: Tensor) -> Iterator[Tensor]:
        """Yield contiguous fp32 pieces of the shard on the device. The first rank's device can hold
        one piece from each rank."""
        for piece in torch.split(
            shard.detach(), max(1, _GATHERED_ELEMENTS // self.world.num_ranks)
        ):
            yield piece.to(self.device, torch.float32, non_blocking=True)

    def _gathered(self, piece: Tensor) -> list[Tensor]:
        if self.stage == 0 or self.world.num_ranks == 1:
            return [piece]
        received = [torch.empty_like(piece) for _ in range(self.world.num_ranks)]
        dist.gather(piece, received, dst=0)
        return received

    @torch.no_grad()
    def write(self, shards: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> None:
        for layout, shard in zip(self.layouts.values(), shards, strict=True):
            row = shard.detach().view(-1)
            for each in layout[self.world.rank]:
                source = tensors[self._names[each.parameter_number]].reshape(-1)
                row.narrow(0, each.offset, each.length).copy_(
                    source.narrow(0, each.start, each.length)
                )


def _copy_out(
    piece: Tensor, offset: int, segments: Sequence[Segment], rows: Sequence[Tensor]
) -> None:
    """Copy a piece to the flat parameters `rows`. The piece begins at `offset` in its shard."""
    for each in segments:
        low = max(each.offset, offset)
        high = min(each.offset + each.length, offset + piece.numel())
        if low < high:
            target = rows[each.parameter_number].narrow(
                0, each.start + low - each.offset, high - low
            )
            target.copy_(piece.narrow(0, low - offset, high - low), non_blocking=True)
