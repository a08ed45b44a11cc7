"""Whether jobs can run here as cluster/site.env has it: Python, sbatch's answer, partition, time
limit; and of one submission its config, data and batch. Started by the script cluster/doctor, which
reads site.env.

Asks `sbatch --test-only` and `scontrol show`; nothing is submitted or changed. Imports nothing that
must be installed: that may be what is missing. Account and QOS are checked where SLURM's accounting
is: in `sbatch --test-only`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.driver import cuda_of_torch, known_driver, too_old
from cluster.slurm import WARNING, SlurmError, Submission, facts, read_submission, slurm

USAGE = """\
cluster/doctor [sbatch options] [cluster/NAME.slurm CONFIG key=value ...]

Checks whether jobs can run here as cluster/site.env has it. Nothing is submitted or changed.
With the words of a submission (what would follow cluster/submit) it checks that submission.
Ends with 1 when there is a FAULT, otherwise with 0."""
SIGNAL_LEAD_MIN = 5.0
"""How long before the time limit a job receives the signal to save (--signal=...@300)."""
REMEDIES = {
    "partition name": "SBATCH_PARTITION in site.env, or --partition: sinfo -o '%P' lists them",
    "account": (
        "SBATCH_ACCOUNT in site.env: yours are in sacctmgr show assoc user=$USER"
        " format=account,partition,qos"
    ),
    "qos": "SBATCH_QOS in site.env: yours are in sacctmgr show assoc user=$USER format=account,qos",
    "time limit": "SBATCH_TIMELIMIT in site.env: sinfo -o '%P %l' lists the longest",
    "node configuration": (
        "fewer or other nodes, CPUs (--cpus-per-task), GPUs or memory: see sinfo -o '%P %D %c"
        " %m %G'"
    ),
    "node count": "--nodes: sinfo -o '%P %D' lists how many there are",
    "gres": "--gpus-per-node or --gres: sinfo -o '%P %G' lists what there is",
}
"""What mends SLURM's best known complaints."""


class Finding(NamedTuple):
    check: str
    verdict: str
    """ok, warning, or FAULT: it stops jobs or spoils them."""
    found: str
    remedy: str = ""


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    submission = read_submission(arguments)
    if {"-h", "--help"} & set(submission.options):
        print(USAGE)
        return 0
    stray = [word for word in submission.options if Path(word).suffix in (".yaml", ".yml")]
    if stray and submission.script is None:
        print(
            f"cluster/doctor: {stray[0]}: name the job script before it, such as"
            " cluster/pretrain.slurm",
            file=sys.stderr,
        )
        return 1
    width = min(120, max(60, shutil.get_terminal_size((80, 24)).columns))
    findings: list[Finding] = []
    for check in (check_python, check_driver, check_locks, check_slurm, check_job):
        for finding in check(submission, os.environ):
            findings.append(finding)
            print(in_lines(finding, width=width), flush=True)  # at once: some checks take seconds
    faults, warnings = (
        sum(each.verdict == verdict for each in findings) for verdict in ("FAULT", "warning")
    )
    print(
        f"\nfaults: {faults}, warnings:"
        f" {warnings}{'; jobs will not run well until the faults are mended' if faults else ''}"
    )
    return 1 if faults else 0


def in_lines(finding: Finding, *, width: int) -> str:
    indent = " " * 21
    parts = [(f"{finding.verdict:<8} {finding.check:<11} ", indent, finding.found)]
    parts += [(f"{indent}-> ", f"{indent}   ", finding.remedy)] if finding.remedy else []
    lines = []
    for first, later, text in parts:
        wrapper = textwrap.TextWrapper(
            width, first, later, break_long_words=False, break_on_hyphens=False
        )
        lines += wrapper.wrap(" ".join(text.split()))
    return "\n".join(lines)


# ---- Python
# --------------------------------------------------------------------------------------------------


