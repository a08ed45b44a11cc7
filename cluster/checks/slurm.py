"""What SLURM says of a submission: whether it takes it, for how long jobs run, and what happens to them at preemption.

All of it from `scontrol show` and `sbatch --test-only`; nothing is submitted.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from cluster.checks.finding import Finding, ask
from cluster.checks.site_time import in_words, minutes_of
from cluster.slurm import Submission

PROGRAMS = ("sbatch", "srun", "scontrol", "squeue")
SIGNAL_LEAD_MIN = 5.0
"""How long before the time limit a job is told to save (--signal=...@300)."""
_LONGEST_ARRAY = 1000


def of_script(script: Path, *names: str) -> str | None:
    """The value of an option in the script's own #SBATCH lines."""
    lines = re.findall(r"^#SBATCH\s+(.+)$", script.read_text(errors="replace"), re.MULTILINE)
    return Submission(tuple(word for line in lines for word in line.split())).option(*names)


def check_slurm(submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    missing = [program for program in PROGRAMS if shutil.which(program, path=environment.get("PATH")) is None]
    if len(missing) == len(PROGRAMS):
        return [Finding("SLURM", "FAULT", "no SLURM here", "for this machine alone: make study")]
    if missing:
        return [Finding("SLURM", "FAULT", f"no {', '.join(missing)} in PATH", "module load slurm, or ask the site")]
    ping = ask(["scontrol", "ping"], environment=environment)
    if ping.code or "UP" not in ping.out:
        found = f"the controller does not answer: {ping.last_error}"
        return [Finding("SLURM", "FAULT", found, "wait, or ask the site; SLURM_CONF must lead to its slurm.conf")]
    settings = _facts(ask(["scontrol", "show", "config"], environment=environment).out, separator=r"\s*=\s*")
    findings = [
        Finding("SLURM", "ok", f"{settings.get('SLURM_VERSION', '?')}, cluster {settings.get('ClusterName', '?')}")
    ]
    partitions = _partitions(environment)
    if submission.script and not Path(submission.script).is_file():
        scripts = ", ".join(sorted(str(path) for path in Path("cluster").glob("*.slurm")))
        return [*findings, Finding("script", "FAULT", f"{submission.script}: no such file", f"there are {scripts}")]
    scripts_checked = [Path(submission.script)] if submission.script else sorted(Path("cluster").glob("*.slurm"))
    findings += _accepted(scripts_checked, submission, environment, partitions)
    for name in chosen_partitions(submission, environment, partitions):
        if partitions[name].get("State", "UP") != "UP":
            found = f"partition {name} is {partitions[name]['State']}: nothing starts there"
            findings.append(Finding("partition", "FAULT", found, "another partition, or wait: sinfo"))
        findings += _cpus(name, scripts_checked, submission, environment)
        findings += _time_limit(name, partitions[name], scripts_checked, submission, environment)
        above = partitions_above(name, partitions, environment)
        findings += _sharing(name, partitions[name]) + judge_preemption(name, partitions[name], settings, above=above)
    return findings + _limits(settings)


# ---- what sbatch takes ------------------------------------------------------------------------------------------------


def _accepted(
    scripts: list[Path],
    submission: Submission,
    environment: Mapping[str, str],
    partitions: Mapping[str, Mapping[str, str]],
) -> list[Finding]:
    """One line for the scripts that are taken alike, one for each other complaint."""
    taken: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for script in scripts:
        answer = ask(
            ["sbatch", "--test-only", *submission.options, str(script), *submission.arguments], environment=environment
        )
        if answer.code:
            refused.setdefault(answer.last_error, []).append(script.name)
        else:
            said = re.search(r"on nodes (\S+)(?: in partition (\S+))?", answer.errors + answer.out)
            place = f"partition {said[2]}, nodes {said[1]}" if said and said[2] else "as asked for"
            taken.setdefault(place, []).append(script.name)
    lines = [
        Finding("submission", "ok", f"sbatch would take {', '.join(names)} ({place})") for place, names in taken.items()
    ]
    for error, names in refused.items():
        words = re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: |allocation failure: )?", "", error)
        found = f"sbatch refuses {', '.join(names)}: {words}"
        lines.append(Finding("submission", "FAULT", found, _remedy(words, partitions)))
    return lines


