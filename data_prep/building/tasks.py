"""`data_prep build --task i/n`: one of n array tasks, on any machines that share the file system of OUT.

The first task to come makes the plan, alone; the others wait for it, then all of them hold the directory together:

1. nobody is here (the sole lock is free): prepare the plan, then change the lock to a shared one;
2. others are here: take the shared lock (waiting for whoever is still preparing) and check that their plan is ours, and that
   the source has not changed since;
3. hold the lock of the task's own number, and write its shards.

A task may be run again at any time, on its own or with others. `data_prep merge OUT` needs the sole lock.
"""

import fcntl
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from data_prep.building.build import write_shards
from data_prep.building.config import BuildSettings
from data_prep.building.shards import PARTS
from data_prep.building.workers import Tally, worker_pool
from data_prep.building.workplan import Workplan, begun_by_others, load_begun, prepare
from data_prep.manifest import MANIFEST_NAME
from data_prep.publish import make_directory, sole_writer
from data_prep.settings import UserError
from data_prep.sources import Source, open_source


@dataclass(frozen=True)
class Task:
    """Array task `number` of `total`, from 0."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "Task":
        number, slash, total = text.partition("/")
        if not (slash and text.isascii() and number.isdigit() and total.isdigit() and int(number) < int(total)):
            raise UserError(
                f"--task: {text!r} will not do; write i/n with 0 <= i < n, such as 0/8 (tasks count from 0)"
            )
        return cls(int(number), int(total))


def build_task(settings: BuildSettings, task: Task) -> int:
    """Writes the shards of one task; returns their number."""
    directory = Path(settings.out)
    source = open_source(settings.source, num_workers=settings.num_workers)
    tally = Tally()
    with (
        worker_pool(settings.num_workers, tally=tally) as pool,
        _work_together(settings, source, pool, task) as work,
        sole_writer(directory / PARTS / f"task-{task.number}"),
    ):
        plans = work.of_task(task.number)
        write_shards(work, plans, source, settings.image_spec, pool=pool, tally=tally)
    return len(plans)


@contextmanager
def _work_together(settings: BuildSettings, source: Source, pool: Executor, task: Task) -> Iterator[Workplan]:
    directory = Path(settings.out)
    make_directory(directory)
    with open(directory / ".lock", "w") as lock:
        if _try_lock(lock):
            _refuse_merged(directory)
            work = prepare(settings, source, pool, num_tasks=task.total)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if load_begun(directory) != work.begun:  # the lock is let go for a moment when it changes
                raise UserError(f"{directory}: others have begun here at the same moment; start this task again")
        else:
            print(f"data_prep: others are at work in {directory}; waiting for the plan", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_SH)
            _refuse_merged(directory)
            work = begun_by_others(settings, source, num_tasks=task.total)
        yield work


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_merged(directory: Path) -> None:
    if (directory / MANIFEST_NAME).exists():
        raise UserError(f"{directory}: is merged already, so nothing is left for a task; to build anew, remove it")
