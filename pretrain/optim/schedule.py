"""The learning rate as a pure function of the step: a straight warm-up, then what the name says."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    name: Literal["constant", "cosine", "linear"]
    base_lr: float
    final_lr: float
    """Where cosine and linear end."""
    warmup_steps: int
    num_steps: int
    warmup_from: float | None = None
    """The rate of the first step; None: one step's share of `base_lr`, as if the line began at 0 one step earlier."""

    def lr(self, step: int) -> float:
        """For the update that takes the model from `step` to `step + 1`."""
        if step < self.warmup_steps:
            start = self.base_lr / (self.warmup_steps + 1) if self.warmup_from is None else self.warmup_from
            return start + (self.base_lr - start) * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        fall = self.base_lr - self.final_lr
        match self.name:
            case "constant":
                return self.base_lr
            case "cosine":
                return self.final_lr + fall * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                return self.final_lr + fall * (1 - done)
