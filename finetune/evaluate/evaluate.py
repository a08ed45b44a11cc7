"""`finetune evaluate`: predictions of a checkpoint on a split, and their scores.

1. Each rank predicts its images, and the first rank gathers the predictions (`scoring.Answers`).
2. The first rank computes scores (`scoring.py`), writes files and figures (`report.py`), records
   the scores in MLflow, and writes result.json.

An image is decoded once for all views. A view depends only on (seed, number of the view, sample),
so ranks and batch sizes change no prediction. Shapes: B batch, K classes, A top predictions.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.manifest import DatasetError
from data_prep.progress import ProgressLine
from finetune.evaluate.config import Evaluation
from finetune.evaluate.report import report
from finetune.evaluate.scoring import COLUMNS, Answers
from finetune.session import PatientGroup, open_backbone, session
from finetune.split import batches_of, class_numbers, view_of
from pretrain.augment.augmentation import Augmentation
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch, lone_threads
from pretrain.data.reader import ShardReader, reading
from pretrain.engine.step import working_in
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

NUM_ANSWERS = 5


def evaluate_checkpoint(evaluation: Evaluation, world: World) -> dict[str, Any] | None:
    """Return the result on the first rank, None on other ranks."""
    settings, manifest, checkpoint = evaluation.settings, evaluation.manifest, evaluation.checkpoint
    numbers = class_numbers(checkpoint.card, manifest, dataset=settings.data.dataset)
    part = Part(settings.data.directory, manifest, settings.data.split, numbers)
    with (
        session(
            settings,
            world,
            used=[(part, "evaluation")],
            checkpoint=checkpoint,
            task="evaluate",
            facts=evaluation.facts,
        ) as (device, tracker),
        reading([part], settings.data, image_size=checkpoint.card.image_size) as reader,
    ):
        began_s = time.perf_counter()
        backbone = open_backbone(checkpoint, manifest, device=device)
        model, augment = backbone.model, settings.augment if settings.num_views else None
        assert model is not None

        def logits_of(images_BCHW: Tensor) -> Tensor:
            with (
                working_in(settings.precision),
                torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"),
            ):
                logits_BK: Tensor = model(images_BCHW)
            return logits_BK

        answers = answer(
            logits_of,
            reader,
            backbone.augmentation(augment, seed=settings.seed, device=device),
            views=settings.view_numbers,
            local_batch_size=settings.local_batch_size,
            world=world,
        )
        if answers is None:
            return None  # other ranks do not wait for the figures
        if not len(answers):
            raise DatasetError(
                "data.split",
                "no image of the split decodes",
                f"run data_prep verify {settings.data.dataset}",
                code="damaged",
            )
        return report(evaluation, answers, reader, tracker, seconds=time.perf_counter() - began_s)


@torch.no_grad()
def answer(
    logits_of: Callable[[Tensor], Tensor],
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    views: Sequence[int | None],
    local_batch_size: int,
    world: World,
) -> Answers | None:
    """Return the predictions of all ranks on the first rank, None on other ranks. In `views`, None
    is the plain image."""
    PROGRESS.mark(f"predicting {reader.parts[0].split}")
    group, device = PatientGroup(), augmentation.device
    moments = () if list(views) == [None] else moments_up_to(len(views))
    # a small split needs small batches, or each view computes much padding
    size = min(local_batch_size, -(-reader.num_samples // world.num_ranks))
    total = reader.num_samples * len(views)
    shares, samples, masks, num_bad = list[tuple[Tensor, ...]](), list[Tensor](), list[Tensor](), 0
    unit = "images" if len(views) == 1 else "images x views"
    batches = batches_of(reader, title=None, local_batch_size=size, world=world, device=device)
    mean: _Mean | None = None
    with ProgressLine("evaluating", total=total, unit=unit, enabled=world.is_first) as line:
        for batch, images_BCHW in _views(batches, augmentation, views, world.num_cores):
            PROGRESS.touch()
            mean = mean or _Mean(batch.labels_B, moments)
            mean.add(logits_of(images_BCHW))
            if mean.num_views == len(views):
                assert batch.mask_B is not None
                masks.append(batch.mask_B)
                samples.append(torch.from_numpy(batch.samples))
                shares.append(mean.rows())
                num_bad, mean = num_bad + batch.num_bad, None
            line.advance(min(size * world.num_ranks, total - line.done))
    is_kept = torch.cat(masks)
    columns = [
        torch.cat(list(column)).cpu()[is_kept].numpy()
        for column in (samples, *zip(*shares, strict=True))
    ]
    own = Answers(**dict(zip(COLUMNS, columns, strict=True)), moments=moments)
    gathered = group.gather((own, num_bad))
    if gathered is None:
        return None
    rows, bad = zip(*gathered, strict=True)
    return Answers.of_ranks(rows, num_samples=reader.num_samples, num_bad=sum(bad))


def moments_up_to(num_views: int) -> tuple[int, ...]:
    """Return the numbers of views after which scores are recorded: 1, 2, 5, 10, 20, 50, ..., and
    the last number."""
    steps = [base * 10**power for power in range(len(str(num_views))) for base in (1, 2, 5)]
    return (*(step for step in steps if step < num_views), num_views)


class _Mean:
    """Mean softmax over the views of one batch, and the predictions after each number of views in
    `moments`."""

    def __init__(self, labels_B: Tensor, moments: tuple[int, ...]):
        self._labels_B1, self._moments, self.num_views = labels_B.unsqueeze(1), moments, 0
        self._answers = [self._labels_B1[:, :0]]
        self._losses = [self._labels_B1[:, :0].double()]

    def add(self, logits_BK: Tensor) -> None:
        logs_BK = logits_BK.float().log_softmax(dim=1)
        label_log_B1 = logs_BK.gather(1, self._labels_B1).double()
        self.num_views += 1
        if self.num_views == 1:
            # rank logits, as training does, because probabilities have more ties
            self._ranked_BK, self._sum_BK = logits_BK, logs_BK.exp().double()
            self._label_log_B1 = label_log_B1
        else:
            self._ranked_BK = self._sum_BK.add_(logs_BK.exp().double())
            self._label_log_B1 = torch.logaddexp(self._label_log_B1, label_log_B1)
        if self.num_views in self._moments:
            self._answers.append(self._ranked_BK.argmax(dim=1, keepdim=True))
            self._losses.append(self._loss())

    def rows(self) -> tuple[Tensor, ...]:
        """Return the columns of `Answers` without `samples_N`."""
        mean_BK = self._sum_BK / self.num_views
        tops_BA = self._ranked_BK.topk(min(NUM_ANSWERS, mean_BK.shape[1]), dim=1).indices
        return (
            self._labels_B1.squeeze(1),
            tops_BA,
            mean_BK.gather(1, tops_BA),
            self._loss().squeeze(1),
            -torch.special.xlogy(mean_BK, mean_BK).sum(dim=1),
            mean_BK.square().sum(dim=1),
            torch.cat(self._answers, 1),
            torch.cat(self._losses, 1),
        )

    def _loss(self) -> Tensor:
        return float(np.log(self.num_views)) - self._label_log_B1


def _views(
    batches: Iterator[Batch],
    augmentation: Augmentation,
    views: Sequence[int | None],
    num_threads: int,
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield all views of a batch, then all views of the next batch. On a CPU, threads compute views
    in advance."""
    if augmentation.device.type == "cuda":
        for batch in batches:
            for view in views:
                yield batch, view_of(batch, view, augmentation)
        return
    ahead = deque[tuple[Batch, Future[Tensor]]]()
    with lone_threads(num_threads, pin=False) as pool:
        for batch in batches:
            for view in views:
                ahead.append((batch, pool.submit(view_of, batch, view, augmentation)))
                if len(ahead) > num_threads:
                    first, images = ahead.popleft()
                    yield first, images.result()
        yield from ((first, images.result()) for first, images in ahead)
