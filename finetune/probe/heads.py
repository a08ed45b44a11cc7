"""Many linear heads trained at once on the same batches: forward and backward are one matrix product each, for any number of cells.

The gradient of the mean cross-entropy by the logits is (softmax - one hot) / B, so nothing is recorded for autograd. Heads begin
at zero; the order of an epoch is a function of (seed, epoch).
B batch, E rows of a head (rows.py), G cells, K classes, C = K G columns: all cells of the first class, then of the next; so what
is done over classes runs over cells that lie side by side, which a CPU does faster. T steps of an epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data_prep.progress import progress
from finetune.probe.config import ProbeSettings
from finetune.probe.rows import Rows
from finetune.probe.updates import AdamWUpdate, LionUpdate, SgdUpdate, Update
from pretrain.data.order import Ids, hash64, permute
from pretrain.optim.schedule import Schedule

JUDGED_NUMBERS = 8_000_000
"""Logits held at a time while heads are judged."""
_ORDER = 0x68656164
"""Part of the key, so that the order has nothing to do with other permutations under the same seed."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    lr: float
    weight_decay: float
    epochs: int


@dataclass(frozen=True)
class Score:
    top1: float
    loss: float
    """Mean cross-entropy; not finite where training has diverged."""


def order_of(num_rows: int, *, seed: int, epoch: int) -> Ids:
    return permute(np.arange(num_rows), size=num_rows, key=int(hash64(_ORDER, seed, epoch)))


