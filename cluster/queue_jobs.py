"""`cluster/submit` as Python: submit one job, or a plan as one job for each unfinished stage.

1. Fail if a setting is wrong or an input is missing. Skip members that are finished or in the
   queue.
2. Submit the stages in order, then the plan's figure. Each stage waits for the stages that write
   its inputs.
3. If the queue is full (MaxSubmitJobs, MaxJobCount), submit the small job `cluster/queue.slurm` in
   place of the last members. This job begins when half of the submitted jobs (a wave) have ended,
   and submits the next wave. Each wave uses the code and configs of the first wave.
4. If sbatch rejects a job for another reason, cancel the jobs submitted before.

All waves together submit each member once, because a wave reads jobs/JOB/writes of all earlier
jobs of the plan. To submit a failed member again, run `cluster/submit` again. While queue.slurm of
a plan is in the queue, no second command submits the plan.

If a job fails, the jobs that wait for it leave the queue (--kill-on-invalid-dep). Later waves skip
these jobs. A grid that reads the runs of another grid begins even if members of the other grid
failed.

Exit codes: 0 submitted, or everything is done; 1 rejected by sbatch; 2 the submission cannot run.
"""

import fcntl
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from cluster.plan_file import Stage, check_figure, compressed, load_checked
from cluster.slurm import (
    SlurmError,
    entries_of,
    in_columns,
    lines_of,
    places_since,
    slurm,
    writers_of,
)
from cluster.submission import Submission, book_part_of_node, read_submission
from cluster.submit import (
    NothingLeft,
    QueueFullError,
    RefusedError,
    examine,
    refuse_missing,
    submit,
)
from cluster.work import COMMANDS, Work
from data_prep.exit_codes import BAD_INPUT, FAILED, OK, message_of
from data_prep.interrupts import keep
from pretrain.config import PretrainSettings, check_against_ranks

_LATER = "Repeat the command after some of your jobs have ended"


def main(words: list[str]) -> int:
    jobs: list[str] = []
    try:
        if words and words[0].startswith("--examine="):  # cluster/submit --check
            return _examine(read_submission(words[1:]), words[0].partition("=")[2])
        submission = read_submission([word for word in words if word != "--parsable"])
        if not submission.script and words and Path(words[-1]).suffix in (".yaml", ".yml"):
            options = [word for word in submission.options[:-1] if word != "--dry-run"]
            plan = Path(words[-1])
            with plan.open("rb") if plan.is_file() else nullcontext() as file:
                if file is not None:
                    with suppress(OSError):  # one command at a time
                        fcntl.flock(file, fcntl.LOCK_EX)
                Queue(words[-1], options).fill(is_dry_run="--dry-run" in words)
        else:
            with _all_or_none(jobs):
                submit(submission, jobs)
            if jobs:
                numbers = " and ".join(jobs)
                text = f"Submitted batch job {numbers} with the present code and config"
                print(jobs[-1] if "--parsable" in words else text)
    except NothingLeft as left:
        print(f"nothing is submitted: {left}", file=sys.stderr)
    except ValueError as error:
        print(f"cluster/submit: {message_of(error)}", file=sys.stderr)
        return BAD_INPUT
    except QueueFullError:
        some = f" Submitted before: {', '.join(jobs)}." * bool(jobs)
        print(f"cluster/submit: the queue is full.{some} {_LATER}", file=sys.stderr)
        return FAILED
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


@contextmanager
def _all_or_none(jobs: Sequence[str]) -> Iterator[None]:
    """Cancel the jobs after an error or Ctrl-C, so that no part of a plan stays in the queue."""
    try:
        yield
    except QueueFullError:
        raise
    except BaseException:
        if jobs:
            with suppress(SlurmError):
                slurm("scancel", *jobs)
            print(f"cluster/submit: canceled jobs: {', '.join(jobs)}", file=sys.stderr)
        raise


