"""`analysis sweep`, `curves` and `widths`."""

import argparse
from pathlib import Path

from analysis.output import Result, add_out
from data_prep.errors import UserError
from data_prep.explain import Verbs
from pretrain.models.listing import parse_power


def add_commands(commands: Verbs) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="errors of many runs by width, shape, depth, batch size ... over seeds (Mixer paper,"
        " Fig. 2d, 4-7; Scaling MLPs, Fig. 4)",
        description=(
            "Draws mean and SD over seeds, and the binomial error of the test images. RP and normal"
            " Mixers are compared by pairs of one seed. A sweep by width also gets Kendall's tau"
            " with its exact null; a sweep by log_cs the optimum of a parabola with its interval."
        ),
        epilog="analysis sweep runs/plans/a_fig6_textC5.parquet --x log_cs --hue mixing",
    )
    sweep.add_argument(
        "--x",
        required=True,
        help="a variable, such as width, density, log_cs, depth, gamma, patch_size or"
        " global_batch_size, or an axis of the plan",
    )
    sweep.add_argument("--task", help="only results of this task, such as probe (default: all)")
    sweep.set_defaults(run=_sweep)
    curves = commands.add_parser(
        "curves",
        help="training and test loss, ranges over seeds, and overfit (Mixer paper, Fig. S.6-S.8)",
        description=(
            "Bands are the range over seeds; the table has the SD. Overfit is the last test loss"
            " minus the smallest one."
        ),
        epilog="analysis curves runs/plans/a_figS6.parquet --hue mixing --facet shape",
    )
    curves.set_defaults(run=_curves)
    for command, name in ((sweep, "sweep"), (curves, "curves")):
        command.add_argument(
            "results",
            nargs="+",
            type=Path,
            metavar="RESULTS.parquet",
            help="files of `analysis points`",
        )
        command.add_argument(
            "--hue", type=_names, default=(), help="variables that make lines, such as kind,mixing"
        )
        command.add_argument(
            "--facet", type=_names, default=(), help="variables that make panels, such as target"
        )
        add_out(command, name)
    widths = commands.add_parser(
        "widths",
        help="the effective width m and the density p against C at a fixed number of connections"
        " (Mixer paper, Fig. 3)",
        epilog="analysis widths --omega 2^18,2^21 --gamma 1",
    )
    widths.add_argument(
        "--omega", default="2^18,2^21,2^27", help="connections of a layer, with commas"
    )
    widths.add_argument(
        "--gamma",
        type=float,
        default=1.0,
        help="hidden width divided by width (default: 1, the S-Mixer)",
    )
    add_out(widths, "widths")
    widths.set_defaults(run=_widths)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _sweep(options: argparse.Namespace) -> Result:
    from analysis.results import read_results
    from analysis.sweeps.sweep import sweep

    results = read_results(options.results)
    result = sweep(results, options.x, options.hue, options.facet, options.task)
    return result.with_inputs(options.results)


def _curves(options: argparse.Namespace) -> Result:
    from analysis.results import read_results
    from analysis.sweeps.curves import curves

    result = curves(read_results(options.results), options.hue, options.facet)
    return result.with_inputs(options.results)


def _widths(options: argparse.Namespace) -> Result:
    if not options.gamma > 0:
        raise UserError(
            "--gamma", f"{options.gamma:g} is not positive", "give 4, for example", code="bad-value"
        )
    omegas = {name: parse_power(name) for name in _names(options.omega)}
    if not omegas:
        raise UserError("--omega", "no number is given", "give 2^18", code="missing-value")
    from analysis.sweeps.widths import widths

    return widths(omegas, options.gamma)
