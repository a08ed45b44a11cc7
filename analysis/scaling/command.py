"""`analysis scaling`."""

import argparse
from pathlib import Path

from analysis.output import Result, add_out
from data_prep.errors import UserError
from data_prep.explain import Verbs


def add_commands(commands: Verbs) -> None:
    scaling = commands.add_parser(
        "scaling",
        help="scaling laws with intervals: the frontier, laws in C, P and N, repeated data, the"
        " best P and N",
        epilog="analysis scaling runs/plans/b_scaling.parquet --out runs/plans/b_scaling-laws",
    )
    scaling.add_argument(
        "points",
        type=Path,
        nargs="+",
        help="files of `analysis points`, or CSV files with compute,error",
    )
    scaling.add_argument(
        "--target", action="append", default=[], help="only this dataset; may be repeated"
    )
    scaling.add_argument(
        "--epochs", type=float, default=50.0, help="T of the allocation and of the law in P and N"
    )
    scaling.add_argument("--quick", action="store_true", help="200 resamples instead of 2,000")
    add_out(scaling, "scaling")
    scaling.set_defaults(run=_scaling)


def _scaling(options: argparse.Namespace) -> Result:
    if not 0 < options.epochs < float("inf"):
        problem = f"{options.epochs:g} is not a positive number"
        raise UserError("--epochs", problem, "give 50, for example", code="bad-value")
    for path in options.points:
        _check_points(path)
    from analysis.scaling.samples import read_points

    points = read_points(options.points)
    from analysis.scaling.study import scaling

    result = scaling(points, options.target, epochs=options.epochs, quick=options.quick)
    return result.with_inputs(options.points)


def _check_points(path: Path) -> None:
    """Check a file before pandas is imported."""
    fix = "give a file of `analysis points`, or a CSV file with the columns compute and error"
    if path.is_dir():
        raise UserError(str(path), "is a folder", fix, code="unreadable")
    if not path.exists():
        raise UserError(str(path), "the file does not exist", fix, code="missing-path")
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", errors="replace") as file:
            header = file.readline().strip().split(",")
        if not {"compute", "error"} <= {*header}:
            problem = f"has the columns {', '.join(header)}, not compute and error"
            raise UserError(str(path), problem, fix, code="unknown-format")
