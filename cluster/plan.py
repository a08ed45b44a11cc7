"""A whole plan: prepare -> pretrain -> probe + finetune -> evaluate ..., each with all its members
(the file: plan_file.py).

`cluster/submit PLAN` queues a job for each stage (`queue`), `wide-mlps run PLAN` does the same on
this machine, one member after the other. Either leaves out what is finished, so the same command
goes on after any interruption. `list` shows how far each member has come, and what is wrong with
the file.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from cluster.plan_file import Plan, Stage, load_checked
from cluster.slurm import SlurmError, Submission, in_columns, jobs_of, slurm, writers_of
from cluster.submit import NothingLeft, on_part_of_node, refuse_missing, submit
from cluster.work import COMMANDS, Work, in_file
from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import BAD_INPUT, FAILED, OK
from data_prep.interrupts import INTERRUPTED, keep
from pretrain.ranks.preemption import heeded_signals


def show(options: argparse.Namespace) -> int:
    plan = load_checked(options.file, is_demo=options.demo)
    rows = [["member", "state", "waits for", "writes", "overrides"]]
    for stage in plan.stages:
        after = ", ".join(each.name for each in plan.after(stage)) or "-"
        for member in stage.members:
            rows.append(
                [
                    stage.title(member),
                    member.work.state(),
                    after,
                    member.work.writes,
                    " ".join(member.own),
                ]
            )
    print(
        *in_columns(rows),
        f"{sum(row[1] == 'finished' for row in rows)} of {len(rows) - 1} finished",
        sep="\n",
    )
    for error in plan.missing():
        print(f"missing: {error}")
    if not plan.is_demo:
        print(f"on SLURM: cluster/submit {plan.path}")
    print(f"here:     wide-mlps run {shlex.join(plan.words)}")
    return OK


# ---- on this machine
# --------------------------------------------------------------------------------------------------


class Here:
    """Runs our commands, and passes on what is meant to stop them, so that they can save.

    Ctrl-C reaches the command from the terminal itself; the other signals are sent on to it. A
    training that receives one saves and exits. Its own files say if it is finished.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """Signals, by which somebody wants all of it to end."""
        self._process: subprocess.Popen[bytes] | None = None
        keep("")  # the command says what it keeps
        for number in heeded_signals():
            signal.signal(number, self._receive)

    def run(self, words: list[str]) -> int:
        """The exit code of `python -m WORDS`; that of a signal as shells have it."""
        if self.received:
            return INTERRUPTED
        print(f"$ {shlex.join(words)}", flush=True)
        self._process = subprocess.Popen([sys.executable, "-m", *words])
        if self.received:  # while it was being started
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        if number != signal.SIGINT and self._process is not None:
            self._process.send_signal(number)


