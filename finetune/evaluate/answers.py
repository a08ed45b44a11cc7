"""What a model answers on a split: one exact pass over the disk, on any number of ranks, whatever the number of views, as the table
that everything is judged by: one row per picture that decodes, sorted by sample.

A batch is read and decoded once; its views are made from it, on the training device, one forward pass after the other. A view is
a function of (seed, number of the view, sample), so the answers depend on no rank, batch size or order. On a CPU threads make the
next pictures while the model works; on a GPU nobody waits until the pass is over: the rows stay there.
B batch, K classes, N samples, A answers (the five most probable), M moments of test-time augmentation.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.progress import progress
from finetune.session import PatientGroup
from finetune.split import batches_of, view_of
from pretrain.augment.augmentation import Augmentation
from pretrain.data.loader import Batch, lone_threads
from pretrain.data.order import Ids
from pretrain.data.reader import ShardReader
from pretrain.ranks.hangs import PROGRESS
from pretrain.ranks.world import World

Floats = NDArray[np.float64]
Logits = Callable[[Tensor], Tensor]
NUM_ANSWERS = 5


@dataclass(frozen=True)
class Answers:
    """Labels and answers are the model's numbers of the classes."""

    samples_N: Ids
    labels_N: Ids
    answers_NA: Ids
    """The most probable first."""
    probabilities_NA: Floats
    losses_N: Floats
    """-log of the probability of the label; of the mean probability, with test-time augmentation."""
    entropies_N: Floats
    """Of all probabilities, in nats."""
    squares_N: Floats
    """The sum of the squares of all probabilities."""
    answers_NM: Ids
    """The most probable answer after so many views."""
    losses_NM: Floats
    moments: tuple[int, ...] = ()
    """After how many views the running mean is noted; none without test-time augmentation."""

    @classmethod
    def of_ranks(cls, shares: Sequence["Answers"], *, num_samples: int, num_bad: int) -> "Answers":
        """Of all ranks, in any order. Every sample is there once, or was counted as one that does not decode."""
        order = np.argsort(samples := np.concatenate([share.samples_N for share in shares]), kind="stable")
        whole = {name: np.concatenate([getattr(share, name) for share in shares])[order] for name in _COLUMNS}
        found = samples[order]
        assert (np.diff(found) > 0).all(), "a sample was answered twice"
        assert len(found) + num_bad == num_samples, (len(found), num_bad, num_samples)
        assert not len(found) or (found[0] >= 0 and found[-1] < num_samples), (found[0], found[-1], num_samples)
        return cls(**whole, moments=shares[0].moments)

    def __len__(self) -> int:
        return len(self.samples_N)

    def left_out(self, *, num_samples: int) -> Ids:
        """The samples that did not decode."""
        return np.setdiff1d(np.arange(num_samples), self.samples_N, assume_unique=True)


_COLUMNS = tuple(field.name for field in fields(Answers) if field.name != "moments")


def moments_up_to(num_views: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... and the last."""
    steps = [base * 10**power for power in range(len(str(num_views))) for base in (1, 2, 5)]
    return (*(step for step in steps if step < num_views), num_views)


def answer(
    logits_of: Logits,
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    views: Sequence[int | None],
    local_batch_size: int,
    world: World,
) -> Answers | None:
    """The table of the whole split, on the first rank. `views`: numbers of views, where None is the plain picture."""
    group = PatientGroup()
    PROGRESS.mark(f"answering {reader.parts[0].split}")
    own = answer_share(logits_of, reader, augmentation, views=views, local_batch_size=local_batch_size, world=world)
    found = group.gather(own)  # a slow rank may be longer at its share than any other exchange may take
    if found is None:
        return None
    num_bad = sum(count for _, count in found)
    return Answers.of_ranks([share for share, _ in found], num_samples=reader.num_samples, num_bad=num_bad)


@torch.no_grad()
def answer_share(
    logits_of: Logits,
    reader: ShardReader,
    augmentation: Augmentation,
    *,
    views: Sequence[int | None],
    local_batch_size: int,
    world: World,
) -> tuple[Answers, int]:
    """This rank's rows; and how many of its pictures do not decode."""
    device, moments = augmentation.device, () if list(views) == [None] else moments_up_to(len(views))
    batches_rows, masks, num_bad = list[tuple[Tensor, ...]](), list[Tensor](), 0
    # a small split is not padded to a whole batch: each view would pay for it
    size = min(local_batch_size, -(-reader.num_samples // world.num_ranks))
    batches = batches_of(reader, title=None, local_batch_size=size, world=world, pin=device.type == "cuda")
    seen = count = 0
    unit = "images" if len(views) == 1 else "images x views"
    with progress("evaluating", total=reader.num_samples * len(views), unit=unit, enabled=world.is_first) as line:
        for batch, place, images_BCHW in _pictures(batches, augmentation, views, num_threads=world.num_cores):
            if place == 0:
                mean = _Mean(batch.labels_B.to(device, non_blocking=True), moments)
                count = min(size * world.num_ranks, reader.num_samples - seen)
                seen += count
            PROGRESS.touch()
            mean.add(logits_of(images_BCHW))
            if place == len(views) - 1:
                assert batch.mask_B is not None
                masks.append(batch.mask_B)
                samples = torch.from_numpy(batch.samples).to(device, non_blocking=True)
                batches_rows.append((samples, *mean.rows()))
                num_bad += batch.num_bad
            line.advance(count)
    kept = torch.cat(masks)
    columns = (torch.cat(column).cpu()[kept].numpy() for column in zip(*batches_rows, strict=True))
    named = dict(zip(_COLUMNS, columns, strict=True))
    return Answers(**named, moments=moments), num_bad


class _Mean:
    """The mean softmax of one batch over its views, and what is noted on the way."""

    def __init__(self, labels_B: Tensor, moments: tuple[int, ...]):
        self._labels_B1, self._moments = labels_B.unsqueeze(1), moments
        self._count = 0
        self._logits: Tensor | None = None
        self._probabilities: Tensor | None = None
        self._label_log: Tensor | None = None
        empty = self._labels_B1[:, :0]
        self._answers, self._losses = [empty], [empty.double()]

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
        if self._count in self._moments:
            self._answers.append(self._probabilities.argmax(dim=1, keepdim=True))
            self._losses.append(self._loss())

    def rows(self) -> tuple[Tensor, ...]:
        """The columns of `Answers`, from the labels on."""
        assert self._probabilities is not None
        mean_BK = self._probabilities / self._count
        # of a single answer by the logits, as training's evaluation does: there are fewer ties among them
        ranked = mean_BK if self._logits is None else self._logits
        tops_BA = ranked.topk(min(NUM_ANSWERS, ranked.shape[1]), dim=1).indices
        entropy = -torch.special.xlogy(mean_BK, mean_BK).sum(dim=1)
        scores = (mean_BK.gather(1, tops_BA), self._loss().squeeze(1), entropy, mean_BK.square().sum(dim=1))
        return self._labels_B1.squeeze(1), tops_BA, *scores, torch.cat(self._answers, 1), torch.cat(self._losses, 1)

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
