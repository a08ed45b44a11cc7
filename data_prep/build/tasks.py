"""`data_prep build --plan` and `--task i/n`: array tasks on machines that share OUT's file system.

`--plan` makes the plan (workplan.py) under the lock of OUT. Without `--plan`, task 0 makes the plan
and the other tasks wait. Any number of tasks can share a plan: task i of n writes the shards i,
i + n, ... that have no record. Steps of a task:

1. lock the folder task-i, after waiting for an earlier attempt that still holds this lock;
2. lock OUT, and look for a plan of this config and source;
3. if a plan exists, lock the folder task-i/at-work. While any task holds such a lock, `build`,
   `merge` and `index` fail with "busy";
4. otherwise, task 0 makes the plan. Any other task releases OUT and repeats step 2. The task fails
   after PLAN_DEADLINE_S, or if task 0 has recorded an error in failed.json;
5. release OUT and write the shards.

A killed task releases all locks at once. You can run a task again at any time.
"""

import json
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from data_prep.build.build import write_shards
from data_prep.build.config import BuildSettings
from data_prep.build.parts import AT_WORK, claim, own_place, refuse_tasks_at_work
from data_prep.build.workplan import Workplan, open_source_of, plan_that_fits, prepare
from data_prep.errors import UserError
from data_prep.limits import error_of_system
from data_prep.manifest import MANIFEST_NAME, PARTS
from data_prep.publish import remove_leftovers, sole_writer, write_json
from data_prep.sources import Source
from data_prep.workers import Pool

PLAN_DEADLINE_S = 1800.0
"""Longest time in seconds that a task waits for a plan. Time in which another process holds the
lock of OUT does not count."""
POLL_S = 1.0
FAILURE = "failed.json"


@dataclass(frozen=True)
class ArrayTask:
    """Task `number` of `total`; numbers start at 0."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "ArrayTask":
        number, _, total = text.partition("/")
        is_valid = text.isascii() and number.isdigit() and total.isdigit()
        if not is_valid or int(number) >= int(total):
            raise UserError(
                "--task",
                f"{text!r} is not of the form i/n with 0 <= i < n",
                "count tasks from 0, for example 0/8",
                code="bad-syntax",
            )
        return cls(int(number), int(total))


def plan_build(settings: BuildSettings) -> Workplan:
    """Make the plan that array tasks share. A plan of the same config and source is reused."""
    _refuse_merged(settings.directory)
    with own_place(settings.directory), Pool(settings.num_workers) as pool:
        return prepare(settings, open_source_of(settings), pool)


def build_task(settings: BuildSettings, task: ArrayTask) -> int:
    """Write the shards of one task, and return their number."""
    directory, source = settings.directory, open_source_of(settings)
    _refuse_merged(directory)
    claim(directory)
    own = directory / PARTS / f"task-{task.number}"
    earlier = f"data_prep: waiting until an earlier attempt at task {task.number}/{task.total} ends"
    known_failure, deadline_s = _failure(directory), time.monotonic() + PLAN_DEADLINE_S
    with Pool(settings.num_workers) as pool, ExitStack() as locks:
        locks.enter_context(sole_writer(own, wait=True, notice=earlier))
        notice = f"data_prep: waiting until another task has planned the shards of {directory}"
        while True:
            asked_s = time.monotonic()
            with sole_writer(directory, wait=True, notice=notice):
                deadline_s += time.monotonic() - asked_s  # another process may have been planning
                _refuse_merged(directory)
                work = plan_that_fits(settings, source)
                if work is None and task.number == 0:
                    work = _first_plan(settings, source, pool)
                if work is not None:
                    locks.enter_context(sole_writer(own / AT_WORK))
                    break
                failure = _failure(directory)
            if failure and (failure != known_failure or failure["array"] == _attempt() != ""):
                raise UserError(*failure["error"], code=failure["code"])
            if time.monotonic() > deadline_s:
                raise UserError(
                    "--task",
                    f"{directory} has no plan of this config and source",
                    "run task 0, or data_prep build CONFIG --plan",
                    code="unfinished",
                )
            time.sleep(POLL_S)
        plans = work.shards[
            task.number :: task.total
        ]  # equal parts, so tasks end at about the same time
        write_shards(work, plans, source, pool)
    return len(plans)


def _first_plan(settings: BuildSettings, source: Source, pool: Pool) -> Workplan:
    """Make the plan, or record the error for the waiting tasks."""
    failure = settings.directory / PARTS / FAILURE
    try:
        refuse_tasks_at_work(settings.directory)
        remove_leftovers(settings.directory, settings.directory / PARTS)
        work = prepare(settings, source, pool)
    except Exception as error:
        if isinstance(error, UserError):
            cause = error
        elif isinstance(error, OSError):
            cause = error_of_system(error)
        else:
            problem = f"task 0 failed with {type(error).__name__}: {error}"
            cause = UserError("--task", problem, "read the log of task 0", code="unfinished")
        with suppress(OSError):  # the disk itself may be the problem
            record = {"error": [cause.field, cause.problem, cause.fix], "code": cause.code}
            write_json(failure, record | {"array": _attempt(), "id": uuid4().hex})
        raise
    failure.unlink(missing_ok=True)
    return work


def _failure(directory: Path) -> dict[str, Any]:
    """Return the error that task 0 has recorded; {} if there is none."""
    try:
        return dict(json.loads((directory / PARTS / FAILURE).read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}


def _attempt() -> str:
    """Return the SLURM array job's number and its restart count as text; "" outside an array
    job."""
    job, restarts = (os.environ.get(f"SLURM_{name}") for name in ("ARRAY_JOB_ID", "RESTART_COUNT"))
    return f"{job}-{restarts or 0}" if job else ""


def _refuse_merged(directory: Path) -> None:
    if (directory / MANIFEST_NAME).exists():
        raise UserError(
            "out", f"{directory} is already merged", "remove it to build it again", code="exists"
        )
