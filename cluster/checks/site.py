"""cluster/site.env as a job will see it: sourced by a bash of its own, and judged line by line.

Names are found in the text, so that a mistake has its line; values come from bash, so that `$HOME` and `module load` count.
What site.env may set stands in SETTINGS, one entry for each name that the commented file shows.
"""

import difflib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.checks.finding import Answer, Finding, ask
from cluster.checks.site_time import minutes_of

SITE = "cluster/site.env"
_CHECK = "site.env"


def _whole(least: int) -> Callable[[str], str]:
    return lambda value: (
        "" if value.isascii() and value.isdigit() and int(value) >= least else f"a whole number from {least} on"
    )


def _switch(value: str) -> str:
    return "" if value in ("0", "1") else "1 (yes) or 0 (no)"


def _absolute(value: str) -> str:
    return "" if value.startswith("/") else "an absolute path, which all nodes understand alike"


def _mounts(value: str) -> str:
    paths = [path for mount in value.split(",") for path in mount.split(":")[:2]]
    return (
        ""
        if all(path.startswith("/") for path in paths)
        else "absolute paths with commas between, such as /data,/scratch"
    )


def _names(value: str) -> str:
    return "a name, or several with commas: Gloo knows no ^ and no =" if value[:1] in ("^", "=") else ""


def _anything(_value: str) -> str:
    return ""


def _time(value: str) -> str:
    return "" if minutes_of(value) is not None else "minutes, hours:minutes:seconds, or days-hours"


def _not_ours(reason: str) -> Callable[[str], str]:
    return lambda _value: f"left to the job scripts: {reason}"


SETTINGS: dict[str, Callable[[str], str]] = {
    "APPTAINER_IMAGE": _anything,
    "PYXIS_IMAGE": _anything,
    "CONTAINER_MOUNTS": _mounts,
    "NODE_SCRATCH": _absolute,
    "STAGE_DATA": _switch,
    "NCCL_SOCKET_IFNAME": _anything,
    "GLOO_SOCKET_IFNAME": _names,
    "RANKS_PER_NODE": _whole(1),
    "PREFLIGHT": _switch,
    "PREFLIGHT_GPUS": lambda value: "" if value == "ignore" else "ignore, or nothing",
    "MAX_IDLE_STARTS": _whole(1),
    "SBATCH_PARTITION": _anything,
    "SBATCH_ACCOUNT": _anything,
    "SBATCH_QOS": _anything,
    "SBATCH_TIMELIMIT": _time,
    "SBATCH_GPUS_PER_NODE": _anything,
}
"""Each name with what is wrong with a value, in words that follow "it must be"."""

TAKEN: dict[str, Callable[[str], str]] = {
    "SBATCH_SIGNAL": _not_ours("they save when their own signal comes"),
    "SBATCH_NO_REQUEUE": _not_ours("they put themselves back in the queue"),
    "SBATCH_OPEN_MODE": _not_ours("the log of a later start goes on below the earlier one"),
    "SBATCH_ARRAY_INX": _not_ours("give --array with the submission"),
    "SBATCH_WAIT": _not_ours("cluster/submit would wait for each job in turn"),
}
OF_SBATCH = re.findall(
    r"\w+",
    """
    ACCOUNT ACCTG_FREQ BATCH CLUSTERS CLUSTER_CONSTRAINT CONSTRAINT CONTAINER CONTAINER_ID CORE_SPEC CPUS_PER_GPU
    CPU_FREQ_REQ DEBUG DELAY_BOOT DISTRIBUTION ERROR EXCLUSIVE EXPORT GET_USER_ENV GPUS GPUS_PER_NODE GPUS_PER_TASK
    GPU_BIND GPU_FREQ GRES GRES_FLAGS HINT IGNORE_PBS INPUT JOB_NAME MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE
    NETWORK NO_KILL OUTPUT OVERCOMMIT PARTITION POWER PROFILE QOS REQUEUE REQ_SWITCH RESERVATION SEGMENT_SIZE
    SPREAD_JOB STEPMGR THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND TRES_PER_TASK USE_MIN_NODES WAIT4SWITCH
    WAIT_ALL_NODES WCKEY
    """,
)
"""What else sbatch reads as SBATCH_NAME, in one release or another."""
_OTHERS = re.compile(
    r"(NCCL|GLOO|TP|UCX|FI|OMP|MKL|KMP|CUDA|NVIDIA|TORCH|PYTORCH|TRITON|MLFLOW|AWS|PYTHON|HF|LD|APPTAINER|APPTAINERENV|SINGULARITY"
    r"|SINGULARITYENV|ENROOT|PYXIS|SLURM|MODULE|LMOD|XDG|S3|FSSPEC|WIDE_MLPS|MALLOC|LC)_\w+|\w*(proxy|PROXY|PATH|DIR)|HOME|LANG|TMPDIR|CC|CXX"
)
_SOURCE = r"""
bash -n "$1" || exit
trap '[ "${BASH_SOURCE[0]:-}" != "$1" ] || echo "$LINENO" >>"$3"' ERR; [ -z "$2" ] || set -a
. "$1"
trap - ERR; env -0 >"$4"
"""


@dataclass(frozen=True)
class Assignment:
    name: str
    line: int


@dataclass(frozen=True)
class Sourced:
    answer: Answer
    environment: Mapping[str, str] | None
    """Of whoever sourced it; None if it did not come to its end."""
    failed_lines: tuple[int, ...] = ()
    """Of commands in it that ended with another code than 0, outside of conditions."""


