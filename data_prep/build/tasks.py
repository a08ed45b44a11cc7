"""`data_prep build --task i/n`: one of n array tasks, on any machines that share the file system of
OUT.

1. Hold the lock of the task's own number, waiting for an earlier start of it that is still ending.
2. Hold OUT alone, waiting for other tasks that do. Where others are at work, join their plan, if it
   is ours and the source still as it was; else make the plan (workplan.py): the first task does,
   and whoever comes when nobody is at work checks it again.
3. Still alone in OUT, take the lock that marks the task as at work: `build`, `merge` and `index`
   refuse OUT while one is held.
4. Let go of OUT; write the shards.

What is wrong with the source or the config, and was found while this task waited in 2, is its own
answer, too (if it was found on this node, or on two): to list a large source once for each task,
only to fail again, helps nobody. Whoever is killed, anywhere, lets go of all locks at once. A task
may be run again at any time, on its own or with others.
"""

import json
import socket
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from data_prep.build.build import write_shards
from data_prep.build.config import BuildSettings
from data_prep.build.destination import occupy
from data_prep.build.parts import AT_WORK, claim, tasks_at_work
from data_prep.build.workplan import Workplan, begun_by_others, prepare
from data_prep.errors import UserError
from data_prep.manifest import MANIFEST_NAME, PARTS
from data_prep.publish import hash_of_json, sole_writer, write_json
from data_prep.sources import Source, open_source
from data_prep.workers import worker_pool


@dataclass(frozen=True)
class ArrayTask:
    """Task `number` of `total`, from 0."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "ArrayTask":
        number, slash, total = text.partition("/")
        if not (
            slash
            and text.isascii()
            and number.isdigit()
            and total.isdigit()
            and int(number) < int(total)
        ):
            raise UserError(
                f"--task: {text!r} will not do; write i/n with 0 <= i < n, such as 0/8 "
                "(tasks count from 0)"
            )
        return cls(int(number), int(total))


def build_task(settings: BuildSettings, task: ArrayTask) -> int:
    """Writes the shards of one task; returns their number."""
    directory = settings.directory
    source = open_source(settings.source, num_workers=settings.num_workers)
    _refuse_merged(directory)
    claim(directory)
    own = directory / PARTS / f"task-{task.number}"
    earlier = (
        f"data_prep: task {task.number}/{task.total} is at work elsewhere, from an earlier "
        "start; waiting until it ends"
    )
    others = f"data_prep: others are at work in {directory}; waiting for the plan"
    with worker_pool(settings.num_workers) as pool, ExitStack() as locks:
        locks.enter_context(sole_writer(own, wait=True, notice=earlier))
        failure = directory / PARTS / "failed.json"
        before = _read(failure)
        with sole_writer(directory, wait=True, notice=others):
            occupy(settings)
            _refuse_merged(directory)
            if tasks_at_work(directory):
                work = begun_by_others(settings, source, num_tasks=task.total)
            else:
                work = _prepared(settings, source, pool, task, failure=failure, before=before)
            locks.enter_context(sole_writer(own / AT_WORK))
        plans = work.shards[task.number :: task.total]  # so that tasks end together
        write_shards(work, plans, source, pool)
    return len(plans)


def _prepared(
    settings: BuildSettings,
    source: Source,
    pool: Executor,
    task: ArrayTask,
    *,
    failure: Path,
    before: dict[str, Any],
) -> Workplan:
    """The plan; or what a user must mend before there can be one, kept for the tasks of the same
    config that wait meanwhile.

    Which of it is news is known by its number, not by clocks: those of nodes differ. One node may
    be wrong by itself, such as one that lacks the disk with the source: two must say the same.
    """
    found, config, node = (
        _read(failure),
        hash_of_json(settings.model_dump(mode="json")),
        socket.gethostname(),
    )
    nodes = found["nodes"] if found.get("config") == config else []
    if nodes and found["number"] != before.get("number") and (len(nodes) > 1 or node in nodes):
        raise UserError(found["error"])
    try:
        work = prepare(settings, source, pool, num_tasks=task.total)
    except UserError as error:
        nodes = sorted({node, *(nodes if found.get("error") == str(error) else [])})
        with suppress(OSError):  # what is wrong may be the disk
            write_json(
                failure,
                {"number": uuid4().hex, "config": config, "error": str(error), "nodes": nodes},
            )
        raise
    failure.unlink(missing_ok=True)
    return work


def _read(failure: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(failure.read_bytes()))
    except (
        FileNotFoundError,
        ValueError,
        TypeError,
    ):  # another task may remove it at any moment; damaged, it says nothing
        return {}


def _refuse_merged(directory: Path) -> None:
    if (directory / MANIFEST_NAME).exists():
        raise UserError(
            f"{directory}: is merged already, so nothing is left for a task; to build anew, "
            "remove it"
        )
