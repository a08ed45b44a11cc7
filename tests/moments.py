"""Moments at which a test waits or strikes, told by what a process has done and never by a clock,
however slow the machine is.

A moment is an operation on a directory or what is below it, or a mark of training's progress. A
process counts its own, and strikes itself:

    STRIKE=JSON python -m tests.moments PROGRAM WORDS...     `PROGRAM WORDS`, of which each process, also of its pools, counts
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
    """Waits for a condition, for as long as those who are to bring it about live; the limit is for
    what hangs."""
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
    """A signal to oneself: at this moment (from 1 on) of those since training has come to this
    step, or this stage."""

    folder: Path
    moment: int
    step: int = 0
    stage: str = ""
    signal: int = signal.SIGKILL
    target: Literal["self", "group", "main"] = "self"
    """Also the whole process group, or the process by which it was begun."""

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


if __name__ in ("__main__", "__mp_main__"):  # the latter is how a worker of a pool knows it
    _facts = json.loads(os.environ["STRIKE"])
    Strike(**_facts | {"folder": Path(_facts["folder"])}).arm()

if __name__ == "__main__":
    os.environ["STRUCK_PID"] = str(os.getpid())
    sys.argv = sys.argv[1:]
    sys.exit(importlib.import_module(f"{sys.argv[0]}.__main__").main(sys.argv[1:]))
