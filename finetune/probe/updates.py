"""Optimizers of many heads at once: one weight matrix, in which each column has a learning rate and a decay of its own.

E rows: D features, the bias, then zeros (see rows.py); C columns: the classes of all cells. Only the D feature rows decay. A column
whose learning rate is 0 stands still.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


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
