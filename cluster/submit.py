"""Check a submission, keep code and configs, and call sbatch.

A run's inputs must exist, unless the job waits (--dependency, --begin, --hold). If another job in
the queue writes the same output path, this job must wait for it (--dependency). Members of a grid
that are in the queue are skipped.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.plan_file import Stage, compressed, load_checked
from cluster.slurm import (
    ALL_TASKS,
    SlurmError,
    Writer,
    jobs_of,
    lines_of,
    new_job,
    slurm,
    writers_of,
)
from cluster.submission import WARNING, Submission, book_part_of_node
from cluster.work import COMMANDS, Kind, Work, kept
from data_prep.errors import SettingsError, UserError
from data_prep.settings import near_path
from pretrain.engine.zero_cost import Cluster

SPEEDS = {"GPU_TFLOPS": "teraflops", "NODE_GBIT": "gbit_per_s", "GPU_GBIT": "gbit_per_s_inside"}
"""Variable of site.env -> field of `Cluster`."""


class NothingLeft(Exception):  # noqa: N818
    """Everything in the submission is finished or in the queue."""


class RefusedError(Exception):
    """Raised if sbatch or cluster/snapshot has failed and printed the reason."""


class QueueFullError(RefusedError):
    """The user or the cluster has the maximum number of jobs."""


FULL = re.compile("Submit\\w*Limit|temporarily unable to accept job")
"""Messages of sbatch at the limits MaxSubmitJobs (association or QOS) and MaxJobCount."""


@dataclass(frozen=True)
class Order:
    """A checked submission, with the files that its jobs read and write."""

    submission: Submission
    writes: Mapping[str, str]
    """Output path -> array task that writes the path, or "-" (all tasks)."""
    reads: Sequence[str] = ()
    """Files that jobs read, except the config."""
    grid: Stage | None = None
    """Grid to submit. The tasks in `writes` are then member numbers."""


def submit(submission: Submission, jobs: list[str]) -> None:
    """Submit a job, and append its SLURM jobs to `jobs`. A dataset has two jobs: parts and merge.
    Later jobs wait for the merge. A grid has several arrays if one array is too large."""
    order = examine(submission)
    submission = book_part_of_node(
        order.submission, gpus=order.grid.num_gpus if order.grid else None
    )
    arguments = submission.arguments
    config = next((word for word in arguments if not word.startswith("-")), "")
    snapshot = str(submission.kept or "")
    if not snapshot:
        words = ["cluster/snapshot", config, *order.reads]
        taken = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if taken.returncode:
            raise RefusedError
        snapshot = taken.stdout.rstrip()
    script = f"{snapshot}/cluster/{submission.name}"
    if order.grid:
        submit_grid(order.grid, submission, order.writes, script, jobs)
    elif submission.has("test-only") or submission.name != "data_prep.slurm":
        _sbatch(submission, [*submission.options, script, *arguments], jobs, order.writes)
    else:
        _sbatch(
            submission, [*submission.options, script, "--parts", *arguments], jobs, order.writes
        )
        waits = (f"--dependency=afterok:{jobs[-1]}", "--kill-on-invalid-dep=yes", "--array=0")
        words = [*submission.options, *waits, script, "--merge", *arguments]
        try:
            _sbatch(submission, words, jobs, order.writes)
        except RefusedError:
            slurm("scancel", jobs[-1])
            parts = jobs.pop()
            Path("jobs", parts, "writes").unlink(missing_ok=True)  # a later wave submits both
            print(
                f"cluster/submit: the merge was rejected, so job {parts} is canceled",
                file=sys.stderr,
            )
            raise


def submit_grid(
    stage: Stage, submission: Submission, members: Mapping[str, str], script: str, jobs: list[str]
) -> None:
    """Submit members in as few arrays as possible. Halve arrays too large for the queue."""
    places = {int(index): place for place, index in members.items()}
    todo, length, before = [*places], len(places), len(jobs)
    limit = f"%{stage.entry.max_concurrent}" if stage.entry.max_concurrent else ""
    options = [each for each in submission.options if not each.startswith("--array=")]
    while todo:
        chosen = todo[:length]
        words = [*options, f"--array={compressed(chosen)}{limit}"]
        if limit and len(jobs) > before:  # the limit holds for all arrays together
            waits = [submission.option("dependency"), f"afterany:{jobs[-1]}"]
            words.append(f"--dependency={','.join(filter(None, waits))}")
        words += [script, *submission.arguments]
        try:
            _sbatch(submission, words, jobs, {places[index]: str(index) for index in chosen})
        except QueueFullError:
            length = len(chosen) // 2
            if not length:
                raise
        else:
            todo = todo[len(chosen) :]


def _sbatch(
    submission: Submission, words: Sequence[str], jobs: list[str], writes: Mapping[str, str]
) -> None:
    """Call sbatch, append the job number to `jobs`, and record the output paths."""
    done = subprocess.run(
        ["sbatch", "--parsable", *words],
        env=new_job(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and FULL.search(done.stderr):
        raise QueueFullError
    print(done.stderr, end="", file=sys.stderr, flush=True)
    if done.returncode:
        raise RefusedError
    if not submission.has("test-only"):
        lines = done.stdout.split()  # sites may print more before the number
        jobs.append(lines[-1].partition(";")[0] if lines else "")
        directory = Path("jobs", jobs[-1])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "writes").write_text(lines_of(writes))  # prevents a second submission


# ---- checks


def examine(submission: Submission) -> Order:
    """Check a submission. Raise SettingsError if it cannot run, NothingLeft if it has nothing to
    run."""
    if submission.script is None or not submission.arguments:
        raise SettingsError(
            "usage",
            "cluster/submit [sbatch options] cluster/NAME.slurm CONFIG [key=value ...]",
            "or cluster/submit PLAN.yaml",
            code="missing-value",
        )
    script = Path(submission.script)
    if not script.is_file():
        fix = near_path(script) or "choose a job script, for example cluster/pretrain.slurm"
        raise SettingsError(str(script), "no such file", fix, code="missing-path")
    ours = Path("cluster", script.name)
    if not ours.is_file() or not ours.samefile(script):
        problem = "a job script must be in cluster/"
        raise SettingsError(str(script), problem, "move it to cluster/", code="missing-path")
    first = submission.arguments[0]
    if first.startswith("-") and script.name != "data_prep.slurm":
        fix = "put options of sbatch before the script"
        raise SettingsError(first, "this option is after the script", fix, code="bad-syntax")
    if script.name == "grid.slurm":
        return examine_grid(submission)
    if script.name == "queue.slurm":
        return Order(submission, {first: ALL_TASKS}, load_checked(first, submission.kept).files)
    if script.name == "figure.slurm":  # checks if the plan's runs are finished
        plan = load_checked(first, submission.kept)
        if plan.figure is None:
            field = f"{plan.path}: figure"
            raise SettingsError(field, "the section is missing", "add it", code="missing-value")
        return Order(submission, {plan.drawn: ALL_TASKS}, plan.files)
    for kind, command in COMMANDS.items():
        if Path(command.script).name == script.name:
            return examine_work(submission, kind)
    return Order(submission, {})  # a script of the site's own


def examine_work(submission: Submission, kind: Kind) -> Order:
    config, *words = submission.arguments
    work = Work(kind, kept(config, submission.kept), tuple(words))
    array = submission.option("array")
    if array is not None and kind != "build":
        fix = "for several runs, write a plan"
        raise SettingsError("--array", f"{submission.name} is one run", fix, code="conflict")
    work.check()
    if work.is_finished():
        place = COMMANDS[kind].place
        raise NothingLeft(f"{work.writes} is finished; set another {place} to repeat it")
    refuse_missing(submission, work.missing())
    if writers := _writers(submission, [work.writes]).get(work.writes):
        jobs = jobs_of([writers])
        fix = f"wait with --dependency=afterany:{':'.join(jobs)}, or run scancel {' '.join(jobs)}"
        raise SettingsError(work.writes, f"{writers[0]} already writes it", fix, code="busy")
    warn_of_nodes(submission, [work])
    return Order(submission, {work.writes: ALL_TASKS})


def examine_grid(submission: Submission) -> Order:
    if len(submission.arguments) != 2:
        fix = "write overrides into the plan; cluster/submit PLAN submits all stages"
        problem = "the arguments must be PLAN STAGE"
        raise SettingsError("cluster/grid.slurm", problem, fix, code="bad-syntax")
    path, name = submission.arguments
    plan = load_checked(path, submission.kept)
    stage = plan.stage(name)
    members, array = stage.members, submission.option("array")
    chosen = indices(array) if array else range(len(members))
    if beyond := compressed(index for index in chosen if index >= len(members)):
        fix = f"choose members from 0 to {len(members) - 1}"
        problem = f"{name} has no member {beyond}"
        raise SettingsError("--array", problem, fix, code="unknown-name")
    undone = [members[index] for index in chosen if not members[index].work.is_finished()]
    if not undone:
        raise NothingLeft(f"{path}: all {len(chosen)} members of {name} are finished")
    missing = {str(error): error for member in undone for error in member.work.missing()}
    refuse_missing(submission, [*missing.values()])
    writers = _writers(submission, [member.work.writes for member in undone])
    queued = compressed(member.index for member in undone if member.work.writes in writers)
    if queued:
        jobs = ", ".join(jobs_of(writers.values()))
        print(f"{path}: members {queued} are already in the queue, in job {jobs}", file=sys.stderr)
    todo = [member for member in undone if member.work.writes not in writers]
    if not todo:
        raise NothingLeft(f"{path}: all unfinished members of {name} are in the queue")
    warn_of_nodes(submission, [member.work for member in todo])
    writes = {member.work.writes: str(member.index) for member in todo}
    return Order(submission, writes, plan.files, stage)


def indices(array: str) -> list[int]:
    """Return the task numbers in a value of sbatch's --array, such as 0-3,7,8-12:2%4."""
    found: set[int] = set()
    for span in array.partition("%")[0].split(","):
        parts = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?(?::([0-9]*[1-9][0-9]*))?", span)
        if parts is None:
            fix = "write it as 0-7, 0-7%2 or 1,4-6"
            raise SettingsError("--array", f"{array} is not valid", fix, code="bad-syntax")
        first, last, step = int(parts[1]), int(parts[2] or parts[1]), int(parts[3] or 1)
        found |= set(range(first, last + 1, step))
    return sorted(found)


