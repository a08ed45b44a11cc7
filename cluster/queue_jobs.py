"""`cluster/submit` as Python: submit one job, or a plan as one job for each unfinished stage.

A plan is queued completely or not at all:

1. Refuse what is wrong, what lacks an input, and what a job of the queue writes already.
2. Submit the stages in order, and the plan's figure after all of them. Each waits for the stages
   that write its inputs.
3. If a job is refused, cancel those before it.

A job that fails takes those that wait for it out of the queue (--kill-on-invalid-dep). Only a grid
that reads the runs of another grid begins when that grid has ended, however its members fared.

Exit codes: 0 submitted, or nothing is left to do; 1 sbatch has refused it; 2 it cannot run.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.plan_file import Plan, Stage, check_figure, load_checked
from cluster.slurm import SlurmError, in_columns, jobs_of, slurm, writers_of
from cluster.submission import Submission, book_part_of_node, read_submission
from cluster.submit import NothingLeft, RefusedError, examine, refuse_missing, submit
from cluster.work import COMMANDS, Work, in_file
from data_prep.errors import UserError
from data_prep.exit_codes import BAD_INPUT, FAILED, OK, message_of
from data_prep.interrupts import keep
from pretrain.config import PretrainSettings, check_against_ranks


def main(words: list[str]) -> int:
    try:
        if words and words[0].startswith("--examine="):  # cluster/submit --check
            return _examine(read_submission(words[1:]), words[0].partition("=")[2])
        submission = read_submission([word for word in words if word != "--parsable"])
        if not submission.script and words and Path(words[-1]).suffix in (".yaml", ".yml"):
            options = [word for word in submission.options[:-1] if word != "--dry-run"]
            queue(words[-1], options, is_dry_run="--dry-run" in words)
        elif jobs := submit(submission):
            text = f"Submitted batch job {' and '.join(jobs)}, with code and config as they are now"
            print(jobs[-1] if "--parsable" in words else text)
    except NothingLeft as left:
        print(f"{left}, nothing is submitted", file=sys.stderr)
    except ValueError as error:
        print(f"cluster/submit: {message_of(error)}", file=sys.stderr)
        return BAD_INPUT
    except RefusedError:
        return FAILED
    return OK


def _examine(submission: Submission, ranks: str) -> int:
    examine(submission)
    if ranks:
        settings = Work("pretrain", submission.arguments[0], submission.arguments[1:]).settings
        assert isinstance(settings, PretrainSettings)
        check_against_ranks(settings.train, settings.augment, num_ranks=int(ranks))
    return OK


def queue(path: str, options: Sequence[str], *, is_dry_run: bool) -> None:
    plan = load_checked(path)
    refuse_missing(Submission(tuple(options)), plan.missing())
    check_figure(plan)
    todo = [stage for stage in plan.stages if stage.undone()]
    if len(todo) > 1:  # of a single one the members that are in the queue are skipped
        _refuse_queued(path, todo)
    jobs: dict[str, tuple[str, ...]] = {}
    keep("what was queued is cancelled")
    try:
        for stage in todo:
            submission = submission_of(plan, stage, jobs, options)
            jobs[stage.name] = _submit(submission, stage.name, is_dry_run=is_dry_run)
        if plan.figure and (last := [numbers[-1] for numbers in jobs.values() if numbers]):
            waits = (f"--dependency=afterok:{':'.join(last)}", "--kill-on-invalid-dep=yes")
            submission = Submission((*options, *waits), "cluster/figure.slurm", (path,))
            jobs["figure"] = _submit(submission, "figure", is_dry_run=is_dry_run)
    except BaseException:  # Ctrl-C too: half a plan in the queue helps nobody
        queued = [job for numbers in jobs.values() for job in numbers if job.isdigit()]
        if queued:
            with suppress(SlurmError):
                slurm("scancel", *queued)
            print(f"cluster/submit: cancelled: {', '.join(queued)}", file=sys.stderr)
        raise
    numbers = [job for each in jobs.values() for job in each]
    if numbers and not is_dry_run:
        rows = [["stage", "jobs", "waits for"]]
        for stage in todo:
            after = ", ".join(jobs[each.name][-1] for each in plan.after(stage) if each in todo)
            rows.append([stage.name, ", ".join(jobs[stage.name]), after or "-"])
        rows += [["figure", ", ".join(jobs["figure"]), "all"]] if "figure" in jobs else []
        print(*in_columns(rows), sep="\n")
        print(f"look:   squeue -j {','.join(numbers)}\ncancel: scancel {' '.join(numbers)}")
        print(
            "Jobs that wait for a job that fails leave the queue. Then run the same command again."
        )
    for stage in plan.stages:
        if stage not in todo:
            print(f"{stage.name}: finished, not submitted")
    if plan.figure and not todo:
        print(f"figure: analysis figure {path}, or cluster/submit cluster/figure.slurm {path}")


def _submit(submission: Submission, name: str, *, is_dry_run: bool) -> tuple[str, ...]:
    words = [*submission.options, submission.script or "", *submission.arguments]
    print(f"$ cluster/submit {shlex.join(words)}")
    return (f"<{name}>",) if is_dry_run else submit(submission)


def submission_of(
    plan: Plan, stage: Stage, jobs: Mapping[str, Sequence[str]], options: Sequence[str]
) -> Submission:
    """Return the submission of a stage; `jobs`: the numbers of the stages before it."""
    words = [f"--nodes={stage.entry.nodes}"] if stage.entry.nodes else []
    words += [*stage.entry.sbatch, *options]
    after: dict[str, list[str]] = {}
    for each in plan.after(stage):
        if numbers := jobs.get(each.name):
            kind = "afterany" if each.entry.is_grid and stage.entry.is_grid else "afterok"
            after.setdefault(kind, []).append(numbers[-1])
    if after:
        waits = ",".join(f"{kind}:{':'.join(numbers)}" for kind, numbers in after.items())
        words += [f"--dependency={waits}", "--kill-on-invalid-dep=yes"]
    work = stage.members[0].work
    script, arguments = COMMANDS[stage.kind].script, (work.config, *work.overrides)
    if stage.entry.is_grid:
        script, arguments = "cluster/grid.slurm", (plan.path, stage.name)
    return book_part_of_node(Submission(tuple(words), script, arguments), gpus=stage.num_gpus)


def _refuse_queued(path: str, todo: Sequence[Stage]) -> None:
    places = {member.work.writes: stage for stage in todo for member in stage.undone()}
    writers = writers_of([*places])
    fix = f"wait for it, or: scancel {' '.join(jobs_of(writers.values()))}"
    errors = [
        UserError(stage.name, f"{writers[place][0]} writes {place} already", fix, code="busy")
        for place, stage in places.items()
        if place in writers
    ]
    if errors:
        raise in_file(path, *errors[:20])