def check_python(_: Submission, environment: Mapping[str, str]) -> list[Finding]:
    """The container if one is set, otherwise .venv."""

    def fault(text: str, remedy: str = "sh install.sh") -> list[Finding]:
        return [Finding("python", "FAULT", text, remedy)]

    apptainer, pyxis = environment.get("APPTAINER_IMAGE", ""), environment.get("PYXIS_IMAGE", "")
    image, stamp, lock = apptainer or pyxis, Path(".venv/.installed"), Path("requirements.lock")
    if apptainer and pyxis:
        return fault(
            "both APPTAINER_IMAGE and PYXIS_IMAGE are set", "keep one of them in cluster/site.env"
        )
    if (
        image
        and (apptainer or image.startswith(("/", ".")) or image.endswith(".sqsh"))
        and not os.access(image, os.R_OK)
    ):
        return fault(f"{image}: no such readable image", "docs/cluster.md shows how to make one")
    if apptainer and not (shutil.which("apptainer") or shutil.which("singularity")):
        remedy = "it may be a module: write module load apptainer into cluster/site.env"
        return fault("neither apptainer nor singularity is in PATH", remedy)
    if image:
        return [Finding("python", "ok", f"in the container {image}")]
    is_laid_out = Path("cluster/snapshot").is_symlink()  # by `wide-mlps init`
    if not os.access(".venv/bin/python", os.X_OK):
        return fault(
            "no .venv, and no container image is set",
            "wide-mlps init ." if is_laid_out else "sh install.sh",
        )
    if is_laid_out:
        return [
            Finding(
                "python",
                "ok",
                f".venv is {os.path.realpath('.venv')}, where wide-mlps is installed; nodes must"
                " see it, too",
            )
        ]
    if not stamp.exists():
        return fault(".venv is half installed: its last step is missing")
    if lock.exists() and stamp.stat().st_mtime < lock.stat().st_mtime and not _installed_from(lock):
        return fault(".venv is older than requirements.lock")
    return [Finding("python", "ok", ".venv is whole and as new as requirements.lock")]


def _installed_from(lock: Path) -> bool:
    """Whether install.sh took these very lines: a checkout gives files new dates without changing
    them."""
    taken = Path(".venv/all.lock")
    without_pillow = re.sub(r"^pillow(?:.*\\\n)*.*\n", "", lock.read_text(), flags=re.MULTILINE)
    return taken.exists() and taken.read_text() == without_pillow


def check_driver(_: Submission, environment: Mapping[str, str]) -> list[Finding]:
    """Where both are known: a container has its own torch, and the nodes' pre-flight looks
    again."""
    driver, cuda = known_driver(environment), cuda_of_torch(Path(".venv"))
    if (
        driver is None
        or cuda is None
        or environment.get("APPTAINER_IMAGE")
        or environment.get("PYXIS_IMAGE")
    ):
        return []
    if fault := too_old(driver, cuda):
        return [Finding("driver", "FAULT", *fault)]
    return [Finding("driver", "ok", f"{driver} runs torch's CUDA {cuda}")]


# ---- file systems
# --------------------------------------------------------------------------------------------------

MOUNTS = Path("/proc/self/mounts")
LOCAL_LOCKS = ("localflock", "nolock", "local_lock=all", "local_lock=flock")
"""Mount options of Lustre and NFS with which a lock is known to its own node only."""


def check_locks(submission: Submission, _: Mapping[str, str]) -> list[Finding]:
    """Look at the places that jobs write, as this node has them mounted."""
    named = [
        word.partition("=")[2]
        for word in submission.arguments
        if word.startswith(("run_dir=", "out="))
    ]
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:
        return []
    found = dict(
        filter(
            None,
            (
                local_locks(os.path.realpath(place), mounts)
                for place in (".", "jobs", "runs", "data", *named)
            ),
        )
    )
    remedy = (
        "ask the site for a mount with flock, or keep jobs, runs and data on another file system"
    )
    text = (
        "{} is mounted with {}: two nodes may write the same run or dataset, because a lock holds"
        " on its own node only"
    )
    return [
        Finding("locks", "warning", text.format(place, option), remedy)
        for place, option in found.items()
    ]


def local_locks(path: str, mounts: str) -> tuple[str, str] | None:
    """Return the mount point of an absolute path and its option for node-local locks, or None.
    `mounts`: /proc/mounts."""
    point, given = "", ""
    for line in mounts.splitlines():
        words = [
            re.sub(r"\\(0[0-7]{2}|1[0-7]{2})", lambda code: chr(int(code[1], 8)), word)
            for word in line.split(" ")
        ]
        if (
            len(words) > 3
            and len(words[1]) >= len(point)
            and f"{path}/".startswith(words[1].rstrip("/") + "/")
        ):
            point, given = words[1], words[3]
    option = next((option for option in given.split(",") if option in LOCAL_LOCKS), None)
    return None if option is None else (point, option)


# ---- SLURM
# --------------------------------------------------------------------------------------------------


