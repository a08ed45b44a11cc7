"""What `cluster/submit` does: checks what it is given, keeps code and configs, and calls sbatch.

A mistake costs a second here and a wait in the queue there. What a run reads must be there, unless
the job is to wait (--dependency, --begin, --hold); and no job in the queue may write the same,
unless this one waits for it: members of a grid that are there are left out. Exit codes: 0
submitted, or nothing is left to do; 2 it cannot run (the reasons on stderr); 1 sbatch has refused
it.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cluster.plan_file import compressed, load_checked
from cluster.slurm import (
    ALL_TASKS,
    WARNING,
    SlurmError,
    Submission,
    Writer,
    jobs_of,
    lines_of,
    max_array_size,
    new_job,
    nodes_of,
    part_of_node,
    read_submission,
    slurm,
    writers_of,
)
from cluster.work import COMMANDS, Kind, Work
from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import message_of
from data_prep.settings import near_path
from pretrain.config import PretrainSettings, check_against_ranks


class NothingLeft(Exception):  # noqa: N818
    """What was to be submitted is finished, or in the queue."""


class RefusedError(Exception):
    """sbatch did not take it, in words of its own on stderr."""


@dataclass(frozen=True)
class Order:
    """A submission that will do."""

    submission: Submission
    writes: Mapping[str, str]
    """place -> the task that writes it, or "-" """
    reads: tuple[str, ...] = ()
    """Files besides the config that jobs read."""
    gpus: int | None = None
    """GPUs of each member, if the plan says so."""


# ---- what is refused
# --------------------------------------------------------------------------------------------------


def examine(submission: Submission) -> Order:
    """Raises `ValueError` for what cannot run, `NothingLeft` for what need not."""
    if submission.script is None or not submission.arguments:
        raise SettingsError(
            "usage",
            "cluster/submit [sbatch options] cluster/NAME.slurm CONFIG [key=value ...]",
            "or cluster/submit PLAN.yaml",
            code="missing-value",
        )
    script = Path(submission.script)
    if not script.is_file():
        raise SettingsError(
            str(script),
            "no such file",
            near_path(script) or "choose a job script, for example cluster/pretrain.slurm",
            code="missing-path",
        )
    kept = Path("cluster", script.name)
    if not kept.is_file() or not kept.samefile(script):
        raise SettingsError(
            str(script),
            "the job's snapshot would not have it",
            "move it to cluster/",
            code="missing-path",
        )
    if {"-W", "--wait"} & set(submission.options):
        raise SettingsError(
            "--wait",
            "a job that is requeued ends several times",
            "use squeue, or --dependency=afterok:JOB for the job that waits",
            code="unsupported",
        )
    if submission.arguments[0].startswith("-") and script.name != "data_prep.slurm":
        raise SettingsError(
            submission.arguments[0],
            "it follows the script",
            "put options of sbatch before the script",
            code="bad-syntax",
        )
    check = _CHECKS.get(script.name)
    return check(submission) if check else Order(submission, {})  # a script of the site's own


def _run(submission: Submission, kind: Kind) -> Order:
    config, *words = submission.arguments
    if submission.option("--array", "-a") is not None:
        raise SettingsError(
            "--array",
            f"{submission.name} is one run",
            "write a plan for several runs",
            code="conflict",
        )
    again = f"finished before; name another {COMMANDS[kind].place} to do it anew"
    work = Work(kind, config, tuple(words))
    order = _of_work(submission, work, again=again)
    _warn_of_nodes(submission, [work])
    return order


def _data(submission: Submission) -> Order:
    array = submission.option("--array", "-a")
    tasks = indices(array) if array else [0]
    if tasks != list(range(tasks[0], tasks[0] + len(tasks))):
        raise SettingsError(
            "--array",
            f"{array} has gaps, but each task writes a part",
            "give all tasks, for example --array=0-7",
            code="bad-value",
        )
    config, *words = submission.arguments
    work = Work("build", config, tuple(words))
    again = (
        f"built before; data_prep verify {work.writes} reads all of it, another out= builds it anew"
    )
    return _of_work(submission, work, again=again)


def _of_work(submission: Submission, work: Work, *, again: str) -> Order:
    """`again`: what is said of one that is finished."""
    work.check()
    if work.is_finished():
        raise NothingLeft(f"{work.writes}: {again}")
    refuse_missing(submission, work.missing())
    writers = _writers(submission, [work.writes]).get(work.writes)
    if writers:
        jobs = jobs_of([writers])
        raise SettingsError(
            work.writes,
            f"{writers[0]} writes it already",
            f"wait with --dependency=afterany:{':'.join(jobs)}, or scancel {' '.join(jobs)}",
            code="busy",
        )
    return Order(submission, {work.writes: ALL_TASKS})


def _figure(submission: Submission) -> Order:
    """The configs of the plan are kept, too: whether its runs are finished is asked of these."""
    plan = load_checked(submission.arguments[0])
    if plan.figure is None:
        raise SettingsError(
            f"{plan.path}: figure", "the plan has no such section", "add it", code="missing-value"
        )
    return Order(submission, {}, tuple(plan.files))


def _grid(submission: Submission) -> Order:
    if len(submission.arguments) != 2:
        raise SettingsError(
            "cluster/grid.slurm",
            "its words are PLAN STAGE",
            "write overrides into the plan; cluster/submit PLAN submits all stages",
            code="bad-syntax",
        )
    path, name = submission.arguments
    plan = load_checked(path)
    stage = plan.stage(name)
    members = stage.members
    array = submission.option("--array", "-a")
    chosen = indices(array) if array else [member.index for member in members]
    beyond = compressed(index for index in chosen if index >= len(members))
    if beyond:
        raise SettingsError(
            "--array",
            f"{name} has no member {beyond}",
            f"choose members from 0 to {len(members) - 1}",
            code="unknown-name",
        )
    undone = [members[index] for index in chosen if not members[index].work.is_finished()]
    if not undone:
        raise NothingLeft(f"{path}: all {len(chosen)} members of {name} are finished")
    missing = {str(error): error for member in undone for error in member.work.missing()}
    refuse_missing(submission, [*missing.values()])
    writers = _writers(submission, [member.work.writes for member in undone])
    queued = compressed(member.index for member in undone if member.work.writes in writers)
    todo = [member for member in undone if member.work.writes not in writers]
    if queued:
        said = (
            f"members {queued} are in the queue already, in job"
            f" {', '.join(jobs_of(writers.values()))}"
        )
        if array:
            left = stage.array(member.index for member in todo)
            fix = f"omit them: --array={left}" if todo else "wait for them"
            raise SettingsError("--array", said, fix, code="busy")
        print(f"{path}: {said}", file=sys.stderr)
    if not todo:
        raise NothingLeft(f"{path}: all that is left of {name} is in the queue")
    limit = max_array_size()
    if limit is not None and todo[-1].index >= limit:
        raise SettingsError(
            f"{path}: {name}",
            f"member {todo[-1].index:,} is too large for this cluster (MaxArraySize {limit:,})",
            "split the entry into two",
            code="unsupported",
        )
    _warn_of_nodes(submission, [member.work for member in todo])
    if not array:
        options = (*submission.options, f"--array={stage.array(member.index for member in todo)}")
        submission = replace(submission, options=options)
    return Order(
        submission,
        {member.work.writes: str(member.index) for member in todo},
        tuple(plan.files),
        stage.num_gpus,
    )


_CHECKS: Mapping[str, Callable[[Submission], Order]] = {
    **{Path(command.script).name: partial(_run, kind=kind) for kind, command in COMMANDS.items()},
    "data_prep.slurm": _data,
    "grid.slurm": _grid,
    "figure.slurm": _figure,
}


def indices(array: str) -> list[int]:
    """Of sbatch's --array: 0-3,7,8-12:2%4"""
    found: set[int] = set()
    for span in array.partition("%")[0].split(","):
        parts = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?(?::([0-9]*[1-9][0-9]*))?", span)
        if parts is None:
            raise SettingsError(
                "--array",
                f"{array} is not valid",
                "write it as 0-7, 0-7%2 or 1,4-6",
                code="bad-syntax",
            )
        first, last, step = int(parts[1]), int(parts[2] or parts[1]), int(parts[3] or 1)
        if last - first > MAX_INDICES:
            raise SettingsError(
                "--array",
                f"{array} is longer than any array of SLURM",
                "give fewer tasks",
                code="bad-value",
            )
        found |= set(range(first, last + 1, step))
    return sorted(found)


