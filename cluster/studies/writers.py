"""Which jobs of the queue write which place: two jobs for one run, or for one dataset, would only fight.

jobs/JOB/writes has a line for each place: the array's task that writes it (or "-": all of the job), a tab, the whole path.
`cluster/submit` notes it once SLURM has taken the job. A job that plain sbatch took does at its start; a task of an array then in
jobs/JOB_TASK, for NFS does not let many nodes append to one file. Jobs that squeue does not list any more say nothing, so nobody
cleans up after them.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from data_prep.settings import UserError

ALL_TASKS = "-"


class Writer(NamedTuple):
    """A task of a job that is in the queue; `task` is empty where the job is no array."""

    job: str
    task: str
    state: str
    since: str
    """When it was started: ISO, so that texts sort as times do."""

    @property
    def label(self) -> str:
        """As its logs are called."""
        return f"{self.job}_{self.task}" if self.task else self.job

    def __str__(self) -> str:
        return f"job {self.label} ({self.state})"


def lines_of(places: Mapping[str, str]) -> list[str]:
    """For the file: path -> task."""
    return [f"{task}\t{_path(place)}" for place, task in places.items()]


def writers_of(places: Sequence[str]) -> dict[str, list[Writer]]:
    """Of each place that has any; the one that was started first comes first."""
    wanted = {_path(place): place for place in places}
    found: dict[str, list[Writer]] = {}
    for writer in sorted(_in_queue(), key=_order):
        for path in _noted(writer) & wanted.keys():
            found.setdefault(wanted[path], []).append(writer)
    return found


def jobs_of(writers: Iterable[list[Writer]]) -> list[str]:
    """Their numbers, each once."""
    return sorted({writer.job for each in writers for writer in each}, key=int)


def taken_by(place: str, environment: Mapping[str, str]) -> Writer | None:
    """Within a job: another that writes this place and was started before it. The job is noted first, so of two one gives way."""
    job = environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID")
    if not job:
        return None
    me = Writer(job, environment.get("SLURM_ARRAY_TASK_ID", ""), "", "")
    if _path(place) not in _noted(me):
        with suppress(OSError):  # a full disk is told by whoever needs it
            _file(me.label).parent.mkdir(parents=True, exist_ok=True)
            _file(me.label).write_text("\n".join(lines_of({place: ALL_TASKS})) + "\n")
    try:
        first = writers_of([place]).get(place, [me])[0]
    except UserError:  # SLURM does not answer, or not from within a container: the run's own lock is left
        return None
    return first if first.state == "RUNNING" and first.label != me.label else None


def slurm(*words: str) -> str:
    try:
        # whatever the user likes to see
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SINFO_"))}
        environment["SLURM_TIME_FORMAT"] = "standard"
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{words[0]}: {error}; is this a node of a SLURM cluster? Without one: --local") from None
    if done.returncode != 0:
        raise UserError(f"{words[0]}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    return done.stdout


def _path(place: str) -> str:
    """The same by whichever way it is named."""
    return str(Path(place).resolve())


def _file(label: str) -> Path:
    return Path("jobs") / label / "writes"


def _in_queue() -> list[Writer]:
    """But for those that are ending: after scancel that may take long, and they write no more than their last checkpoint."""
    # of one's own jobs all, not -j: that is an error as soon as SLURM has forgotten one of them
    lines = slurm("squeue", "--noheader", "--me", "--array", "--format=%F %K %T %S").splitlines()
    found = [line.split() for line in lines if len(line.split()) == 4]
    return [
        Writer(job, "" if task == "N/A" else task, state, since)
        for job, task, state, since in found
        if state != "COMPLETING"
    ]


def _order(writer: Writer) -> tuple[bool, str, int]:
    return writer.state != "RUNNING", writer.since, int(writer.job)


def _noted(writer: Writer) -> set[str]:
    """What it writes."""
    lines: list[str] = []
    for label in {writer.job, writer.label}:
        with suppress(OSError):
            lines += _file(label).read_text().splitlines()
    return {path for task, _, path in (line.partition("\t") for line in lines) if task in (ALL_TASKS, writer.task)}
