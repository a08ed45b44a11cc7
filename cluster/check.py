"""`cluster/submit --check`: report whether jobs can run with cluster/site.env as it is.

It checks Python, locks of the file systems, the answer of `sbatch --test-only` and the time limit;
of a submission also config, data and batch. It submits and changes nothing. It runs without
installed packages, because these may be what is missing.
"""

import os
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.driver import cuda_of_torch, find_driver, outdated_driver
from cluster.slurm import WARNING, SlurmError, Submission, facts, read_submission, slurm

SIGNAL_LEAD_MIN = 5
"""Minutes before the time limit at which a job is told to save (--signal=...@300)."""
ASSOCIATIONS = "yours: sacctmgr show assoc user=$USER format=account,partition,qos"
FIXES = {
    "partition name": "SBATCH_PARTITION in site.env, or --partition: sinfo -o '%P' lists them",
    "account": f"SBATCH_ACCOUNT in site.env; {ASSOCIATIONS}",
    "qos": f"SBATCH_QOS in site.env; {ASSOCIATIONS}",
    "time limit": "SBATCH_TIMELIMIT in site.env: sinfo -o '%P %l' lists the longest",
    "node configuration": "fewer nodes, CPUs, GPUs or less memory: sinfo -o '%P %D %c %m %G'",
    "node count": "--nodes: sinfo -o '%P %D' lists how many there are",
    "gres": "--gpus-per-node or --gres: sinfo -o '%P %G' lists them",
}
"""A part of SLURM's complaint -> how to fix it."""
MOUNTS = Path("/proc/self/mounts")
LOCAL_LOCKS = ("localflock", "nolock", "local_lock=all", "local_lock=flock")
"""Mount options of Lustre and NFS that limit a lock to its own node."""


class Finding(NamedTuple):
    check: str
    verdict: str
    """ok, warning, or FAULT, which stops or spoils jobs."""
    text: str
    fix: str = ""


def main(arguments: list[str]) -> int:
    submission = read_submission(arguments)
    width = min(120, max(60, shutil.get_terminal_size((80, 24)).columns))
    verdicts = []
    for check in (check_python, check_driver, check_locks, check_slurm, check_job):
        for finding in check(submission, os.environ):
            verdicts.append(finding.verdict)
            print(in_lines(finding, width=width), flush=True)  # some checks take seconds
    faults = verdicts.count("FAULT")
    print(f"\nfaults: {faults}, warnings: {verdicts.count('warning')}")
    return 1 if faults else 0