MAX_INDICES = 4_000_000
"""More than any site's MaxArraySize may be."""


def _writers(submission: Submission, places: list[str]) -> dict[str, list[Writer]]:
    if submission.option("--dependency", "-d") is not None:  # it knows of others
        return {}
    with contextlib.suppress(SlurmError):  # SLURM does not answer: sbatch will report it
        return writers_of(places)
    return {}


def _warn_of_nodes(submission: Submission, works: list[Work]) -> None:
    """Of pretrainings on GPUs: a line where fewer nodes would be faster, of the first for which
    that is so."""
    nodes, of_node = submission.ranks(os.environ)
    if nodes is None or nodes == 1 or not of_node or not submission.gpus_per_node(os.environ):
        return
    speeds = {}
    for name, field in (
        ("GPU_TFLOPS", "teraflops"),
        ("NODE_GBIT", "gbit_per_s"),
        ("GPU_GBIT", "gbit_per_s_inside"),
    ):
        if given := os.environ.get(name):
            if not re.fullmatch(r"[0-9]*[1-9][0-9]*", given):
                raise SettingsError(
                    name,
                    f"{given!r} is not a whole number",
                    "fix it in cluster/site.env",
                    code="bad-value",
                )
            speeds[field] = int(given)
    lines = (
        work.slower_nodes(nodes, gpus_per_node=of_node, **speeds)
        for work in works
        if work.kind == "pretrain"
    )
    if line := next(filter(None, lines), None):
        print(f"cluster/submit: {WARNING}{line}", file=sys.stderr)


