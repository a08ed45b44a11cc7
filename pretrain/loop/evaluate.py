"""Exact evaluation on any number of ranks: every sample counts once, padding is masked, sums are
reduced at the end.

A picture that does not decode is left out of the score, and `num_samples` says so. Where the split
has ReaL labels they are counted beside the dataset's own. If the split's classes are unequal, their
mean accuracy is a score, too. K classes of the model.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_prep.manifest import DatasetError
from data_prep.progress import progress
from pretrain.augment.augmentation import Augmentation
from pretrain.augment.feed import on_device
from pretrain.data.loader import Batch, evaluation_batches
from pretrain.data.reader import ShardReader
from pretrain.data.real_labels import RealLabels
from pretrain.ranks.collectives import Exchange, all_sum
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.preemption import Interrupted, StopFlag
from pretrain.ranks.world import World


@dataclass(frozen=True)
class Scores:
    top1: float
    top5: float
    loss: float
    num_samples: int
    real: float | None = None
    """Top-1 by the ReaL labels; None where there are none."""
    class_top1: float | None = None
    """The mean over classes of each class's top-1; None if the classes of the split are equally
    large."""

    def metrics(self, prefix: str) -> dict[str, float]:
        named = {
            name: value
            for name, value in asdict(self).items()
            if name != "num_samples" and value is not None
        }
        return {f"{prefix}/{name}": float(value) for name, value in named.items()}


def evaluate(
    logits_of: Callable[[Tensor], Tensor],
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    local_batch_size: int,
    world: World,
    stop: StopFlag,
    num_threads: int = 1,
) -> Scores:
    """The scores of all ranks together. Raises Interrupted, on all ranks at the same batch, once
    one of them is to stop."""
    device, num_bad = augmentation.device, 0
    sums, real_sums = (torch.zeros(size, dtype=torch.float64, device=device) for size in (4, 2))
    hits_2K = sums.new_zeros(2, 0)  # (right in 1, number) of each class
    real: RealLabels | None = None
    with (
        progress(
            "evaluating", total=reader.num_samples, unit="images", enabled=world.is_first
        ) as line,
        evaluation_batches(
            reader,
            local_batch_size=local_batch_size,
            world=world,
            num_threads=num_threads,
            pin=device.type == "cuda",
            waits=Future.result if device.type == "cuda" else stop.result,
        ) as stored,
        on_device(stored, device, waits=stop.result) as batches,
    ):
        for number, batch in enumerate(_heeding(stop, batches, device=device)):
            PROGRESS.mark(f"evaluating batch {number + 1:,}")
            prepared = augmentation.plain(batch)
            assert batch.mask_B is not None
            logits, mask_B = (
                logits_of(prepared.images_BCHW),
                batch.mask_B.to(device, non_blocking=True),
            )
            columns_4B = _count(logits, prepared.labels_B, mask_B)
            sums += columns_4B.sum(dim=1)
            if number == 0:
                hits_2K = sums.new_zeros(2, logits.shape[1])
            hits_2K.index_add_(1, prepared.labels_B, columns_4B[[0, 3]])
            if number == 0 and len(reader.parts) == 1:
                real = RealLabels.of(reader.parts[0], num_answers=logits.shape[1], device=device)
            if real is not None:
                real_sums += real.count(logits.argmax(dim=1), batch.samples, mask_B)
            num_bad += batch.num_bad
            line.advance(min(local_batch_size * world.num_ranks, reader.num_samples - line.done))
    totals = all_sum(
        torch.cat([sums, real_sums, sums.new_tensor([float(num_bad)]), hits_2K.flatten()])
    )
    right1, right5, loss, size, real_right, real_size, left_out = totals[:7].tolist()
    right_K, number_K = totals[7:].view(2, -1)
    assert size + left_out == reader.num_samples, (size, left_out, reader.num_samples)
    if size == 0:
        raise DatasetError(
            "evaluation: no picture of the split decodes; run data_prep verify on the dataset"
        )
    is_there_K, are_unequal = (
        number_K > 0,
        any(part.content.largest_class is not None for part in reader.parts),
    )
    return Scores(
        right1 / size,
        right5 / size,
        loss / size,
        int(size),
        real=real_right / real_size if real_size else None,
        class_top1=float((right_K / number_K)[is_there_K].mean()) if are_unequal else None,
    )


def _heeding(stop: StopFlag, batches: Iterator[Batch], *, device: torch.device) -> Iterator[Batch]:
    """The batches, unless ranks are to stop; they agree on it a batch late, when that costs no
    wait."""
    vote: Exchange | None = None
    while True:
        with stop.waiting():
            batch = next(batches, None)
        if vote is not None and vote.read().votes:
            raise Interrupted
        if batch is None:
            return
        vote = Exchange(
            torch.zeros((), device=device), 0.0, flag=stop.raised_by is not None, num_bad=0
        )
        yield batch


def _count(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """(right in 1, right in 5, loss, number) of each row; 0 where it is masked."""
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
    losses = cross_entropy(logits.float(), labels, reduction="none")
    columns = torch.stack(
        [
            top[:, 0].double(),
            top.any(dim=1).double(),
            losses.double(),
            torch.ones_like(losses).double(),
        ]
    )
    return columns * mask
