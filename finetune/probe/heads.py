"""Many linear heads trained at once on the same batches: forward and backward are one matrix product each, for any number of heads.

The gradient of the mean cross-entropy by the logits is (softmax - one hot) / B, so nothing is recorded for autograd. Heads begin
at zero; the order of an epoch is a function of (seed, epoch). The optimizers are torch's own rules on one weight matrix, in which
each column has a learning rate and a decay of its own; only the D feature rows decay.
B batch, E rows of a head: D features, the bias, then zeros (rows.py); G candidates, K classes, C = K G columns: all candidates of
the first class, then of the next; so what is done over classes runs over candidates that lie side by side, which a CPU does faster.
T steps of an epoch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data_prep.progress import progress
from finetune.probe.config import ProbeSettings
from finetune.probe.rows import Rows
from pretrain.config import ScheduleSettings
from pretrain.data.order import Ids, hash64, permute
from pretrain.optim.schedule import Schedule

JUDGED_NUMBERS = 8_000_000
"""Logits that are in memory at a time while heads are judged."""
_ORDER = 0x68656164
"""Part of the key, so that the order has nothing to do with other permutations under the same seed."""


@dataclass(frozen=True)
class Candidate:
    """One point of the grid: what a head is trained with."""

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


class Update(ABC):
    """Changes `weights_EC` in place; keeps one or two states of its shape."""

    def __init__(self, weights_EC: Tensor, *, num_features: int, num_states: int):
        self.weights_EC, self.num_features = weights_EC, num_features
        self.states = [torch.zeros_like(weights_EC) for _ in range(num_states)]
        self._spare_EC = torch.empty_like(weights_EC)
        self.num_steps = 0

    @abstractmethod
    def step(self, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        """`gradient_EC` may be overwritten."""

    def keep(self, columns: Tensor) -> None:
        """Goes on with these columns alone."""
        self.weights_EC = self.weights_EC[:, columns].contiguous()
        self.states = [state[:, columns].contiguous() for state in self.states]
        self._spare_EC = torch.empty_like(self.weights_EC)

    def _decay(self, lr_C: Tensor, decay_C: Tensor) -> None:
        self.weights_EC[: self.num_features].mul_(1 - lr_C * decay_C)


class LionUpdate(Update):
    """w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m = b2 m + (1 - b2) g; sign(0) is 0."""

    def __init__(self, weights_EC: Tensor, *, num_features: int, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(weights_EC, num_features=num_features, num_states=1)
        self.betas = betas

    def step(self, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        self._decay(lr_C, decay_C)
        (momentum_EC,), (beta1, beta2) = self.states, self.betas
        torch.mul(momentum_EC, beta1, out=self._spare_EC)
        self._spare_EC.add_(gradient_EC, alpha=1 - beta1).sign_()
        self.weights_EC.addcmul_(self._spare_EC, -lr_C)
        momentum_EC.mul_(beta2).add_(gradient_EC, alpha=1 - beta2)


class SgdUpdate(Update):
    """torch's: g += decay w, m = momentum m + g, w -= lr m; with Nesterov's momentum w -= lr (g + momentum m)."""

    def __init__(self, weights_EC: Tensor, *, num_features: int, momentum: float, nesterov: bool):
        super().__init__(weights_EC, num_features=num_features, num_states=1)
        self.momentum, self.nesterov = momentum, nesterov

    def step(self, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        decayed = slice(0, self.num_features)
        gradient_EC[decayed].addcmul_(self.weights_EC[decayed], decay_C)
        (velocity_EC,) = self.states
        velocity_EC.mul_(self.momentum).add_(gradient_EC)
        way = gradient_EC.add_(velocity_EC, alpha=self.momentum) if self.nesterov else velocity_EC
        self.weights_EC.addcmul_(way, -lr_C)


class AdamWUpdate(Update):
    """torch's AdamW, with eps 1e-8 and betas of 0.9 and 0.999."""

    def __init__(self, weights_EC: Tensor, *, num_features: int, betas: tuple[float, float] = (0.9, 0.999)):
        super().__init__(weights_EC, num_features=num_features, num_states=2)
        self.betas, self.eps = betas, 1e-8

    def step(self, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        self.num_steps += 1
        self._decay(lr_C, decay_C)
        (mean_EC, square_EC), (beta1, beta2) = self.states, self.betas
        mean_EC.lerp_(gradient_EC, 1 - beta1)
        square_EC.mul_(beta2).addcmul_(gradient_EC, gradient_EC, value=1 - beta2)
        torch.sqrt(square_EC, out=self._spare_EC)
        self._spare_EC.div_(math.sqrt(1 - beta2**self.num_steps)).add_(self.eps)
        way_EC = torch.div(mean_EC, self._spare_EC, out=self._spare_EC)
        self.weights_EC.addcmul_(way_EC, lr_C, value=-1 / (1 - beta1**self.num_steps))


def train_heads(rows: Rows, candidates: Sequence[Candidate], *, settings: ProbeSettings, num_classes: int) -> Tensor:
    """(G, E, K) on the rows' device. One of fewer epochs than others ends with them, and is the same as if trained alone."""
    num_batches, device = -(-rows.num_rows // settings.batch_size), rows.device
    heads_GEK = torch.zeros(len(candidates), rows.width, num_classes, device=device)
    active, update = list(range(len(candidates))), _update(rows, len(candidates) * num_classes, settings)

    def take_out() -> None:
        heads_GEK[torch.tensor(active, device=device)] = as_heads(update.weights_EC, num_classes=num_classes)

    with progress("linear heads", total=max(each.epochs for each in candidates), unit="epochs") as line:
        for epoch in range(line.total):
            if any(candidates[number].epochs == epoch for number in active):
                take_out()
                kept = [place for place, number in enumerate(active) if candidates[number].epochs > epoch]
                update.keep((torch.arange(num_classes).view(-1, 1) * len(active) + torch.tensor(kept)).flatten())
                active = [active[place] for place in kept]
            now, first = [candidates[number] for number in active], epoch * num_batches
            schedules = [Schedule(ScheduleSettings(), each.lr, num_steps=each.epochs * num_batches) for each in now]
            lr_TG = torch.tensor([[each.lr(first + n) for each in schedules] for n in range(num_batches)])
            decay_C = torch.tensor([each.weight_decay for each in now], device=device).repeat(num_classes)
            order = order_of(rows.num_rows, seed=settings.seed, epoch=epoch)
            batches = rows.epoch(epoch % max(1, settings.views), order, batch_size=settings.batch_size)
            gradient_EC = torch.empty_like(update.weights_EC)
            for (x_BE, labels_B), lr_G in zip(batches, lr_TG.to(device).unbind(), strict=True):
                errors_BC = errors_of(x_BE @ update.weights_EC, labels_B, num_classes=num_classes)
                torch.mm(x_BE.T, errors_BC.div_(len(x_BE)), out=gradient_EC)
                update.step(gradient_EC, lr_C=lr_G.repeat(num_classes), decay_C=decay_C)
            line.advance()
    take_out()
    return heads_GEK


def errors_of(logits_BC: Tensor, labels_B: Tensor, *, num_classes: int) -> Tensor:
    """softmax - one hot, for each candidate: the gradient of the summed cross-entropy."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    if logits_BKG.shape[2] == 1:  # classes lie side by side then, and torch has faster ways for that
        errors_BC = torch.softmax(logits_BC, dim=1)
        places_B1 = labels_B.unsqueeze(1)
        return errors_BC.scatter_add_(1, places_B1, errors_BC.new_full((), -1.0).expand_as(places_B1))
    errors_BKG = torch.softmax(logits_BKG, dim=1)
    errors_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B] -= 1
    return errors_BKG.view_as(logits_BC)


def losses_of(logits_BC: Tensor, labels_B: Tensor, *, num_classes: int) -> Tensor:
    """The summed cross-entropy of each candidate, in double precision."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    own_BG = logits_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B]
    return (torch.logsumexp(logits_BKG, dim=1) - own_BG).sum(dim=0, dtype=torch.float64)


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


def as_columns(heads_GEK: Tensor) -> Tensor:
    return heads_GEK.permute(1, 2, 0).reshape(heads_GEK.shape[1], -1)


def as_heads(columns_EC: Tensor, *, num_classes: int) -> Tensor:
    """(G, E, K), on the same memory."""
    return columns_EC.view(len(columns_EC), num_classes, -1).permute(2, 0, 1)


@torch.no_grad()
def judge(rows: Rows, heads_GEK: Tensor) -> list[Score]:
    """Of each head, on all rows."""
    num_candidates, _, num_classes = heads_GEK.shape
    weights_EC = as_columns(heads_GEK)
    right_G, loss_G = (torch.zeros(num_candidates, dtype=torch.float64, device=rows.device) for _ in range(2))
    for x_BE, labels_B in rows.chunks(size=max(1, min(8192, JUDGED_NUMBERS // weights_EC.shape[1]))):
        logits_BC = x_BE @ weights_EC
        right_BG = logits_BC.view(len(x_BE), num_classes, num_candidates).argmax(dim=1) == labels_B.unsqueeze(1)
        right_G += right_BG.sum(dim=0)
        loss_G += losses_of(logits_BC, labels_B, num_classes=num_classes)
    sums = torch.stack([right_G, loss_G]).div(rows.num_rows).tolist()
    return [Score(*pair) for pair in zip(*sums, strict=True)]