def refuse_missing(submission: Submission, missing: list[UserError]) -> None:
    waits = any(
        submission.option(*names) is not None
        for names in (("--dependency", "-d"), ("--begin", "-b"))
    )
    if missing and not waits and not {"-H", "--hold", "--test-only"} & set(submission.options):
        first, *others = missing
        raise SettingsError(
            first.field,
            first.problem,
            f"{first.fix}, or wait for its job: --dependency=afterok:JOB",
            code=first.code,
            others=others,
        )


# ---- a part of a node
# --------------------------------------------------------------------------------------------------

ON_PARTS = ("grid.slurm", "probe.slurm", "finetune.slurm", "knn.slurm", "evaluate.slurm")
"""Job scripts whose runs mostly need one GPU; they book a complete node unless the options say
otherwise."""
_SHAPES = (
    *(
        ("--nodes", "-N"),
        ("--ntasks", "-n"),
        ("--ntasks-per-node",),
        ("--exclusive",),
        ("--oversubscribe", "-s"),
    ),
    *(("--gpus", "-G"), ("--gpus-per-task",), ("--gpus-per-socket",)),
)
"""Options by which a submission says itself how much of a node it takes."""


def on_part_of_node(
    submission: Submission, environment: Mapping[str, str], *, gpus: int | None = None
) -> Submission:
    """Return the submission with options for a part of a node in front of its own.

    The part has `gpus` GPUs (None: one, if the site has any) with their fraction of the CPUs and
    the memory. --oversubscribe takes back the script's --exclusive; SLURM never gives a GPU to two
    jobs.
    """
    is_shaped = any(submission.option(*names) is not None for names in _SHAPES)
    of_site = {
        "SBATCH_EXCLUSIVE",
        "RANKS_PER_NODE",
    } & environment.keys()  # the latter if SLURM does not know of the GPUs
    if is_shaped or of_site or (submission.name not in ON_PARTS and gpus is None):
        return submission
    asks = submission.gpu_request()
    wanted = submission.gpus_per_node({}) or 0 if asks else 1 if gpus is None else gpus
    try:
        nodes = nodes_of(
            submission.option("--partition", "-p") or environment.get("SBATCH_PARTITION", "")
        )
    except SlurmError:
        return submission
    if not nodes:
        return submission
    has_gpus, cpus, memory_mb = part_of_node(nodes, gpus=wanted)
    options = (
        ["--oversubscribe"]
        if asks
        else ["--oversubscribe", *_gpu_options(environment, wanted, are_known=bool(has_gpus))]
    )
    if not any(
        submission.option(*names) for names in (("--cpus-per-task", "-c"), ("--cpus-per-gpu",))
    ):
        options.append(f"--cpus-per-task={cpus}")
    is_known = memory_mb > 1  # SLURM's RealMemory is 1 if the site does not set it
    if is_known and not any(
        submission.option(name) for name in ("--mem", "--mem-per-cpu", "--mem-per-gpu")
    ):
        options.append(f"--mem={memory_mb}M")
    return replace(submission, options=(*options, *submission.options))


