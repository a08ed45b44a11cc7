"""`analysis invariance`: what is left of a network's answers and features when its pictures are
changed: shifted, mirrored, cropped, their pixels put into another order; and what the mean answer
over augmented views gains.

Each change is made to the picture that the model would be fed, before its pixels get an order of
the model's own. What a shift uncovers is the mean colour. Features are those of the mixings, and
CKA compares a picture's with the changed one's. B batch, K changes, L mixings, M moments: numbers
of views.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from analysis.features.hsic import Grams, cka, gram, hsic
from analysis.features.mixings import Pictures, Subject
from finetune.evaluate.config import ViewSettings, choose_views
from finetune.evaluate.evaluate import moments_up_to
from finetune.split import class_numbers, view_of
from pretrain.augment.augmentation import IN_PLACE, pixel_order

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
    found = [Change("none", 0, "", lambda x: x)]
    for pixels in (each for each in (QUICK_SHIFTS if quick else SHIFTS) if each < size):
        for name, (y, x) in DIRECTIONS.items():
            found.append(
                Change(
                    "shift",
                    pixels,
                    name,
                    partial(pad, pad=(x * pixels, -x * pixels, y * pixels, -y * pixels)),
                )
            )
    found += [
        Change("flip", 0, name, partial(torch.flip, dims=(axis,)))
        for name, axis in (("left to right", 3), ("upside down", 2))
    ]
    found += [
        Change("crop", share, "", partial(_crop, side=max(1, round(size * share))))
        for share in CROPS
    ]
    return [
        *found,
        Change("permutation", 0, "", partial(_permute, order_P=pixel_order(ORDER, size=size))),
    ]


def _crop(x_BCHW: Tensor, *, side: int) -> Tensor:
    """The middle, as large as before."""
    size = x_BCHW.shape[2]
    middle = slice((size - side) // 2, (size - side) // 2 + side)
    return interpolate(
        x_BCHW[:, :, middle, middle], size=(size, size), mode="bilinear", align_corners=False
    )


def _permute(x_BCHW: Tensor, *, order_P: Tensor) -> Tensor:
    return x_BCHW.flatten(2)[:, :, order_P.to(x_BCHW.device, non_blocking=True)].view_as(x_BCHW)


def measure(
    subject: Subject,
    pictures: Pictures,
    *,
    views: int,
    seeds: int,
    quick: bool,
    device: torch.device,
) -> list[dict[str, Any]]:
    """A row for each change, and one for each number of views and seed of these. What is counted
    stays on the device until the end."""
    card, size = subject.card, subject.card.image_size
    numbers = torch.tensor(
        class_numbers(card, pictures.manifest, dataset=pictures.dataset), device=device
    )
    asked, plain = (
        changes(size, quick=quick),
        replace(subject.backbone, pixels=IN_PLACE).augmentation(device=device),
    )
    order_P = (
        torch.arange(size**2)
        if card.pixel_permutation is None
        else pixel_order(card.pixel_permutation, size=size)
    )
    right_K, same_K = torch.zeros(2, len(asked), dtype=torch.int64, device=device)
    hsic_K3L, seen = (
        torch.zeros(len(asked), 3, len(subject.mixings), dtype=torch.float64, device=device),
        0,
    )
    for batch in pictures.batches(
        f"{subject.place}: changes", size=size, device=device, times=len(asked)
    ):
        images, labels_B, usual = plain.plain(batch).images_BCHW, numbers[batch.labels_B], None
        for number, change in enumerate(asked):
            logits, features = subject.run(_permute(change.of(images), order_P=order_P), gram)
            answers_B, grams = logits.argmax(1), Grams.of(features)
            usual_B, usual_grams = usual = usual or (answers_B, grams)
            right_K[number] += (answers_B == labels_B).sum()
            same_K[number] += (answers_B == usual_B).sum()
            pairs = ((grams, usual_grams), (grams, grams), (usual_grams, usual_grams))
            hsic_K3L[number] += torch.stack([hsic(*pair).diagonal() for pair in pairs])
            del features, grams, pairs  # before there are others
        seen += len(labels_B)
    cross, one, other = hsic_K3L[..., None].cpu().unbind(1)
    cka_KL = cka(cross[..., None], one, other)[..., 0, 0]
    rows = [
        {
            **_place(change.kind, change.amount, change.direction),
            **_accuracy(right, seen),
            "agreement": same / seen,
            "cka": cka_L,
        }
        for change, right, same, cka_L in zip(
            asked, right_K.tolist(), same_K.tolist(), cka_KL.tolist(), strict=True
        )
    ]
    for seed in range(seeds if views else 0):
        rows += _views(subject, pictures, views, numbers, seed=seed, device=device)
    return [{"run": subject.place, "model": card.model.label} | row for row in rows]


def _place(
    kind: str, amount: float, direction: str = "", seed: int | None = None
) -> dict[str, Any]:
    return {"kind": kind, "amount": float(amount), "direction": direction, "seed": seed}


def _accuracy(right: int, seen: int) -> dict[str, Any]:
    top1 = right / seen
    return {"num_pictures": seen, "top1": top1, "standard_error": (top1 * (1 - top1) / seen) ** 0.5}


@torch.no_grad()
def _views(
    subject: Subject,
    pictures: Pictures,
    num_views: int,
    numbers: Tensor,
    *,
    seed: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Of the mean softmax over the first 1, 2, 5, ... views: those that `finetune evaluate
    views=... seed=...` takes."""
    checkpoint, model, moments = (
        subject.backbone.checkpoint,
        subject.backbone.model,
        moments_up_to(num_views),
    )
    assert checkpoint is not None and model is not None
    settings = choose_views(ViewSettings(), checkpoint.run_dir)[0]
    augmentation = subject.backbone.augmentation(settings, seed=seed, device=device)
    right_M, seen = dict.fromkeys(moments, torch.zeros((), dtype=torch.int64, device=device)), 0
    title = f"{subject.place}: views, seed {seed}"
    for batch in pictures.batches(
        title, size=subject.card.image_size, device=device, times=num_views
    ):
        total_BK = torch.zeros((), device=device)
        for view in range(num_views):
            total_BK = total_BK + model(view_of(batch, view, augmentation)).double().softmax(1)
            if view + 1 in moments:
                right_M[view + 1] = (
                    right_M[view + 1] + (total_BK.argmax(1) == numbers[batch.labels_B]).sum()
                )
        seen += len(batch.labels_B)
    return [
        {**_place("views", number, seed=seed), **_accuracy(int(right), seen)}
        for number, right in right_M.items()
    ]