@dataclass(frozen=True)
class Site:
    environment: Mapping[str, str]
    """With which cluster/submit calls sbatch."""
    findings: tuple[Finding, ...]


def read_site(path: Path = Path(SITE)) -> Site:
    if not path.exists():
        found = f"no {path}: jobs take what the site does by default"
        return Site(
            os.environ, (Finding(_CHECK, "warning", found, f"git checkout {path}, and set what your site needs"),)
        )
    text = path.read_text(errors="replace")
    submitted = _source(path, all_exported=True)
    if submitted.environment is None:
        found = f"{path} does not come to its end: {submitted.answer.last_error}"
        return Site(os.environ, (Finding(_CHECK, "FAULT", found, "it is read by bash: mend that line"),))
    plain = _source(path, all_exported=False).environment or {}
    assignments = assignments_of(text)
    findings = [*_failures(submitted, text), *_unknown(assignments, text)]
    findings += _wrong_values(assignments, submitted.environment) + _not_exported(
        assignments, submitted.environment, plain
    )
    names = sorted({each.name for each in assignments if each.name in submitted.environment})
    settings = (
        ", ".join(f"{name}={submitted.environment[name]}" for name in names) or "nothing; the site's defaults hold"
    )
    return Site(submitted.environment, (*findings, *([] if findings else [Finding(_CHECK, "ok", f"sets {settings}")])))


def assignments_of(text: str) -> list[Assignment]:
    """NAME=... at the beginning of a command, or after `export`. Bash is richer; what is missed here is merely not judged."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        command = re.match(r"\s*(?:export\s+)?((?:[A-Za-z_]\w*=(?:\"[^\"]*\"|'[^']*'|[^\s;\"']*)*\s*)+)", line)
        if command and not line.lstrip().startswith("#"):
            found += [Assignment(name, number) for name in re.findall(r"(?:^|\s)([A-Za-z_]\w*)=", command[1])]
    return found


def _source(path: Path, *, all_exported: bool) -> Sourced:
    with tempfile.TemporaryDirectory() as directory:
        failed, result = Path(directory, "failed"), Path(directory, "environment")
        words = [
            "bash",
            "-c",
            _SOURCE,
            "site",
            str(path.absolute()),
            "1" if all_exported else "",
            str(failed),
            str(result),
        ]
        answer = ask(words, timeout_s=60)
        lines = failed.read_text(errors="replace").splitlines() if failed.exists() else []
        entries = result.read_text(errors="replace").split("\0") if result.exists() else []
    environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return Sourced(answer, environment or None, tuple(int(line) for line in lines))


def _failures(sourced: Sourced, text: str) -> list[Finding]:
    said = sourced.answer.errors.strip().splitlines()
    if sourced.failed_lines:
        number = sourced.failed_lines[0]
        command = (text.splitlines()[number - 1 : number] or ["?"])[0].strip()
        no_modules = command.startswith("module ") and any("not found" in line for line in said)
        remedy = "no modules in this shell: source their set-up (such as /etc/profile.d/modules.sh) in the line before"
        found = f"line {number} fails: {command}{f' ({said[0]})' if said else ''}"
        return [Finding(_CHECK, "FAULT", found, remedy if no_modules else "mend or remove that line")]
    wrong = [line for line in said if re.search(r"error|unable to|unknown", line, re.IGNORECASE)]
    if wrong:  # older modules say so, but end with 0
        return [
            Finding(_CHECK, "FAULT", f"it says: {wrong[0]}", "mend that line; module avail lists what can be loaded")
        ]
    return []


def _unknown(assignments: list[Assignment], text: str) -> list[Finding]:
    known = [*SETTINGS, *TAKEN, *(f"SBATCH_{name}" for name in OF_SBATCH)]
    findings = []
    for name, line in ((each.name, each.line) for each in assignments if each.name not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            findings.append(Finding(_CHECK, "FAULT", f"line {line}: nobody reads {name}", f"did you mean {near[0]}?"))
        elif name.startswith("SBATCH_") or not (_OTHERS.fullmatch(name) or re.search(rf"\${{?{name}\b", text)):
            remedy = (
                "keep it if a program of yours does"
                if not name.startswith("SBATCH_")
                else "see man sbatch, INPUT ENVIRONMENT"
            )
            found = f"line {line}: {name} is known neither to wide-mlps nor to sbatch"
            findings.append(Finding(_CHECK, "warning", found, remedy))
    return findings


def _wrong_values(assignments: list[Assignment], environment: Mapping[str, str]) -> list[Finding]:
    findings = []
    for each in assignments:
        value = environment.get(each.name, "")
        wrong = {**SETTINGS, **TAKEN}[each.name](value) if value and each.name in {**SETTINGS, **TAKEN} else ""
        if wrong:
            remedy = f"remove it; it is {wrong}" if each.name in TAKEN else f"it must be {wrong}"
            findings.append(Finding(_CHECK, "FAULT", f"line {each.line}: {each.name}={value} will not do", remedy))
    return findings


def _not_exported(
    assignments: list[Assignment], submitted: Mapping[str, str], plain: Mapping[str, str]
) -> list[Finding]:
    ours = [each for each in assignments if each.name in SETTINGS or each.name.startswith("SBATCH_")]
    missing = [each for each in ours if plain.get(each.name) != submitted.get(each.name)]
    if not missing:
        return []
    names = ", ".join(dict.fromkeys(each.name for each in missing))
    found = f"line {missing[0].line}: {names} set without export: cluster/submit sees it, plain sbatch does not"
    return [Finding(_CHECK, "warning", found, "write export before it")]
