"""What a model answers on a split: one exact pass over the disk, on any number of ranks, whatever the number of views.

A batch is read and decoded once; its views are made from it, on the training device, one forward pass after the other. A view is
a function of (seed, number of the view, sample), so the answers depend on no rank, batch size or order. On a CPU threads make the
next pictures while the model works; on a GPU nobody waits until the pass is over: the rows stay there.
B batch, K classes, A answers, R rows.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.progress import progress
from finetune.evaluate.answers import NO_SAMPLE, Answers, Layout
from finetune.session import PatientGroup
from finetune.split import batches_of, view_of
from pretrain.augment.augmentation import Augmentation
from pretrain.data.loader import Batch, lone_threads
from pretrain.data.reader import ShardReader
from pretrain.ranks.collectives import all_sum, is_distributed
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

ROWS_AT_ONCE = 65_536
"""That a rank sends to the first one in one message."""
Logits = Callable[[Tensor], Tensor]


def answer(
    logits_of: Logits,
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    views: Sequence[int | None],
    num_classes: int,
    local_batch_size: int,
    world: World,
) -> Answers | None:
    """The table of the whole split, on the first rank. `views`: numbers of views, where None is the plain picture."""
    group = PatientGroup()
    PROGRESS.mark(f"answering {reader.parts[0].split}")
    layout = Layout.of(num_classes=num_classes, num_views=0 if list(views) == [None] else len(views))
    rows, num_bad = answer_share(
        logits_of, reader, augmentation, views=views, layout=layout, local_batch_size=local_batch_size, world=world
    )
    group.any_rank(False)  # a slow rank may be longer at its share than any exchange may take
    PROGRESS.mark("gathering the answers")
    gathered = gather_rows(rows)
    bad = int(all_sum(torch.tensor(num_bad, device=augmentation.device)))
    if gathered is None:
        return None
    return Answers.of_rows(gathered.numpy(), layout, num_samples=reader.num_samples, num_bad=bad)


@torch.no_grad()
def answer_share(
    logits_of: Logits,
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    views: Sequence[int | None],
    layout: Layout,
    local_batch_size: int,
    world: World,
) -> tuple[Tensor, int]:
    """This rank's rows, as many as every other's, on the device; and how many of its pictures do not decode."""
    rows, num_bad = list[Tensor](), 0
    # a small split is not padded to a whole batch: each view would pay for it
    size = min(local_batch_size, -(-reader.num_samples // world.num_ranks))
    pin = augmentation.device.type == "cuda"
    batches = batches_of(reader, title=None, local_batch_size=size, world=world, pin=pin)
    mean, seen, count = _Mean(torch.zeros(0), layout), 0, 0
    unit = "images" if len(views) == 1 else "images x views"
    with progress("evaluating", total=reader.num_samples * len(views), unit=unit, enabled=world.is_first) as line:
        for batch, place, images_BCHW in _pictures(batches, augmentation, views, num_threads=world.num_cores):
            if place == 0:
                mean = _Mean(batch.labels_B.to(augmentation.device, non_blocking=True), layout)
                count = min(size * world.num_ranks, reader.num_samples - seen)
                seen += count
            PROGRESS.touch()
            mean.add(logits_of(images_BCHW))
            if place == len(views) - 1:
                assert batch.mask_B is not None
                samples = torch.from_numpy(batch.samples).double().where(batch.mask_B, NO_SAMPLE)
                rows.append(mean.rows(samples.to(augmentation.device, non_blocking=True)))
                num_bad += batch.num_bad
            line.advance(count)
    return torch.cat(rows), num_bad


def gather_rows(rows_RC: Tensor) -> Tensor | None:
    """The rows of all ranks, on the first one's CPU. Every rank has as many, some of them padding."""
    if not is_distributed():
        return rows_RC.cpu()
    is_first, found = dist.get_rank() == 0, list[Tensor]()
    for part in torch.split(rows_RC.contiguous(), ROWS_AT_ONCE):
        PROGRESS.touch()
        places = [torch.empty_like(part) for _ in range(dist.get_world_size())] if is_first else None
        dist.gather(part, places, dst=0)
        found += [place.cpu() for place in places or ()]
    return torch.cat(found) if is_first else None


class _Mean:
    """The mean softmax of one batch over its views, and what is noted on the way."""

    def __init__(self, labels_B: Tensor, layout: Layout):
        self._labels_B1, self._layout = labels_B.unsqueeze(1), layout
        self._count = 0
        self._logits: Tensor | None = None
        self._probabilities: Tensor | None = None
        self._label_log: Tensor | None = None
        self._noted: list[Tensor] = []

    def add(self, logits_BK: Tensor) -> None:
        logs = logits_BK.float().log_softmax(dim=1)
        label_log = logs.gather(1, self._labels_B1).double()
        probabilities = logs.exp().double()
        self._count += 1
        if self._probabilities is None or self._label_log is None:
            self._logits, self._probabilities, self._label_log = logits_BK, probabilities, label_log
        else:
            self._logits = None
            self._probabilities += probabilities
            self._label_log = torch.logaddexp(self._label_log, label_log)  # a sum of tiny probabilities is not lost
        if self._count in self._layout.moments:
            self._noted.append(torch.cat([self._probabilities.argmax(dim=1, keepdim=True).double(), self._loss()], 1))

    def rows(self, samples_B: Tensor) -> Tensor:
        assert self._probabilities is not None
        mean_BK = self._probabilities / self._count
        # of a single answer by the logits, as training's evaluation does: there are fewer ties among them
        ranked = mean_BK if self._logits is None else self._logits
        tops_BA = ranked.topk(self._layout.num_answers, dim=1).indices
        entropy = -torch.special.xlogy(mean_BK, mean_BK).sum(dim=1, keepdim=True)
        noted = [part[:, column : column + 1] for column in range(2) for part in self._noted]
        columns = [samples_B.unsqueeze(1), self._labels_B1, tops_BA, mean_BK.gather(1, tops_BA), self._loss(), entropy]
        columns += [mean_BK.square().sum(dim=1, keepdim=True), *noted]
        return torch.cat([column.double() for column in columns], dim=1)

    def _loss(self) -> Tensor:
        assert self._label_log is not None
        return float(np.log(self._count)) - self._label_log


def _pictures(
    batches: Iterator[Batch], augmentation: Augmentation, views: Sequence[int | None], *, num_threads: int
) -> Iterator[tuple[Batch, int, Tensor]]:
    """All views of one batch after those of the other: (batch, place among the views, pictures)."""
    if augmentation.device.type == "cuda":
        for batch in batches:
            there = replace(batch, images_BHWC=batch.images_BHWC.to(augmentation.device, non_blocking=True))
            for place, view in enumerate(views):
                yield batch, place, view_of(there, view, augmentation)
        return
    ahead = deque[tuple[Batch, int, Future[Tensor]]]()
    with lone_threads(num_threads, pin=False) as pool:
        for batch in batches:
            for place, view in enumerate(views):
                ahead.append((batch, place, pool.submit(view_of, batch, view, augmentation)))
                if len(ahead) > num_threads:
                    first, its_place, pictures = ahead.popleft()
                    yield first, its_place, pictures.result()
        for first, its_place, pictures in ahead:
            yield first, its_place, pictures.result()