def in_lines(finding: Finding, *, width: int) -> str:
    indent = " " * 21
    parts = [(f"{finding.verdict:<8} {finding.check:<11} ", indent, finding.text)]
    parts += [(f"{indent}-> ", f"{indent}   ", finding.fix)] if finding.fix else []
    lines = []
    for first, later, text in parts:
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def check_python(_: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Check the words of RANK_PYTHON if site.env sets them, otherwise .venv."""
    words = shlex.split(environment.get("RANK_PYTHON", ""))
    is_laid_out = Path("cluster/snapshot").is_symlink()  # by `wide-mlps init`
    stamp, lock = Path(".venv/.installed"), Path("requirements.lock")
    problem, fix = "", "wide-mlps init ." if is_laid_out else "sh install.sh"
    if words:
        if not environment.get("SRUN_OPTIONS") and not shutil.which(words[0]):
            problem, fix = f"RANK_PYTHON: {words[0]} is not in PATH", "load its module in site.env"
        images = [word for word in words if word.endswith(".sif") and not os.access(word, os.R_OK)]
        if images:
            problem, fix = f"{images[0]} is not readable", "docs/cluster.md shows how to make it"
    elif not os.access(".venv/bin/python", os.X_OK):
        problem = "there is no .venv, and RANK_PYTHON is not set"
    elif not is_laid_out and not stamp.exists():
        problem = "the installation of .venv is incomplete"
    elif not is_laid_out and lock.exists() and stamp.stat().st_mtime < lock.stat().st_mtime:
        # a checkout gives files new dates without changing them
        without_pillow = re.sub(r"^pillow(?:.*\\\n)*.*\n", "", lock.read_text(), flags=re.MULTILINE)
        installed = Path(".venv/all.lock")
        if not installed.exists() or installed.read_text() != without_pillow:
            problem = ".venv is older than requirements.lock"
    if problem:
        yield Finding("python", "FAULT", problem, fix)
    elif words:
        yield Finding("python", "ok", shlex.join(words))
    elif is_laid_out:
        text = f".venv is {os.path.realpath('.venv')}, which nodes must see, too"
        yield Finding("python", "ok", text)
    else:
        yield Finding("python", "ok", ".venv is complete and as new as requirements.lock")


def check_driver(_: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Check the GPUs' driver if it is known. A container has its own torch."""
    driver, cuda = find_driver(environment), cuda_of_torch(Path(".venv"))
    if driver and cuda and "RANK_PYTHON" not in environment:
        if outdated := outdated_driver(driver, cuda):
            yield Finding("driver", "FAULT", *outdated)
        else:
            yield Finding("driver", "ok", f"{driver} runs torch's CUDA {cuda}")


def check_locks(submission: Submission, _: Mapping[str, str]) -> Iterable[Finding]:
    """Check the mount options of the directories to which jobs write."""
    words = [word.partition("=") for word in submission.arguments]
    named = [value for key, _, value in words if key in ("run_dir", "out")]
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:
        return
    found = {}
    for place in (".", "jobs", "runs", "data", *named):
        point, option = local_locks(os.path.realpath(place), mounts)
        if option:
            found[point] = option
    for point, option in found.items():
        text = f"{point} is mounted with {option}, so two nodes could write to the same run"
        fix = "keep jobs, runs and data on a file system with flock, or ask the site for it"
        yield Finding("locks", "warning", text, fix)


def local_locks(path: str, mounts: str) -> tuple[str, str]:
    """Return the mount point of an absolute path and its option for node-local locks, or "".

    `mounts` is the text of /proc/mounts, which writes a space as \\040.
    """
    point, options = "", ""
    for line in mounts.splitlines():
        words = [word.replace("\\040", " ") for word in line.split(" ")]
        is_above = len(words) > 3 and f"{path}/".startswith(words[1].rstrip("/") + "/")
        if is_above and len(words[1]) >= len(point):
            point, options = words[1], words[3]
    return point, next((each for each in options.split(",") if each in LOCAL_LOCKS), "")


def check_slurm(submission: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Ask sbatch about the submission, or about every job script."""
    missing = [name for name in ("sbatch", "srun", "scontrol", "squeue") if not shutil.which(name)]
    if missing:
        fix = "module load slurm, or ask the site; on this machine only: wide-mlps run PLAN"
        yield Finding("SLURM", "FAULT", f"{', '.join(missing)}: not in PATH", fix)
        return
    try:
        lines = slurm("scontrol", "-o", "show", "partition").splitlines()
    except SlurmError as error:
        fix = "wait, or ask the site; SLURM_CONF must lead to its slurm.conf"
        yield Finding("SLURM", "FAULT", f"the controller does not answer: {error}", fix)
        return
    partitions = {each["PartitionName"]: each for each in map(facts, lines)}
    ours = sorted(Path("cluster").glob("*.slurm"))
    if submission.script and not Path(submission.script).is_file():
        text = f"{submission.script}: no such file"
        yield Finding("submission", "FAULT", text, f"choose one of {', '.join(map(str, ours))}")
        return
    num_refused = 0
    for script in [Path(submission.script)] if submission.script else ours:
        words = ["sbatch", "--test-only", *submission.options, str(script), *submission.arguments]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        answer = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        if done.returncode:
            num_refused += 1
            known = [fix for part, fix in FIXES.items() if part in answer.lower()]
            fix = (*known, "fix SBATCH_... in site.env, or the options")[0]
            text = f"sbatch refuses {script.name}: {answer}"
            yield Finding("submission", "FAULT", text, fix)
        elif submission.script:
            yield Finding("submission", "ok", answer.removeprefix("sbatch: "))
    if not num_refused and not submission.script:
        yield Finding("submission", "ok", "sbatch would take every job script")
    default = next((name for name, each in partitions.items() if each.get("Default") == "YES"), "")
    asked = submission.option("--partition", "-p") or environment.get("SBATCH_PARTITION")
    for name in (asked or default).split(","):
        if name not in partitions:
            continue
        state = partitions[name].get("State", "UP")
        if state != "UP":
            text = f"partition {name} is {state}: no job starts in it"
            yield Finding("partition", "FAULT", text, "another partition, or wait: sinfo")
        time = submission.option("--time", "-t") or environment.get("SBATCH_TIMELIMIT")
        yield check_time_limit(name, partitions[name], asked=time)


def check_time_limit(name: str, partition: Mapping[str, str], *, asked: str | None) -> Finding:
    longest = read_minutes(partition.get("MaxTime", "UNLIMITED")) or float("inf")
    default = read_minutes(partition.get("DefaultTime", "NONE")) or longest
    limit = read_minutes(asked) if asked else default
    verdict, fix = "ok", ""
    if limit is None:
        verdict, fix = "FAULT", "write minutes, hours:minutes:seconds, or days-hours"
        return Finding("time limit", verdict, f"{asked} is not a time", fix)
    if limit > longest:
        verdict, fix = "FAULT", f"--time or SBATCH_TIMELIMIT: at most {in_words(longest)}"
    elif limit <= 2 * SIGNAL_LEAD_MIN:
        fix = f"--time or SBATCH_TIMELIMIT: longer; jobs save {SIGNAL_LEAD_MIN} min before the end"
        verdict = "FAULT"
    elif limit < 60 and not asked:
        fix = f"the site's default; SBATCH_TIMELIMIT may be up to {in_words(longest)}"
        verdict = "warning"
    text = f"partition {name}: {in_words(limit)} for each attempt of a job"
    return Finding("time limit", verdict, text, fix)


def read_minutes(text: str) -> float | None:
    """Read `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`; inf if unlimited, None if invalid."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None or third is not None:  # hours come first
        return (days or 0) * 1440 + (first or 0) * 60 + (second or 0) + (third or 0) / 60
    return (first or 0) + (second or 0) / 60


def in_words(minutes: float) -> str:
    for unit, size in (("d", 1440), ("h", 60)):
        if 2 * size <= minutes < float("inf"):
            return f"{minutes / size:.3g} {unit}"
    return "no limit" if minutes == float("inf") else f"{minutes:.3g} min"


def check_job(submission: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Check config, data, batch and queue with the Python that jobs use."""
    if not submission.script or not Path(submission.script).is_file():
        return
    if not os.access(".venv/bin/python", os.X_OK):
        yield Finding("config", "warning", "not checked without .venv", "the job checks it, too")
        return
    is_training = submission.name == "pretrain.slurm"
    nodes, per_node = submission.ranks(environment) if is_training else (None, None)
    ranks = nodes * per_node if nodes and per_node else None
    words = [".venv/bin/python", "-m", "cluster", "submit", f"--examine={ranks or ''}"]
    done = subprocess.run(
        [*words, *submission.options, submission.script, *submission.arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    lines = [line.removeprefix("cluster/submit: ") for line in done.stderr.strip().splitlines()]
    if done.returncode:
        yield Finding("config", "FAULT", "; ".join(lines[-5:]), "fix it; nothing was submitted")
        return
    warnings = [line.removeprefix(WARNING) for line in lines if line.startswith(WARNING)]
    others = [line for line in lines if not line.startswith(WARNING)]
    text = f"{' '.join(submission.arguments[:1])} is valid, its data are complete"
    splits = f", its batch splits over {ranks} ranks" if ranks else ""
    yield Finding("config", "ok", "; ".join(others) or text + splits)
    for warning in warnings:
        yield Finding("nodes", "warning", *warning.split("; ", 1))