def _writers(submission: Submission, places: list[str]) -> dict[str, list[Writer]]:
    if not submission.has("dependency"):  # which may already name the other job
        with suppress(SlurmError):  # SLURM does not respond: sbatch will report it
            return writers_of(places)
    return {}


def warn_of_nodes(submission: Submission, works: Sequence[Work]) -> None:
    """Print a warning for the first pretraining that fewer nodes would make faster."""
    nodes, of_node = submission.ranks(os.environ)
    if nodes is None or nodes == 1 or not of_node or not submission.gpus_per_node(os.environ):
        return
    speeds = {}
    for name, field in SPEEDS.items():
        value = os.environ.get(name)
        if value and not re.fullmatch(r"[0-9]*[1-9][0-9]*", value):
            problem, fix = f"{value!r} is not a whole number above 0", "fix it in cluster/site.env"
            raise SettingsError(name, problem, fix, code="bad-value")
        if value:
            speeds[field] = float(value)
    cluster = Cluster(of_node, **speeds)
    lines = (work.slower_nodes(nodes, cluster) for work in works)
    if line := next(filter(None, lines), None):
        print(f"cluster/submit: {WARNING}{line}", file=sys.stderr)


def refuse_missing(submission: Submission, missing: Sequence[UserError]) -> None:
    is_late = submission.kept or submission.has("dependency", "begin", "hold", "test-only")
    if missing and not is_late:
        first, *others = missing
        fix = f"{first.fix}, or wait for another job: --dependency=afterok:JOB"
        raise SettingsError(first.field, first.problem, fix, code=first.code, others=others)
