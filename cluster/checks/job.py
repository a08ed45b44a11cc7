"""Whether a given job has what it needs: its config resolves, its dataset is there, its batch divides over the ranks.

The project's own commands answer, each in a process of its own and with the Python that jobs use.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cluster.checks.finding import Answer, Finding, ask
from cluster.checks.slurm import chosen_partitions, of_script
from cluster.slurm import Submission

_VERBS = {
    "pretrain.slurm": (("-m", "pretrain", "show"), ()),
    "probe.slurm": (("-m", "finetune", "probe"), ("--show",)),
    "finetune.slurm": (("-m", "finetune", "tune"), ("--show",)),
}
"""What prints a job's settings: the command before its words, and after them. What the others read `cluster.submission` says."""
_SCRIPTS = (*_VERBS, "data_prep.slurm", "grid.slurm")
_FINISHED = 3
_BATCH = """
import sys
from data_prep.settings import load_settings
from pretrain.config import PretrainSettings, check_against_ranks
settings = load_settings(PretrainSettings, path=sys.argv[2], overrides=sys.argv[3:])
ranks = int(sys.argv[1])
try:
    check_against_ranks(settings.train, settings.augment, num_ranks=ranks)
except ValueError as error:
    sys.exit(str(error))
print(settings.train.global_batch_size // ranks)
"""


