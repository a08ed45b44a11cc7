"""The learning rate as a pure function of the step: a linear warm-up, then the named decay."""

import math
from dataclasses import dataclass

from pretrain.config import ScheduleSettings


@dataclass(frozen=True)
class Schedule:
    settings: ScheduleSettings
    base_lr: float
    num_steps: int
    warmup_steps: int = 0
    cooldown_steps: int = 0

    def lr(self, step: int) -> float:
        """Return the learning rate of the update from `step` to `step + 1`."""
        if step < self.warmup_steps:
            start = self.settings.warmup_from
            if start is None:  # linear from 0 at step -1
                start = self.base_lr / (self.warmup_steps + 1)
            return start + (self.base_lr - start) * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        final_lr = self.settings.final_lr
        fall = self.base_lr - final_lr
        match self.settings.name:
            case "constant":
                return self.base_lr
            case "cosine":
                return final_lr + fall * 0.5 * (1 + math.cos(math.pi * done))
            case "wsd":
                return self.base_lr - fall * max(
                    0.0, 1 - (self.num_steps - step) / self.cooldown_steps
                )
            case "linear":
                return final_lr + fall * (1 - done)
