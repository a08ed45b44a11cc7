"""`cluster/submit --check`: report whether jobs can run with the present cluster/site.env.

The command checks Python, the GPUs' driver, file locks, the reply of `sbatch --test-only` and the
time limit. For a submission, it also checks config, data and batch. It changes nothing, and needs
no installed packages.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.slurm import SlurmError, facts, slurm
from cluster.submission import WARNING, Submission, read_submission

LOCAL_LOCKS = ("localflock", "nolock", "local_lock=all", "local_lock=flock")
"""Mount options of Lustre and NFS that make a lock visible only on its own node."""
OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Major version of CUDA -> oldest NVIDIA driver that runs all of its minor versions."""
BUILD = "CUDA=cu128 sh install.sh torch"
"""Install torch for drivers of CUDA 12. The current torch has no build for CUDA 11."""
BUILD_WITHOUT_CHECKOUT = (
    ".venv/bin/pip install torch==2.11.0+cu128 torchvision==0.26.0+cu128"
    " --extra-index-url https://download.pytorch.org/whl/cu128"
)


class Finding(NamedTuple):
    check: str
    verdict: str
    """Result of a check: ok, warning, or FAULT. After a FAULT, jobs fail or give wrong results."""
    text: str
    fix: str = ""


def main(arguments: list[str]) -> int:
    submission = read_submission(arguments)
    verdicts = []
    for check in (check_python, check_driver, check_locks, check_slurm, check_job):
        for finding in check(submission, os.environ):
            verdicts.append(finding.verdict)
            print(f"{finding.verdict:<8} {finding.check:<11} {finding.text}", flush=True)
            if finding.fix:
                print(f"{'->':>20} {finding.fix}")
    faults = verdicts.count("FAULT")
    print(f"\nfaults: {faults}, warnings: {verdicts.count('warning')}")
    return 1 if faults else 0


def check_python(_: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Check the Python of the ranks: the command RANK_PYTHON if site.env sets it, otherwise
    .venv."""
    words = shlex.split(environment.get("RANK_PYTHON", ""))
    is_laid_out = Path("cluster/snapshot").is_symlink()  # made by `wide-mlps init`
    problem, fix = "", "wide-mlps init ." if is_laid_out else "sh install.sh"
    if words:
        if not environment.get("SRUN_OPTIONS") and not shutil.which(words[0]):
            problem, fix = (
                f"RANK_PYTHON: {words[0]} is not in PATH",
                "load a module of Python in site.env",
            )
        images = [word for word in words if word.endswith(".sif") and not os.access(word, os.R_OK)]
        if images:
            problem, fix = (
                f"the container {images[0]} is not readable",
                "build it as in docs/cluster.md",
            )
    elif not os.access(".venv/bin/python", os.X_OK):
        problem = "there is no .venv, and RANK_PYTHON is not set"
    elif not is_laid_out and not Path(".venv/.installed").exists():
        problem = "the installation of .venv is incomplete"
    elif not is_laid_out and not _has_lock():
        problem = ".venv is older than requirements.lock"
    if problem:
        yield Finding("python", "FAULT", problem, fix)
    else:
        text = f".venv is {os.path.realpath('.venv')}; every node must be able to read this path"
        yield Finding("python", "ok", shlex.join(words) if words else text)


def _has_lock() -> bool:
    """Return True if .venv was installed from this requirements.lock. Contents are compared,
    because a checkout changes file times."""
    stamp, lock = Path(".venv/.installed"), Path("requirements.lock")
    if not lock.exists() or stamp.stat().st_mtime >= lock.stat().st_mtime:
        return True
    without_pillow = re.sub(r"^pillow(?:.*\\\n)*.*\n", "", lock.read_text(), flags=re.MULTILINE)
    installed = Path(".venv/all.lock")
    return installed.exists() and installed.read_text() == without_pillow


def check_driver(_: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Check that the driver, if it is known, supports torch's CUDA version. Skip the check for a
    container, because it has its own torch."""
    driver, cuda = find_driver(environment), cuda_of_torch(Path(".venv"))
    if driver and cuda and "RANK_PYTHON" not in environment:
        yield compare_driver(driver, cuda)


def compare_driver(driver: str, cuda: str) -> Finding:
    """Return a finding: FAULT if the driver is too old. install.sh prints the fix before it
    downloads torch."""
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), "0")
    if _parts(driver) >= _parts(oldest):
        return Finding("driver", "ok", f"{driver} runs torch's CUDA {cuda}")
    command = BUILD if Path("install.sh").exists() else BUILD_WITHOUT_CHECKOUT
    fix = f"install a newer driver, or run {command}"
    if _parts(driver) < _parts(OLDEST_DRIVER[12]):
        fix = f"install driver {OLDEST_DRIVER[12]} or newer, then run {command}"
    problem = f"driver {driver} is older than {oldest}, which torch's CUDA {cuda} needs"
    return Finding("driver", "FAULT", problem, fix)


def find_driver(
    environment: Mapping[str, str], *, loaded: Path = Path("/proc/driver/nvidia/version")
) -> str | None:
    """Return CUDA_DRIVER from site.env, or else the version of the driver loaded on this node."""
    if "CUDA_DRIVER" in environment:
        return environment["CUDA_DRIVER"]
    if loaded.exists():
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", loaded.read_text())
    elif shutil.which("nvidia-smi"):  # containers and WSL do not have the file
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        found = re.match(r"(\d+\.\d[\d.]*)", done.stdout)
    else:
        return None
    return found[1] if found else None