def check_job(submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    if submission.script is None:
        return []
    name = Path(submission.script).name
    if name not in _SCRIPTS or not Path(submission.script).is_file():
        return []
    if not submission.arguments:
        return [
            Finding(
                "config",
                "FAULT",
                f"{name} is given no config",
                f"cluster/doctor {submission.script} CONFIG [key=value ...]",
            )
        ]
    python = python_words(environment)
    if not python:
        remedy = "with Pyxis and no .venv Python runs only within a job; its first start checks the config, too"
        return [Finding("config", "warning", "not looked at: no Python here", remedy)]
    # --hold: what is missing has findings of its own below
    words = [*(["--hold"] if name in _VERBS else []), *submission.options, submission.script, *submission.arguments]
    answer = ask([*python, "-m", "cluster.submit", "--test-only", *words], environment=environment, timeout_s=120)
    if answer.code == _FINISHED:
        return [Finding("config", "ok", f"nothing is left to do: {answer.last_error}")]
    if answer.code:
        remedy = "mend that; nothing was submitted"
        return [Finding("config", "FAULT", _complaint(answer), remedy)]
    findings = [Finding("config", "ok", f"{submission.arguments[0]} resolves")]
    if name not in _VERBS:
        return findings
    before, after = _VERBS[name]
    answer = ask([*python, *before, *submission.arguments, *after], environment=environment, timeout_s=120)
    findings += _dataset(answer.out, submission)
    if name == "pretrain.slurm":
        findings += _batch(python, submission, environment)
    return findings


def python_words(environment: Mapping[str, str]) -> list[str]:
    """cluster/python.sh's words for this machine."""
    script = '. cluster/python.sh && python_command && printf "%s\\0" "${python_here[@]}"'
    answer = ask(["bash", "-c", script], environment=environment)
    return [word for word in answer.out.split("\0") if word]


def _complaint(answer: Answer) -> str:
    """Lines of ours, the first few; of a traceback, or of a shell's words, the last."""
    lines = [line for line in answer.errors.strip().splitlines() if line.strip()]
    own = [line.removeprefix("cluster/submit: ") for line in lines]
    if lines and own[0] != lines[0]:
        return "; ".join(own[:5]) + (f"; and {len(own) - 5} more" if len(own) > 5 else "")
    return answer.last_error if not lines or len(lines) > 5 else "; ".join(lines)


def _dataset(resolved: str, submission: Submission) -> list[Finding]:
    names = [name.strip("'\"") for name in re.findall(r"^[\s-]*dataset: (\S.*)$", resolved, re.MULTILINE)]
    pretrained = re.search(r"^pretrained: (\S.*)$", resolved, re.MULTILINE)
    missing = [name for name in names if "://" not in name and not Path(name, "manifest.json").exists()]
    waits = submission.option("--dependency", "-d") is not None
    findings = []
    for name in missing:
        found = f"{name} has no manifest: it is not built, or not finished"
        remedy = (
            "cluster/submit cluster/data_prep.slurm CONFIG builds it"
            if not waits
            else "right if the job waits for what builds it"
        )
        findings.append(Finding("dataset", "warning" if waits else "FAULT", found, remedy))
    if pretrained and not Path(pretrained[1].strip("'\"")).exists():
        found = f"pretrained: {pretrained[1]} is not there"
        remedy = (
            "right if the job waits for what trains it"
            if waits
            else "pretrain it first, or submit with --dependency=afterok:JOB"
        )
        findings.append(Finding("pretrained", "warning" if waits else "FAULT", found, remedy))
    if names and not missing:
        findings.append(Finding("dataset", "ok", f"{', '.join(names)}: there, with its manifest"))
    return findings


# ---- batch arithmetic -------------------------------------------------------------------------------------------------


def _batch(python: list[str], submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    nodes = submission.option("--nodes", "-N") or of_script(Path(submission.script or ""), "--nodes", "-N") or "1"
    per_node = ranks_per_node(submission, environment)
    if not nodes.isdigit() or per_node is None:
        return []
    ranks = int(nodes) * per_node
    answer = ask([*python, "-c", _BATCH, str(ranks), *submission.arguments], environment=environment, timeout_s=120)
    told = f"{nodes} node{'s' if nodes != '1' else ''} x {per_node} rank{'s' if per_node > 1 else ''}"
    if answer.code:
        return [
            Finding("batch", "FAULT", f"on {told}: {answer.last_error}", "other nodes, or that setting as key=value")
        ]
    return [Finding("batch", "ok", f"{told}: {answer.out.strip()} samples a step for each")]


def ranks_per_node(submission: Submission, environment: Mapping[str, str]) -> int | None:
    """RANKS_PER_NODE, otherwise the GPUs of a node, otherwise 1; None if the nodes differ."""
    fixed = environment.get("RANKS_PER_NODE", "")
    if fixed:
        return int(fixed) if fixed.isdigit() and int(fixed) > 0 else None
    asked = submission.option("--gpus-per-node") or environment.get("SBATCH_GPUS_PER_NODE")
    asked = asked or _gpus_of_gres(submission.option("--gres") or environment.get("SBATCH_GRES") or "")
    if asked and re.search(r"(\d+)$", asked):
        return int(asked.rpartition(":")[2])
    if submission.option("--gpus", "-G") is not None:
        return None
    gpus = node_gpus(submission, environment)
    return None if gpus < 0 else max(1, gpus)


def node_gpus(submission: Submission, environment: Mapping[str, str]) -> int:
    """Of each node of the partition; -1 if they differ."""
    partitions = chosen_partitions(submission, environment, _any_name(submission, environment))
    words = ["sinfo", "-h", "-o", "%G", *(["-p", ",".join(partitions)] if partitions else [])]
    counts = {int(_gpus_of_gres(line) or 0) for line in ask(words, environment=environment).out.splitlines()}
    return counts.pop() if len(counts) == 1 else -1


def _any_name(submission: Submission, environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    names = submission.option("--partition", "-p") or environment.get("SBATCH_PARTITION")
    if names:
        return {name: {} for name in names.split(",")}
    lines = ask(["sinfo", "-h", "-o", "%P"], environment=environment).out.split()
    return {line.rstrip("*"): {"Default": "YES" if line.endswith("*") else "NO"} for line in lines}


def _gpus_of_gres(gres: str) -> str:
    """The count of gpu:4, gpu:a100:4 or gpu:a100:4(S:0-1), summed over kinds."""
    counts = [int(count or 1) for count in re.findall(r"\bgpu(?::[A-Za-z_][\w.-]*)?(?::(\d+))?", gres)]
    return str(sum(counts)) if counts else ""
