"""Train many linear heads at once. Forward and backward are one matrix product for all heads.

The gradient of the mean cross-entropy with respect to the logits is (softmax - target) / B, so
autograd is not used. Heads begin at zero. The sample order depends only on (seed, epoch).

Shapes: B batch. E rows of a head: D features, the bias, then zeros (rows.py). G candidates, K
classes. C = K G columns: all candidates of the first class, then of the next.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.progress import ProgressLine
from finetune.probe.config import ProbeSettings
from finetune.probe.rows import Rows
from pretrain.data.order import Ids, hash64, permute
from pretrain.optim.schedule import Schedule

JUDGED_NUMBERS = 8_000_000
"""Largest number of logits in memory while heads are evaluated."""
_ORDER = 0x68656164
"""Constant in the random key of the sample order. Other orders with the same seed use another
constant."""


class Candidate(NamedTuple):
    lr: float
    weight_decay: float
    epochs: int


class Score(NamedTuple):
    top1: float
    loss: float
    """Mean cross-entropy; not finite if the training has diverged."""


def order_of(num_rows: int, *, seed: int, epoch: int) -> Ids:
    return permute(np.arange(num_rows), size=num_rows, key=int(hash64(_ORDER, seed, epoch)))


class Update:
    """Update rules of the optimizers on one weight matrix, in place.

    Each column has its own learning rate and decay. Only the D feature rows decay.

    lion    w -= lr (sign(0.9 m + 0.1 g) + decay w), then m = 0.99 m + 0.01 g; sign(0) is 0
    sgd     torch: g += decay w, m = momentum m + g, w -= lr m; Nesterov: w -= lr (g + momentum m)
    adamw   torch: betas 0.9 and 0.999, eps 1e-8
    """

    def __init__(self, weights_EC: Tensor, settings: ProbeSettings, *, num_features: int):
        self.weights_EC, self._settings, self._num_features = weights_EC, settings, num_features
        self._num_steps = 0
        num_states = 2 if settings.optimizer == "adamw" else 1
        self._states = [torch.zeros_like(weights_EC) for _ in range(num_states)]
        self._spare_EC = torch.empty_like(weights_EC)

    def keep(self, columns: Tensor) -> None:
        """Keep only these columns of the weights and of the optimizer state."""
        self.weights_EC = self.weights_EC[:, columns].contiguous()
        self._states = [state[:, columns].contiguous() for state in self._states]
        self._spare_EC = torch.empty_like(self.weights_EC)

    def step(self, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        """Update the weights. `gradient_EC` may be overwritten."""
        self._num_steps += 1
        settings, decaying = self._settings, slice(0, self._num_features)
        mean_EC, spare_EC = self._states[0], self._spare_EC
        if settings.optimizer == "sgd":
            gradient_EC[decaying].addcmul_(self.weights_EC[decaying], decay_C)
            mean_EC.mul_(settings.momentum).add_(gradient_EC)
            way_EC = (
                gradient_EC.add_(mean_EC, alpha=settings.momentum) if settings.nesterov else mean_EC
            )
            self.weights_EC.addcmul_(way_EC, -lr_C)
            return
        self.weights_EC[decaying].mul_(1 - lr_C * decay_C)
        if settings.optimizer == "lion":
            torch.mul(mean_EC, 0.9, out=spare_EC)
            self.weights_EC.addcmul_(spare_EC.add_(gradient_EC, alpha=1 - 0.9).sign_(), -lr_C)
            mean_EC.mul_(0.99).add_(gradient_EC, alpha=1 - 0.99)
            return
        square_EC = self._states[1]
        mean_EC.lerp_(gradient_EC, 1 - 0.9)
        square_EC.mul_(0.999).addcmul_(gradient_EC, gradient_EC, value=1 - 0.999)
        torch.sqrt(square_EC, out=spare_EC)
        spare_EC.div_(math.sqrt(1 - 0.999**self._num_steps)).add_(1e-8)
        torch.div(mean_EC, spare_EC, out=spare_EC)
        self.weights_EC.addcmul_(spare_EC, lr_C, value=-1 / (1 - 0.9**self._num_steps))


def train_heads(
    rows: Rows,
    candidates: Sequence[Candidate],
    *,
    settings: ProbeSettings,
    num_classes: int,
    num_epochs: int | None = None,
) -> Tensor:
    """Return the trained heads (G, E, K). A head does not depend on the other candidates.
    `num_epochs`: number of passes over the rows (default: epochs of the longest candidate)."""
    num_batches, device = -(-rows.num_rows // settings.batch_size), rows.device
    schedules = [
        Schedule(settings.schedule, each.lr, *settings.steps_of(each.epochs, rows.num_rows))
        for each in candidates
    ]
    heads_GEK = torch.zeros(len(candidates), rows.width, num_classes, device=device)
    active = list(range(len(candidates)))
    weights_EC = torch.zeros(rows.width, len(candidates) * num_classes, device=device)
    update = Update(weights_EC, settings, num_features=rows.num_features)
    total = num_epochs or max(each.epochs for each in candidates)
    with ProgressLine("linear heads", total=total, unit="epochs") as line:
        for epoch in range(total):
            now, first = [candidates[number] for number in active], epoch * num_batches
            lr_TG = torch.tensor(
                [[schedules[each].lr(first + n) for each in active] for n in range(num_batches)]
            ).to(device)
            decays = [each.weight_decay for each in now]
            decay_C = torch.tensor(decays, device=device).repeat(num_classes)
            order = order_of(rows.num_rows, seed=settings.seed, epoch=epoch)
            batches = rows.epoch(
                epoch % max(1, settings.num_views), order, batch_size=settings.batch_size
            )
            gradient_EC = torch.empty_like(update.weights_EC)
            for (x_BE, labels_B), lr_G in zip(batches, lr_TG.unbind(), strict=True):
                if not active:  # keep reading: all ranks must request the same rows
                    continue
                errors_BC = errors_of(
                    x_BE @ update.weights_EC,
                    labels_B,
                    num_classes=num_classes,
                    smoothing=settings.label_smoothing,
                )
                torch.mm(x_BE.T, errors_BC.div_(len(x_BE)), out=gradient_EC)
                if settings.gradient_clip_norm:
                    clip(gradient_EC, norm=settings.gradient_clip_norm, num_classes=num_classes)
                update.step(gradient_EC, lr_C=lr_G.repeat(num_classes), decay_C=decay_C)
            kept = [place for place, each in enumerate(now) if each.epochs > epoch + 1]
            if len(kept) < len(active):
                trained_GEK = as_heads(update.weights_EC, num_classes=num_classes)
                heads_GEK[torch.tensor(active, device=device)] = trained_GEK
                columns = torch.arange(num_classes).view(-1, 1) * len(active)
                update.keep((columns + torch.tensor(kept, dtype=torch.long)).flatten())
                active = [active[place] for place in kept]
            line.advance()
    return heads_GEK


def clip(gradient_EC: Tensor, *, norm: float, num_classes: int) -> None:
    """Clip each candidate's gradient by its own norm, as torch does."""
    gradient_EKG = gradient_EC.view(len(gradient_EC), num_classes, -1)
    gradient_EKG.mul_(
        (norm / (torch.linalg.vector_norm(gradient_EKG, dim=(0, 1)) + 1e-6)).clamp(max=1.0)
    )


