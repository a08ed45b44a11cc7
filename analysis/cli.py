"""Command line of `analysis`. Commands check their options before they import slow libraries."""

import argparse
from pathlib import Path

from analysis import command
from analysis.command import add_command, add_points
from analysis.features import command as features
from analysis.matrices import command as matrices
from analysis.output import Result
from analysis.scaling import command as scaling
from analysis.speed import command as speed
from analysis.sweeps import command as sweeps
from data_prep.errors import UserError
from data_prep.exit_codes import OK, run_command
from data_prep.explain import Parser, Verbs, program
from data_prep.settings import near_path
from pretrain.models.imported import add_allow_import


def main(arguments: list[str] | None = None) -> int:
    return run_command("analysis", make_parser().parse_args(arguments))


def make_parser() -> Parser:
    about = "Make tables and figures of trained runs."
    return program("analysis", description=about, add_verbs=_add_verbs)


def _add_verbs(verbs: Verbs) -> None:
    report = add_command(
        verbs,
        "report",
        _report,
        out="{runs}/report",
        help="a table and a figure of all runs in a folder",
        epilog="analysis report runs",
    )
    report.add_argument("runs", type=Path, help="folder of the runs")
    table = add_command(
        verbs,
        "table",
        _table,
        out="{runs}/tables",
        help="accuracies of finished runs next to the papers' tables (Markdown, PNG)",
        epilog="analysis table runs",
    )
    table.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs"), help="folder of the runs"
    )
    paper = add_command(
        verbs,
        "paper",
        _paper,
        out="papers/{paper}",
        help="draw a page with a paper's figures and tables, and commands for missing figures",
        epilog="analysis paper mixer --out papers/mixer",
    )
    papers = "MLP-Mixer as a Wide and Sparse MLP, or Scaling MLPs"
    paper.add_argument("paper", choices=["mixer", "scaling-mlps"], help=papers)
    collect = add_command(
        verbs,
        "collect",
        _collect,
        out="runs/plans/results",
        help="write a table of the results of plans, one row per checkpoint and accuracy",
        epilog="analysis collect configs/plan/scaling_laws.yaml --out runs/plans/all",
    )
    collect.add_argument("plans", nargs="+", metavar="PLAN.yaml", help="plans whose runs to read")
    figure = add_command(
        verbs,
        "figure",
        _figure,
        out="runs/plans/{plan.stem}{demo}/figure",
        help="draw the `figure:` of a plan file",
        epilog="analysis figure configs/plan/mixer_fig7_depth.yaml",
    )
    figure.add_argument("plan", type=Path, metavar="PLAN.yaml", help="plan whose runs to read")
    figure.add_argument(
        "--kept", type=Path, metavar="SNAPSHOT", help="read configs from this snapshot of a job"
    )
    figure.add_argument(
        "--check", action="store_true", help="only check the `figure:`, without reading runs"
    )
    figure.set_defaults(run=_run_figure)
    for verb in (collect, figure, paper):
        verb.add_argument(
            "--demo",
            action="store_const",
            const="_demo",
            default="",
            help="use the `demo:` section of each plan",
        )
        if verb is not paper:
            verb.add_argument(
                "--allow-incomplete", action="store_true", help="skip unfinished runs"
            )
        if verb is not collect:
            add_points(verb, "--points", help="read files of `analysis collect` instead of runs")
    for package in (sweeps, scaling, features, matrices, speed):
        package.add_commands(verbs)
    for name in ("cka", "invariance", "spectra", "structure", "filters"):
        add_allow_import(verbs.choices[name])


def _check_runs(root: Path) -> Path:
    fix = "give a folder of runs, such as runs/"
    if not root.exists():
        fix = near_path(root) or fix
        raise UserError(str(root), "the folder does not exist", fix, code="missing-path")
    if root.is_file():
        raise UserError(str(root), "this is a file", fix, code="wrong-command")
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


def _collect(options: argparse.Namespace) -> Result:
    from analysis.results import results_of_plans
    from cluster.plan_file import load_plan

    plans = [load_plan(path, is_demo=bool(options.demo)) for path in options.plans]
    results = results_of_plans(plans, partial=options.allow_incomplete)
    line = f"{len(results):,} results of {results.run.nunique():,} runs"
    return Result(results, inputs=options.plans, printed=[line])


def _run_figure(options: argparse.Namespace) -> int:
    from analysis.figure import figure_settings
    from cluster.plan_file import load_plan

    is_demo, snapshot = bool(options.demo), options.kept
    options.loaded = load_plan(str(options.plan), is_demo=is_demo, snapshot=snapshot)
    figure_settings(options.loaded)
    return OK if options.check else command.run(options)


def _figure(options: argparse.Namespace) -> Result:
    from analysis.figure import figure
    from analysis.results import read_results

    results = read_results(options.points) if options.points else None
    return figure(options.loaded, results, partial=options.allow_incomplete)


def _paper(options: argparse.Namespace) -> Result:
    from analysis.papers.page import paper
    from analysis.results import read_results

    folder, options.out = options.out, options.out / "index"
    results = read_results(options.points) if options.points else None
    return paper(options.paper, folder, results, is_demo=bool(options.demo))
