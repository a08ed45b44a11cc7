"""Command line of the top floor. Its verbs check all that they can before they import what takes
time."""

import argparse
import shlex
from pathlib import Path

from analysis.device import add_device
from analysis.features import command as features
from analysis.matrices import command as matrices
from analysis.output import add_out, check_out, write, written
from analysis.scaling import command as scaling
from analysis.sweeps import command as sweeps
from data_prep.exit_codes import OK, run_command
from data_prep.explain import Verbs, program
from data_prep.images.sheet import check_out as check_picture
from data_prep.progress import doing
from data_prep.settings import near_path


def main(arguments: list[str] | None = None) -> int:
    parser = program(
        "analysis", description="Tables and pictures of what was trained.", add_verbs=_add_verbs
    )
    return run_command("analysis", parser.parse_args(arguments))


def _add_verbs(verbs: Verbs) -> None:
    for add in (
        _add_pages,
        _add_points,
        *(room.add_verbs for room in (sweeps, scaling, features, matrices)),
        _add_costs,
    ):
        add(verbs)


def _add_pages(verbs: Verbs) -> None:
    report = verbs.add_parser(
        "report",
        help="a table and a picture of all runs below a folder",
        epilog="analysis report runs",
    )
    report.add_argument("runs", type=Path, help="the folder that the runs lie in")
    report.add_argument("--out", type=Path, help="the picture; by default RUNS/report.png")
    report.set_defaults(run=_report)
    table = verbs.add_parser(
        "table",
        help="what finished runs reached, beside the papers' tables: Markdown and PNG",
        epilog="analysis table runs",
    )
    table.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs"), help="the folder that the runs lie in"
    )
    table.add_argument(
        "--out",
        type=Path,
        help="where tables.md and tables.png go; by default the folder of the runs",
    )
    table.set_defaults(run=_table)
    paper = verbs.add_parser(
        "paper",
        help=(
            "every figure and table of a paper: what is there, what is missing, and the command for"
            " it, on one page"
        ),
        epilog="analysis paper A --out papers/A",
    )
    paper.add_argument(
        "paper", choices=["A", "B"], help="A: Understanding MLP-Mixer; B: Scaling MLPs"
    )
    paper.add_argument(
        "--out", type=Path, help="the folder of index.html and the figures (default: papers/A)"
    )
    paper.add_argument(
        "--demo", action="store_true", help="of the plans' twins on synthetic shapes"
    )
    paper.add_argument(
        "--points",
        type=Path,
        nargs="+",
        default=[],
        help="files of `analysis points`, in the place of runs",
    )
    paper.set_defaults(run=_paper)


def _add_points(verbs: Verbs) -> None:
    points = verbs.add_parser(
        "points",
        help="what finished plans have reached, a row for each checkpoint and result, as Parquet",
        epilog="analysis points configs/plan/b_scaling.yaml --out runs/plans/b_scaling.parquet",
    )
    points.add_argument("plans", nargs="+", metavar="PLAN.yaml", help="plans that were run")
    points.add_argument(
        "--out", type=Path, required=True, metavar="FILE.parquet", help="where the points go"
    )
    points.add_argument(
        "--partial", action="store_true", help="of what is finished, where not all is"
    )
    points.set_defaults(run=_points)
    figure = verbs.add_parser(
        "figure",
        help="what a plan file's `figure:` names, of the runs that it has made",
        description="Writes OUT-points.parquet as `analysis points` does, and of these the figure.",
        epilog="analysis figure configs/plan/a_fig7_depth.yaml",
    )
    figure.add_argument("plan", metavar="PLAN.yaml", help="a plan that was run")
    figure.add_argument(
        "--partial", action="store_true", help="of what is finished, where not all is"
    )
    figure.add_argument(
        "--out",
        type=Path,
        help="what the files are called, without an ending (default: runs/plans/PLAN/figure)",
    )
    figure.add_argument(
        "--kept",
        type=Path,
        metavar="SNAPSHOT",
        help="the configs as this keeps them: what a job of SLURM gives",
    )
    figure.add_argument(
        "--points",
        type=Path,
        nargs="+",
        default=[],
        help="files of `analysis points`, in the place of runs",
    )
    figure.set_defaults(run=_figure)


def _add_costs(verbs: Verbs) -> None:
    cost = verbs.add_parser(
        "cost",
        help="memory, FLOPs and seconds an epoch of paper A's SW-MLP and Mixers (Table S.3)",
        epilog="analysis cost --quick",
    )
    cost.add_argument(
        "--quick", action="store_true", help="one round of one step each: a minute on 2 cores"
    )
    add_device(cost)
    add_out(cost, "cost")
    cost.set_defaults(run=_cost)
    efficiency = verbs.add_parser(
        "efficiency",
        help="latency and throughput of paper B's four models at 64 px",
        epilog="analysis efficiency --quick",
    )
    efficiency.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds: a few minutes on 2 cores"
    )
    add_device(efficiency)
    efficiency.add_argument(
        "--batch", type=int, help="images in a batch (default: 1024 on cuda, 16 on a CPU)"
    )
    efficiency.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="default: bf16 on cuda, fp32 on a CPU"
    )
    efficiency.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="default: on cuda only"
    )
    add_out(efficiency, "efficiency")
    efficiency.set_defaults(run=_efficiency)