class Queue:
    """One wave of a plan: the jobs that one call of cluster/submit queues."""

    def __init__(self, path: str, options: Sequence[str]) -> None:
        kept = Path(os.environ["PLAN_KEPT"]) if "PLAN_KEPT" in os.environ else None
        self.since = int(os.environ.get("PLAN_SINCE", "0"))
        """Number of the first job of the plan's first wave; 0 in the first wave."""
        self.plan, self.options, self.kept = load_checked(path, kept), options, kept
        plan = self.plan
        refuse_missing(Submission(tuple(options), kept=kept), plan.missing())
        if kept is None:
            check_figure(plan)
        places = [work.writes for stage in plan.stages for work in stage.works]
        # before the results are read, so a member that ends in between counts as queued
        self.writers = writers_of([*places, path, plan.drawn])
        own = kept and os.environ.get("SLURM_JOB_ID")
        if others := [each for each in self.writers.pop(path, []) if each.job != own]:
            raise NothingLeft(f"{path}: {others[0]} already submits the rest of the plan")
        self.begun = places_since(self.since) if self.since else set()
        self.submitted: list[str] = []
        self.jobs: dict[str, list[str]] = {}
        """Stage -> numbers of its jobs in this wave."""
        self.failed: set[str] = set()
        """Stages with members that failed in an earlier wave, and stages that depend on these."""

    def waits(self, stage: Stage) -> list[str]:
        """Return the jobs (or array tasks) that write the results of a stage."""
        writers = [each for work in stage.works for each in self.writers.get(work.writes, [])]
        labels = dict.fromkeys(each.label for each in writers)
        jobs = self.jobs.get(stage.name, ())
        return [*labels, *(jobs[-1:] if stage.kind == "build" else jobs)]

    def fill(self, *, is_dry_run: bool) -> None:
        plan = self.plan
        undone = {stage.name: stage.undone() for stage in plan.stages}
        keep("queued jobs are canceled")
        with nullcontext() if self.kept else _all_or_none(self.submitted):
            try:
                for stage in plan.stages:
                    if submission := self.next(stage):
                        self.submit(submission, stage.name, is_dry_run=is_dry_run)
                if plan.figure and (submission := self.figure()):
                    self.submit(submission, "figure", is_dry_run=is_dry_run)
            except QueueFullError:
                self.leave_rest()
        if self.submitted:
            self.report()
        for stage in plan.stages:
            if not undone[stage.name]:
                print(f"{stage.name}: finished, not submitted")
        if plan.figure and not any(undone.values()) and not self.jobs:
            path = plan.path
            print(
                f"figure: run analysis figure {path}, or cluster/submit cluster/figure.slurm {path}"
            )

    def report(self) -> None:
        rows = [["stage", "jobs", "waits for"]]
        for stage in self.plan.stages:
            if jobs := self.jobs.get(stage.name):
                after = ", ".join(
                    job for each in self.plan.after(stage) for job in self.waits(each)[-1:]
                )
                rows.append([stage.name, ", ".join(jobs), after or "-"])
        if drawn := self.jobs.get("figure"):
            rows.append(["figure", *drawn, "all"])
        print(*in_columns(rows), sep="\n")
        numbers = self.submitted
        print(f"look:   squeue -j {','.join(numbers)}\ncancel: scancel {' '.join(numbers)}")
        if rest := self.jobs.get("rest"):
            print(f"The queue is full. Job {rest[0]} submits the rest of the plan.")
        print(
            "If a job fails, the jobs that wait for it leave the queue. Then run the same "
            "command again."
        )

    def next(self, stage: Stage) -> Submission | None:
        """Return the submission of the members that were never submitted. Return None if there are
        none, or if a required stage has failed."""
        queued = [each for each in stage.members if each.work.writes in self.writers]
        if queued:
            numbers = f" {compressed(each.index for each in queued)}" * stage.entry.is_grid
            writer = self.writers[queued[0].work.writes][0]
            print(f"{stage.name}{numbers}: {writer} is already in the queue", file=sys.stderr)
        left = [member for member in stage.undone() if member not in queued]
        begun = [each for each in left if str(Path(each.work.writes).resolve()) in self.begun]
        left = [member for member in left if member not in begun]
        lost = [
            each.name
            for each in self.plan.after(stage)
            if each.name in self.failed and not (each.entry.is_grid and stage.entry.is_grid)
        ]
        if begun or lost:
            self.failed.add(stage.name)
        if left and lost:
            print(f"{stage.name}: not submitted, because {lost[0]} has failed", file=sys.stderr)
        if not left or lost:
            return None
        submission = self.submission_of(stage)
        if len(left) < len(stage.members):
            array = f"--array={compressed(member.index for member in left)}"
            submission = submission.with_options(last=[array])
        return submission

    def submission_of(self, stage: Stage) -> Submission:
        """Return the submission of all members of a stage."""
        words = [f"--nodes={stage.entry.nodes}"] if stage.entry.nodes else []
        words += [*stage.entry.sbatch, *self.options]
        after: dict[str, list[str]] = {}
        for each in self.plan.after(stage):
            kind = "afterany" if each.entry.is_grid and stage.entry.is_grid else "afterok"
            after.setdefault(kind, []).extend(self.waits(each))
        if stage.entry.max_concurrent:  # the limit holds for all arrays together
            after.setdefault("afterany", []).extend(self.waits(stage))
        waits = ",".join(f"{kind}:{':'.join(each)}" for kind, each in after.items() if each)
        if waits:
            words += [f"--dependency={waits}", "--kill-on-invalid-dep=yes"]
        work = stage.members[0].work
        config = work.config.removeprefix(f"{self.kept}/given").removeprefix(f"{self.kept}/")
        script, arguments = COMMANDS[stage.kind].script, (config, *work.overrides)
        if stage.entry.is_grid:
            script, arguments = "cluster/grid.slurm", (self.plan.path, stage.name)
        submission = Submission(tuple(words), script, arguments, self.kept)
        return book_part_of_node(submission, gpus=stage.num_gpus)

    def figure(self) -> Submission | None:
        """Return the submission of the figure. Return None if it is queued, a stage has failed, or
        nothing was submitted."""
        last = [job for stage in self.plan.stages for job in self.waits(stage)]
        place = self.plan.drawn
        is_queued = place in self.writers or str(Path(place).resolve()) in self.begun
        if is_queued or self.failed or not (self.jobs or self.kept):
            return None
        waits = [f"--dependency=afterok:{':'.join(last)}", "--kill-on-invalid-dep=yes"]
        options = (*self.options, *(waits if last else []))
        return Submission(options, "cluster/figure.slurm", (self.plan.path,), self.kept)

    def submit(self, submission: Submission, name: str, *, is_dry_run: bool = False) -> None:
        words = [*submission.options, submission.script or "", *submission.arguments]
        print(f"$ cluster/submit {shlex.join(words)}", flush=True)
        before = len(self.submitted)
        try:
            if not is_dry_run:
                submit(submission, self.submitted)
        finally:
            self.jobs[name] = [f"<{name}>"] if is_dry_run else self.submitted[before:]

    def leave_rest(self) -> None:
        """Submit queue.slurm, which submits the rest of the plan. If the queue is too full, first
        cancel the last members of this wave."""
        own = [entry for job in self.submitted for entry in entries_of(job)]
        others = [each.label for writers in self.writers.values() for each in writers]
        while waits := [label for label, _ in own] or others:
            first = self.since or min(int(label.partition("_")[0]) for label in [*others, *waits])
            words = (self.plan.path, str(first), *self.options)
            options = (*self.options, f"--dependency=afterany:{waits[(len(waits) - 1) // 2]}")
            try:
                submission = Submission(options, "cluster/queue.slurm", words, self.kept)
                return self.submit(submission, "rest")
            except QueueFullError:
                if not own:
                    break
                place = own[-1][1]
                for label, _ in [entry for entry in own if entry[1] == place]:
                    take_back(label, place)
                own = [entry for entry in own if entry[1] != place]
        print(f"cluster/submit: the queue is full, even for one job. {_LATER}", file=sys.stderr)
        raise RefusedError


def take_back(label: str, place: str) -> None:
    """Cancel a job or a task, and remove its output path from jobs/JOB/writes."""
    slurm("scancel", label)
    job = label.partition("_")[0]
    left = {path: each for each, path in entries_of(job) if path != place}
    tasks = {path: each.partition("_")[2] or "-" for path, each in left.items()}
    Path("jobs", job, "writes").write_text(lines_of(tasks))