def _remedy(error: str, partitions: Mapping[str, Mapping[str, str]]) -> str:
    """What mends SLURM's best known complaints."""
    text = error.lower()
    remedies = {
        "partition name": f"SBATCH_PARTITION in site.env, or --partition: one of {', '.join(sorted(partitions)) or 'sinfo -o %P'}",
        "account": "SBATCH_ACCOUNT in site.env: yours are in sacctmgr show assoc user=$USER format=account,partition,qos",
        "qos": "SBATCH_QOS in site.env: yours are in sacctmgr show assoc user=$USER format=account,qos",
        "time limit": "SBATCH_TIMELIMIT in site.env: sinfo -o '%P %l' lists the longest",
        "node configuration": "fewer or other nodes, CPUs (--cpus-per-task), GPUs or memory: see sinfo -o '%P %D %c %m %G'",
        "node count": "--nodes: sinfo -o '%P %D' lists how many there are",
        "gres": "--gpus-per-node or --gres: sinfo -o '%P %G' lists what there is",
    }
    return next(
        (remedy for words, remedy in remedies.items() if words in text),
        "mend SBATCH_... in site.env, or the options given here",
    )


def _cpus(partition: str, scripts: list[Path], submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    """Some sites' sbatch takes a job that no node of the partition can hold: it then waits for ever."""
    lines = ask(["sinfo", "-h", "-p", partition, "-o", "%c"], environment=environment).out.split()
    most = max((int(line.rstrip("+")) for line in lines if line.rstrip("+").isdigit()), default=None)
    too_many = []
    for script in scripts:
        asked = submission.option("--cpus-per-task", "-c") or of_script(script, "--cpus-per-task", "-c") or "1"
        if most is not None and asked.isdigit() and int(asked) > most:
            too_many.append(f"{script.name} asks for {asked} CPUs a task")
    found = f"partition {partition}: {', '.join(too_many)}, and its nodes have at most {most}"
    remedy = f"--cpus-per-task={most} before the script; otherwise it is refused, or waits for ever"
    return [Finding("CPUs", "FAULT", found, remedy)] if too_many else []


# ---- what SLURM will do -----------------------------------------------------------------------------------------------


def chosen_partitions(
    submission: Submission, environment: Mapping[str, str], partitions: Mapping[str, Mapping[str, str]]
) -> list[str]:
    default = next((name for name, facts in partitions.items() if facts.get("Default") == "YES"), "")
    names = submission.option("--partition", "-p") or environment.get("SBATCH_PARTITION") or default
    return [name for name in names.split(",") if name in partitions]


def _time_limit(
    name: str, facts: Mapping[str, str], scripts: list[Path], submission: Submission, environment: Mapping[str, str]
) -> list[Finding]:
    longest = minutes_of(facts.get("MaxTime", "UNLIMITED")) or float("inf")
    by_default = minutes_of(facts.get("DefaultTime", "NONE")) or longest
    findings: dict[Finding, None] = {}  # scripts that are treated alike share a line
    for script in scripts:
        asked = (
            submission.option("--time", "-t")
            or environment.get("SBATCH_TIMELIMIT")
            or of_script(script, "--time", "-t")
        )
        limit = minutes_of(asked) if asked else by_default
        if limit is not None:  # otherwise sbatch has said so
            findings[_judge_limit(name, limit, longest=longest, asked=bool(asked))] = None
    return list(findings)


def _judge_limit(name: str, limit: float, *, longest: float, asked: bool) -> Finding:
    told = f"partition {name}: a start of a job lasts {in_words(limit)}"
    lead = f"{SIGNAL_LEAD_MIN:.0f} min"
    if limit > longest:
        remedy = f"SBATCH_TIMELIMIT or --time: at most {in_words(longest)}; with more it waits for ever"
        return Finding("time limit", "FAULT", told, remedy)
    if limit <= 2 * SIGNAL_LEAD_MIN:
        return Finding(
            "time limit", "FAULT", told, f"SBATCH_TIMELIMIT or --time: longer; jobs save and end {lead} before it"
        )
    if limit < 60 and not asked:
        remedy = f"that is the site's default; SBATCH_TIMELIMIT may be up to {in_words(longest)}"
        return Finding("time limit", "warning", told, remedy)
    if limit == float("inf"):
        return Finding("time limit", "ok", f"partition {name} has none")
    return Finding("time limit", "ok", f"{told}, saves {lead} before its end, and goes on in a new start")


def partitions_above(
    name: str, partitions: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]
) -> list[str]:
    """Those whose jobs may take this one's nodes: of a higher tier, with a node in common."""
    lines = ask(["sinfo", "-h", "-N", "-o", "%N %R"], environment=environment).out.splitlines()
    pairs = [line.split() for line in lines if len(line.split()) == 2]
    nodes = {node for node, partition in pairs if partition == name}
    sharing = {partition for node, partition in pairs if node in nodes}
    tier = int(partitions[name].get("PriorityTier", "1"))
    return sorted(other for other in sharing if int(partitions.get(other, {}).get("PriorityTier", "1")) > tier)


