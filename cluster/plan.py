"""`wide-mlps list` and `run`: show or run a plan on this machine, one run after the other.
Finished runs are skipped, so you can interrupt any run and repeat the command."""

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from cluster.plan_file import Plan, check_figure, load_checked
from cluster.slurm import in_columns
from cluster.work import Work, in_file
from data_prep.exit_codes import FAILED, OK
from data_prep.interrupts import INTERRUPTED, keep
from pretrain.ranks.preemption import heeded_signals
from pretrain.tracking.node import usable_gpus


def show(options: argparse.Namespace) -> int:
    plan = load_checked(options.file, is_demo=options.demo)
    rows = [["member", "state", "waits for", "writes", "overrides"]]
    for stage in plan.stages:
        after = ", ".join(each.name for each in plan.after(stage)) or "-"
        for member in stage.members:
            work, own = member.work, " ".join(member.own)
            rows.append([stage.title(member), work.state(), after, work.writes, own])
    num_finished = sum(row[1] == "finished" for row in rows)
    print(*in_columns(rows), f"{num_finished} of {len(rows) - 1} finished", sep="\n")
    for error in plan.missing():
        print(f"missing: {error}")
    if not plan.is_demo:
        print(f"on SLURM: cluster/submit {plan.path}")
    print(f"locally:  wide-mlps run {shlex.join(plan.words)}")
    return OK


class Here:
    """Runner of commands on this machine. It forwards signals, so that a training can save. Ctrl-C
    reaches the command directly from the terminal."""

    def __init__(self) -> None:
        self.received: list[int] = []
        """Received signals. After a signal, no more commands run."""
        self._process: subprocess.Popen[bytes] | None = None
        keep("")  # the command prints what it keeps
        for number in heeded_signals():
            signal.signal(number, self._receive)

    def run(self, words: list[str]) -> int:
        """Run `python -m WORDS` and return its exit code (128 + the number of a signal)."""
        if self.received:
            return INTERRUPTED
        print(f"$ {shlex.join(words)}", flush=True)
        self._process = subprocess.Popen([sys.executable, "-m", *words])
        if self.received:  # a signal during the start
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        if number != signal.SIGINT and self._process is not None:
            self._process.send_signal(number)


def run(options: argparse.Namespace) -> int:
    """Run all members (single runs of the plan). If a member fails, the other members of its stage
    still run. Later stages do not run, because most read the results of earlier stages."""
    plan = load_checked(options.file, is_demo=options.demo)
    ranks = options.ranks or len(usable_gpus()) or 1
    if missing := plan.missing():
        raise in_file(plan.path, *missing)
    check_figure(plan)
    drawing = ["analysis", "figure", *plan.words]
    if options.dry_run:
        works = [member.work for stage in plan.stages for member in stage.undone()]
        commands = [words for work in works for words in _commands(work, ranks=ranks)]
        for words in [*commands, *[drawing] * (plan.figure is not None)]:
            print(f"$ {shlex.join(words)}")
        return OK
    here, rows, left = Here(), [["member", "outcome", "writes"]], ""
    for number in range(1, len(plan.stages) + 1):
        outcomes = [*_run_stage(plan, number - 1, here, ranks=ranks)]
        rows += outcomes
        if not all(outcome.startswith("finished") for _, outcome, _ in outcomes):
            others = [each.name for each in plan.stages[number:] if each.undone()]
            left = ", ".join(others) or "nothing"
            break
    if plan.figure and not left:  # drawing takes seconds, and results may have changed
        code = here.run(drawing)
        outcome = f"failed with exit code {code}" if code else "drawn"
        rows.append(["figure", outcome, plan.drawn])
        left = "nothing" if code else ""
    print("", *in_columns(rows), sep="\n")
    if not left:
        return OK
    why = "stopped" if here.received else "a command failed"
    fix = "Finished members are kept; run the same command again."
    print(f"wide-mlps: {why}; skipped: {left}. {fix}", file=sys.stderr)
    return INTERRUPTED if here.received else FAILED


def _run_stage(plan: Plan, number: int, here: Here, *, ranks: int) -> Iterator[list[str]]:
    """Run the members of a stage. Yield the title, outcome and output directory of each member."""
    stage = plan.stages[number]
    for member in stage.members:
        work, title, outcome = member.work, stage.title(member), "finished before"
        if not work.is_finished() or _unverified(work).exists():
            code = INTERRUPTED
            if not here.received:
                print(f"\n[{number + 1}/{len(plan.stages)}] {title}: {work.writes}", flush=True)
                code = _run_work(work, here, ranks=ranks)
            outcome = f"failed with exit code {code}" if code else "ended unfinished"
            if code == 0 and work.is_finished():
                outcome = "finished"
            elif here.received:
                outcome = "stopped"
        yield [title, outcome, work.writes]


def _run_work(work: Work, here: Here, *, ranks: int) -> int:
    mark = _unverified(work)
    if work.kind == "build":
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    code = next(filter(None, map(here.run, _commands(work, ranks=ranks))), OK)
    if code == OK:
        mark.unlink(missing_ok=True)
    return code


def _unverified(work: Work) -> Path:
    """Return the path of a marker file. The file exists from the start of a build until `data_prep
    verify` has passed."""
    return Path("jobs/unverified") / str(Path(work.writes).absolute()).replace("/", "%")


def _commands(work: Work, *, ranks: int) -> list[list[str]]:
    if work.kind == "build":
        return [work.words, ["data_prep", "verify", work.writes]]
    return [work.words if work.kind == "export" else [*work.words, "--ranks", str(ranks)]]
