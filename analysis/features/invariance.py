"""`analysis invariance`: what is left of a network's answers and features when its pictures are changed: shifted, mirrored,
cropped, their pixels put into another order; and what the mean answer over augmented views gains.

Each change is made to the picture that the model would be fed, before its pixels get an order of the model's own. What a shift
uncovers is the mean colour. Features are those of the mixings, and CKA compares a picture's with the changed one's.
B batch, L mixings, M moments: numbers of views.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from analysis.features.hsic import Grams, gram, hsic
from analysis.features.mixings import Subject, stored_batches, too_few
from data_prep.manifest import Manifest
from data_prep.progress import progress
from data_prep.settings import UserError
from finetune.evaluate.config import ViewSettings, choose_views
from finetune.evaluate.evaluate import moments_up_to
from finetune.split import class_numbers, view_of
from pretrain.augment.augmentation import IN_PLACE, pixel_order
from pretrain.config import ReadingSettings
from pretrain.data.datasets import Part
from pretrain.data.loader import Batch
from pretrain.data.reader import reading

SHIFTS, QUICK_SHIFTS = (*range(1, 17),), (1, 2, 4, 8, 16)
DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
CROPS = (0.9, 0.8, 0.7, 0.6, 0.5)
ORDER = 0
"""Seed of the order of pixels."""


@dataclass(frozen=True)
class Change:
    kind: str
    """none, shift, flip, crop or permutation."""
    amount: float
    """Pixels of a shift; of a crop the side that is left, in shares."""
    direction: str
    of: Callable[[Tensor], Tensor]
    """(B, C, H, W) to the same."""


def changes(size: int, *, quick: bool = False) -> list[Change]:
    """Of pictures of this size, no change first. `quick`: fewer shifts."""
    order_P = pixel_order(ORDER, size=size)
    found = [Change("none", 0, "", lambda x: x)]
    for pixels in (each for each in (QUICK_SHIFTS if quick else SHIFTS) if each < size):
        found += [Change("shift", pixels, name, _shift(pixels * y, pixels * x)) for name, (y, x) in DIRECTIONS.items()]
    found += [Change("flip", 0, name, _flip(axis)) for name, axis in (("left to right", 3), ("upside down", 2))]
    found += [Change("crop", share, "", _crop(max(1, round(size * share)))) for share in CROPS]
    permuted = Change("permutation", 0, "", lambda x: x.flatten(2)[:, :, order_P.to(x.device)].view_as(x))
    return [*found, permuted]


def _shift(down: int, right: int) -> Callable[[Tensor], Tensor]:
    def shifted(x_BCHW: Tensor) -> Tensor:
        by = (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0))
        height, width = x_BCHW.shape[2:]
        return pad(x_BCHW, by)[:, :, by[3] : by[3] + height, by[1] : by[1] + width]

    return shifted


def _flip(axis: int) -> Callable[[Tensor], Tensor]:
    return lambda x_BCHW: x_BCHW.flip(axis)


def _crop(side: int) -> Callable[[Tensor], Tensor]:
    """The middle, as large as before."""

    def cropped(x_BCHW: Tensor) -> Tensor:
        size = x_BCHW.shape[2]
        first = (size - side) // 2
        middle = x_BCHW[:, :, first : first + side, first : first + side]
        return interpolate(middle, size=(size, size), mode="bilinear", align_corners=False)

    return cropped


@dataclass(frozen=True)
class Request:
    dataset: str
    manifest: Manifest
    split: str
    batch: int = 256
    count: int | None = None
    quick: bool = False
    views: int = 0
    """Of test-time augmentation; 0: none."""
    seeds: int = 3
    """Of these views."""


def measure(subject: Subject, request: Request, *, device: torch.device) -> list[dict[str, Any]]:
    """A row for each change, and one for each number of views and seed."""
    card, part = subject.card, Part(Path(request.dataset), request.manifest, request.split)
    numbers = torch.tensor(class_numbers(card, request.manifest, dataset=request.dataset))
    asked = changes(card.image_size, quick=request.quick)
    order_P = None if card.pixel_permutation is None else pixel_order(card.pixel_permutation, size=card.image_size).to(device)
    plain = replace(subject.backbone, pixels=IN_PLACE).augmentation(device=device)
    tallies = [_Tally() for _ in asked]
    with reading([part], ReadingSettings(dataset=request.dataset), image_size=card.image_size) as reader:
        count = min(request.count or reader.num_samples, reader.num_samples)
        with progress(f"{subject.place}: changes", total=count * len(asked), unit="images") as line:
            for batch in stored_batches(reader, size=request.batch, count=count):
                images, labels = plain.plain(batch).images_BCHW, numbers[batch.labels_B]
                unchanged: tuple[Tensor, Grams] | None = None
                for change, tally in zip(asked, tallies, strict=True):
                    fed = change.of(images)
                    fed = fed if order_P is None else fed.flatten(2)[:, :, order_P].view_as(fed)
                    logits, features = subject.run(fed, gram)
                    found = logits.argmax(1).cpu(), Grams.of(features)
                    unchanged = unchanged or found
                    tally.add(found, unchanged, labels)
                    line.advance(len(labels))
        rows = [
            {"kind": change.kind, "amount": float(change.amount), "direction": change.direction, "seed": None, **tally.row()}
            for change, tally in zip(asked, tallies, strict=True)
        ]
        if not rows[0]["num_pictures"]:
            raise UserError(too_few(request.dataset, request.split))
        if request.views:
            for seed in range(request.seeds):
                batches = stored_batches(reader, size=request.batch, count=count)
                with progress(f"{subject.place}: views, seed {seed}", total=count * request.views, unit="images") as line:
                    rows += _views(subject, batches, request.views, numbers, seed=seed, advance=line.advance, device=device)
    return [{"run": subject.place, "model": subject.label} | row for row in rows]


class _Tally:
    """Sums over batches, of one change."""

    def __init__(self) -> None:
        self.right = self.same = self.seen = 0
        self.hsic_3L = torch.zeros(())

    def add(self, found: tuple[Tensor, Grams], unchanged: tuple[Tensor, Grams], labels_B: Tensor) -> None:
        (answers_B, grams), (usual_B, usual) = found, unchanged
        self.right += int((answers_B == labels_B).sum())
        self.same += int((answers_B == usual_B).sum())
        self.seen += len(labels_B)
        pairs = ((grams, usual), (grams, grams), (usual, usual))
        self.hsic_3L = self.hsic_3L + torch.stack([hsic(*pair).diagonal() for pair in pairs]).cpu()

    def row(self) -> dict[str, Any]:
        if not self.seen:
            return {"num_pictures": 0}
        both_L = (self.hsic_3L[1] * self.hsic_3L[2]).clamp_min(0).sqrt()
        return {**_accuracy(self.right, self.seen), "agreement": self.same / self.seen, "cka": (self.hsic_3L[0] / both_L).tolist()}


def _accuracy(right: int, seen: int) -> dict[str, Any]:
    top1 = right / seen
    return {"num_pictures": seen, "top1": top1, "standard_error": (top1 * (1 - top1) / seen) ** 0.5}


@torch.no_grad()
def _views(
    subject: Subject,
    batches: Iterable[Batch],
    num_views: int,
    numbers: Tensor,
    *,
    seed: int,
    advance: Callable[[int], None],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Of the mean softmax over the first 1, 2, 5, ... views: those that `finetune evaluate views=... seed=...` takes."""
    checkpoint, model, moments = subject.backbone.checkpoint, subject.backbone.model, moments_up_to(num_views)
    assert checkpoint is not None and model is not None
    settings = choose_views(ViewSettings(), checkpoint.run_dir)[0]
    augmentation = subject.backbone.augmentation(settings, seed=seed, device=device)
    right_M, seen = np.zeros(len(moments), np.int64), 0
    for batch in batches:
        total_BK = torch.zeros((), device=device)
        for view in range(num_views):
            total_BK = total_BK + model(view_of(batch, view, augmentation)).double().softmax(1)
            if view + 1 in moments:
                answers = total_BK.argmax(1).cpu()
                right_M[moments.index(view + 1)] += int((answers == numbers[batch.labels_B]).sum())
            advance(len(batch.labels_B))
        seen += len(batch.labels_B)
    return [
        {"kind": "views", "amount": float(views), "direction": "", "seed": seed, **_accuracy(int(right), seen)}
        for views, right in zip(moments, right_M, strict=True)
    ]


def mean_of(rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> tuple[np.ndarray, ...]:
    """(amounts, mean, least, most) over the rows of each amount: directions of a shift, seeds of views."""
    amounts = sorted({row["amount"] for row in rows})
    found = [[value(row) for row in rows if row["amount"] == amount] for amount in amounts]
    return np.array(amounts), *(np.array([form(values) for values in found]) for form in (np.mean, np.min, np.max))
