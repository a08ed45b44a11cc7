"""Exact evaluation on any number of ranks: every sample counts once, padding is masked, sums are reduced at the end."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_prep.progress import progress
from pretrain.augment.augmentation import Augmentation
from pretrain.collectives import all_sum
from pretrain.loader import evaluation_batches
from pretrain.shards import SplitReader
from pretrain.world import World


@dataclass(frozen=True)
class Scores:
    top1: float
    top5: float
    loss: float
    num_samples: int

    def metrics(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}/{name}": float(value) for name, value in asdict(self).items() if name != "num_samples"}


def evaluate(
    logits_of: Callable[[Tensor], Tensor],
    reader: SplitReader,
    augmentation: Augmentation,
    *,
    local_batch_size: int,
    world: World,
) -> Scores:
    sums = torch.zeros(4, dtype=torch.float64, device=augmentation.device)
    batches = evaluation_batches(reader, local_batch_size=local_batch_size, num_ranks=world.num_ranks, rank=world.rank)
    with progress("evaluating", total=reader.num_samples, unit="images", enabled=world.is_first) as line:
        for batch in batches:
            prepared = augmentation.plain(batch)
            assert batch.mask_B is not None
            sums += count(logits_of(prepared.images_BCHW), prepared.labels_B, batch.mask_B.to(augmentation.device))
            line.advance(min(local_batch_size * world.num_ranks, reader.num_samples - line.done))
    right1, right5, loss, number = all_sum(sums).tolist()
    assert number == reader.num_samples, (number, reader.num_samples)
    return Scores(top1=right1 / number, top5=right5 / number, loss=loss / number, num_samples=int(number))


def count(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """(right in 1, right in 5, loss, number) of the unmasked rows, summed."""
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
    losses = cross_entropy(logits.float(), labels, reduction="none")
    columns = torch.stack(
        [top[:, 0].double(), top.any(dim=1).double(), losses.double(), torch.ones_like(losses).double()]
    )
    return (columns * mask).sum(dim=1)
