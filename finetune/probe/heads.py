"""Many linear heads trained at once on the same batches: forward and backward are one matrix
product each, for any number of heads.

The gradient of the mean cross-entropy by the logits is (softmax - target) / B, so nothing is
recorded for autograd. Heads begin at zero; the order of an epoch is a function of (seed, epoch).

By L-BFGS each head minimises mean cross-entropy + decay / 2 |W|^2 (biases free) with a history of
its own, and all share each pass over the features, which evaluates one trial point of each head. A
head whose trial is good enough (Armijo's rule, with room for rounding) takes it and chooses a new
direction; another tries a shorter step in the next pass. So no head waits for the line search of
another, as it would with torch.optim.LBFGS, which takes one head after the other: a pass over the
features for each step of each head (6 times as long for four decays of 8,000 x 512 features and 10
classes on one core, in as many passes each). Vectors of a head are kept in double precision;
products over the features are in single. B batch, E rows of a head: D features, the bias, then
zeros (rows.py); G candidates, K classes, C = K G columns: all candidates of the first class, then
of the next; so what is done over classes runs over candidates that lie side by side, which a CPU
does faster. T steps of an epoch.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.progress import progress
from finetune.probe.config import ProbeSettings
from finetune.probe.rows import Rows
from pretrain.config import parse_length
from pretrain.data.order import Ids, hash64, permute
from pretrain.optim.schedule import Schedule

JUDGED_NUMBERS, PASS_NUMBERS = 8_000_000, 16_000_000
"""Logits that are in memory at a time while heads are judged; in a pass of L-BFGS."""
HISTORY, ENOUGH, ROUNDING = 10, 1e-4, 1e-7
"""Of L-BFGS: the steps that a head remembers; Armijo's share of the promised descent; the share by
which a loss in single precision may be worse without being known to be."""
_ORDER = 0x68656164
"""Part of the key, so that the order has nothing to do with other permutations under the same
seed."""


class Candidate(NamedTuple):
    """One point of the grid: what a head is trained with."""

    lr: float
    weight_decay: float
    epochs: int


class Score(NamedTuple):
    top1: float
    loss: float
    """Mean cross-entropy; not finite where training has diverged."""


def order_of(num_rows: int, *, seed: int, epoch: int) -> Ids:
    return permute(np.arange(num_rows), size=num_rows, key=int(hash64(_ORDER, seed, epoch)))


class Update:
    """The optimizers' own rules on one weight matrix, in place. Each column has a learning rate and
    a decay of its own; only the D feature rows decay.

    lion    w -= lr (sign(0.9 m + 0.1 g) + decay w), then m = 0.99 m + 0.01 g; sign(0) is 0
    sgd     torch's: g += decay w, m = momentum m + g, w -= lr m; with Nesterov's momentum w -= lr (g + momentum m)
    adamw   torch's, with betas of 0.9 and 0.999 and eps 1e-8
    """  # noqa: E501 (a table)

    def __init__(self, weights_EC: Tensor, settings: ProbeSettings, *, num_features: int):
        self.weights_EC, self._settings, self._num_features, self._num_steps = (
            weights_EC,
            settings,
            num_features,
            0,
        )
        num_states = {"lion": 1, "sgd": 1, "adamw": 2}[settings.optimizer]
        self._states = [torch.zeros_like(weights_EC) for _ in range(num_states)]
        self._spare_EC = torch.empty_like(weights_EC)

    def keep(self, columns: Tensor) -> None:
        """Goes on with these columns alone."""
        self.weights_EC = self.weights_EC[:, columns].contiguous()
        self._states = [state[:, columns].contiguous() for state in self._states]
        self._spare_EC = torch.empty_like(self.weights_EC)

    def step(self, gradient_EC: Tensor, *, lr_C: Tensor, decay_C: Tensor) -> None:
        """`gradient_EC` may be overwritten."""
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
    """(G, E, K) on the rows' device. One of fewer epochs than others ends with them, and is the
    same as if trained alone. `num_epochs`: that rows are asked for, with other ranks; by default
    those of the longest candidate.
    """
    num_batches, device = -(-rows.num_rows // settings.batch_size), rows.device
    warmup, cooldown = (
        parse_length(length).steps(global_batch_size=settings.batch_size, num_samples=rows.num_rows)
        for length in (settings.schedule.warmup, settings.schedule.cooldown)
    )
    heads_GEK = torch.zeros(len(candidates), rows.width, num_classes, device=device)
    active, weights_EC = (
        list(range(len(candidates))),
        torch.zeros(rows.width, len(candidates) * num_classes, device=device),
    )
    update = Update(weights_EC, settings, num_features=rows.num_features)

    def take_out() -> None:
        if active:
            heads_GEK[torch.tensor(active, device=device)] = as_heads(
                update.weights_EC, num_classes=num_classes
            )

    with progress(
        "linear heads", total=num_epochs or max(each.epochs for each in candidates), unit="epochs"
    ) as line:
        for epoch in range(line.total):
            if any(candidates[number].epochs == epoch for number in active):
                take_out()
                kept = [
                    place
                    for place, number in enumerate(active)
                    if candidates[number].epochs > epoch
                ]
                update.keep(
                    (
                        torch.arange(num_classes).view(-1, 1) * len(active)
                        + torch.tensor(kept, dtype=torch.long)
                    ).flatten()
                )
                active = [active[place] for place in kept]
            now, first = [candidates[number] for number in active], epoch * num_batches
            schedules = [
                Schedule(settings.schedule, each.lr, each.epochs * num_batches, warmup, cooldown)
                for each in now
            ]
            lr_TG = torch.tensor(
                [[each.lr(first + n) for each in schedules] for n in range(num_batches)]
            )
            decay_C = torch.tensor([each.weight_decay for each in now], device=device).repeat(
                num_classes
            )
            order = order_of(rows.num_rows, seed=settings.seed, epoch=epoch)
            batches = rows.epoch(
                epoch % max(1, settings.views), order, batch_size=settings.batch_size
            )
            gradient_EC = torch.empty_like(update.weights_EC)
            for (x_BE, labels_B), lr_G in zip(batches, lr_TG.to(device).unbind(), strict=True):
                if not active:
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
            line.advance()
    take_out()
    return heads_GEK


def clip(gradient_EC: Tensor, *, norm: float, num_classes: int) -> None:
    """Each candidate's by its own norm, as torch clips."""
    gradient_EKG = gradient_EC.view(len(gradient_EC), num_classes, -1)
    gradient_EKG.mul_(
        (norm / (torch.linalg.vector_norm(gradient_EKG, dim=(0, 1)) + 1e-6)).clamp(max=1.0)
    )


