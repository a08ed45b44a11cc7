"""`analysis scaling`."""

import argparse

from analysis.command import add_command, add_points
from analysis.output import Result
from data_prep.errors import UserError
from data_prep.explain import Verbs


def add_commands(verbs: Verbs) -> None:
    scaling = add_command(
        verbs,
        "scaling",
        _scaling,
        help="fit scaling laws in compute C, parameters P and images N; best P and N for each C",
        epilog="analysis scaling runs/plans/all.parquet --out runs/plans/scaling_laws-fits",
    )
    add_points(scaling, help="files of `analysis collect`, or CSV files with compute,error")
    scaling.add_argument(
        "--target", action="append", default=[], help="only results on this dataset; repeatable"
    )
    scaling.add_argument(
        "--epochs",
        type=float,
        default=50.0,
        help="fit best P, best N and the P-N law to results at this number of epochs",
    )
    scaling.add_argument("--quick", action="store_true", help="200 resamples instead of 2,000")


def _scaling(options: argparse.Namespace) -> Result:
    if not 0 < options.epochs < float("inf"):
        problem = f"{options.epochs:g} is not a positive number"
        raise UserError("--epochs", problem, "give 50, for example", code="bad-value")
    from analysis.scaling.samples import read_points
    from analysis.scaling.study import scaling

    points = read_points(options.points)
    return scaling(points, options.target, epochs=options.epochs, quick=options.quick)
