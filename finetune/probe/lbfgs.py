"""L-BFGS for several linear heads at once, on the same passes over the features.

Each head minimizes mean cross-entropy + decay / 2 |W|^2 (biases do not decay) with its own history.
A pass over the features evaluates one trial point of each head. A head accepts its trial and
chooses a new direction if the loss satisfies Armijo's condition. Otherwise the head tries a shorter
step in the next pass. Points and gradients are in double precision. Products with the features are
in single precision. Shapes: see heads.py.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from data_prep.progress import ProgressLine
from finetune.probe.heads import Candidate, as_columns, as_heads, errors_of, losses_of
from finetune.probe.rows import Rows

HISTORY_SIZE = 10
SUFFICIENT_DECREASE = 1e-4
"""Constant of Armijo's condition."""
ROUNDING = 1e-7
"""Relative error of a loss in single precision."""
LEAST_STEP = 1e-8
"""Smallest step size. Smaller steps change nothing in single precision."""
PASS_NUMBERS = 16_000_000
"""Number of logits in memory at a time."""


class Minimizer:
    """L-BFGS iteration of one head. `trial` is the point to evaluate next."""

    def __init__(self, start: Tensor, *, tolerance: float):
        self.tolerance = tolerance
        self.point, self.trial = start, start.clone()
        self.is_done = self.has_converged = False
        self.num_passes = 0
        """Number of passes over the features until this head was done."""
        self._loss, self._gradient = 0.0, start
        self._direction, self._step_size, self._slope = start, 0.0, 0.0
        self._history: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY_SIZE)
        """(s, y, rho): step, change of the gradient, 1 / (s y)."""

    @property
    def is_stuck(self) -> bool:
        """True if the head stopped before convergence, because no step lowers the loss in single
        precision."""
        return self.is_done and not self.has_converged

    @property
    def largest_gradient(self) -> float:
        return float(self._gradient.abs().max())

    def update(self, loss: float, gradient: Tensor) -> None:
        """Use the loss and gradient at `trial` to choose the next trial."""
        self.num_passes += 1
        if self.num_passes == 1:
            self._accept(loss, gradient)
            return
        expected = self._loss + SUFFICIENT_DECREASE * self._step_size * self._slope
        if loss <= expected + ROUNDING * abs(self._loss):
            s, y = self.trial - self.point, gradient - self._gradient
            curvature = float((s * y).sum())
            if curvature > 1e-12 * float(y.square().sum()):
                self._history.append((s, y, 1 / curvature))
            self._accept(loss, gradient)
            return
        # line search: the minimum of the parabola through both losses and the slope
        step, excess = self._step_size, loss - self._loss - self._step_size * self._slope
        shorter = -self._slope * step**2 / (2 * excess) if excess > 0 else 0.5 * step
        self._try_step(min(max(shorter, 0.1 * step), 0.5 * step))

    def _accept(self, loss: float, gradient: Tensor) -> None:
        self.point, self._loss, self._gradient = self.trial, loss, gradient
        if self.largest_gradient <= self.tolerance:
            self.is_done = self.has_converged = True
            return
        self._direction = self._two_loop_recursion()
        self._slope = float((self._direction * gradient).sum())
        if self._slope >= 0:  # rounding errors made the history useless
            self._history.clear()
            self._direction, self._slope = -gradient, -float(gradient.square().sum())
        first_step = min(1.0, 1 / max(1e-30, float(gradient.norm())))
        self._try_step(1.0 if self._history else first_step)

    def _try_step(self, step_size: float) -> None:
        self._step_size, self.trial = step_size, self.point + step_size * self._direction
        if step_size < LEAST_STEP:
            self.is_done, self.trial = True, self.point

    def _two_loop_recursion(self) -> Tensor:
        """Return -H g for the inverse Hessian H that the history approximates."""
        direction, alphas = -self._gradient, []
        for s, y, rho in reversed(self._history):
            alpha = rho * (s * direction).sum()
            direction = direction - alpha * y
            alphas.append(alpha)
        if self._history:
            _, y, rho = self._history[-1]
            direction = direction / (rho * y.square().sum())
        for (s, y, rho), alpha in zip(self._history, reversed(alphas), strict=True):
            direction = direction + (alpha - rho * (y * direction).sum()) * s
        return direction


def minimize(
    rows: Rows, candidates: Sequence[Candidate], *, tolerance: float, num_classes: int
) -> tuple[Tensor, list[Minimizer]]:
    """Return the heads (G, E, K) on the rows' device, and the final Minimizer of each head."""
    most = max(candidate.epochs for candidate in candidates)
    shape = (len(candidates), rows.width, num_classes)
    starts = torch.zeros(shape, dtype=torch.float64, device=rows.device)
    heads = [Minimizer(start, tolerance=tolerance) for start in starts]
    with ProgressLine("linear heads (L-BFGS)", total=most, unit="passes") as line:
        for _ in range(most):
            active = [number for number, head in enumerate(heads) if not head.is_done]
            if not active:
                break
            trials_GEK = torch.stack([heads[number].trial for number in active])
            decays = [candidates[number].weight_decay for number in active]
            losses, gradients_GEK = objective(rows, trials_GEK, decays=decays)
            for number, loss, gradient in zip(active, losses, gradients_GEK, strict=True):
                heads[number].update(loss, gradient)
            line.advance(note=f"{len(active)} heads not converged")
    return torch.stack([head.point for head in heads]).float(), heads


def objective(
    rows: Rows, heads_GEK: Tensor, *, decays: Sequence[float]
) -> tuple[list[float], Tensor]:
    """Return the loss of each head and the gradients (G, E, K), from one pass over the rows."""
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