def cuda_of_torch(venv: Path) -> str | None:
    """Return torch's CUDA version without importing torch, which is slow; None without CUDA."""
    for path in venv.glob("lib/python3*/site-packages/torch/version.py"):
        if found := re.search(r"^cuda\b.*= *'([\d.]+)'", path.read_text(), flags=re.MULTILINE):
            return found[1]
    return None


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_locks(submission: Submission, _env: Mapping[str, str]) -> Iterable[Finding]:
    """Warn if jobs write to a file system whose locks have no effect on other nodes."""
    places, found = [".", "jobs", "runs", "data"], {}
    for word in submission.arguments:
        key, _, value = word.partition("=")
        places += [value] if key in ("run_dir", "out") else []
    if not shutil.which("findmnt"):
        return
    for path in (Path(place).resolve() for place in places):
        nearest = next(each for each in (path, *path.parents) if each.exists())
        words = ["findmnt", "--noheadings", "--output=TARGET,OPTIONS", f"--target={nearest}"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        point, _, options = answer.strip().rpartition(" ")
        for option in {*options.split(",")} & {*LOCAL_LOCKS}:
            found[point.strip()] = option
    for point, option in found.items():
        text = f"{point} is mounted with {option}, so two nodes could write to the same run"
        fix = "keep jobs, runs and data on a file system with flock"
        yield Finding("locks", "warning", text, fix)


def check_slurm(submission: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Test the submission, or without one every job script, with sbatch --test-only. Report the
    time limit."""
    missing = [name for name in ("sbatch", "srun", "scontrol", "squeue") if not shutil.which(name)]
    if missing:
        fix = "run module load slurm, or ask the site; to use only this machine: wide-mlps run PLAN"
        yield Finding("SLURM", "FAULT", f"{', '.join(missing)}: not in PATH", fix)
        return
    try:
        lines = slurm("scontrol", "-o", "show", "partition").splitlines()
    except SlurmError as error:
        fix = "wait, or ask the site; SLURM_CONF must name the site's slurm.conf"
        yield Finding("SLURM", "FAULT", f"the controller does not respond: {error}", fix)
        return
    partitions = {each["PartitionName"]: each for each in map(facts, lines)}
    ours = sorted(Path("cluster").glob("*.slurm"))
    if submission.script and not Path(submission.script).is_file():
        fix = f"choose one of {', '.join(map(str, ours))}"
        yield Finding("submission", "FAULT", f"{submission.script}: no such file", fix)
        return
    is_taken = True
    for script in [Path(submission.script)] if submission.script else ours:
        words = ["sbatch", "--test-only", *submission.options, str(script), *submission.arguments]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        answer = (done.stderr.strip().splitlines() or ["no answer"])[-1].removeprefix("sbatch: ")
        if done.returncode:
            is_taken = False
            limits = "sinfo -o '%P %l %D %c %m %G', sacctmgr show assoc user=$USER"
            fix = f"fix SBATCH_... in site.env, or the options; {limits} print the limits"
            yield Finding("submission", "FAULT", f"sbatch rejects {script.name}: {answer}", fix)
    if is_taken:
        text = answer if submission.script else "sbatch accepts every job script"
        yield Finding("submission", "ok", text)
    default = next((name for name, each in partitions.items() if each.get("Default") == "YES"), "")
    asked = submission.option("partition") or environment.get("SBATCH_PARTITION")
    time = submission.option("time") or environment.get("SBATCH_TIMELIMIT")
    for name in {*(asked or default).split(",")} & partitions.keys():
        partition = partitions[name]
        if partition.get("State", "UP") != "UP":
            text = f"partition {name} is {partition['State']}: no job starts in it"
            yield Finding("partition", "FAULT", text, "choose another partition, or wait")
        longest = partition.get("MaxTime", "UNLIMITED")
        usual = partition.get("DefaultTime", "NONE")
        limit = time or (longest if usual == "NONE" else usual)
        text = f"{limit} for each attempt of a job; partition {name} allows up to {longest}"
        fix = "" if time else "set SBATCH_TIMELIMIT in site.env if this is too short"
        yield Finding("time limit", "ok", text, fix)


def check_job(submission: Submission, environment: Mapping[str, str]) -> Iterable[Finding]:
    """Run the checks of cluster/submit (config, data, batch, queue) with the Python of the jobs."""
    if not submission.script or not Path(submission.script).is_file():
        return
    if not os.access(".venv/bin/python", os.X_OK):
        yield Finding(
            "config", "warning", "not checked, because .venv is missing", "the job checks it"
        )
        return
    is_training = submission.name == "pretrain.slurm"
    nodes, per_node = submission.ranks(environment) if is_training else (None, None)
    ranks = nodes * per_node if nodes and per_node else None
    words = [".venv/bin/python", "-m", "cluster", "submit", f"--examine={ranks or ''}"]
    words += [*submission.options, submission.script, *submission.arguments]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    lines = [line.removeprefix("cluster/submit: ") for line in done.stderr.strip().splitlines()]
    if done.returncode:
        yield Finding("config", "FAULT", "; ".join(lines[-5:]), "fix it; nothing was submitted")
        return
    others = [line for line in lines if not line.startswith(WARNING)]
    text = f"{' '.join(submission.arguments[:1])} is valid, and its data are complete"
    splits = f", and its batch can be divided over {ranks} ranks" if ranks else ""
    yield Finding("config", "ok", "; ".join(others) or text + splits)
    for line in lines:
        if line.startswith(WARNING):
            yield Finding("nodes", "warning", *line.removeprefix(WARNING).split("; ", 1))