def _gpu_options(environment: Mapping[str, str], gpus: int, *, are_known: bool) -> list[str]:
    """Return the option for so many GPUs, in the way and of the kind that the site asks for its
    own."""
    name, value = next(iter(Submission().gpu_request(environment).items()), ("", ""))
    if not name:
        return [f"--gpus-per-node={gpus}"] if are_known else []
    item = next((each for each in value.split(",") if each.startswith("gpu:")), f"gpu:{value}")
    kind = [word for word in item.split(":")[1:] if word and not word.isdigit()]
    words = ":".join([*kind, str(gpus)])
    return [
        f"{name}=gpu:{words}" if name == "--gres" else f"{name}={words}"
    ]  # replaces the site's own request


# ---- what is submitted
# ------------------------------------------------------------------------------------------------


def submit(submission: Submission) -> tuple[str, ...]:
    """The numbers of the jobs: to prepare the parts and their merge; others wait for the last
    one."""
    order = examine(submission)
    options, arguments = (
        on_part_of_node(order.submission, os.environ, gpus=order.gpus).options,
        order.submission.arguments,
    )
    config = next((word for word in arguments if not word.startswith("-")), "")
    if not Path(config).is_file():
        raise SettingsError(config, "no such file", "check the path", code="missing-path")
    kept = subprocess.run(
        ["cluster/snapshot", config, *order.reads], stdout=subprocess.PIPE, text=True, check=False
    )
    if kept.returncode:
        raise RefusedError
    script = f"{kept.stdout.rstrip()}/cluster/{submission.name}"
    if "--test-only" in options:
        _sbatch(*options, script, *arguments)
        return ()
    if submission.name != "data_prep.slurm":
        return (_sbatch(*options, script, *arguments, writes=order.writes),)
    parts = _sbatch(*options, script, "--parts", *arguments, writes=order.writes)
    waits = (f"--dependency=afterok:{parts}", "--kill-on-invalid-dep=yes", "--array=0")
    try:
        merge = _sbatch(*options, *waits, script, "--merge", *arguments, writes=order.writes)
    except RefusedError:
        slurm("scancel", parts)
        print(
            f"cluster/submit: the merge was not taken; the parts ({parts}) are cancelled",
            file=sys.stderr,
        )
        raise
    return parts, merge


def _sbatch(*words: str, writes: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        ["sbatch", "--parsable", *words],
        env=new_job(os.environ),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RefusedError
    lines = done.stdout.split()  # sites may print more before the number
    job = lines[-1].partition(";")[0] if lines else ""
    if writes is not None:
        directory = Path("jobs", job)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "writes").write_text(lines_of(writes))  # so that nobody submits it twice
    return job


def main(words: list[str]) -> int:
    parsable = "--parsable" in words
    words = [word for word in words if word != "--parsable"]
    try:
        if (
            words
            and Path(words[-1]).suffix in (".yaml", ".yml")
            and not any(word.endswith(".slurm") for word in words)
        ):
            from cluster.plan import queue  # it submits with this file

            return queue(
                words[-1],
                [word for word in words[:-1] if word != "--dry-run"],
                dry_run="--dry-run" in words,
            )
        if words and words[0].startswith("--examine="):  # cluster/submit --check
            submission, ranks = read_submission(words[1:]), words[0].partition("=")[2]
            examine(submission)
            if ranks:
                settings = Work(
                    "pretrain", submission.arguments[0], submission.arguments[1:]
                ).settings
                assert isinstance(settings, PretrainSettings)
                check_against_ranks(settings.train, settings.augment, num_ranks=int(ranks))
            return 0
        jobs = submit(read_submission(words))
    except NothingLeft as left:
        print(f"{left}, nothing is submitted", file=sys.stderr)
        return 0
    except ValueError as error:  # `UserError` is one; what does not fit the data is another
        print(f"cluster/submit: {message_of(error)}", file=sys.stderr)
        return 2
    except RefusedError:
        return 1
    if jobs:
        print(
            jobs[-1]
            if parsable
            else f"Submitted batch job {' and '.join(jobs)}, with code and config as they are now"
        )
    return 0
