"""`data_prep build --task i/n`: one of n array tasks, on any machines that share the file system of OUT.

The first task to come makes the plan, alone; the others wait for it, then all of them hold the directory together. Tasks pass one
at a time through a gate (the lock of PARTS/plan):

0. what is wrong with the source or the config, and was found while this task waited, is its own answer, too (if it was found on
   this node, or on two): to list a large source once for each task, only to fail again, helps nobody;
1. nobody is here (the sole lock of OUT is free): prepare the plan, then change the lock to a shared one;
2. others are here: take the shared lock, waiting for whoever prepares; if there is no whole plan then, they have ended before they
   had one: begin again with 1, for nobody else can be in the gate.

Past the gate: check that the plan is ours and the source still as it was; hold the lock of the task's own number, waiting for an
earlier start of it that is still ending; write its shards. Whoever is killed, anywhere, lets go of all that at once.

A task may be run again at any time, on its own or with others. `data_prep merge OUT` needs the sole lock.
"""

import fcntl
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from data_prep.build.build import write_shards
from data_prep.build.config import BuildSettings
from data_prep.build.shards import PARTS
from data_prep.build.workers import Tally, worker_pool
from data_prep.build.workplan import Workplan, begun_by_others, claim, has_plan, load_begun, prepare
from data_prep.manifest import MANIFEST_NAME
from data_prep.publish import hash_of_json, sole_writer, write_json
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
        sole_writer(
            directory / PARTS / f"task-{task.number}",
            wait=True,
            notice=f"data_prep: task {task.number}/{task.total} is at work elsewhere, from an earlier start; waiting until it ends",
        ),
    ):
        plans = work.of_task(task.number)
        write_shards(work, plans, source, settings.image_spec, pool=pool, tally=tally)
    return len(plans)


@contextmanager
def _work_together(settings: BuildSettings, source: Source, pool: Executor, task: Task) -> Iterator[Workplan]:
    directory = Path(settings.out)
    _refuse_merged(directory)
    claim(directory)
    with open(directory / ".lock", "a") as lock:
        mine = _pass_gate(lock, settings, source, pool, task)
        # a `build` may have stepped in when the lock changed
        is_mine = mine is not None and load_begun(directory) == mine.begun
        yield mine if mine is not None and is_mine else begun_by_others(settings, source, num_tasks=task.total)


def _pass_gate(lock: IO[str], settings: BuildSettings, source: Source, pool: Executor, task: Task) -> Workplan | None:
    """Leaves with the shared lock, and a plan on disk; returns it if it was made here."""
    directory, mine = Path(settings.out), None
    waiting = f"data_prep: others are at work in {directory}; waiting for the plan"
    failure = _Failure(directory / PARTS / "plan", settings)
    with sole_writer(failure.directory, wait=True, notice=waiting):
        failure.share()
        while True:
            if _try_lock(lock):
                _refuse_merged(directory)
                with failure.kept():
                    mine = prepare(settings, source, pool, num_tasks=task.total)
            elif not _try_lock(lock, shared=True):  # a `build` or a `merge`
                print(waiting, file=sys.stderr, flush=True)
            _hold(lock, fcntl.LOCK_SH)
            _refuse_merged(directory)
            if has_plan(directory):
                return mine
            mine = None
            fcntl.flock(lock, fcntl.LOCK_UN)


class _Failure:
    """What a user must mend before there can be a plan, for the tasks of the same config that wait for it meanwhile.

    Which of it is news is told by its number, not by clocks: those of nodes differ. One node may be wrong by itself, such as one
    that lacks the disk with the source: two must say the same.
    """

    def __init__(self, directory: Path, settings: BuildSettings):
        self.directory = directory
        self._path, self._config = directory / "failed.json", hash_of_json(settings.model_dump(mode="json"))
        self._before = self._read().get("number")

    def share(self) -> None:
        found = self._read()
        if found.get("number") == self._before or found.get("config") != self._config:
            return
        if len(found["nodes"]) > 1 or socket.gethostname() in found["nodes"]:
            raise UserError(found["error"])

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            before, text = self._read(), str(error)
            same = (before.get("config"), before.get("error")) == (self._config, text)
            nodes = {socket.gethostname(), *(before["nodes"] if same else [])}
            found = {"number": uuid4().hex, "config": self._config, "error": text, "nodes": sorted(nodes)}
            with suppress(OSError):  # what is wrong may be the disk
                write_json(self._path, found)
            raise
        self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        return found


def _hold(lock: IO[str], how: int) -> None:
    fcntl.flock(lock, how)
    lock.truncate(0)  # who wrote in it was killed, and is no holder any more


def _try_lock(lock: IO[str], *, shared: bool = False) -> bool:
    try:
        _hold(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_merged(directory: Path) -> None:
    if (directory / MANIFEST_NAME).exists():
        raise UserError(f"{directory}: is merged already, so nothing is left for a task; to build anew, remove it")