def errors_of(
    logits_BC: Tensor, labels_B: Tensor, *, num_classes: int, smoothing: float = 0.0
) -> Tensor:
    """softmax - target, for each candidate: the gradient of the summed cross-entropy. `smoothing`:
    the share of the target that all classes have alike."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    if (
        logits_BKG.shape[2] == 1
    ):  # classes lie side by side then, and torch has faster ways for that
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
    """The summed cross-entropy of each candidate, in double precision."""
    logits_BKG = logits_BC.view(len(logits_BC), num_classes, -1)
    own_BG = logits_BKG[torch.arange(len(labels_B), device=labels_B.device), labels_B]
    return (torch.logsumexp(logits_BKG, dim=1) - own_BG).sum(dim=0, dtype=torch.float64)


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


class Descent:
    """One head's way down. `trial` is where its loss and gradient are wanted next."""

    def __init__(self, start: Tensor, *, tolerance: float):
        self.tolerance = tolerance
        self.point, self.trial = start, start.clone()
        self.is_done = self.has_converged = False
        self.num_passes = 0
        """Over the features, until it was done."""
        self._loss, self._gradient, self._way, self._step, self._slope = 0.0, start, start, 0.0, 0.0
        self._history: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=HISTORY)
        """(step, change of the gradient, 1 / their product)."""

    @property
    def is_stuck(self) -> bool:
        """Single precision saw no way down any more: neither converged, nor would more passes
        help."""
        return self.is_done and not self.has_converged

    @property
    def steepest(self) -> float:
        """Largest entry of the gradient that is left."""
        return float(self._gradient.abs().max())

    def take(self, loss: float, gradient: Tensor) -> None:
        """What was found at `trial`."""
        self.num_passes += 1
        if self.num_passes == 1:
            self._accept(loss, gradient)
            return
        promised = ENOUGH * self._step * self._slope
        if loss <= self._loss + promised + ROUNDING * abs(self._loss):
            moved, change = self.trial - self.point, gradient - self._gradient
            curvature = float((moved * change).sum())
            if curvature > 1e-12 * float(change.square().sum()):
                self._history.append((moved, change, torch.as_tensor(1 / curvature)))
            self._accept(loss, gradient)
            return
        bend = loss - self._loss - self._step * self._slope
        shorter = -self._slope * self._step**2 / (2 * bend) if bend > 0 else 0.5 * self._step
        self._try(min(max(shorter, 0.1 * self._step), 0.5 * self._step))

    def _accept(self, loss: float, gradient: Tensor) -> None:
        self.point, self._loss, self._gradient = self.trial, loss, gradient
        if self.steepest <= self.tolerance:
            self.is_done = self.has_converged = True
            return
        self._way = self._direction()
        self._slope = float((self._way * gradient).sum())
        if self._slope >= 0:  # rounding has spoilt the history
            self._history.clear()
            self._way, self._slope = -gradient, -float(gradient.square().sum())
        self._try(1.0 if self._history else min(1.0, 1 / max(1e-30, float(gradient.norm()))))

    def _try(self, step: float) -> None:
        self._step, self.trial = step, self.point + step * self._way
        if step < 1e-8:  # single precision sees no way down any more
            self.is_done, self.trial = True, self.point

    def _direction(self) -> Tensor:
        """The two loops over the history."""
        way, shares = -self._gradient, []
        for moved, change, inverse in reversed(self._history):
            share = inverse * (moved * way).sum()
            way = way - share * change
            shares.append(share)
        if self._history:
            moved, change, inverse = self._history[-1]
            way = way / (inverse * change.square().sum())
        for (moved, change, inverse), share in zip(self._history, reversed(shares), strict=True):
            way = way + (share - inverse * (change * way).sum()) * moved
        return way


