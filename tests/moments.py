"""Moments at which a test waits or sends a signal. They depend on a process's actions, not on a
clock, so slow machines do not matter.

A moment is an operation on a directory or its contents, or a mark of training's progress. Each
process counts its own moments, and signals itself:

    STRIKE=JSON python -m tests.moments PROGRAM WORDS...     runs `PROGRAM WORDS`; each process,
    also of its pools, counts
"""

import importlib
import inspect
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pretrain.ranks.hangs import PROGRESS

_FILE_EVENTS = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.truncate",
    "os.listdir",
    "os.scandir",
)


def wait_until(
    condition: Callable[[], bool],
    *,
    lives: Callable[[], bool] = lambda: True,
    timeout_s: float = 150,
) -> None:
    """Wait for a condition while `lives()` is true. `timeout_s` ends a hang."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert lives(), f"ended before: {_source(condition)}"
        assert time.monotonic() < end_s, f"not within {timeout_s:.0f} s: {_source(condition)}"
        time.sleep(0.005)


def _source(condition: Callable[[], bool]) -> str:
    return (
        inspect.getsource(condition).strip()
        if condition.__name__ == "<lambda>"
        else repr(condition)
    )


@dataclass(frozen=True)
class Strike:
    """A signal that a process sends at the n-th `moment` (from 1) after training has reached this
    step or stage."""

    folder: Path
    moment: int
    step: int = 0
    stage: str = ""
    signal: int = signal.SIGKILL
    target: Literal["self", "group", "main"] = "self"
    """Receiver of the signal: this process, its process group, or the first process."""

    def arm(self) -> None:
        moments, has_come, mark = itertools.count(1), not (self.step or self.stage), PROGRESS.mark

        def counted(stage: str, *, step: int | None = None) -> None:
            nonlocal has_come
            mark(stage, step=step)
            has_come = has_come or (
                PROGRESS.standing().step >= self.step and self.stage in ("", stage)
            )
            pass_one()

        def noticed(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _FILE_EVENTS and f"{arguments[0]}/".startswith(f"{self.folder}/"):
                pass_one()

        def pass_one() -> None:
            if has_come and next(moments) == self.moment:
                targets = {
                    "self": os.getpid(),
                    "group": 0,
                    "main": int(os.environ.get("STRUCK_PID", "0")),
                }
                os.kill(targets[self.target], self.signal)

        PROGRESS.mark = counted  # type: ignore[method-assign]
        sys.addaudithook(noticed)

    @property
    def environment(self) -> dict[str, str]:
        return {"STRIKE": json.dumps(asdict(self) | {"folder": str(self.folder)})}


if __name__ in ("__main__", "__mp_main__"):  # a pool's worker has the second name
    _facts = json.loads(os.environ["STRIKE"])
    Strike(**_facts | {"folder": Path(_facts["folder"])}).arm()

if __name__ == "__main__":
    os.environ["STRUCK_PID"] = str(os.getpid())
    sys.argv = sys.argv[1:]
    sys.exit(importlib.import_module(f"{sys.argv[0]}.__main__").main(sys.argv[1:]))