def _report(options: argparse.Namespace) -> int:
    path = options.out or options.runs / "report.png"
    _check_runs(options.runs)
    if path.suffix not in (".pdf", ".svg"):
        check_picture(path)
    from analysis.report import collect, draw, print_table
    from analysis.tables.pages import console_of

    runs = collect(options.runs)
    print_table(runs, console_of())
    draw(runs, path)
    print(f"picture: {path}")
    return OK


def _check_runs(root: Path) -> None:
    """Before matplotlib is imported."""
    if not root.is_dir():
        near, what = (near_path(root), "is not there") if not root.exists() else ("", "is a file")
        raise ValueError(
            f"{root}: {what}; {near or 'name the folder that holds the runs, such as runs'}"
        )
    if not any(root.rglob("config.yaml")):
        raise ValueError(f"{root}: holds no runs; name the folder that they lie in, such as runs")


def _table(options: argparse.Namespace) -> int:
    _check_runs(options.runs)
    from analysis.tables.pages import NOTES, console_of, console_table, draw, markdown, with_runs
    from analysis.tables.published import TABLES
    from analysis.tables.table import fill
    from data_prep.publish import make_directory, write_atomic
    from finetune.runs import runs_below

    runs = runs_below(options.runs)
    if not runs:
        raise ValueError(f"{options.runs}: holds no runs; name the folder that they lie in")
    tables, out = fill(TABLES, runs), options.out or options.runs
    make_directory(out)
    write_atomic(out / "tables.md", markdown(tables).encode())
    draw(tables, out / "tables.png")
    console = console_of(160)
    finished = sum(bool(run.result) for run in runs)
    for table in with_runs(tables) if finished else ():  # else they are pages of "not run"
        console.print(console_table(table), "")
    for note in NOTES if finished else ():
        console.print(note, style="dim")
    print(
        f"{out / 'tables.md'} (all tables), tables.png: of {finished:,} finished runs among"
        f" {len(runs):,}"
    )
    return OK


def _points(options: argparse.Namespace) -> int:
    from pretrain.checkpoints.run import check_place

    if options.out.suffix != ".parquet":
        raise ValueError(
            f"--out: {options.out} does not end in .parquet; name it"
            f" {options.out.with_suffix('.parquet')}"
        )
    check_place(options.out.absolute().parent, field="--out")
    from analysis.points import collect
    from analysis.points import write as write_points
    from cluster.plan_file import load_plan

    points = collect([load_plan(path) for path in options.plans], partial=options.partial)
    write_points(points, options.out, plans=options.plans)
    print(f"{options.out}: {len(points):,} points of {len({point.run for point in points}):,} runs")
    return OK


def _figure(options: argparse.Namespace) -> int:
    from analysis.figure import command_of
    from cluster.plan_file import load_plan

    plan = load_plan(options.plan, snapshot=options.kept)
    out: Path = options.out or Path("runs/plans", Path(options.plan).stem, "figure")
    check_out(out)
    words = command_of(plan, out=out, partial=options.partial, kept=options.points)
    print(f"$ analysis {shlex.join(words)}", flush=True)
    return main(words)


def _paper(options: argparse.Namespace) -> int:
    from pretrain.checkpoints.run import check_place

    out = options.out or Path("papers") / options.paper
    check_place(out.absolute(), field="--out")
    from analysis.paper import make

    print(f"page: {make(options.paper, out, demo=options.demo, kept=options.points, run=main)}")
    return OK


def _cost(options: argparse.Namespace) -> int:
    check_out(options.out)
    with doing("loading torch"):
        from analysis.cost import COLUMNS, NOTE, cells, draw, facts_of, measure
        from analysis.efficiency import conditions_for, machine
    from analysis.tables.pages import console_of, for_console

    conditions = conditions_for(
        options.device, dtype="fp32", compiled=False, batch_size=None, quick=options.quick
    )
    place = machine(conditions)
    rounds, steps = (1, 1) if options.quick else (5, 3)
    rows = measure(device=conditions.device, num_rounds=rounds, num_steps=steps)
    console = console_of(150)
    console.print(
        for_console(
            COLUMNS,
            [cells(row) for row in rows],
            title=f"{place}, median of {rounds} rounds of {steps} steps",
        )
    )
    console.print(NOTE, style="dim")
    facts, figures = (
        {"machine": place, "rounds": rounds, "steps": steps},
        {"": draw(rows, device=conditions.device)},
    )
    return written(write(options.out, facts=facts, rows=facts_of(rows), read=(), figures=figures))


def _efficiency(options: argparse.Namespace) -> int:
    check_out(options.out)
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch: {options.batch} will not do; give 1 or more")
    with doing("loading torch"):
        from analysis.efficiency import (
            IMAGE_SIZE,
            PRINTED,
            conditions_for,
            draw,
            facts_of,
            machine,
            measure_named,
            print_table,
            title,
        )
    from analysis.tables.pages import console_of

    conditions = conditions_for(
        options.device,
        dtype=options.dtype,
        compiled=options.compile,
        batch_size=options.batch,
        quick=options.quick,
    )
    place = machine(conditions)
    rows = measure_named(list(PRINTED), conditions)
    print_table(rows, console_of(132), heading=title(conditions, place))
    facts = {"machine": place, "conditions": conditions._asdict(), "image_size": IMAGE_SIZE}
    return written(
        write(
            options.out,
            facts=facts,
            rows=facts_of(rows),
            read=(),
            figures={"": draw(rows, conditions)},
        )
    )