def minimise(
    rows: Rows, candidates: Sequence[Candidate], *, tolerance: float, num_classes: int
) -> tuple[Tensor, list[Descent]]:
    """(G, E, K) on the rows' device, and how each has ended within its number of passes."""
    most = max(candidate.epochs for candidate in candidates)
    starts = torch.zeros(
        len(candidates), rows.width, num_classes, dtype=torch.float64, device=rows.device
    )
    ways = [Descent(start, tolerance=tolerance) for start in starts]
    with progress("linear heads (L-BFGS)", total=most, unit="passes") as line:
        for _ in range(most):
            active = [number for number, way in enumerate(ways) if not way.is_done]
            if not active:
                break
            trials_GEK = torch.stack([ways[number].trial for number in active])
            decays = [candidates[number].weight_decay for number in active]
            losses, gradients_GEK = objective(rows, trials_GEK, decays=decays)
            for number, loss, gradient in zip(active, losses, gradients_GEK, strict=True):
                ways[number].take(loss, gradient)
            line.advance(note=f"{len(active)} not yet converged")
    return torch.stack([way.point for way in ways]).float(), ways


def objective(
    rows: Rows, heads_GEK: Tensor, *, decays: Sequence[float]
) -> tuple[list[float], Tensor]:
    """(loss of each head, gradients in double precision): one pass over the rows, in chunks."""
    num_candidates, _, num_classes = heads_GEK.shape
    weights_EC = as_columns(heads_GEK).float()
    gradient_EC = torch.zeros(weights_EC.shape, dtype=torch.float64, device=rows.device)
    loss_G = torch.zeros(num_candidates, dtype=torch.float64, device=rows.device)
    for x_BE, labels_B in rows.chunks(
        size=max(256, min(8192, PASS_NUMBERS // weights_EC.shape[1]))
    ):
        logits_BC = x_BE @ weights_EC
        loss_G += losses_of(logits_BC, labels_B, num_classes=num_classes)
        gradient_EC += x_BE.T @ errors_of(logits_BC, labels_B, num_classes=num_classes)
    decay_G = torch.tensor(decays, dtype=torch.float64, device=rows.device)
    decayed_GDK = heads_GEK[:, : rows.num_features]
    loss_G = loss_G / rows.num_rows + decay_G / 2 * decayed_GDK.square().sum(dim=(1, 2))
    gradients_GEK = as_heads(gradient_EC, num_classes=num_classes) / rows.num_rows
    gradients_GEK[:, : rows.num_features] += decay_G.view(-1, 1, 1) * decayed_GDK
    return loss_G.tolist(), gradients_GEK