def errors_of(
    logits_BC: Tensor, labels_B: Tensor, *, num_classes: int, smoothing: float = 0.0
) -> Tensor:
    """Return the gradient of the summed cross-entropy with respect to the logits: softmax -
    target."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    if logits_BKG.shape[2] == 1:  # faster for one candidate
        errors_BC = torch.softmax(logits_BC, dim=1)
        places_B1 = labels_B.unsqueeze(1)
        errors_BC.scatter_add_(
            1, places_B1, errors_BC.new_full((), smoothing - 1).expand_as(places_B1)
        )
    else:
        errors_BKG = torch.softmax(logits_BKG, dim=1)
        errors_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B] -= 1 - smoothing
        errors_BC = errors_BKG.view_as(logits_BC)
    return errors_BC.sub_(smoothing / num_classes) if smoothing else errors_BC


def losses_of(logits_BC: Tensor, labels_B: Tensor, *, num_classes: int) -> Tensor:
    """Return the summed cross-entropy of each candidate, in double precision."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    own_BG = logits_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B]
    return (torch.logsumexp(logits_BKG, dim=1) - own_BG).sum(dim=0, dtype=torch.float64)


def as_columns(heads_GEK: Tensor) -> Tensor:
    return heads_GEK.permute(1, 2, 0).reshape(heads_GEK.shape[1], -1)


def as_heads(columns_EC: Tensor, *, num_classes: int) -> Tensor:
    return columns_EC.view(len(columns_EC), num_classes, -1).permute(2, 0, 1)


@torch.no_grad()
def judge(rows: Rows, heads_GEK: Tensor) -> list[Score]:
    num_candidates, _, num_classes = heads_GEK.shape
    weights_EC = as_columns(heads_GEK)
    right_G, loss_G = (
        torch.zeros(num_candidates, dtype=torch.float64, device=rows.device) for _ in range(2)
    )
    for x_BE, labels_B in rows.chunks(
        size=max(1, min(8192, JUDGED_NUMBERS // weights_EC.shape[1]))
    ):
        logits_BC = x_BE @ weights_EC
        right_BG = logits_BC.view(len(x_BE), num_classes, num_candidates).argmax(
            dim=1
        ) == labels_B.unsqueeze(1)
        right_G += right_BG.sum(dim=0)
        loss_G += losses_of(logits_BC, labels_B, num_classes=num_classes)
    sums = torch.stack([right_G, loss_G]).div(rows.num_rows).tolist()
    return [Score(*pair) for pair in zip(*sums, strict=True)]