def _sharing(name: str, facts: Mapping[str, str]) -> list[Finding]:
    if not facts.get("OverSubscribe", "NO").startswith("FORCE"):
        return []
    found = f"partition {name} shares nodes whatever jobs ask for (OverSubscribe={facts['OverSubscribe']})"
    remedy = "memory, GPUs and timings are not yours alone; take another partition if there is one"
    return [Finding("sharing", "warning", found, remedy)]


def judge_preemption(
    name: str, facts: Mapping[str, str], settings: Mapping[str, str], *, above: list[str]
) -> list[Finding]:
    kind, mode = (
        settings.get("PreemptType", "preempt/none"),
        facts.get("PreemptMode", settings.get("PreemptMode", "OFF")),
    )
    mode = mode.replace("GANG,", "").replace(",GANG", "")
    if kind == "preempt/qos":
        found = "jobs of a low QOS are preempted here"
        remedy = "how, and with how many seconds to save: sacctmgr show qos format=name,preemptmode,gracetime"
        return [Finding("preemption", "warning", found, remedy)]
    if kind == "preempt/none" or mode in ("OFF", "") or not above:
        return [Finding("preemption", "ok", f"jobs of partition {name} are not preempted")]
    by = f" by {', '.join(above)}"
    grace_s = int(facts.get("GraceTime", "0")) if facts.get("GraceTime", "0").isdigit() else 0
    if mode == "SUSPEND":
        found = f"jobs of partition {name} are suspended{by}, and keep their GPUs' memory meanwhile"
        remedy = "ranks that stop for longer than engine.heartbeat_timeout_s look hung: take another partition if there is one"
        return [Finding("preemption", "warning", found, remedy)]
    comes_back = "and queued again" if mode == "REQUEUE" else "and cancelled"
    if grace_s == 0:
        remedy = "the work since the last checkpoint is lost: set checkpoint.every to what you can spare"
        remedy += "" if mode == "REQUEUE" else "; submit the same command again to go on"
        found = f"jobs of partition {name} are preempted{by} without time to save (GraceTime=0), {comes_back}"
        return [Finding("preemption", "warning", found, remedy)]
    user_signal = "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
    told = "the job is told (USR2)" if user_signal else "ranks are told (TERM)"
    if mode == "REQUEUE":
        found = (
            f"partition {name}: before a preemption{by} {told}, with {grace_s} s to save; then the job is queued again"
        )
        return [Finding("preemption", "ok", found)]
    found = f"partition {name}: before a preemption{by} {told}, with {grace_s} s to save; then SLURM cancels the job"
    remedy = "it asks to be queued again meanwhile; if that fails (squeue --me), submit the same command again to go on"
    return [Finding("preemption", "warning", found, remedy)]


def _limits(settings: Mapping[str, str]) -> list[Finding]:
    findings = []
    array = settings.get("MaxArraySize", "1001")
    if array.isdigit() and int(array) <= _LONGEST_ARRAY:
        found = f"arrays may have {max(0, int(array) - 1)} tasks here (MaxArraySize={array})"
        findings.append(Finding("arrays", "warning", found, "split longer grids; give data_prep.slurm fewer tasks"))
    wait = re.match(r"\d+", settings.get("KillWait", "30"))
    if wait and int(wait[0]) < 10:
        found = f"scancel leaves ranks {wait[0]} s until they are killed (KillWait)"
        remedy = "a large checkpoint does not fit in; the one before it stays, and the same command goes on from there"
        findings.append(Finding("scancel", "warning", found, remedy))
    return findings


def _partitions(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    lines = ask(["scontrol", "-o", "show", "partition"], environment=environment).out.splitlines()
    facts = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    return {each["PartitionName"]: each for each in facts if "PartitionName" in each}


def _facts(text: str, *, separator: str) -> dict[str, str]:
    pairs = (re.split(separator, line.strip(), maxsplit=1) for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
