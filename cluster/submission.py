"""What `cluster/submit` asks before sbatch: `python -m cluster.submission [sbatch options] SCRIPT CONFIG [key=value ...]`.

A mistake costs a second here and a wait in the queue there. Exit codes: 0 submit it, 2 it cannot run (the reasons on stderr),
3 there is nothing left to do. What a run reads must be there, unless the job is to wait (--dependency, --begin, --hold); and no job
in the queue may write the same, unless this one waits for it: members of a sweep that are there are left out.

Prints for `cluster/submit`, each after its name and a tab:

    writes  what studies/writers.py keeps of each place that the job will write
    array   of a sweep, unless --array says it: which of its members are to be done
    reads   of a sweep: the files that its members come from
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from cluster.checks.slurm import Submission, read_submission
from cluster.studies.sweep_file import MAX_MEMBERS, compressed
from cluster.studies.work import COMMANDS, Kind, Work, refuse_options
from cluster.studies.writers import ALL_TASKS, Writer, jobs_of, lines_of, writers_of
from cluster.sweep import load_checked
from data_prep.cli import main as data_prep
from data_prep.settings import SettingsError, UserError

SUBMIT, REFUSE, FINISHED = 0, 2, 3
_WAITS = (("--dependency", "-d"), ("--begin", "-b"))


def main(arguments: list[str]) -> int:
    submission = read_submission(arguments)
    check = _CHECKS.get(Path(submission.script or "").name)
    if check is None or not submission.arguments:
        return SUBMIT  # a script of the site's own
    try:
        return check(submission)
    except ValueError as error:  # `UserError` is one; what does not fit the data is another
        print(f"cluster/submit: {error}", file=sys.stderr)
        return REFUSE


def _run(submission: Submission, kind: Kind) -> int:
    config, *words = submission.arguments
    name = Path(submission.script or "").name
    if submission.option("--array", "-a") is not None:
        raise SettingsError(f"--array: {name} is one run, whose tasks would only fight over it; for many: sweep.slurm")
    refuse_options(words)
    work = Work(kind, config, tuple(words))
    work.check()
    if work.is_finished():
        print(f"{work.writes}: finished before, not submitted; name another run_dir to do it anew", file=sys.stderr)
        return FINISHED
    _refuse_missing(submission, work.missing())
    return _submit(submission, work.writes)


def _data(submission: Submission) -> int:
    config, *words = submission.arguments
    array = submission.option("--array", "-a")
    tasks = indices(array) if array else [0]
    if tasks != list(range(tasks[0], tasks[0] + len(tasks))):
        raise SettingsError(f"--array={array}: each task writes a part; give all of them, without gaps: --array=0-7")
    options = [word for word in submission.arguments if word.startswith("-")]
    if options:  # such as --source KIND: let its own command read them
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if data_prep(["build", *submission.arguments, "--show"]):
                return REFUSE
        return _submit(submission, str(yaml.safe_load(said.getvalue())["out"]))
    work = Work("build", config, tuple(words))
    if work.is_finished():
        print(
            f"{work.writes}: built before, not submitted; data_prep verify {work.writes} reads all of it, "
            "another out= builds it anew",
            file=sys.stderr,
        )
        return FINISHED
    _refuse_missing(submission, work.missing())
    return _submit(submission, work.writes)


def _sweep(submission: Submission) -> int:
    path, *words = submission.arguments
    if words:
        raise SettingsError(
            f"{words[0]}: a sweep takes no words after its file, whose members have theirs; write it into {path}: "
            f"overrides: [{', '.join(words)}]"
        )
    sweep = load_checked(path)
    members = sweep.members
    array, last = submission.option("--array", "-a"), len(members) - 1
    chosen = indices(array) if array else [member.index for member in members]
    beyond = [index for index in chosen if index > last]
    if beyond:
        raise SettingsError(f"--array={array}: {path} has no member {compressed(beyond)}; its members are 0 to {last}")
    undone = [members[index] for index in chosen if not members[index].work.is_finished()]
    if not undone:
        print(f"{path}: all {len(chosen)} members are finished, nothing is submitted", file=sys.stderr)
        return FINISHED
    _refuse_missing(submission, list(dict.fromkeys(line for member in undone for line in member.work.missing())))
    writers = _writers(submission, [member.work.writes for member in undone])
    queued = compressed(member.index for member in undone if member.work.writes in writers)
    todo = [member for member in undone if member.work.writes not in writers]
    if queued:
        jobs = ", ".join(jobs_of(writers.values()))
        if array:
            free = f"; without them: --array={sweep.array(member.index for member in todo)}" if todo else ""
            raise SettingsError(f"--array={array}: members {queued} are in the queue already, of job {jobs}{free}")
        print(f"{path}: members {queued} are in the queue already, of job {jobs}", file=sys.stderr)
    if not todo:
        print("nothing is submitted", file=sys.stderr)
        return FINISHED
    _print("writes", lines_of({member.work.writes: str(member.index) for member in todo}))
    _print("array", [] if array else [sweep.array(member.index for member in todo)])
    _print("reads", sweep.files)
    return SUBMIT


def indices(array: str) -> list[int]:
    """Of sbatch's --array: 0-3,7,8-12:2%4"""
    found: set[int] = set()
    for span in array.partition("%")[0].split(","):
        parts = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?(?::([0-9]*[1-9][0-9]*))?", span)
        if parts is None:
            raise SettingsError(f"--array={array}: will not do; write it as 0-7, 0-7%2 or 1,4-6")
        first, last, step = int(parts[1]), int(parts[2] or parts[1]), int(parts[3] or 1)
        if last - first > 10 * MAX_MEMBERS:
            raise SettingsError(f"--array={array}: no array of SLURM is that long")
        found |= set(range(first, last + 1, step))
    return sorted(found)


def _submit(submission: Submission, place: str) -> int:
    writers = _writers(submission, [place]).get(place)
    if writers:
        jobs = jobs_of([writers])
        raise SettingsError(
            f"{place}: {writers[0]} writes it already; squeue -j {','.join(jobs)} shows it, scancel {' '.join(jobs)} makes room, "
            f"or let this one wait for it: --dependency=afterany:{':'.join(jobs)}"
        )
    _print("writes", lines_of({place: ALL_TASKS}))
    return SUBMIT


def _writers(submission: Submission, places: list[str]) -> dict[str, list[Writer]]:
    if submission.option("--dependency", "-d") is not None:  # it knows of others
        return {}
    try:
        return writers_of(places)
    except UserError:  # SLURM does not answer: sbatch will say so
        return {}


def _print(name: str, lines: list[str]) -> None:
    for line in lines:
        print(name, line, sep="\t")


def _refuse_missing(submission: Submission, missing: list[str]) -> None:
    waits = any(submission.option(*names) is not None for names in _WAITS)
    if missing and not waits and not {"-H", "--hold"} & set(submission.options):
        raise SettingsError("; ".join(missing) + "; or let the job wait for what makes it: --dependency=afterok:JOB")


_CHECKS: Mapping[str, Callable[[Submission], int]] = {
    "pretrain.slurm": lambda submission: _run(submission, "pretrain"),
    "probe.slurm": lambda submission: _run(submission, "probe"),
    "finetune.slurm": lambda submission: _run(submission, "tune"),
    "data_prep.slurm": _data,
    "sweep.slurm": _sweep,
}
assert {Path(command.script).name for command in COMMANDS.values()} <= _CHECKS.keys()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