def num_gpus() -> int:
    """That this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout.count("GPU ")
    except OSError:
        return 0
    return (
        listed
        if visible is None
        else min(listed, len([name for name in visible.split(",") if name.strip()]))
    )


def run(options: argparse.Namespace) -> int:
    """A member that fails does not stop the others of its grid; the stages after it mostly need it,
    and are left out."""
    plan = load_checked(options.file, is_demo=options.demo)
    ranks = options.ranks or num_gpus() or 1
    if missing := plan.missing():
        raise in_file(plan.path, *missing)
    check_figure(plan)
    outcomes = [["member", "outcome", "writes"]]
    here, failed = Here(), False
    for number, stage in enumerate(plan.stages, start=1):
        for member in stage.members:
            work, title, outcome = member.work, stage.title(member), ""
            if work.is_finished() and not _doubt(work).exists():
                outcome = "finished before"
            elif options.dry_run:
                print(
                    "\n".join(
                        f"$ {shlex.join(command)}" for command in _commands(work, ranks=ranks)
                    )
                )
            elif not here.received:
                print(f"\n[{number}/{len(plan.stages)}] {title}: {work.writes}", flush=True)
                code = _run_work(work, here, ranks=ranks)
                is_done = code == 0 and work.is_finished()
                outcome = (
                    "finished"
                    if is_done
                    else f"failed with exit code {code}"
                    if code
                    else "ended unfinished"
                )
            outcomes.append(
                [
                    title,
                    "stopped" if here.received and "finished" not in outcome else outcome,
                    work.writes,
                ]
            )
        failed = any(row[1] not in ("finished", "finished before", "") for row in outcomes[1:])
        if failed:
            break
    drawing = ["analysis", "figure", *plan.words]
    if options.dry_run:
        if plan.figure:
            print(f"$ {shlex.join(drawing)}")
        return OK
    if plan.figure and not failed:  # what is drawn takes seconds, and may have changed
        code = here.run(drawing)
        outcomes.append(
            [
                "figure",
                f"failed with exit code {code}" if code else "drawn",
                f"runs/plans/{plan.name}",
            ]
        )
        failed = code != 0
    print("", *in_columns(outcomes), sep="\n")
    if not failed:
        return OK
    left = ", ".join(stage.name for stage in plan.stages[number:] if stage.undone()) or "nothing"
    why = "stopped" if here.received else "not all of it went well"
    print(
        f"wide-mlps: {why}; left out: {left}. What is finished is kept, the same command goes on.",
        file=sys.stderr,
    )
    return INTERRUPTED if here.received else FAILED


def _commands(work: Work, *, ranks: int) -> list[list[str]]:
    if work.kind == "build":
        return [work.words, ["data_prep", "verify", work.writes]]
    return [work.words if work.kind == "export" else [*work.words, "--ranks", str(ranks)]]


def check_figure(plan: Plan) -> None:
    """Check the `figure:` by its own program, as far as it is installed on this machine."""
    if plan.figure is None:
        return
    command = [sys.executable, "-m", "analysis", "figure", *plan.words, "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode == BAD_INPUT:
        problem = checked.stderr.strip().removeprefix("analysis: ")
        raise SettingsError(f"{plan.path}: figure", problem, "correct it", code="bad-value")


def _run_work(work: Work, here: Here, *, ranks: int) -> int:
    if work.kind == "build":
        _doubt(work).parent.mkdir(parents=True, exist_ok=True)
        _doubt(work).touch()
    for command in _commands(work, ranks=ranks):
        code = here.run(command)
        if code != 0:
            return code
    _doubt(work).unlink(missing_ok=True)
    return OK


def _doubt(work: Work) -> Path:
    """A file for each dataset that was built here and not verified yet: a manifest alone is not
    enough then."""
    return Path("jobs/unverified") / str(Path(work.writes).absolute()).replace("/", "%")


# ---- on SLURM
# --------------------------------------------------------------------------------------------------


def queue(path: str, options: Sequence[str], *, dry_run: bool) -> int:
    """A job for each unfinished stage, held back until those that it waits for have ended.

    1. Refuse what is wrong, what lacks something, and what a job of the queue writes already.
    2. Submit the stages in order, and what draws the plan's figure after all of them.
    3. If one is not taken, cancel those that were: a plan is queued whole or not at all.

    A job that fails takes those that wait for it out of the queue (--kill-on-invalid-dep); only a
    grid that reads the runs of another grid begins when that has ended, however its members fared:
    each member looks for what it reads.
    """
    plan = load_checked(path)
    refuse_missing(Submission(tuple(options)), plan.missing())
    check_figure(plan)
    todo = [stage for stage in plan.stages if stage.undone()]
    if len(todo) > 1:  # of a single one the members that are in the queue are left out
        _refuse_twice(todo)
    jobs: dict[str, tuple[str, ...]] = {}
    keep("what was queued is cancelled")
    try:
        for stage in todo:
            words = submission(
                plan,
                stage,
                {name: numbers[-1] for name, numbers in jobs.items() if numbers},
                options,
            )
            print(
                "$ cluster/submit"
                f" {shlex.join([*words.options, words.script or '', *words.arguments])}"
            )
            jobs[stage.name] = (f"<{stage.name}>",) if dry_run else submit(words)
        if plan.figure and (last := [numbers[-1] for numbers in jobs.values() if numbers]):
            waits = (f"--dependency=afterok:{':'.join(last)}", "--kill-on-invalid-dep=yes")
            words = Submission((*options, *waits), "cluster/figure.slurm", (path,))
            print(f"$ cluster/submit {shlex.join([*words.options, words.script or '', path])}")
            jobs["figure"] = ("<figure>",) if dry_run else submit(words)
    except BaseException as error:  # Ctrl-C too: half a plan in the queue helps nobody
        queued = [job for numbers in jobs.values() for job in numbers if job.isdigit()]
        if queued:
            with suppress(SlurmError):
                slurm("scancel", *queued)
            refused = stage.name if len(jobs) < len(todo) else "figure"
            print(
                f"cluster/submit: cancelled, for {refused} was not taken: {', '.join(queued)}",
                file=sys.stderr,
            )
        if isinstance(error, NothingLeft):
            print(f"{error}, nothing is submitted", file=sys.stderr)
            return OK
        raise
    numbers = [job for each in jobs.values() for job in each]
    if numbers and not dry_run:
        after = [
            ", ".join(jobs[each.name][-1] for each in plan.after(stage) if each in todo) or "-"
            for stage in todo
        ]
        rows = [
            [stage.name, ", ".join(jobs[stage.name]), waits]
            for stage, waits in zip(todo, after, strict=True)
        ]
        rows += [["figure", ", ".join(jobs["figure"]), "all"]] if "figure" in jobs else []
        print(*in_columns([["stage", "jobs", "waits for"], *rows]), sep="\n")
        print(f"look:   squeue -j {','.join(numbers)}\ncancel: scancel {' '.join(numbers)}")
        print(
            "When a job fails, those that wait for it leave the queue; the same command then"
            " goes on."
        )
    for stage in plan.stages:
        if stage not in todo:
            print(f"{stage.name}: finished, not submitted")
    if plan.figure and not todo:
        print(
            f"figure: analysis figure {path} draws it here, cluster/submit cluster/figure.slurm"
            f" {path} on a node"
        )
    return OK


def submission(
    plan: Plan, stage: Stage, jobs: dict[str, str], options: Sequence[str]
) -> Submission:
    """What submits a stage; `jobs`: the numbers of the stages that are queued before it."""
    words = [f"--nodes={stage.entry.nodes}"] if stage.entry.nodes else []
    words += [*stage.entry.sbatch, *options]
    after: dict[str, list[str]] = {}
    for each in plan.after(stage):
        if each.name in jobs:
            kind = "afterany" if each.entry.is_grid and stage.entry.is_grid else "afterok"
            after.setdefault(kind, []).append(jobs[each.name])
    if after:
        words.append(
            "--dependency="
            + ",".join(f"{kind}:{':'.join(numbers)}" for kind, numbers in after.items())
        )
        words.append("--kill-on-invalid-dep=yes")
    work = stage.members[0].work
    script, arguments = COMMANDS[stage.kind].script, (work.config, *work.overrides)
    if stage.entry.is_grid:
        script, arguments = "cluster/grid.slurm", (plan.path, stage.name)
    return on_part_of_node(
        Submission(tuple(words), script, arguments), os.environ, gpus=stage.num_gpus
    )


def _refuse_twice(todo: list[Stage]) -> None:
    works = [(stage, member.work) for stage in todo for member in stage.undone()]
    writers = writers_of([work.writes for _, work in works])
    jobs = " ".join(jobs_of(writers.values()))
    errors = [
        UserError(
            stage.name,
            f"{writers[work.writes][0]} writes {work.writes} already",
            f"wait for it, or: scancel {jobs}",
            code="busy",
        )
        for stage, work in works
        if work.writes in writers
    ]
    if errors:
        raise in_file("cluster/submit", *errors[:20])