def train_heads(
    rows: Rows, cells: Sequence[Cell], *, settings: ProbeSettings, num_classes: int, title: str = "linear heads"
) -> Tensor:
    """(G, E, K) on the rows' device. A cell of fewer epochs than others ends with them, and is the same as if trained alone."""
    num_batches = -(-rows.num_rows // settings.batch_size)
    heads_GEK = torch.zeros(len(cells), rows.width, num_classes, device=rows.device)
    active, update = list(range(len(cells))), _update(rows, len(cells) * num_classes, settings)
    with progress(title, total=max(cell.epochs for cell in cells), unit="epochs") as line:
        for epoch in range(line.total):
            ended = [place for place, number in enumerate(active) if cells[number].epochs == epoch]
            if ended:
                _take_out(update, heads_GEK, active, num_classes=num_classes)
                active = [number for number in active if cells[number].epochs > epoch]
                places = [n for n in range(len(active) + len(ended)) if n not in ended]
                update.keep(_columns(places, num_cells=len(active) + len(ended), num_classes=num_classes))
            now = [cells[number] for number in active]
            rates = _rates(now, epoch=epoch, num_batches=num_batches, device=rows.device)
            order = order_of(rows.num_rows, seed=settings.seed, epoch=epoch)
            batches = rows.epoch(epoch % max(1, settings.views), order, batch_size=settings.batch_size)
            _train_epoch(update, batches, *rates, num_classes=num_classes)
            line.advance()
    _take_out(update, heads_GEK, active, num_classes=num_classes)
    return heads_GEK


def _train_epoch(
    update: Update, batches: Iterator[tuple[Tensor, Tensor]], lr_TG: Tensor, decay_G: Tensor, *, num_classes: int
) -> None:
    gradient_EC, decay_C = torch.empty_like(update.weights_EC), decay_G.repeat(num_classes)
    for (x_BE, labels_B), lr_G in zip(batches, lr_TG.unbind(), strict=True):
        errors_BC = errors_of(x_BE @ update.weights_EC, labels_B, num_classes=num_classes)
        torch.mm(x_BE.T, errors_BC.div_(len(x_BE)), out=gradient_EC)
        update.step(gradient_EC, lr_C=lr_G.repeat(num_classes), decay_C=decay_C)


def errors_of(logits_BC: Tensor, labels_B: Tensor, *, num_classes: int) -> Tensor:
    """softmax - one hot, for each cell: the gradient of the summed cross-entropy."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    if logits_BKG.shape[2] == 1:  # classes lie side by side then, and torch has faster ways for that
        errors_BC = torch.softmax(logits_BC, dim=1)
        places_B1 = labels_B.unsqueeze(1)
        return errors_BC.scatter_add_(1, places_B1, errors_BC.new_full((), -1.0).expand_as(places_B1))
    errors_BKG = torch.softmax(logits_BKG, dim=1)
    errors_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B] -= 1
    return errors_BKG.view_as(logits_BC)


def losses_of(logits_BC: Tensor, labels_B: Tensor, *, num_classes: int) -> Tensor:
    """The summed cross-entropy of each cell, in double precision."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    own_BG = logits_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B]
    return (torch.logsumexp(logits_BKG, dim=1) - own_BG).sum(dim=0, dtype=torch.float64)


def _rates(cells: Sequence[Cell], *, epoch: int, num_batches: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(lr_TG, decay_G): of each step of an epoch, of every cell."""
    schedules = [Schedule("cosine", cell.lr, 0.0, 0, cell.epochs * num_batches) for cell in cells]
    lr_TG = torch.tensor([[each.lr(epoch * num_batches + n) for each in schedules] for n in range(num_batches)])
    decay_G = torch.tensor([cell.weight_decay for cell in cells])
    return lr_TG.to(device), decay_G.to(device)


def _update(rows: Rows, num_columns: int, settings: ProbeSettings) -> Update:
    weights_EC = torch.zeros(rows.width, num_columns, device=rows.device)
    match settings.optimizer:
        case "lion":
            return LionUpdate(weights_EC, num_features=rows.num_features)
        case "sgd":
            nesterov = settings.nesterov and settings.momentum > 0
            return SgdUpdate(weights_EC, num_features=rows.num_features, momentum=settings.momentum, nesterov=nesterov)
        case "adamw":
            return AdamWUpdate(weights_EC, num_features=rows.num_features)
        case "lbfgs":
            raise AssertionError("lbfgs.py trains these")


def _columns(places: Sequence[int], *, num_cells: int, num_classes: int) -> Tensor:
    return (torch.arange(num_classes).view(-1, 1) * num_cells + torch.tensor(places)).flatten()


def as_columns(heads_GEK: Tensor) -> Tensor:
    return heads_GEK.permute(1, 2, 0).reshape(heads_GEK.shape[1], -1)


def as_heads(columns_EC: Tensor, *, num_classes: int) -> Tensor:
    """(G, E, K), on the same memory."""
    return columns_EC.view(len(columns_EC), num_classes, -1).permute(2, 0, 1)


def _take_out(update: Update, heads_GEK: Tensor, active: Sequence[int], *, num_classes: int) -> None:
    """What the active cells have come to."""
    heads_GEK[torch.tensor(active, device=heads_GEK.device)] = as_heads(update.weights_EC, num_classes=num_classes)


@torch.no_grad()
def judge(rows: Rows, heads_GEK: Tensor) -> list[Score]:
    """Of each head, on all rows."""
    num_cells, _, num_classes = heads_GEK.shape
    weights_EC = as_columns(heads_GEK)
    right_G, loss_G = (torch.zeros(num_cells, dtype=torch.float64, device=rows.device) for _ in range(2))
    for x_BE, labels_B in rows.chunks(size=max(1, min(8192, JUDGED_NUMBERS // weights_EC.shape[1]))):
        logits_BC = x_BE @ weights_EC
        right_BG = logits_BC.view(len(x_BE), num_classes, num_cells).argmax(dim=1) == labels_B.unsqueeze(1)
        right_G += right_BG.sum(dim=0)
        loss_G += losses_of(logits_BC, labels_B, num_classes=num_classes)
    sums = torch.stack([right_G, loss_G]).div(rows.num_rows).tolist()
    return [Score(*pair) for pair in zip(*sums, strict=True)]
