"""L-BFGS for many heads at once: each minimises mean cross-entropy + decay / 2 |W|^2 (biases free) with a history of its own, and
all share each pass over the features.

Every pass evaluates one trial point of each head. A head whose trial is good enough (Armijo's rule, with room for rounding) takes
it and chooses a new direction; another tries a shorter step in the next pass. So no head waits for the line search of another, as
it would with torch.optim.LBFGS, which takes one head after the other: a pass over the features for each step of each head (6 times
as long for four decays of 8,000 x 512 features and 10 classes on one core, in as many passes each).
Vectors of a head are kept in double precision; products over the features are in single.
E rows of a head, G candidates, K classes, C = K G (heads.py).
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from data_prep.progress import progress
from finetune.probe.heads import Candidate, as_columns, as_heads, errors_of, losses_of
from finetune.probe.rows import Rows

HISTORY = 10
ENOUGH = 1e-4
"""Armijo's share of the promised descent."""
ROUNDING = 1e-7
"""Of a loss in single precision: a trial that is worse by less is not known to be worse."""
PASS_NUMBERS = 16_000_000
"""Logits held at a time."""


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
        """Single precision saw no way down any more: neither converged, nor would more passes help."""
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


def minimise(rows: Rows, candidates: Sequence[Candidate], *, tolerance: float, num_classes: int) -> tuple[Tensor, list[Descent]]:
    """(G, E, K) on the rows' device, and how each has ended within its number of passes."""
    most = max(candidate.epochs for candidate in candidates)
    starts = torch.zeros(len(candidates), rows.width, num_classes, dtype=torch.float64, device=rows.device)
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


def objective(rows: Rows, heads_GEK: Tensor, *, decays: Sequence[float]) -> tuple[list[float], Tensor]:
    """(loss of each head, gradients in double precision): one pass over the rows, in chunks."""
    num_candidates, _, num_classes = heads_GEK.shape
    weights_EC = as_columns(heads_GEK).float()
    gradient_EC = torch.zeros(weights_EC.shape, dtype=torch.float64, device=rows.device)
    loss_G = torch.zeros(num_candidates, dtype=torch.float64, device=rows.device)
    for x_BE, labels_B in rows.chunks(size=max(256, min(8192, PASS_NUMBERS // weights_EC.shape[1]))):
        logits_BC = x_BE @ weights_EC
        loss_G += losses_of(logits_BC, labels_B, num_classes=num_classes)
        gradient_EC += x_BE.T @ errors_of(logits_BC, labels_B, num_classes=num_classes)
    decay_G = torch.tensor(decays, dtype=torch.float64, device=rows.device)
    decayed_GDK = heads_GEK[:, : rows.num_features]
    loss_G = loss_G / rows.num_rows + decay_G / 2 * decayed_GDK.square().sum(dim=(1, 2))
    gradients_GEK = as_heads(gradient_EC, num_classes=num_classes) / rows.num_rows
    gradients_GEK[:, : rows.num_features] += decay_G.view(-1, 1, 1) * decayed_GDK
    return loss_G.tolist(), gradients_GEK
