"""Whether jobs can run here as cluster/site.env has it: every check in turn, as a table. Started by the script cluster/doctor.

Reads, and asks SLURM; all that is written are small files in runs/ and jobs/, which are removed again. Nothing is submitted, unless
`--on-nodes` asks for it.
"""

import os
import shutil
import sys
from pathlib import Path

from cluster.checks.files import check_files, check_interfaces, check_python, check_repository
from cluster.checks.finding import Finding, summary, table
from cluster.checks.job import check_job
from cluster.checks.nodes import check_nodes
from cluster.checks.site import read_site
from cluster.checks.slurm import check_slurm
from cluster.slurm import read_submission

USAGE = """\
cluster/doctor [--on-nodes] [sbatch options] [cluster/NAME.slurm CONFIG key=value ...]

Says whether jobs can run here as cluster/site.env has it. Nothing is submitted or changed.
With the words of a submission (what would follow cluster/submit) it checks that submission.
  --on-nodes   also runs a job of a minute on one node (with --nodes N on N), and looks from there
Ends with 1 when there is a FAULT, otherwise with 0."""


def main(arguments: list[str]) -> int:
    submission = read_submission([word for word in arguments if word != "--on-nodes"])
    if "-h" in submission.options or "--help" in submission.options:
        print(USAGE)
        return 0
    if submission.option("--nodes", "-N") == "":
        print("cluster/doctor: --nodes needs a number of nodes; a look from a node is --on-nodes", file=sys.stderr)
        return 1
    stray = [word for word in submission.options if Path(word).suffix in (".yaml", ".yml")]
    if stray and submission.script is None:
        print(
            f"cluster/doctor: {stray[0]}: name the job script before it, such as cluster/pretrain.slurm",
            file=sys.stderr,
        )
        return 1
    width = min(120, max(60, shutil.get_terminal_size((80, 24)).columns))
    findings: list[Finding] = []

    def show(found: list[Finding]) -> list[Finding]:
        """At once, for some checks take seconds."""
        findings.extend(found)
        if found:
            print(table(found, width=width), flush=True)
        return found

    show(check_repository())
    site = read_site()
    show(list(site.findings))
    show(check_python(site.environment))
    show(check_files())
    show(check_interfaces(site.environment))
    slurm = show(check_slurm(submission, site.environment))
    show(check_job(submission, site.environment))
    if "--on-nodes" in arguments and not any(
        finding.check == "SLURM" and finding.verdict == "FAULT" for finding in slurm
    ):
        show(check_nodes(submission, site.environment))
    print("\n" + in_width(summary(findings), width))
    return 1 if any(finding.verdict == "FAULT" for finding in findings) else 0


def in_width(text: str, width: int) -> str:
    return text if len(text) <= width else text.replace(": ", ":\n", 1)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        code = 141
    sys.exit(code)
