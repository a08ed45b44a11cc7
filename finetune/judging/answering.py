"""What a model answers on a split: one exact pass over the disk, on any number of ranks, whatever the number of views.

A batch is read and decoded once; its views are made from it, on the training device, one forward pass after the other. A view is
a function of (seed, number of the view, sample), so the answers depend on no rank, batch size or order. On a CPU threads make the
next pictures while the model works; on a GPU nobody waits until the pass is over: the rows stay there.
B batch, K classes, A answers, R rows.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from finetune.judging.answers import NO_SAMPLE, Answers, Layout
from finetune.whole_split import batches_of
from pretrain.augment.augmentation import Augmentation
from pretrain.collectives import all_sum, is_distributed
from pretrain.loader import Batch
from pretrain.shards import ShardReader
from pretrain.threads import lone_threads
from pretrain.world import World

ROWS_AT_ONCE = 65_536
"""That a rank sends to the first one in one message."""
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Views:
    """The pictures that are made of each picture: the plain one, augmented ones, or both (then the plain one is the first)."""

    num_augmented: int = 0
    plain: bool = True

    def __len__(self) -> int:
        return self.num_augmented + int(self.plain)

    def make(self, batch: Batch, number: int, augmentation: Augmentation) -> Tensor:
        if self.plain and number == 0:
            return augmentation.plain(batch).images_BCHW
        view = number - int(self.plain)
        return augmentation.prepare(replace(batch, epochs=np.full(len(batch.samples), view, np.int64))).images_BCHW


def answer(
    logits_of: Logits,
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    views: Views,
    num_classes: int,
    local_batch_size: int,
    world: World,
) -> Answers | None:
    """The table of the whole split, on the first rank."""
    layout = Layout.of(num_classes=num_classes, num_views=views.num_augmented and len(views))
    rows, num_bad = answer_share(
        logits_of, reader, augmentation, views=views, layout=layout, local_batch_size=local_batch_size, world=world
    )
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
    views: Views,
    layout: Layout,
    local_batch_size: int,
    world: World,
) -> tuple[Tensor, int]:
    """This rank's rows, as many as every other's, on the device; and how many of its pictures do not decode."""
    rows, num_bad = list[Tensor](), 0
    # a small split is not padded to a whole batch: each view would pay for it
    size = min(local_batch_size, -(-reader.num_samples // world.num_ranks))
    pin = augmentation.device.type == "cuda"
    batches = batches_of(reader, title="evaluating", local_batch_size=size, world=world, pin=pin)
    mean: _Mean | None = None
    for batch, number, images_BCHW in _pictures(batches, augmentation, views, num_threads=world.num_cores):
        if number == 0:
            mean = _Mean(batch.labels_B.to(augmentation.device, non_blocking=True), layout)
        assert mean is not None
        mean.add(logits_of(images_BCHW))
        if number == len(views) - 1:
            assert batch.mask_B is not None
            samples = torch.from_numpy(batch.samples).double().where(batch.mask_B, NO_SAMPLE)
            rows.append(mean.rows(samples.to(augmentation.device, non_blocking=True)))
            num_bad += batch.num_bad
    return torch.cat(rows), num_bad


def gather_rows(rows_RC: Tensor) -> Tensor | None:
    """The rows of all ranks, on the first one's CPU. Every rank has as many, some of them padding."""
    if not is_distributed():
        return rows_RC.cpu()
    is_first, found = dist.get_rank() == 0, list[Tensor]()
    for part in torch.split(rows_RC.contiguous(), ROWS_AT_ONCE):
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
    batches: Iterator[Batch], augmentation: Augmentation, views: Views, *, num_threads: int
) -> Iterator[tuple[Batch, int, Tensor]]:
    """All views of one batch after those of the other: (batch, number of the view, pictures)."""
    if augmentation.device.type == "cuda":
        for batch in batches:
            there = replace(batch, images_BHWC=batch.images_BHWC.to(augmentation.device, non_blocking=True))
            for number in range(len(views)):
                yield batch, number, views.make(there, number, augmentation)
        return
    ahead = deque[tuple[Batch, int, Future[Tensor]]]()
    with lone_threads(num_threads, pin=False) as pool:
        for batch in batches:
            for number in range(len(views)):
                ahead.append((batch, number, pool.submit(views.make, batch, number, augmentation)))
                if len(ahead) > num_threads:
                    first, its_number, pictures = ahead.popleft()
                    yield first, its_number, pictures.result()
        for first, its_number, pictures in ahead:
            yield first, its_number, pictures.result()
