"""A study on SLURM: one job per stage, each held back until those that it waits for have succeeded.

1. Refuse while a job that writes the same place as one of them is in the queue (writers.py).
2. Submit the stages in order with `cluster/submit`.
3. If one is not taken, cancel those that were: a study is queued whole or not at all. Of a dataset's two jobs `cluster/submit`
   names the merge, and notes the parts.

A job that fails takes those that wait for it out of the queue (--kill-on-invalid-dep). The same command later submits what is not
finished.
"""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.studies.study_file import Stage, Study
from cluster.studies.work import COMMANDS
from cluster.studies.writers import jobs_of, slurm, writers_of
from data_prep.settings import UserError

_JOB = re.compile(r"\d+")
_NO_TASK = "4294967294"
"""How SLURM writes the task of an array that has none yet."""


class SubmissionFailed(Exception):  # noqa: N818
    """One stage was not taken; the text says what became of the others."""


@dataclass(frozen=True)
class Queued:
    stage: Stage
    job: str
    """What dependents wait for."""
    parts: tuple[str, ...] = ()
    """Of a dataset: the array that its merge, `job`, waits for."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return (*self.parts, self.job)


def submission(stage: Stage, jobs: dict[str, str], options: Sequence[str]) -> list[str]:
    """The command of a stage; `jobs`: the numbers of the stages that are queued before it."""
    words = ["cluster/submit", "--parsable"]
    words += [f"--nodes={stage.entry.nodes}"] if stage.entry.nodes else []
    words += [*stage.entry.sbatch, *options]
    after = [jobs[name] for name in stage.after if name in jobs]
    words += [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
    return [*words, COMMANDS[stage.work.kind].script, stage.work.config, *stage.work.overrides]


def submit(study: Study, options: Sequence[str], *, say: Callable[[str], None]) -> list[Queued]:
    """`say` is told what `cluster/submit` says besides the number."""
    todo = [stage for stage in study.stages if not stage.is_finished]
    refuse_twice(todo)
    check_scripts(todo)
    queued: list[Queued] = []
    try:
        for stage in todo:
            command = submission(stage, {each.stage.name: each.job for each in queued}, options)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = done.stdout.split()
            if done.stderr.strip():
                say(done.stderr.strip())
            job = said[-1].split(";")[0] if said else ""
            if done.returncode != 0 or not _JOB.fullmatch(job):
                reason = (
                    f"ended with {done.returncode}"
                    if done.returncode
                    else f"printed {done.stdout.strip()!r}, no number"
                )
                raise SubmissionFailed(f"{stage.name} was not taken: {shlex.join(command)} {reason}")
            queued.append(Queued(stage, job, _parts_of(stage, job)))
    except BaseException as error:  # Ctrl-C too: half a study in the queue helps nobody
        words = _cancel(queued)
        if isinstance(error, SubmissionFailed | OSError):
            raise SubmissionFailed(f"{error}; {words}") from None
        say(words)
        raise
    return queued


def refuse_twice(todo: list[Stage]) -> None:
    writers = writers_of([stage.work.writes for stage in todo])
    if writers:
        lines = [
            f"{stage.name} is in the queue already: {writers[stage.work.writes][0]} writes {stage.work.writes}"
            for stage in todo
            if stage.work.writes in writers
        ]
        jobs = jobs_of(writers.values())
        raise UserError(
            "\n".join(lines)
            + f"\nnothing was queued; squeue -j {','.join(jobs)} shows them, scancel {' '.join(jobs)} makes room"
        )


def check_scripts(todo: list[Stage]) -> None:
    for path in ("cluster/submit", *(COMMANDS[stage.work.kind].script for stage in todo)):
        if not Path(path).is_file():
            raise UserError(f"{path}: no such file; run this from the repository root")


def log_of(job: str) -> str:
    """Where SLURM writes its output: of an array's only task its file, of several NAME-JOB_*.log; empty where it does not say."""
    try:
        lines = slurm("scontrol", "--oneliner", "show", "job", job).splitlines()
    except UserError:
        return ""
    found = [(re.search(r"StdOut=(\S+)", line), re.search(r"ArrayTaskId=(\S+)", line)) for line in lines]
    logs = [(Path(log[1]).name, task[1] if task else "") for log, task in found if log]
    if not logs:
        return ""
    name, task = logs[
        0
    ]  # a line for each task that has started; the others share one, which may have any number in its name
    label = task if len(logs) == 1 and task.isdigit() else "*"
    return re.sub(rf"_({_NO_TASK}|{re.escape(task) or _NO_TASK})(?=\.|$)", f"_{label}", name)


def _cancel(queued: list[Queued]) -> str:
    """In words, what became of them."""
    if not queued:
        return "nothing was queued"
    jobs = [job for each in queued for job in each.jobs]
    try:
        slurm("scancel", *jobs)
    except UserError as error:
        return f"the jobs queued before it could not be cancelled ({error}); do it with: scancel {' '.join(jobs)}"
    return f"the jobs queued before it are cancelled: {', '.join(jobs)}"


def _parts_of(stage: Stage, job: str) -> tuple[str, ...]:
    """As `cluster/submit` has noted them."""
    noted = Path("jobs") / job / "parts"
    return tuple(noted.read_text().split()) if stage.work.kind == "build" and noted.is_file() else ()
