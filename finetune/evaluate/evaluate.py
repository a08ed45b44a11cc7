"""`finetune evaluate`: a checkpoint's answers on a split, and everything that follows from them.

1. every rank answers its share, in one exact pass over the disk, and the first one gathers the rows
   as a table (`scoring.Answers`);
2. from that table alone come the scores (`scoring.py`), the files and the pictures (`report.py`);
3. MLflow gets them, and then result.json is written: a directory that has it is a whole evaluation,
   and a recorded one.

A batch is read and decoded once; its views are made from it, on the training device, one forward
pass after the other. A view is a function of (seed, number of the view, sample), so the answers
depend on no rank, batch size or order. On a CPU threads make the next pictures while the model
works; on a GPU nobody waits until the pass is over: the rows stay there. B batch, K classes, A
answers.
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
from data_prep.progress import progress
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
    """The result, on the first rank."""
    settings, manifest, checkpoint = evaluation.settings, evaluation.manifest, evaluation.checkpoint
    numbers = class_numbers(checkpoint.card, manifest, dataset=settings.data.dataset)
    part = Part(settings.data.directory, manifest, settings.data.split, numbers)
    with (
        session(
            settings,
            world,
            run_dir=evaluation.run_dir,
            used=[(part, "evaluation")],
            checkpoint=checkpoint,
            task="evaluate",
            tracking=evaluation.tracking,
            identity=evaluation.identity,
            facts=evaluation.facts,
        ) as (device, tracker),
        reading([part], settings.data, image_size=checkpoint.card.image_size) as reader,
    ):
        began_s = time.perf_counter()
        backbone = open_backbone(checkpoint, manifest, device=device)
        model, augment = backbone.model, settings.augment if settings.views else None
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
            return None  # nothing is collective from here on, so nobody waits for the pictures
        if not len(answers):
            raise DatasetError(
                "data.split",
                "no image of the split decodes",
                "run data_prep verify on the dataset",
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
    """The table of the whole split, on the first rank. `views`: numbers of views, where None is the
    plain picture."""
    PROGRESS.mark(f"answering {reader.parts[0].split}")
    group, device, moments = (
        PatientGroup(),
        augmentation.device,
        () if list(views) == [None] else moments_up_to(len(views)),
    )
    shares, samples, masks, num_bad = list[tuple[Tensor, ...]](), list[Tensor](), list[Tensor](), 0
    # a small split is not padded to a whole batch: each view would pay for it
    size = min(local_batch_size, -(-reader.num_samples // world.num_ranks))
    batches = batches_of(reader, title=None, local_batch_size=size, world=world, device=device)
    seen = count = 0
    unit = "images" if len(views) == 1 else "images x views"
    with progress(
        "evaluating", total=reader.num_samples * len(views), unit=unit, enabled=world.is_first
    ) as line:
        for batch, place, images_BCHW in _pictures(
            batches, augmentation, views, num_threads=world.num_cores
        ):
            if place == 0:
                mean = _Mean(batch.labels_B, moments)
                count = min(size * world.num_ranks, reader.num_samples - seen)
                seen += count
            PROGRESS.touch()
            mean.add(logits_of(images_BCHW))
            if place == len(views) - 1:
                assert batch.mask_B is not None
                masks.append(batch.mask_B)
                samples.append(torch.from_numpy(batch.samples))
                shares.append(mean.rows())
                num_bad += batch.num_bad
            line.advance(count)
    kept = torch.cat(masks)
    columns = (
        torch.cat(list(column)).cpu()[kept].numpy()
        for column in (samples, *zip(*shares, strict=True))
    )
    own = Answers(**dict(zip(COLUMNS, columns, strict=True)), moments=moments)
    found = group.gather(
        (own, num_bad)
    )  # a slow rank may be longer at its share than any other exchange may take
    if found is None:
        return None
    return Answers.of_ranks(
        [share for share, _ in found],
        num_samples=reader.num_samples,
        num_bad=sum(bad for _, bad in found),
    )


def moments_up_to(num_views: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... and the last."""
    steps = [base * 10**power for power in range(len(str(num_views))) for base in (1, 2, 5)]
    return (*(step for step in steps if step < num_views), num_views)


class _Mean:
    """The mean softmax of one batch over its views, and what is noted on the way."""

    def __init__(self, labels_B: Tensor, moments: tuple[int, ...]):
        self._labels_B1, self._moments, self._num_views = labels_B.unsqueeze(1), moments, 0
        self._ranked_BK = self._sum_BK = self._label_log_B1 = torch.empty(0)
        empty_B0 = self._labels_B1[:, :0]
        self._answers, self._losses = [empty_B0], [empty_B0.double()]

    def add(self, logits_BK: Tensor) -> None:
        logs_BK = logits_BK.float().log_softmax(dim=1)
        chances_BK, label_log_B1 = (
            logs_BK.exp().double(),
            logs_BK.gather(1, self._labels_B1).double(),
        )
        self._num_views += 1
        if self._num_views == 1:
            # a single answer is ranked by its logits, as training's evaluation does: there are
            # fewer ties among them
            self._ranked_BK, self._sum_BK, self._label_log_B1 = logits_BK, chances_BK, label_log_B1
        else:
            self._ranked_BK = self._sum_BK.add_(chances_BK)
            self._label_log_B1 = torch.logaddexp(
                self._label_log_B1, label_log_B1
            )  # a sum of tiny probabilities is not lost
        if self._num_views in self._moments:
            self._answers.append(self._ranked_BK.argmax(dim=1, keepdim=True))
            self._losses.append(self._loss())

    def rows(self) -> tuple[Tensor, ...]:
        """The columns of `Answers`, from the labels on."""
        mean_BK = self._sum_BK / self._num_views
        tops_BA = self._ranked_BK.topk(min(NUM_ANSWERS, mean_BK.shape[1]), dim=1).indices
        entropy_B, square_B = (
            -torch.special.xlogy(mean_BK, mean_BK).sum(dim=1),
            mean_BK.square().sum(dim=1),
        )
        scores = (mean_BK.gather(1, tops_BA), self._loss().squeeze(1), entropy_B, square_B)
        return (
            self._labels_B1.squeeze(1),
            tops_BA,
            *scores,
            torch.cat(self._answers, 1),
            torch.cat(self._losses, 1),
        )

    def _loss(self) -> Tensor:
        return float(np.log(self._num_views)) - self._label_log_B1


def _pictures(
    batches: Iterator[Batch],
    augmentation: Augmentation,
    views: Sequence[int | None],
    *,
    num_threads: int,
) -> Iterator[tuple[Batch, int, Tensor]]:
    """All views of one batch after those of the other: (batch, place among the views, pictures)."""
    if augmentation.device.type == "cuda":
        for batch in batches:
            yield from (
                (batch, place, view_of(batch, view, augmentation))
                for place, view in enumerate(views)
            )
        return
    ahead = deque[tuple[Batch, int, Future[Tensor]]]()
    with lone_threads(num_threads, pin=False) as pool:
        for batch in batches:
            for place, view in enumerate(views):
                ahead.append((batch, place, pool.submit(view_of, batch, view, augmentation)))
                if len(ahead) > num_threads:
                    first, its_place, pictures = ahead.popleft()
                    yield first, its_place, pictures.result()
        yield from ((first, its_place, pictures.result()) for first, its_place, pictures in ahead)
