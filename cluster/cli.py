"""Command line of what stands around jobs: `wide-mlps init | list | run`. Jobs are queued by the
script `submit`."""

import io
import sys

from cluster import init, plan
from data_prep.exit_codes import run_command
from data_prep.explain import Verbs, at_least, program


def main(arguments: list[str] | None = None) -> int:
    words = (
        "Lays out a folder for jobs, and runs plans here. The programs are data_prep, pretrain,"
        " finetune and analysis."
    )
    options = program("wide-mlps", description=words, add_verbs=add_verbs).parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as stderr: no name stops what only reports it
    return run_command("wide-mlps", options)


def add_verbs(verbs: Verbs) -> None:
    words = (
        "lay out a folder with configs/ and cluster/, from which jobs are submitted; what you have"
        " edited there is kept"
    )
    laying_out = verbs.add_parser("init", help=words, epilog="wide-mlps init my-runs")
    laying_out.add_argument("directory", metavar="DIR", help="the folder; . is this one")
    laying_out.set_defaults(run=init.lay_out)
    listing = verbs.add_parser(
        "list", help="the members of a plan, how far each has come, and what is missing"
    )
    running = verbs.add_parser(
        "run", help="run a plan here, one member after the other; on SLURM: cluster/submit FILE"
    )
    for verb, run in ((listing, plan.show), (running, plan.run)):
        verb.add_argument("file", help="such as configs/plan/demo.yaml")
        verb.add_argument(
            "--demo", action="store_true", help="take the plan's `demo:` section, for two CPU cores"
        )
        verb.epilog = f"{verb.prog} configs/plan/demo.yaml"
        verb.set_defaults(run=run, schema="cluster.plan_file:PlanSettings")
    running.add_argument(
        "--ranks", type=at_least(1), help="processes of each member (default: one per GPU, or 1)"
    )
    running.add_argument("--dry-run", action="store_true", help="only show the commands")