def check_slurm(submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    missing = [
        program
        for program in ("sbatch", "srun", "scontrol", "squeue")
        if shutil.which(program) is None
    ]
    if missing:
        remedy = "module load slurm, or ask the site; for this machine alone: make study"
        return [Finding("SLURM", "FAULT", f"no {', '.join(missing)} in PATH", remedy)]
    try:
        lines = slurm("scontrol", "-o", "show", "partition").splitlines()
    except SlurmError as error:
        remedy = "wait, or ask the site; SLURM_CONF must lead to its slurm.conf"
        return [Finding("SLURM", "FAULT", f"the controller does not answer: {error}", remedy)]
    partitions, ours = (
        {each["PartitionName"]: each for each in map(facts, lines)},
        sorted(Path("cluster").glob("*.slurm")),
    )
    if submission.script and not Path(submission.script).is_file():
        return [
            Finding(
                "submission",
                "FAULT",
                f"{submission.script}: no such file",
                f"there are {', '.join(map(str, ours))}",
            )
        ]
    findings = []
    for script in [Path(submission.script)] if submission.script else ours:
        words = ["sbatch", "--test-only", *submission.options, str(script), *submission.arguments]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        answer = (done.stderr.strip().splitlines() or ["no answer"])[
            -1
        ]  # SLURM's own words, as they are
        if done.returncode:
            known = [each for key, each in REMEDIES.items() if key in answer.lower()]
            remedy = (*known, "mend SBATCH_... in site.env, or the options")[0]
            findings.append(
                Finding("submission", "FAULT", f"sbatch refuses {script.name}: {answer}", remedy)
            )
        elif submission.script:
            findings.append(Finding("submission", "ok", answer.removeprefix("sbatch: ")))
    if not findings:
        findings.append(Finding("submission", "ok", "sbatch would take every job script"))
    default = next((name for name, each in partitions.items() if each.get("Default") == "YES"), "")
    chosen = (
        submission.option("--partition", "-p") or environment.get("SBATCH_PARTITION") or default
    )
    for name in [name for name in chosen.split(",") if name in partitions]:
        state = partitions[name].get("State", "UP")
        if state != "UP":
            text = f"partition {name} is {state}: nothing starts there"
            findings.append(
                Finding("partition", "FAULT", text, "another partition, or wait: sinfo")
            )
        asked = submission.option("--time", "-t") or environment.get("SBATCH_TIMELIMIT")
        findings.append(judge_time_limit(name, partitions[name], asked=asked))
    return findings


def judge_time_limit(name: str, partition: Mapping[str, str], *, asked: str | None) -> Finding:
    longest = minutes_of(partition.get("MaxTime", "UNLIMITED")) or float("inf")
    limit = (
        minutes_of(asked) if asked else minutes_of(partition.get("DefaultTime", "NONE")) or longest
    )
    if limit is None:
        return Finding(
            "time limit",
            "FAULT",
            f"{asked} is no time",
            "minutes, hours:minutes:seconds, or days-hours",
        )
    text, option = (
        f"partition {name}: a start of a job lasts {in_words(limit)}",
        "--time or SBATCH_TIMELIMIT",
    )
    if limit > longest:
        return Finding("time limit", "FAULT", text, f"{option}: at most {in_words(longest)}")
    if limit <= 2 * SIGNAL_LEAD_MIN:
        return Finding(
            "time limit",
            "FAULT",
            text,
            f"{option}: longer; jobs save and end {SIGNAL_LEAD_MIN:.0f} min before it",
        )
    if limit < 60 and not asked:
        return Finding(
            "time limit",
            "warning",
            text,
            f"the site's default; SBATCH_TIMELIMIT may be up to {in_words(longest)}",
        )
    if limit == float("inf"):
        return Finding("time limit", "ok", f"partition {name} has none")
    return Finding(
        "time limit",
        "ok",
        f"{text}, saves {SIGNAL_LEAD_MIN:.0f} min before its end, and goes on in a new start",
    )


def minutes_of(text: str) -> float | None:
    """Of `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`; inf without a limit; None if it is none
    of these."""
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


# ---- one submission
# --------------------------------------------------------------------------------------------------


def check_job(submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    """`cluster/submit --check` answers, with the Python that jobs use: config, data, batch, and
    what is in the queue already."""
    if not submission.script or not Path(submission.script).is_file():
        return []
    if not os.access(".venv/bin/python", os.X_OK):
        return [
            Finding(
                "config",
                "warning",
                "not checked: no .venv here",
                "the job's first start checks it, too",
            )
        ]
    nodes, of_node = (
        submission.ranks(environment) if submission.name == "pretrain.slurm" else (None, None)
    )
    ranks = nodes * of_node if nodes and of_node else None
    words = [
        ".venv/bin/python",
        "-m",
        "cluster",
        "submit",
        f"--check={ranks or ''}",
        *submission.options,
        submission.script,
    ]
    done = subprocess.run(
        [*words, *submission.arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    text = "; ".join(
        line.removeprefix("cluster/submit: ") for line in done.stderr.strip().splitlines()[-5:]
    )
    if done.returncode:
        return [Finding("config", "FAULT", text, "mend that; nothing was submitted")]
    warned = text.partition(WARNING)[2]
    slower = [Finding("nodes", "warning", *warned.split("; ", 1))] if warned else []
    splits = f", its batch splits over {ranks} ranks" if ranks else ""
    text = "" if warned else text
    return [
        Finding(
            "config",
            "ok",
            text or f"{' '.join(submission.arguments[:1])} resolves, its data are there{splits}",
        ),
        *slower,
    ]
