"""`analysis invariance`: predictions and features of a network for shifted, flipped, cropped and
permuted images, and the accuracy of the mean prediction over augmented views.

Images are changed before the model's own pixel order is applied. A shift fills the border with the
mean color. CKA compares the mixings' features of original and changed images. Shapes: B images, K
changes, L mixings, M numbers of views.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from analysis.features.hsic import cka, gram, hsic
from analysis.features.mixings import Images, Subject, open_subjects
from analysis.output import Result
from finetune.evaluate.config import ViewSettings, choose_views
from finetune.evaluate.evaluate import moments_up_to
from finetune.looks import looks
from finetune.split import class_numbers, view_of
from pretrain.augment.augmentation import IN_PLACE, pixel_order

SHIFTS, QUICK_SHIFTS = (*range(1, 17),), (1, 2, 4, 8, 16)
DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
CROPS = (0.9, 0.8, 0.7, 0.6, 0.5)
ORDER = 0
"""Seed of the pixel permutation."""


@dataclass(frozen=True)
class Change:
    kind: str
    """"none", "shift", "flip", "crop" or "permutation"."""
    of: Callable[[Tensor], Tensor]
    """Function from images (B, C, H, W) to images of the same shape."""
    change: str = "unchanged"
    """Name of the change in tables and figures."""
    amount: float = 0.0
    """Shift in pixels, or remaining fraction of the side for a crop."""
    direction: str = ""


def changes(size: int, *, quick: bool = False) -> Iterator[Change]:
    """Yield the changes for images of this size, first the identity. `quick`: fewer shifts."""
    yield Change("none", Tensor.contiguous)
    for pixels in (each for each in (QUICK_SHIFTS if quick else SHIFTS) if each < size):
        for name, (y, x) in DIRECTIONS.items():
            sides = (x * pixels, -x * pixels, y * pixels, -y * pixels)
            yield Change("shift", partial(pad, pad=sides), f"shift by {pixels} px", pixels, name)
    for name, axis in (("left to right", 3), ("upside down", 2)):
        yield Change("flip", partial(torch.flip, dims=(axis,)), f"flip {name}", 0, name)
    for share in CROPS:
        crop = partial(_crop, side=max(1, round(size * share)))
        yield Change("crop", crop, f"middle {share:.0%}", share)
    permute = partial(_permute, order_P=pixel_order(ORDER, size=size))
    yield Change("permutation", permute, "permutation")


def _crop(x_BCHW: Tensor, *, side: int) -> Tensor:
    size = x_BCHW.shape[2]
    middle = slice((size - side) // 2, (size - side) // 2 + side)
    cropped = x_BCHW[:, :, middle, middle]
    return interpolate(cropped, size=(size, size), mode="bilinear", align_corners=False)


def _permute(x_BCHW: Tensor, *, order_P: Tensor) -> Tensor:
    return x_BCHW.flatten(2)[:, :, order_P.to(x_BCHW.device, non_blocking=True)].view_as(x_BCHW)


def invariance(
    runs: Sequence[str],
    images: Images,
    *,
    views: int,
    seeds: int,
    quick: bool,
    device: torch.device,
) -> Result:
    from analysis.features.drawing import draw_changes, draw_mixings, means_of

    frames = []
    for run in dict.fromkeys(runs):  # only one model is in memory
        subject = open_subjects([run], images.manifest, device=device)[run]
        parts = [measure(subject, images, quick=quick, device=device)]
        for seed in range(seeds if views else 0):
            parts.append(_measure_views(subject, images, views, seed=seed, device=device))
        frames.append(pd.concat(parts).assign(run=run, model=subject.card.model.label))
        del subject
    rows = pd.concat(frames, ignore_index=True)
    top1 = rows.top1
    rows["standard_error"] = (top1 * (1 - top1) / rows.num_images) ** 0.5
    facts = {"split": images.split, "batch": images.batch, "views": views, "seeds": seeds}
    with looks(*runs):
        figures = {"": draw_changes(rows), "mixings": draw_mixings(rows)}
    shown = rows[(rows.kind != "shift") | rows.amount.isin(QUICK_SHIFTS)]
    inputs = [images.dataset, *runs]
    return Result(rows, facts, figures, inputs, [means_of(shown)])


def _classes(subject: Subject, images: Images, *, device: torch.device) -> Tensor:
    numbers = class_numbers(subject.card, images.manifest, dataset=images.dataset)
    return torch.tensor(numbers, device=device)


def measure(subject: Subject, images: Images, *, quick: bool, device: torch.device) -> pd.DataFrame:
    """Return a row for each change: top-1, agreement (fraction of predictions that stay equal) and
    CKA."""
    card, classes = subject.card, _classes(subject, images, device=device)
    size = card.image_size
    tried = [*changes(size, quick=quick)]
    plain = replace(subject.backbone, pixels=IN_PLACE).augmentation(device=device)
    order_P = torch.arange(size**2)
    if card.pixel_permutation is not None:
        order_P = pixel_order(card.pixel_permutation, size=size)
    right_K, same_K = torch.zeros(2, len(tried), dtype=torch.int64, device=device)
    hsic_K3L = torch.zeros(len(tried), 3, len(subject.mixings), dtype=torch.float64, device=device)
    num_images, title = 0, f"{subject.place}: changed images"
    for batch in images.batches(title, size=size, device=device, times=len(tried)):
        x_BCHW, labels_B, usual = plain.plain(batch).images_BCHW, classes[batch.labels_B], None
        for number, change in enumerate(tried):
            logits, features = subject.run(_permute(change.of(x_BCHW), order_P=order_P), gram)
            predicted_B, grams_LNN = logits.argmax(1), torch.stack(features)
            usual_B, usual_LNN = usual = usual or (predicted_B, grams_LNN)
            right_K[number] += (predicted_B == labels_B).sum()
            same_K[number] += (predicted_B == usual_B).sum()
            pairs = ((grams_LNN, usual_LNN), (grams_LNN, grams_LNN), (usual_LNN, usual_LNN))
            hsic_K3L[number] += torch.stack([hsic(*pair).diagonal() for pair in pairs])
            del features, grams_LNN, pairs
        num_images += len(labels_B)
    cross, one, other = hsic_K3L[..., None].cpu().unbind(1)
    names = ("kind", "change", "amount", "direction")
    rows = pd.DataFrame([[getattr(each, name) for name in names] for each in tried], columns=names)
    return rows.assign(
        num_images=num_images,
        top1=right_K.cpu().numpy() / num_images,
        agreement=same_K.cpu().numpy() / num_images,
        cka=cka(cross[..., None], one, other)[..., 0, 0].tolist(),
    )


@torch.no_grad()
def _measure_views(
    subject: Subject, images: Images, views: int, *, seed: int, device: torch.device
) -> pd.DataFrame:
    """Return a row for each number of views (1, 2, 5, ...): the accuracy of the mean softmax over
    the first views. `finetune evaluate num_views=... seed=...` uses the same views."""
    checkpoint, model = subject.backbone.checkpoint, subject.backbone.model
    assert checkpoint is not None and model is not None
    moments, classes = moments_up_to(views), _classes(subject, images, device=device)
    settings = choose_views(ViewSettings(), checkpoint.run_dir)[0]
    augmentation = subject.backbone.augmentation(settings, seed=seed, device=device)
    right_M = dict.fromkeys(moments, torch.zeros((), dtype=torch.int64, device=device))
    num_images, size = 0, subject.card.image_size
    title = f"{subject.place}: views, seed {seed}"
    for batch in images.batches(title, size=size, device=device, times=views):
        total_BK = torch.zeros((), device=device)
        for view in range(views):
            total_BK = total_BK + model(view_of(batch, view, augmentation)).double().softmax(1)
            if view + 1 in moments:
                is_right_B = total_BK.argmax(1) == classes[batch.labels_B]
                right_M[view + 1] = right_M[view + 1] + is_right_B.sum()
        num_images += len(batch.labels_B)
    rows = [
        {"change": f"views: {count}", "amount": float(count), "top1": int(right) / num_images}
        for count, right in right_M.items()
    ]
    return pd.DataFrame(rows).assign(kind="views", direction="", seed=seed, num_images=num_images)
