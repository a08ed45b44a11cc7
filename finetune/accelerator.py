"""Joining the ranks of a `finetune` command: accelerate, told what it does not find out by itself."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from finetune.accelerator_settings import RanksSettings
from pretrain.checkpoints.run import stacks_dir
from pretrain.loop.supervision import watched
from pretrain.ranks.collectives import is_distributed
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.heartbeat import Heartbeat
from pretrain.ranks.world import World

_AS_LONG_AS_IT_TAKES = datetime.timedelta(days=365)


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


@dataclass(frozen=True)
class Joined:
    """This rank among the others."""

    accelerator: Accelerator
    heartbeat: Heartbeat
    hang_timeout_s: float | None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @contextmanager
    def attended(self, run_dir: Path) -> Iterator[None]:
        """The work itself: it has to get on, and an error is told at once, not after what takes its time to close around this."""
        self.heartbeat.watch(stacks_dir(run_dir), hang_timeout_s=self.hang_timeout_s)
        try:
            yield
        except BaseException as error:
            self.heartbeat.blame(error)
            raise


@contextmanager
def joined_ranks(world: World, ranks: RanksSettings, *, precision: str = "fp32") -> Iterator[Joined]:
    """Entered by all ranks of a short run: one that is gone, frozen or fails meanwhile ends the others, and is named."""
    accelerator = start_accelerator(world, precision=precision, timeout_s=ranks.timeout_s)
    with watched(world, timeout_s=ranks.heartbeat_timeout_s, device=accelerator.device) as heartbeat:
        yield Joined(accelerator, heartbeat, ranks.hang_timeout_s)


class Patience:
    """For waits that are as long as another rank's work, which no timeout of collectives may end; the heartbeat tells of ranks
    that are gone. All ranks make one together, before that work. Nothing of it goes through a GPU."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES) if is_distributed() else None

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place, of numbers in the host's memory."""
        assert not values.is_cuda
        if self._group is not None:
            with PROGRESS.waiting("waiting for the other ranks"):
                dist.all_reduce(values, group=self._group)
        return values

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_sum(torch.tensor(float(flag))) > 0)
