"""Command line of `analysis`. A command checks all that it can before it imports slow libraries,
and returns a `Result`, which is printed and saved here."""

import argparse
import sys
from pathlib import Path

from analysis.features import command as features
from analysis.matrices import command as matrices
from analysis.output import Result, check_out, show, write
from analysis.scaling import command as scaling
from analysis.speed import command as speed
from analysis.sweeps import command as sweeps
from data_prep.errors import UserError
from data_prep.exit_codes import OK, exit_code_of, message_of
from data_prep.explain import Verbs, program
from data_prep.settings import near_path


def main(arguments: list[str] | None = None) -> int:
    options = program(
        "analysis", description="Tables and figures of trained runs.", add_verbs=_add_verbs
    ).parse_args(arguments)
    try:
        if options.out is None:
            options.out = options.default_out(options)
        check_out(options.out)
        result = options.run(options)
        show(result)
        print(f"written: {', '.join(map(str, write(result, options.out)))}")
        return OK
    except (ValueError, OSError) as error:
        print(f"analysis: {message_of(error)}", file=sys.stderr)
        return exit_code_of(error)


def _add_verbs(verbs: Verbs) -> None:
    _add_tables(verbs)
    _add_plans(verbs)
    for package in (sweeps, scaling, features, matrices, speed):
        package.add_commands(verbs)


def _add_tables(verbs: Verbs) -> None:
    report = verbs.add_parser(
        "report", help="a table and a figure of all runs in a folder", epilog="analysis report runs"
    )
    report.add_argument("runs", type=Path, help="folder of the runs")
    report.set_defaults(
        run=_report, default_out=lambda options: _check_runs(options.runs) / "report"
    )
    table = verbs.add_parser(
        "table",
        help="accuracies of finished runs and the papers' tables: Markdown and PNG",
        epilog="analysis table runs",
    )
    table.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs"), help="folder of the runs"
    )
    table.set_defaults(run=_table, default_out=lambda options: _check_runs(options.runs) / "tables")
    for verb, name in ((report, "report"), (table, "tables")):
        verb.add_argument("--out", type=Path, help=f"name of the files (default: RUNS/{name})")
    paper = verbs.add_parser(
        "paper",
        help="one page with every figure and table of a paper, and the commands for missing ones",
        epilog="analysis paper A --out papers/A",
    )
    paper.add_argument(
        "paper", choices=["A", "B"], help="A: Understanding MLP-Mixer; B: Scaling MLPs"
    )
    paper.add_argument(
        "--out", type=Path, help="folder of index.html and the figures (default: papers/A)"
    )
    paper.add_argument("--demo", action="store_true", help="use the demo variants of the plans")
    paper.set_defaults(run=_paper, default_out=lambda options: Path("papers", options.paper))
    _add_points_option(paper)


def _add_points_option(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--points",
        type=Path,
        nargs="+",
        default=[],
        help="files of `analysis points` to use instead of runs",
    )


def _add_plans(verbs: Verbs) -> None:
    points = verbs.add_parser(
        "points",
        help="the results table of plans: one row for each checkpoint and accuracy",
        epilog="analysis points configs/plan/b_scaling.yaml --out runs/plans/b_scaling.parquet",
    )
    points.add_argument("plans", nargs="+", metavar="PLAN.yaml", help="plans whose runs to read")
    points.add_argument(
        "--out",
        type=lambda name: Path(name.removesuffix(".parquet")),
        required=True,
        metavar="FILE.parquet",
        help="the file to write",
    )
    points.set_defaults(run=_points)
    figure = verbs.add_parser(
        "figure",
        help="the `figure:` of a plan file",
        epilog="analysis figure configs/plan/a_fig7_depth.yaml",
    )
    figure.add_argument("plan", metavar="PLAN.yaml", help="plan whose runs to read")
    figure.add_argument(
        "--out", type=Path, help="name of the files (default: runs/plans/PLAN/figure)"
    )
    figure.add_argument(
        "--kept", type=Path, metavar="SNAPSHOT", help="snapshot of the configs, for SLURM jobs"
    )
    _add_points_option(figure)
    figure.set_defaults(
        run=_figure,
        default_out=lambda options: Path(
            "runs/plans", Path(options.plan).stem + "_demo" * options.demo, "figure"
        ),
    )
    for verb in (points, figure):
        verb.add_argument(
            "--demo", action="store_true", help="take the `demo:` section of each plan"
        )
        verb.add_argument("--partial", action="store_true", help="use the finished runs only")


def _check_runs(root: Path) -> Path:
    """Return the folder if it has runs, before matplotlib is imported."""
    fix = "give the folder of the runs, such as runs"
    if not root.exists():
        fix = near_path(root) or fix
        raise UserError(str(root), "the folder does not exist", fix, code="missing-path")
    if not root.is_dir():
        raise UserError(str(root), "is a file", fix, code="unreadable")
    if not any(root.rglob("config.yaml")):
        raise UserError(str(root), "the folder has no runs", fix, code="empty")
    return root


def _report(options: argparse.Namespace) -> Result:
    root = _check_runs(options.runs)
    from analysis.report import report

    return report(root)


def _table(options: argparse.Namespace) -> Result:
    root = _check_runs(options.runs)
    from analysis.results import results_below
    from analysis.tables.pages import table

    return table(results_below(root))


def _points(options: argparse.Namespace) -> Result:
    from analysis.results import results_of_plans
    from cluster.plan_file import load_plan

    plans = [load_plan(path, is_demo=options.demo) for path in options.plans]
    results = results_of_plans(plans, partial=options.partial)
    line = f"{len(results):,} results of {results.run.nunique():,} runs"
    return Result(results, inputs=options.plans, printed=[line])


def _figure(options: argparse.Namespace) -> Result:
    from analysis.figure import figure
    from analysis.results import read_results
    from cluster.plan_file import load_plan

    plan = load_plan(options.plan, is_demo=options.demo, snapshot=options.kept)
    results = read_results(options.points) if options.points else None
    return figure(plan, results, partial=options.partial).with_inputs(options.points)


def _paper(options: argparse.Namespace) -> Result:
    from analysis.paper import paper
    from analysis.results import read_results

    results = read_results(options.points) if options.points else None
    folder, options.out = options.out, options.out / "index"
    return paper(options.paper, folder, results, demo=options.demo)
