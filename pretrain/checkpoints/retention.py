"""Which checkpoints stay: the last ones, the best by evaluation, and those at multiples of a length, for ever.

Which one is the best is part of the training state (trainer.json holds it), so a run that goes on knows it as an undisturbed one
would; `RUN/checkpoints/best.json` repeats it for people and scripts, and names only one that is there. Nothing is removed before a
newer checkpoint is published, and the best that is published stays until a better one is.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.publish import withdraw, write_json
from pretrain.checkpoints.card import checkpoints_dir, list_checkpoints

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest top-1 accuracy so far; of equal ones the first."""

    step: int
    score: float


@dataclass(frozen=True)
class Retention:
    keep_last: int
    keep_every_steps: int | None = None

    def is_kept_for_ever(self, step: int) -> bool:
        return self.keep_every_steps is not None and step % self.keep_every_steps == 0


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def superfluous(found: list[Path], *, newest: Path, retention: Retention, best: Best | None) -> list[Path]:
    """Of all (oldest first) the older ones that no rule keeps, and those newer than `newest`: training had gone on there."""
    older = [path for path in found if path.name < newest.name]
    stay = set(older[max(0, len(older) - (retention.keep_last - 1)) :])
    kept = {
        path for path in older if retention.is_kept_for_ever(step_of(path)) or (best and step_of(path) == best.step)
    }
    return [path for path in found if path != newest and path not in stay | kept]


def prune(run_dir: Path, *, newest: Path, retention: Retention, best: Best | None) -> None:
    for path in superfluous(list_checkpoints(run_dir), newest=newest, retention=retention, best=best):
        withdraw(path)


def published_best(run_dir: Path, best: Best | None, *, newest_step: float = math.inf) -> Best | None:
    """This one, or, where its checkpoint never came to be, the one that best.json names. What is newer than `newest_step` goes."""
    named = _read(checkpoints_dir(run_dir) / BEST)
    published = {step_of(path) for path in list_checkpoints(run_dir) if step_of(path) <= newest_step}
    return next((each for each in (best, named) if each is not None and each.step in published), None)


def write_best(run_dir: Path, best: Best | None) -> None:
    """Of a published one. Does nothing where it is known already."""
    path = checkpoints_dir(run_dir) / BEST
    if best is None:
        if path.exists():
            withdraw(path)
    elif _read(path) != best:
        write_json(path, asdict(best))


def _read(path: Path) -> Best | None:
    try:
        found: Any = json.loads(path.read_text())
        return Best(int(found["step"]), float(found["score"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
