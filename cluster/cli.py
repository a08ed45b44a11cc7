"""Command line of `wide-mlps init | list | run`. The script `cluster/submit` submits jobs."""

from cluster import init, plan
from data_prep.exit_codes import run_command
from data_prep.explain import Parser, Verbs, at_least, program


def main(arguments: list[str] | None = None) -> int:
    return run_command("wide-mlps", make_parser().parse_args(arguments))


def make_parser() -> Parser:
    about = (
        "Create a folder for jobs, and run plans on this machine. The programs are data_prep, "
        "pretrain, finetune and analysis."
    )
    return program("wide-mlps", description=about, add_verbs=_add_verbs)


def _add_verbs(verbs: Verbs) -> None:
    words = "create a folder with configs/ and cluster/ to submit jobs from; edited files are kept"
    laying_out = verbs.add_parser("init", help=words, epilog="wide-mlps init my-runs")
    laying_out.add_argument(
        "directory", metavar="DIR", help="folder to create; . is the current folder"
    )
    laying_out.set_defaults(run=init.lay_out)
    listing = verbs.add_parser(
        "list", help="list the runs of a plan with their states, and missing inputs"
    )
    running = verbs.add_parser(
        "run",
        help="run a plan on this machine, one run after the other; on SLURM: cluster/submit FILE",
    )
    for verb, run in ((listing, plan.show), (running, plan.run)):
        verb.add_argument("file", help="plan file, such as configs/plan/demo.yaml")
        verb.add_argument(
            "--demo", action="store_true", help="use the plan's `demo:` section, for two CPU cores"
        )
        verb.epilog = f"{verb.prog} configs/plan/demo.yaml"
        verb.set_defaults(run=run, schema="cluster.plan_file:PlanSettings")
    running.add_argument(
        "--ranks", type=at_least(1), help="processes of each run (default: one per GPU, or 1)"
    )
    running.add_argument("--dry-run", action="store_true", help="only print the commands")
