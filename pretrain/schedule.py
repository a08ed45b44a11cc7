"""The learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    name: Literal["constant", "cosine"]
    base_lr: float
    final_lr: float
    warmup_steps: int
    num_steps: int

    def lr(self, step: int) -> float:
        """For the update that takes the model from `step` to `step + 1`."""
        if step < self.warmup_steps:
            return self.base_lr * (step + 1) / (self.warmup_steps + 1)
        if self.name == "constant":
            return self.base_lr
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
