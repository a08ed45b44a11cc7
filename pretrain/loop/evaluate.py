"""Exact evaluation on any number of ranks: every sample counts once, padding is masked, and sums
are reduced at the end.

Images that do not decode are skipped, and not included in `num_samples`. Shapes: K classes of the
model.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_prep.manifest import DatasetError
from data_prep.progress import ProgressLine
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
    """Top-1 accuracy with ReaL labels, or None if the split has no ReaL labels."""
    class_top1: float | None = None
    """Top-1 accuracy averaged over classes, or None if all classes have the same size."""

    def metrics(self) -> dict[str, float]:
        return {
            f"eval/{name}": float(value)
            for name, value in asdict(self).items()
            if name != "num_samples" and value is not None
        }


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
    """Return the scores of all ranks together. If a rank must stop, all ranks raise Interrupted at
    the same batch."""
    device, num_bad = augmentation.device, 0
    sums, real_sums = (torch.zeros(size, dtype=torch.float64, device=device) for size in (4, 2))
    hits_2K = sums.new_zeros(2, 0)  # correct and all images of each class
    real: RealLabels | None = None
    with (
        ProgressLine(
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
            logits = logits_of(prepared.images_BCHW)
            mask_B = batch.mask_B.to(device, non_blocking=True)
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
    top1, top5, loss, size, real_top1, real_size, skipped = totals[:7].tolist()
    correct_K, number_K = totals[7:].view(2, -1)
    assert size + skipped == reader.num_samples, (size, skipped, reader.num_samples)
    if size == 0:
        place = str(reader.parts[0].directory)
        problem, fix = "no image of the split can be decoded", f"run data_prep verify {place}"
        raise DatasetError(place, problem, fix, code="damaged")
    are_unequal = any(part.content.largest_class is not None for part in reader.parts)
    return Scores(
        top1 / size,
        top5 / size,
        loss / size,
        int(size),
        real=real_top1 / real_size if real_size else None,
        class_top1=float((correct_K / number_K)[number_K > 0].mean()) if are_unequal else None,
    )


def _heeding(stop: StopFlag, batches: Iterator[Batch], *, device: torch.device) -> Iterator[Batch]:
    """Yield the batches. Raise Interrupted if a rank must stop. Ranks learn of the stop one batch
    later, so no rank waits."""
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
    """Return (top-1 correct, top-5 correct, loss, 1) for each row, or zeros for masked rows. Shape:
    (4, B)."""
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
    losses = cross_entropy(logits.float(), labels, reduction="none")
    columns = (top[:, 0], top.any(dim=1), losses, torch.ones_like(losses))
    return torch.stack([column.double() for column in columns]) * mask
