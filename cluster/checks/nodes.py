"""What only a node can tell: a job of a minute looks from inside. It is written in bash, for Python may be what is missing."""

from collections.abc import Mapping
from pathlib import Path

from cluster.checks.files import interface_exists
from cluster.checks.finding import Answer, Finding, Verdict, ask
from cluster.checks.job import node_gpus
from cluster.slurm import Submission

_WAIT_S = 120
_OF_SRUN = {
    "--partition": "-p",
    "--account": "-A",
    "--qos": "-q",
    "--constraint": "-C",
    "--clusters": "-M",
    "--nodelist": "-w",
    "--exclude": "-x",
    "--reservation": "--reservation",
    "--gres": "--gres",
    "--gpus-per-node": "--gpus-per-node",
}
"""What says where a job runs. sbatch reads it from SBATCH_NAME as well; srun must be given it."""
_LOOK = r"""
say() { printf '%s\t%s\t%s\n' "$(hostname -s)" "$1" "$2"; }
if [ -f cluster/site.env ] && [ -d "$ROOT" ]; then say repository yes; else say repository no; fi
. cluster/python.sh 2>/dev/null && python_command
if [ ${#container_options[@]} -gt 0 ]; then say python container
elif version=$("${python[@]}" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1); then say python "yes $version"
else say python "no $(printf %s "$version" | tail -n 1)"; fi
[ ! -r cluster/site.env ] || . cluster/site.env >/dev/null 2>&1 # NODE_SCRATCH may be what only a job knows
scratch=${NODE_SCRATCH:-/tmp}
if probe=$(mktemp "$scratch/.doctor-XXXXXX" 2>/dev/null); then
    printf '#!/bin/sh\n' >"$probe"; chmod +x "$probe"
    if "$probe" 2>/dev/null; then say exec yes; else say exec no; fi
    rm "$probe"
    say scratch "yes $(df -Pk "$scratch" | awk 'NR == 2 { printf "%d", $4 / 1e6 }')"
else say scratch no; say exec unknown; fi
say interfaces "$(ls /sys/class/net | tr '\n' ' ')"
if scontrol show job "$SLURM_JOB_ID" >/dev/null 2>&1; then say scontrol yes; else say scontrol no; fi
if command -v cc >/dev/null || command -v gcc >/dev/null; then say compiler yes; else say compiler no; fi
visible=${CUDA_VISIBLE_DEVICES:-}
say gpus "$(nvidia-smi -L 2>/dev/null | grep -c ^GPU) ${visible:+given}"
"""


def check_nodes(submission: Submission, environment: Mapping[str, str]) -> list[Finding]:
    words = srun_words(submission, environment)
    told = dict(environment) | {"ROOT": str(Path.cwd())}
    answer = ask([*words, "bash", "-c", _LOOK], environment=told, timeout_s=_WAIT_S + 90)
    nodes = read_answers(answer.out)
    if not nodes:
        return [_refused(answer)]
    return judge(nodes, environment)


def srun_words(submission: Submission, environment: Mapping[str, str]) -> list[str]:
    """One task on each node, where the job would run, with one of its GPUs: a step that asks for none is given none."""
    chosen = {
        long: submission.option(long, short) or environment.get(_variable(long)) for long, short in _OF_SRUN.items()
    }
    options = [f"{long}={value}" for long, value in chosen.items() if value]
    if not chosen["--gres"] and not chosen["--gpus-per-node"] and node_gpus(submission, environment) > 0:
        options.append("--gres=gpu:1")
    nodes = submission.option("--nodes", "-N") or "1"
    own = [
        "--job-name=doctor",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--time=2",
        f"--immediate={_WAIT_S}",
        "--export=ALL",
    ]
    return ["srun", *options, *own]


def _variable(option: str) -> str:
    return "SBATCH_" + option.removeprefix("--").replace("-", "_").upper()


def read_answers(text: str) -> dict[str, dict[str, str]]:
    nodes: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        parts = line.split("\t")
        if len(parts) == 3:
            nodes.setdefault(parts[0], {})[parts[1]] = parts[2].strip()
    return nodes


def _refused(answer: Answer) -> Finding:
    if "immediate" in answer.errors.lower() or "unable to allocate" in answer.errors.lower() or answer.code == 124:
        found = f"no node was free within {_WAIT_S} s ({answer.last_error})"
        return Finding(
            "nodes", "warning", found, "try again later, or with --partition of a shorter queue; squeue shows who waits"
        )
    return Finding(
        "nodes", "FAULT", f"srun failed: {answer.last_error}", "mend the options; srun --nodes=1 hostname must work"
    )


def judge(nodes: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]) -> list[Finding]:
    """What is wrong is said with the names of the nodes where it is."""
    findings = []
    has_own_compiler = environment.get("APPTAINER_IMAGE") or environment.get("PYXIS_IMAGE")
    for key, verdict, found, remedy in _complaints(nodes, environment):
        if key == "compiler" and has_own_compiler:
            continue
        names = ", ".join(sorted(name for name, facts in nodes.items() if facts.get(key, "no").split(" ")[0] == "no"))
        if names:
            findings.append(Finding("nodes", verdict, f"{names}: {found}", remedy))
    findings += _interfaces(nodes, environment)
    return findings or [_sound(nodes, environment.get("NODE_SCRATCH", "/tmp"))]


def _complaints(
    nodes: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]
) -> list[tuple[str, Verdict, str, str]]:
    """Of each answer that may be no: how bad that is, what was found, the remedy."""
    scratch, elsewhere = (
        environment.get("NODE_SCRATCH", "/tmp"),
        "set NODE_SCRATCH in site.env to a directory on the node's disk",
    )
    broken = next((facts["python"][3:] for facts in nodes.values() if facts.get("python", "").startswith("no")), "")
    return [
        (
            "repository",
            "FAULT",
            f"does not see {Path.cwd()}",
            "move the checkout to storage that all nodes share",
        ),
        (
            "python",
            "FAULT",
            f"Python does not start there ({broken})",
            "the interpreter that made .venv must exist on nodes: a module, or a container",
        ),
        ("scratch", "FAULT", f"cannot write to {scratch}", elsewhere),
        (
            "exec",
            "FAULT",
            f"nothing can be run in {scratch} (mounted noexec?): kernels that are compiled there cannot be loaded",
            elsewhere,
        ),
        (
            "scontrol",
            "warning",
            "scontrol does not answer there: jobs cannot requeue themselves",
            "ask the site; until then submit again after each end",
        ),
        (
            "compiler",
            "warning",
            "no C compiler there: torch.compile and Triton need one",
            "module load gcc in site.env, or engine.compile=false",
        ),
    ]


def _sound(nodes: Mapping[str, Mapping[str, str]], scratch: str) -> Finding:
    names = ", ".join(sorted(nodes))
    free = min(int(facts["scratch"].split()[-1]) for facts in nodes.values())
    seen = sorted({facts.get("gpus", "0").split(" ")[0] for facts in nodes.values()})
    gpus = (
        f"nvidia-smi sees {' or '.join(seen)} GPU{'s' if seen != ['1'] else ''}"
        if seen != ["0"]
        else "no NVIDIA GPU seen"
    )
    found = f"{names}: repository and Python there, {scratch} writable ({free} GB free), scontrol answers, {gpus}"
    if seen == ["0"] and any(facts.get("gpus", "").endswith("given") for facts in nodes.values()):
        return Finding(
            "nodes", "FAULT", f"{found}, though SLURM gave it some", "the driver is missing there: tell the site"
        )
    return Finding("nodes", "ok", found)


def _interfaces(nodes: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]) -> list[Finding]:
    findings = []
    for setting in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(setting, "")
        bad = {
            name: facts
            for name, facts in nodes.items()
            if value and not interface_exists(value, facts.get("interfaces", "").split())
        }
        if bad:
            there = next(iter(bad.values())).get("interfaces", "nothing")
            found = f"{', '.join(sorted(bad))}: {setting}={value}, but there are only {there}"
            findings.append(
                Finding("nodes", "FAULT", found, "take the one that reaches the other nodes: srun ip -brief address")
            )
    return findings
